// Responses: arrays as rows and columns by batch entry and head.

import { times } from "./dom.js";
import { asTensor, numbers } from "./tensors.js";
import { isMatrix, layoutOf, sliced } from "./request.js";

/** The axes of a block. @param {string} name @returns {{ rowAxis: Axis, colAxis: Axis }} */
const axesOf = (name) => ({ rowAxis: name.startsWith("present_") ? "key" : "query", colAxis: isMatrix(name) ? "key" : "feature" });

/** A stage that a saved page lacks. */
const ABSENT = { b: 1, h: 1, rows: 0, cols: 0, values: new Float64Array() };

/** What the service computed for a request. */
export class Result {
	/** @param {Fields} request @param {Fields} tensors @param {Fields} answer @param {Result} [former] */
	constructor(request, tensors, answer, former) {
		this.request = request;
		this.tensors = tensors;
		this.answer = answer;
		this.metadata = answer.metadata;
		this.layout = layoutOf(request);
		this.columns = this.layout.endsWith("dl");
		/** @type {Zoom | undefined} */
		this.window = answer.window;
		/** What was drawn of it, by name. @type {Record<string, any>} */
		this.drawn = {};
		const { input, context = input, query = input, key = context, value = context, sinks, gate, projection = {} } = request;
		const maps = Object.entries(projection).map(([name, map]) => [`map.${name}`, map.weight ?? map.kernel]);
		const all = { ...tensors, all_weights: tensors.attention_weights, all_scores: tensors.masked_scores, sinks, gate, "given.query": query, "given.key": key, "given.value": value, "given.grad_output": request.grad_output, ...Object.fromEntries(maps) };
		const given = Object.entries(all).filter(([, data]) => data);
		/** @type {Record<string, Blocks>} */
		this.blocks = Object.fromEntries(given.map(([name, data]) => [name, this.arrange(name, asTensor(data))]));
		const [mine, other] = [this.blocks.attention_weights, former?.blocks.attention_weights];
		if (mine) Object.assign(this.metadata, { query_length: mine.rows, key_length: mine.cols });
		if (other && mine.values.length === other.values.length && mine.rows === other.rows && former?.window === this.window) {
			this.blocks.change = { ...mine, values: mine.values.map((value, at) => value - other.values[at]) };
		}
	}

	/** An array by batch entry, head, and rows of tokens. @param {string} name @param {Tensor} tensor */
	arrange(name, tensor) {
		const axes = this.axesOf(name, tensor.shape.length);
		const order = isMatrix(name) ? "bhqk" : "bhld";
		const { rowAxis, colAxis } = axesOf(name);
		for (const [letter, axis] of [[order[2], rowAxis], [order[3], colAxis]]) {
			const [at, [first, last]] = [axes.indexOf(letter), this.window?.[axis] ?? []];
			if (tensor.shape[at] > last - first && !/given|map|all/.test(name)) tensor = sliced(tensor, at, first, last);
		}
		const [b, h, rows, cols] = [...order].map((axis) => tensor.shape[axes.indexOf(axis)] ?? 1);
		return { b, h, rows, cols, values: permuted(numbers(tensor), tensor.shape, axes, order) };
	}

	/** The axes of an array as letters. @param {string} name @param {number} rank */
	axesOf(name, rank) {
		const b = this.layout.includes("b") ? "b" : "";
		const h = this.layout.includes("h") || this.metadata.num_heads > 1 ? "h" : "";
		if (name === "sinks") return rank === 1 ? "h" : "bhl".slice(-rank);
		if (name.startsWith("map.")) return (this.request.projection[name.slice(4)].weight ? "hld" : "hdl").slice(-rank);
		if (name === "gate" || name.startsWith("present_")) return "bhld".slice(-rank);
		const last = !isMatrix(name) ? "ld" : this.columns ? "kq" : "qk";
		const axes = /output$|given/.test(name) ? this.layout : b + h + last;
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

	/**
	 * What is made once for each batch entry, head, and way of colouring.
	 * @template Made @param {string} name @param {() => Made} make @returns {Made}
	 */
	once(name, make) {
		const { batch, head, colours, first } = this.choice;
		return (this.result.drawn[[name, batch, head, colours, first].join()] ??= make());
	}

	/** @param {string} name */
	block(name) {
		const { b, h, rows, cols, values } = this.result.blocks[name] ?? ABSENT;
		const at = Math.min(this.choice.batch, b - 1) * h + Math.floor((this.choice.head * h) / this.result.metadata.num_heads);
		return { rows, cols, values: values.subarray(at * rows * cols, (at + 1) * rows * cols) };
	}

	/** The blocks of all heads, one after the other. @param {string} name */
	allBlocks(name) {
		const { b, h, rows, cols, values } = this.result.blocks[name];
		const size = h * rows * cols;
		return values.subarray(Math.min(this.choice.batch, b - 1) * size).subarray(0, size);
	}

	/** A row, by default that of the chosen query. @param {string} name */
	row(name, row = this.choice.query) {
		const { cols, values } = this.block(name);
		return Array.from(values.subarray(row * cols, (row + 1) * cols));
	}

	/** The rows of all heads for the chosen query, one after the other. @param {string} name */
	allHeads(name) {
		return times(this.result.metadata.num_heads, (head) => this.with({ head }).row(name)).flat();
	}

	/** The chosen number; the only one of an axis with one. @param {string} name */
	at(name) {
		const { rows, cols, values } = this.block(name);
		const { rowAxis, colAxis } = axesOf(name);
		return values[Math.min(this.choice[rowAxis], rows - 1) * cols + Math.min(this.choice[colAxis], cols - 1)];
	}

	/** The chosen row and column of a block, by name. @param {string} name */
	names(name) {
		const { rowAxis, colAxis } = axesOf(name);
		return [rowAxis, colAxis].map((axis) => `${axis} ${this.place(axis, this.choice[axis])}`);
	}

	/** A block with tokens in rows or columns, as in the layout. @param {string} name @returns {Grid} */
	grid(name) {
		return this.once(`${name} as a grid`, () => {
			const { rows, cols, values } = this.block(name);
			const { rowAxis, colAxis } = axesOf(name);
			if (!this.result.columns) return { name, values, rows, cols, rowAxis, colAxis };
			const turned = permuted(values, [rows, cols], "rc", "cr");
			return { name, values: turned, rows: cols, cols: rows, rowAxis: colAxis, colAxis: rowAxis };
		});
	}

	/** The number of the chosen head: in a page of a model, that of the model. */
	head() {
		return this.result.answer.heads?.[this.choice.head] ?? this.choice.head;
	}

	/** An index in the whole sequence. @param {Axis} axis */
	index(axis, at = this.choice[axis]) {
		return at + (this.result.window?.[axis]?.[0] ?? 0);
	}

	/** The label of a token, or its index. @param {Axis} axis @param {number} index */
	label(axis, index) {
		const all = this.result.request[`${axis}_tokens`];
		const tokens = Array.isArray(all?.[0]) ? all[this.choice.batch] : all;
		return String(tokens?.[this.index(axis, index)] ?? this.index(axis, index));
	}

	/** The position of a token, and its label if it has one. @param {Axis} axis @param {number} index */
	place(axis, index) {
		const label = this.label(axis, index);
		const at = String(this.result.answer[`${axis}_places`]?.[index] ?? this.index(axis, index));
		return label === at ? label : `${at} “\u2068${label}\u2069”`;
	}
}

/** @type {permuted} */
const permuted = (values, shape, axes, order) => {
	const places = [...order].map((axis) => axes.indexOf(axis)).filter((place) => place >= 0);
	if (places.every((place, index) => place === index)) return values;
	const strides = places.map((place) => shape.slice(place + 1).reduce((size, part) => size * part, 1));
	return values.map((_, at) => {
		const from = places.reduceRight((sum, place, index) => {
			const count = shape[place];
			const part = at % count;
			at = Math.floor(at / count);
			return sum + part * strides[index];
		}, 0);
		return values[from];
	});
};
