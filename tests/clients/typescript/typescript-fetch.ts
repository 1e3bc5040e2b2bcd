// The client that openapi-generator's typescript-fetch generates. The server's address is the first argument, the API key in API_KEY.
import { AttentionApi, type AttentionRequest, Configuration, ProblemCode, ProblemFromJSON, ResponseError } from "./index.js";

const api = new AttentionApi(new Configuration({ basePath: process.argv[2], accessToken: process.env.API_KEY }));
const request: AttentionRequest = {
  query: [[8.7, 3.2, 4.1], [2.1, 9.9, 1.6]],
  key: [[9.1, 1.0, 2.1], [0.1, 7.5, 4.3], [1.3, 5.5, 8.2], [7.6, 2.4, 4.0], [8.5, 2.7, 2.7]],
  value: [[3.4, 1.3, 0.4, 9.8], [7.5, 3.9, 4.1, 0.2], [8.3, 2.8, 2.3, 0.1], [1.6, 8.4, 9.9, 3.4], [2.2, 9.4, 8.7, 1.1]],
};

const { output } = await api.computeAttention({ attentionRequest: request });
const number: number = output[0][1];
if (number === undefined) throw new Error("no number");
console.log(JSON.stringify(output));

try {
  await api.computeAttention({ attentionRequest: { ...request, key: request.value } }); // four features, the query has three
  throw new Error("no error");
} catch (error) {
  if (!(error instanceof ResponseError)) throw error;
  const problem = ProblemFromJSON(await error.response.json());
  switch (problem.code) {
    case ProblemCode.ShapeMismatch:
      console.log(problem.code, problem.errors[0]?.pointer);
      break;
    default:
      throw new Error(problem.detail);
  }
}
