// Nested lists of any depth are Array<any>, so that output[0][1] compiles; without topType they are Array<unknown>.
export default {
  input: "./openapi/openapi.json",
  output: { path: "./build/clients/hey-api", module: { extension: ".js" } },
  plugins: [{ name: "@hey-api/typescript", topType: "any" }, "@hey-api/sdk", "@hey-api/client-fetch"],
};
