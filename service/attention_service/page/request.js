// Requests to the service: their options and sizes; and where they come from: files, texts, sentences.

import { times } from "./dom.js";
import { Tensor, asTensor, fromText, shapeOf, transposed } from "./tensors.js";
import { readNpy, readNpz, readSafetensors } from "./files.js";
import { MAP, SOURCES, fieldOf, readPasted } from "./paste.js";

/** Results with the axes q and k. */
export const SCORES = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights", "hidden_by"];
/** @type {isMatrix} */
export const isMatrix = (name) => /scores|weights|hidden_by|change/.test(name);
/** The gradient that is a stage, if a request has what it is computed from. */
export const GRADIENT = "grad_masked_scores";
/** Fields that would leave out numbers of the page, or ask for others than its stages. */
export const LEFT_OUT = ["select_queries", "select_heads", "average_heads", "top_k", "gradients"];
/** Fields that say nothing of single queries: beside them some can be computed without the others. */
const OF_ALL = /^(query(_tokens|_norm)?|key.*|value.*|input|context|projection|layout|num_.*|clip_qkv|scale|softcap|is_causal|window|chunk_size|normalization|dtype|select_heads)$/;
const TURNED = [...SOURCES, "mask", "bias", "grad_output"];
/** Numbers of a sentence: with more the page would not react while they are made. */
const MOST_NUMBERS = 2 ** 22;
const STAGES = [...SCORES, "query", "present_key", "present_value", "head_outputs"];

/** @param {Fields} request */
export const hasTensors = (request) => SOURCES.some((name) => request[name] instanceof Tensor);

/** @type {optionsOf} */
export const optionsOf = (request) => {
	const { window, ...own } = request;
	const values = Object.entries({ ...own, "window.left": window?.left, "window.right": window?.right, layout: layoutOf(request) });
	return Object.fromEntries(values.filter(([, value]) => /string|number/.test(typeof value) || value === true).map(([name, value]) => [name, String(value)]));
};

/** @type {withOptions} */
export const withOptions = (request, { layout = layoutOf(request), ...others }) => {
	const changed = withLayout(request, layout);
	for (const name of LEFT_OUT) delete changed[name];
	for (const [name, text] of Object.entries(others)) {
		const [part, inner] = name.split(".");
		const value = text === "true" || (Number.isNaN(Number(text || NaN)) ? text || undefined : Number(text));
		if (inner) changed[part] = { ...changed[part], [inner]: value };
		else changed[name] = value;
	}
	return changed;
};

/** @type {withLayout} */
const withLayout = (request, layout) => {
	if (layoutOf(request) === layout) return { ...request };
	const turned = Object.entries(request).map(([name, data]) => [name, TURNED.includes(name) ? transposed(data) : data]);
	return { ...Object.fromEntries(turned), layout };
};

/** @type {layoutOf} */
export const layoutOf = (request) => {
	const rank = Math.max(2, ...SOURCES.map((name) => shapeOf(request[name]).length));
	return String(request.layout || ["ld", "bld", "bhld"][rank - 2] || "ld");
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

/** @param {Fields} request @returns {Fields} */
export function forStages(request) {
	const { context, query_tokens, grad_output, grad_logsumexp } = request;
	const { q, k } = sizesOf(request);
	const labels = q === k && !context && { key_tokens: query_tokens };
	return { ...labels, ...request, include: grad_output || grad_logsumexp ? [...STAGES, GRADIENT] : STAGES };
}

/** @type {sliced} */
export const sliced = (data, axis, first, last) => {
	const { dtype, shape, bytes } = asTensor(data);
	if (axis >= shape.length) return data; // one query, a vector
	const outer = shape.slice(0, axis).reduce((size, count) => size * count, 1);
	const size = bytes.length / outer / shape[axis];
	const [step, wanted] = [size * shape[axis], size * (last - first)];
	const part = new Uint8Array(outer * wanted);
	for (let n = 0; n < outer; n++) part.set(bytes.subarray(n * step + first * size, n * step + last * size), n * wanted);
	return new Tensor(dtype, shape.with(axis, last - first), part);
};

/** @type {forWindow} */
export const forWindow = (request, [first, last]) => {
	const asked = forStages(request);
	if (!Object.keys(request).every((name) => OF_ALL.test(name))) return { ...asked, select_queries: times(last - first, (at) => first + at) };
	const { input, context = input, query } = asked;
	const layout = layoutOf(request);
	/** @param {any} data */
	const part = (data) => data && sliced(data, layout.indexOf("l"), first, last);
	return { ...asked, layout, context, input: part(input), query: part(query), query_tokens: undefined, query_offset: first };
};

/** @type {ownField} */
function ownField(part, name) {
	if (name in part && !Object.hasOwn(part, name)) throw new Error(`no field has the name ${name}`); // as __proto__ of all objects
	return part;
}

/** @type {joinTensors} */
const joinTensors = ({ tensors, text }) => {
	const request = fromText(text);
	for (const [path, tensor] of Object.entries(tensors)) {
		const names = path.split(".");
		const last = names.pop() ?? "";
		ownField(names.reduce((part, name) => (ownField(part, name)[name] ??= {}), request), last)[last] = tensor;
	}
	return request;
};

/** @type {requestOfText} */
export const requestOfText = (text, field = "input") => {
	let value;
	try {
		value = fromText(text) ?? {};
	} catch {
		return readPasted(text, field);
	}
	return Array.isArray(value) || value instanceof Tensor ? { [field]: value } : value;
};

/** @type {readFiles} */
export const readFiles = async (files) => {
	/** @type {Fields} */
	const request = Object.create(null); // in which __proto__ is a name like any other
	for (const file of files) {
		Object.assign(request, await readFile(file).catch((error) => {
			const isOwn = error.constructor === Error; // all others are of the browser
			throw new Error(`${file.name}: ${isOwn ? error.message : "expected a whole file of the format that its name says"}`);
		}));
	}
	return request;
};

/** @type {readFile} */
async function readFile(file) {
	const [stem, ending = ""] = file.name.split(/\.(?=[^.]*$)/);
	const field = MAP.test(stem) || TURNED.includes(fieldOf(stem)) ? fieldOf(stem) : "input";
	const format = ending.toLowerCase();
	if (!["npy", "npz", "safetensors"].includes(format)) return requestOfText(await file.text(), field);
	const buffer = await file.arrayBuffer();
	if (format === "npy") return { [field]: readNpy(new Uint8Array(buffer)) };
	return joinTensors(format === "npz" ? await readNpz(buffer) : readSafetensors(buffer));
}

/** @type {randomOf} */
function randomOf(text) {
	let state = 1;
	const next = (added = 0) => (state = (Math.imul(state, 1664525) + 1013904223 + added) >>> 0);
	for (const letter of text) next(letter.codePointAt(0));
	next(); // spreads the last letter
	return () => next() / 2 ** 32;
}

/** @type {sentenceRequest} */
export const sentenceRequest = (text, dim, seed) => {
	const words = text.trim().split(/\s+/);
	if (words.length * dim > MOST_NUMBERS) throw new Error(`expected at most ${MOST_NUMBERS} numbers, got ${words.length} words × ${dim}`);
	const input = words.map((word) => {
		const random = randomOf(`${seed}:${word}`);
		const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
		return times(dim, () => Math.round(100 * normal()) / 100);
	});
	return { input, query_tokens: words };
};
