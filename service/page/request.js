// Requests to the service: their options, their sizes, and the files that hold them.

import { Tensor, fromText, shapeOf, transposed } from "./tensors.js";
import { readNpy, readNpz, readSafetensors } from "./files.js";

const TEXTS = ["normalization", "dtype"];
const SOURCES = ["query", "key", "value", "input", "context"];
/** Results with the axes q and k. */
export const SCORES = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights", "hidden_by"];
const TURNED = [...SOURCES, "mask", "bias"];
const STAGES = [...SCORES, "query", "present_key", "present_value", "head_outputs"];

/** @param {Fields} request */
export const hasTensors = (request) => SOURCES.some((name) => request[name] instanceof Tensor);

/** @param {unknown} value */
const isPlain = (value) => value === null || typeof value !== "object";

/** The values of the controls for a request. @type {optionsOf} */
export const optionsOf = (request) => {
	const { window, ...own } = request;
	const values = { ...own, "window.left": window?.left, "window.right": window?.right, layout: layoutOf(request) };
	return Object.fromEntries(Object.entries(values).flatMap(([name, value]) => (isPlain(value) && (value ?? false) !== false ? [[name, String(value)]] : [])));
};

/** A request with the values of the controls. @type {withOptions} */
export const withOptions = ({ window, ...request }, options) => {
	const { layout = layoutOf(request), ...others } = options;
	const changed = withLayout(request, layout);
	for (const [name, text] of Object.entries(others)) {
		const [part, inner] = name.split(".");
		const value = TEXTS.includes(name) ? text : name === "is_causal" ? true : Number(text);
		if (text === "") delete changed[name];
		else if (inner) changed[part] = { ...changed[part], [inner]: value };
		else changed[name] = value;
	}
	return changed;
};

/** A request with its matrices turned to this layout. @type {withLayout} */
const withLayout = (request, layout) => {
	if (layoutOf(request) === layout) return { ...request };
	const turned = Object.entries(request).map(([name, data]) => [name, TURNED.includes(name) ? transposed(data) : data]);
	return { ...Object.fromEntries(turned), layout };
};

/** The axes of the sources as letters. @type {layoutOf} */
export const layoutOf = (request) => {
	const rank = Math.max(2, ...SOURCES.map((name) => shapeOf(request[name]).length));
	return request.layout || ["ld", "bld", "bhld"][rank - 2] || "ld";
};

/** @param {Fields} request */
export function sizesOf(request) {
	const layout = layoutOf(request);
	/** @param {unknown} data @param {string} axis */
	const size = (data, axis) => {
		const shape = shapeOf(data);
		return shape.length < layout.length ? undefined : shape[layout.indexOf(axis)];
	};
	const { query = request.input, key = request.context ?? request.input, projection, num_heads = 1, past_key } = request;
	const { weight, kernel = weight } = projection?.query ?? {};
	const stacked = shapeOf(kernel).at(-3) ?? num_heads;
	const past = shapeOf(past_key).at(-2) ?? 0;
	return { b: size(query, "b") ?? 1, h: size(query, "h") ?? stacked, q: size(query, "l") ?? 1, k: past + (size(key, "l") ?? 1) };
}

/** @param {Fields} request */
export function forStages(request) {
	const softmax = (request.normalization ?? "softmax") === "softmax";
	return { ...request, include: softmax ? [...STAGES, "logsumexp"] : STAGES };
}

/** A request from tensors with dotted names. @type {joinTensors} */
const joinTensors = ({ tensors, text }) => {
	const request = fromText(text);
	for (const [path, tensor] of Object.entries(tensors)) {
		const names = path.split(".");
		const last = names.pop() ?? "";
		names.reduce((part, name) => (part[name] ??= {}), request)[last] = tensor;
	}
	return request;
};

/** The request in a JSON text. An array is its input. @type {requestOfText} */
export const requestOfText = (text) => {
	const value = fromText(text);
	return Array.isArray(value) || value instanceof Tensor ? { input: value } : value;
};

/** The request in files. An .npy file is named for its field, or is the input. @type {readFiles} */
export const readFiles = async (files) => {
	/** @type {Fields} */
	const request = {};
	for (const file of files) {
		const [stem, ending] = file.name.split(/\.(?=[^.]*$)/);
		const buffer = await file.arrayBuffer();
		if (ending === "npy") request[TURNED.includes(stem) ? stem : "input"] = readNpy(new Uint8Array(buffer));
		else if (ending === "npz") Object.assign(request, joinTensors(await readNpz(buffer)));
		else if (ending === "safetensors") Object.assign(request, joinTensors(readSafetensors(buffer)));
		else Object.assign(request, requestOfText(await file.text()));
	}
	return request;
};
