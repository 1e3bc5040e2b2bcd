// Requests to the service. The page itself computes nothing of attention.

import { toText } from "./tensors.js";

/** The typed key, which is kept nowhere else. */
export const session = { key: "" };

/** The response to a request. Errors have `status` and `faults`. @type {post} */
export const post = async (path, request, accept, signal) => {
	/** @type {Record<string, string>} */
	const headers = { "Content-Type": "application/json", Accept: accept };
	if (session.key) headers.Authorization = `Bearer ${session.key}`;
	const response = await fetch(path, { method: "POST", headers, body: toText(request), signal });
	if (response.ok) return response;
	const { title = `Status ${response.status}`, errors = [] } = await response.json().catch(() => ({}));
	const faults = errors.map((/** @type {Fields} */ { pointer = "", expected, got, hint }) => ({ pointer, text: `expected ${expected}, got ${got}${hint ? ` (${hint})` : ""}` }));
	throw Object.assign(new Error(title), { status: response.status, faults });
};
