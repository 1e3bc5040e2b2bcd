// The client that @hey-api/openapi-ts generates. The server's address is the first argument, the API key in API_KEY.
import { type AttentionRequest, computeAttention } from "./index.js";
import { client } from "./client.gen.js";

client.setConfig({ baseUrl: process.argv[2], auth: process.env.API_KEY });
const request = {
  query: [[8.7, 3.2, 4.1], [2.1, 9.9, 1.6]],
  key: [[9.1, 1.0, 2.1], [0.1, 7.5, 4.3], [1.3, 5.5, 8.2], [7.6, 2.4, 4.0], [8.5, 2.7, 2.7]],
  value: [[3.4, 1.3, 0.4, 9.8], [7.5, 3.9, 4.1, 0.2], [8.3, 2.8, 2.3, 0.1], [1.6, 8.4, 9.9, 3.4], [2.2, 9.4, 8.7, 1.1]],
} satisfies AttentionRequest;

const { data } = await computeAttention({ body: request, throwOnError: true });
if (!("output" in data) || !Array.isArray(data.output)) throw new Error("not lists"); // only where the request asks for it
const number: number = data.output[0][1];
if (number === undefined) throw new Error("no number");
console.log(JSON.stringify(data.output));

const { error } = await computeAttention({ body: { ...request, key: request.value } }); // four features, the query has three
switch (error?.code) {
  case "shape_mismatch":
    console.log(error.code, error.errors[0]?.pointer);
    break;
  default:
    throw new Error(error?.detail);
}
