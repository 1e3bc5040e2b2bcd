// Types from the API document, requests by openapi-fetch. The server's address is the first argument, the API key in API_KEY.
import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type EncodedTensor = components["schemas"]["EncodedTensor"];

const headers = { Authorization: `Bearer ${process.env.API_KEY}` };
const client = createClient<paths>({ baseUrl: process.argv[2], headers });
const eye = [[1, 0], [0, 1]];
const animals = {
  query: [[8.7, 3.2, 4.1], [2.1, 9.9, 1.6]],
  key: [[9.1, 1.0, 2.1], [0.1, 7.5, 4.3], [1.3, 5.5, 8.2], [7.6, 2.4, 4.0], [8.5, 2.7, 2.7]],
  value: [[3.4, 1.3, 0.4, 9.8], [7.5, 3.9, 4.1, 0.2], [8.3, 2.8, 2.3, 0.1], [1.6, 8.4, 9.9, 3.4], [2.2, 9.4, 8.7, 1.1]],
};

async function attend(body: components["schemas"]["AttentionRequest"]) {
  const { data, error } = await client.POST("/attention", { body });
  if (error !== undefined) throw new Error(error.detail);
  if (typeof data === "string") throw new Error("binary"); // only where Accept asks for it
  return data;
}

const output = (await attend(animals)).output as number[][]; // nested lists are unknown[], at any depth
const number: number | undefined = output[0]?.[1];
assert.ok(number);
console.log(JSON.stringify(output));

const direct = await attend({ query: eye, key: eye, value: [[1], [2]], scale: 0, include: ["scores"] });
assert.deepEqual(direct.output, [[1.5], [1.5]]);
assert.deepEqual(direct.scores, eye);
assert.equal(direct.metadata.num_heads, 1);

const projected = await attend({ input: eye, scale: 0, projection: { value: { kernel: [[2, 0], [0, 2]] } } });
assert.deepEqual(projected.output, [[1, 1], [1, 1]]);

const masked = await attend({ input: eye, mask: [[true, false], [false, true]] });
assert.deepEqual(masked.attention_weights, eye);

const bytes = Buffer.from(Float32Array.from([1, 0, 0, 1]).buffer).toString("base64");
const tensor: EncodedTensor = { dtype: "float32", shape: [2, 2], data: bytes };
const typed = (await attend({ input: tensor, scale: 0, encoding: "base64" })).output as EncodedTensor;
assert.equal(typed.dtype, "float32");
const content = Buffer.from(typed.data, "base64");
assert.deepEqual([...new Float32Array(content.buffer, content.byteOffset, 4)], [0.5, 0.5, 0.5, 0.5]);

// The headers of a response have types, too.
type Responses = paths["/attention"]["post"]["responses"];
const id: Responses[200]["headers"]["X-Request-ID"] = direct.metadata.request_id;
const { response } = await client.POST("/attention", { body: { input: eye }, headers: { "X-Request-ID": id } });
const seconds: Responses[503]["headers"]["Retry-After"] = 1; // a number
const challenge: Responses[401]["headers"]["WWW-Authenticate"] = "Bearer";
assert.equal(response.headers.get("X-Request-ID"), id);
assert.equal(response.headers.get("Retry-After") ?? response.headers.get("WWW-Authenticate"), null);
assert.ok(seconds && challenge);

// The value has four features, the query three.
const wrong = await client.POST("/attention", { body: { ...animals, key: animals.value } });
switch (wrong.error?.code) {
  case "shape_mismatch":
    console.log(wrong.error.code, wrong.error.errors[0]?.pointer);
    break;
  default:
    throw new Error(wrong.error?.detail);
}

const inferred = await client.POST("/v2/models/{model_name}/infer", {
  params: { path: { model_name: "attention" } },
  body: { inputs: [{ name: "input", shape: [2, 2], datatype: "FP32", data: [1, 0, 0, 1] }], parameters: { scale: 0 } },
});
if (inferred.data === undefined || typeof inferred.data === "string") throw new Error(inferred.error?.error);
assert.deepEqual(inferred.data.outputs[0]?.data, [0.5, 0.5, 0.5, 0.5]);
