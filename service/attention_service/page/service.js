// Requests to the service. The page itself computes nothing of attention.

import { readSafetensors } from "./files.js";
import { toText } from "./tensors.js";

/** The typed key, which is kept nowhere else. */
export const session = { key: "" };

/** @type {postForTensors} */
export const postForTensors = async (request, signal) => {
	const response = await post("attention", request, "application/vnd.safetensors", signal);
	return readSafetensors(await response.arrayBuffer(), "response");
};

/** @type {post} */
export const post = async (path, request, accept, signal) => {
	/** @type {Record<string, string>} */
	const headers = { "Content-Type": "application/json", Accept: accept };
	if (session.key) headers.Authorization = `Bearer ${session.key}`;
	const response = await fetch(path, { method: "POST", headers, body: toText(request), signal }).catch((error) => {
		throw error.name === "AbortError" ? error : Object.assign(new Error("The service does not answer."), { retry: true });
	});
	if (response.ok) return response;
	const { title = `Status ${response.status}`, errors = [] } = await response.json().catch(() => ({}));
	const faults = errors.map((/** @type {Fields} */ { pointer = "", expected, got, hint }) => ({ pointer, text: `expected ${expected}, got ${got}${hint ? ` (${hint})` : ""}` }));
	throw Object.assign(new Error(title), { status: response.status, faults });
};
