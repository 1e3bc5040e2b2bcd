// Types from the API document, requests by openapi-fetch. The server's address is the first argument.
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type EncodedArray = components["schemas"]["EncodedArray"];

const client = createClient<paths>({ baseUrl: process.argv[2] });
const eye = [[1, 0], [0, 1]];

async function attend(body: components["schemas"]["AttentionRequest"]) {
  const { data, error } = await client.POST("/attention", { body });
  if (error !== undefined) throw new Error(error.detail);
  if (typeof data === "string") throw new Error("binary"); // only where Accept asks for it
  return data;
}

const direct = await attend({ query: eye, key: eye, value: [[1], [2]], scale: 0, include: ["scores"] });
assert.deepEqual(direct.output, [[1.5], [1.5]]);
assert.deepEqual(direct.scores, eye);
assert.equal(direct.metadata.num_heads, 1);

const projected = await attend({ input: eye, scale: 0, projection: { value: { kernel: [[2, 0], [0, 2]] } } });
assert.deepEqual(projected.output, [[1, 1], [1, 1]]);

const masked = await attend({ input: eye, mask: [[true, false], [false, true]] });
assert.deepEqual(masked.attention_weights, eye);

const bytes = Buffer.from(Float32Array.from([1, 0, 0, 1]).buffer).toString("base64");
const tensor: EncodedArray = { dtype: "float32", shape: [2, 2], data: bytes };
const typed = (await attend({ input: tensor, scale: 0, encoding: "base64" })).output as EncodedArray;
assert.equal(typed.dtype, "float32");
const content = Buffer.from(typed.data, "base64");
assert.deepEqual([...new Float32Array(content.buffer, content.byteOffset, 4)], [0.5, 0.5, 0.5, 0.5]);

const wrong = await client.POST("/attention", { body: { query: eye, key: [[1]], value: [[1]] } });
assert.equal(wrong.error?.code, "shape_mismatch");
assert.equal(wrong.error?.errors[0]?.pointer, "/key");

const inferred = await client.POST("/v2/models/{model_name}/infer", {
  params: { path: { model_name: "attention" } },
  body: { inputs: [{ name: "input", shape: [2, 2], datatype: "FP32", data: [1, 0, 0, 1] }], parameters: { scale: 0 } },
});
if (inferred.data === undefined || typeof inferred.data === "string") throw new Error(inferred.error?.error);
assert.deepEqual(inferred.data.outputs[0]?.data, [0.5, 0.5, 0.5, 0.5]);
console.log("all as expected");
