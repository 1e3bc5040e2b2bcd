// Responses: arrays as rows and columns by batch entry and head.

import { numbers } from "./tensors.js";
import { SCORES, layoutOf } from "./request.js";

/** @param {string} name */
const isScore = (name) => SCORES.includes(name) || name === "logsumexp";

/** What the service computed for a request. */
export class Result {
	/** @param {Fields} request @param {Record<string, Tensor>} tensors @param {Fields} answer */
	constructor(request, tensors, answer) {
		this.request = request;
		this.tensors = tensors;
		this.answer = answer;
		this.metadata = answer.metadata;
		this.layout = layoutOf(request);
		this.columns = this.layout.endsWith("dl");
		/** @type {Record<string, Blocks>} */
		this.blocks = Object.fromEntries(Object.entries(tensors).map(([name, tensor]) => [name, this.arrange(name, tensor)]));
	}

	/** An array by batch entry, head, and rows of tokens. @param {string} name @param {Tensor} tensor @returns {Blocks} */
	arrange(name, tensor) {
		const axes = this.axesOf(name, tensor.shape.length);
		const order = isScore(name) ? "bhqk" : "bhld";
		const [b, h, rows, cols] = [...order].map((axis) => tensor.shape[axes.indexOf(axis)] ?? 1);
		return { b, h, rows, cols, values: permuted(numbers(tensor), tensor.shape, axes, order) };
	}

	/** The axes of an array as letters. @param {string} name @param {number} rank */
	axesOf(name, rank) {
		const b = this.layout.includes("b") ? "b" : "";
		const h = this.layout.includes("h") || this.metadata.num_heads > 1 ? "h" : "";
		if (name.startsWith("present_")) return `${b}hld`;
		const last = name === "logsumexp" ? "q" : !isScore(name) ? "ld" : this.columns ? "kq" : "qk";
		const axes = name === "output" ? this.layout : b + h + last;
		return rank < axes.length ? axes.replace(/[ql]/, "") : axes; // a query that is a vector has no axis of tokens
	}

	/** The names of what hides a key. @param {number} bits */
	causesIn(bits) {
		return bits ? Object.entries(this.metadata.hidden_by).flatMap(([name, bit]) => (bits & bit ? [name] : [])) : [];
	}
}

/** A result and a choice. */
export class View {
	/** @param {Result} result @param {Choice} choice @param {Choose} choose */
	constructor(result, choice, choose) {
		this.result = result;
		this.choice = choice;
		this.choose = choose;
	}

	/** @param {Partial<Choice>} change */
	with(change) {
		return new View(this.result, { ...this.choice, ...change }, this.choose);
	}

	/** @param {string} name */
	block(name) {
		const { b, h, rows, cols, values } = this.result.blocks[name];
		const group = name.startsWith("present_") ? this.result.metadata.num_heads / h : 1;
		const at = Math.min(this.choice.batch, b - 1) * h + Math.min(Math.floor(this.choice.head / group), h - 1);
		return { rows, cols, values: values.subarray(at * rows * cols, (at + 1) * rows * cols) };
	}

	/** A row, by default that of the chosen query. @param {string} name */
	row(name, row = this.choice.query) {
		const { cols, values } = this.block(name);
		return Array.from(values.subarray(row * cols, (row + 1) * cols));
	}

	/** @param {string} name */
	at(name) {
		const { cols, values } = this.block(name);
		return values[this.choice.query * cols + this.choice.key];
	}

	/** A block with tokens in rows or columns, as in the layout. @param {string} name @returns {Grid} */
	grid(name) {
		const { rows, cols, values } = this.block(name);
		const rowAxis = name.startsWith("present_") ? "key" : "query";
		const colAxis = isScore(name) ? "key" : "feature";
		if (!this.result.columns) return { name, values, rows, cols, rowAxis, colAxis };
		const turned = permuted(values, [rows, cols], "rc", "cr");
		return { name, values: turned, rows: cols, cols: rows, rowAxis: colAxis, colAxis: rowAxis };
	}

	/** The label of a token, or its index. @param {Axis} axis */
	label(axis, index = axis === "feature" ? 0 : this.choice[axis]) {
		const all = this.result.answer[`${axis}_tokens`];
		const tokens = Array.isArray(all?.[0]) ? all[this.choice.batch] : all;
		return String(tokens?.[index] ?? index);
	}
}

/** Numbers with their axes in another order. @type {permuted} */
const permuted = (values, shape, axes, order) => {
	const places = [...order].map((axis) => axes.indexOf(axis)).filter((place) => place >= 0);
	if (places.every((place, index) => place === index)) return values;
	const strides = places.map((place) => shape.slice(place + 1).reduce((size, part) => size * part, 1));
	const moved = values.slice();
	let next = 0;
	const walk = (depth = 0, from = 0) => {
		if (depth === places.length) moved[next++] = values[from];
		else for (let i = 0; i < shape[places[depth]]; i++) walk(depth + 1, from + i * strides[depth]);
	};
	walk();
	return moved;
};
