// All heads as thumbnails, and the lines between queries and keys, as in BertViz's head view.

import { around, decorate, find, keep, make, makeSvg, show, times } from "./dom.js";
import { pixelsOf, shorten } from "./heatmap.js";

const [STEP, WIDTH, MARGIN, MOST_LINES] = [22, 440, 140, 400];

/** @param {View} view */
export function paintHeads(view) {
	const list = find("heads");
	const count = view.result.metadata.num_heads;
	// Kept while their number is the same, with their focus.
	if (list.children.length !== count) list.replaceChildren(...times(count, () => make("button", { type: "button" }, make("b"), make("span"))));
	list.querySelectorAll("button").forEach((button, head) => {
		button.setAttribute("aria-pressed", String(head === view.choice.head));
		button.onclick = () => view.choose({ head });
		const own = view.with({ head });
		button.children[0].replaceChildren(make("i", { class: `head${head % 9}` }), `Head ${own.head()}`);
		keep(button.children[1], pixelsOf(own, own.grid("attention_weights"), "head"));
	});
}

/** @type {paintLines} */
export function paintLines(view) {
	const all = find("all-heads").checked && !view.result.window;
	const { query_length, key_length } = view.result.metadata;
	const shown = { query: around(view.choice.query, query_length), key: around(view.choice.key, key_length) };
	const { batch, head, first } = view.choice;
	const name = [all, batch, head, first, shown.query[0], shown.key[0]].join();
	const { drawn } = view.result;
	if (drawn.lines?.name !== name) drawn.lines = { name, ...drawLines(view, all, shown) };
	const { svg, tokens } = drawn.lines;
	for (const { own, text } of tokens) {
		const isChosen = view.choice[own.axis] === own.index;
		if (text.getAttribute("aria-pressed") === String(isChosen)) continue;
		decorate(text, { "aria-pressed": isChosen, tabindex: isChosen ? 0 : -1 });
	}
	keep(find("lines"), svg);
}

/** @type {drawLines} */
function drawLines(view, all, shown) {
	const heads = all ? times(view.result.metadata.num_heads, Number) : [view.choice.head];
	const lines = heads.flatMap((head) => linesOf(view.with({ head }), shown)).sort((one, other) => other.weight - one.weight);
	const group = makeSvg("g");
	/** @type {Point} */
	const point = (token) => {
		const visible = token ? lines.filter((line) => line[token.axis] === token.index) : lines;
		group.replaceChildren(...visible.slice(0, MOST_LINES).map((line) => drawLine(line, shown)));
		tokens.forEach(({ own, text }) => writeToken(view, text, own, token));
	};
	const tokens = [...tokensOf(view, "query", shown.query, point), ...tokensOf(view, "key", shown.key, point)];
	const viewBox = `0 0 ${WIDTH} ${STEP * Math.max(shown.query.length, shown.key.length) + 8}`;
	const svg = makeSvg("svg", { viewBox, role: "group", "aria-label": find("lines").dataset.label }, group, ...tokens.map(({ text }) => text));
	svg.onpointerleave = () => point();
	point();
	return { svg, tokens };
}

/** @param {number} index */
const middle = (index) => STEP * (index + 0.5) + 4;

/** @type {linesOf} */
const linesOf = (view, shown) => {
	const { cols, values } = view.block("attention_weights");
	const lines = shown.query.flatMap((query) => shown.key.map((key) => ({ query, key, weight: values[query * cols + key], head: view.choice.head })));
	return lines.filter(({ key, weight }) => Math.abs(weight) > 0.004 && !(view.choice.first && view.index("key", key) === 0));
};

/** @type {drawLine} */
function drawLine({ query, key, weight, head }, shown) {
	const [from, to, strength] = [middle(query - shown.query[0]), middle(key - shown.key[0]), Math.min(1, Math.abs(weight))];
	const d = `M${MARGIN} ${from}C${WIDTH / 2} ${from} ${WIDTH / 2} ${to} ${WIDTH - MARGIN} ${to}`;
	const style = { "stroke-width": 0.5 + 4 * strength, "stroke-opacity": 0.1 + 0.9 * strength, "stroke-dasharray": weight < 0 ? "4 3" : "none" };
	return makeSvg("path", { d, stroke: `var(--head${head % 9})`, ...style });
}

/** @type {tokensOf} */
const tokensOf = (view, axis, shown, point) => {
	const place = axis === "query" ? { x: MARGIN - 8, "text-anchor": "end" } : { x: WIDTH - MARGIN + 8 };
	return shown.map((index, row) => {
		const own = { axis, index };
		const state = { role: "button", tabindex: -1, "data-axis": axis, "data-index": index };
		const text = makeSvg("text", { ...place, y: middle(row) + 4, ...state });
		text.onpointerover = text.onfocus = () => point(own);
		text.onclick = () => view.choose({ [axis]: index });
		return { own, text };
	});
};

/** @type {writeToken} */
const writeToken = (view, text, { axis, index }, other) => {
	const pair = other && other.axis !== axis && view.with({ [axis]: index, [other.axis]: other.index });
	text.textContent = `${shorten(view.label(axis, index))} ${pair ? show(pair.at("attention_weights"), 3) : ""}`;
	text.setAttribute("aria-label", `${axis} ${index}: ${text.textContent}`);
};
