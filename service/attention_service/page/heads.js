// All heads as thumbnails, and the lines between queries and keys, as in BertViz's head view.

import { find, make, makeSvg, show, times } from "./dom.js";
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
		button.children[0].replaceChildren(make("i", { class: `head${head % 9}` }), `Head ${head}`);
		button.children[1].replaceChildren(pixelsOf(view, view.with({ head }).grid("attention_weights")));
	});
}

/** @type {paintLines} */
export function paintLines(view) {
	const { query_length, key_length, num_heads } = view.result.metadata;
	const heads = find("all-heads").checked ? times(num_heads, Number) : [view.choice.head];
	const lines = heads.flatMap((head) => linesOf(view.with({ head }))).sort((one, other) => other.weight - one.weight);
	const group = makeSvg("g");
	const svg = find("lines");
	/** @type {Point} */
	const point = (token) => {
		const shown = token ? lines.filter((line) => line[token.axis] === token.index) : lines;
		group.replaceChildren(...shown.slice(0, MOST_LINES).map(drawLine));
		tokens.forEach(({ own, text }) => writeToken(view, text, own, token));
	};
	const tokens = [...tokensOf(view, "query", query_length, point), ...tokensOf(view, "key", key_length, point)];
	svg.setAttribute("viewBox", `0 0 ${WIDTH} ${STEP * Math.max(query_length, key_length) + 8}`);
	svg.replaceChildren(group, ...tokens.map(({ text }) => text));
	svg.onpointerleave = () => point();
	point();
}

/** @param {number} index */
const middle = (index) => STEP * (index + 0.5) + 4;

/** @type {linesOf} */
const linesOf = (view) => {
	const { cols, values } = view.block("attention_weights");
	const lines = Array.from(values, (weight, at) => ({ query: Math.floor(at / cols), key: at % cols, weight, head: view.choice.head }));
	return lines.filter(({ weight }) => Math.abs(weight) > 0.004);
};

/** @param {Line} line */
function drawLine({ query, key, weight, head }) {
	const [from, to, strength] = [middle(query), middle(key), Math.min(1, Math.abs(weight))];
	const d = `M${MARGIN} ${from}C${WIDTH / 2} ${from} ${WIDTH / 2} ${to} ${WIDTH - MARGIN} ${to}`;
	const style = { "stroke-width": 0.5 + 4 * strength, "stroke-opacity": 0.1 + 0.9 * strength, "stroke-dasharray": weight < 0 ? "4 3" : "none" };
	return makeSvg("path", { d, stroke: `var(--head${head % 9})`, ...style });
}

/** @type {tokensOf} */
const tokensOf = (view, axis, count, point) => {
	const place = axis === "query" ? { x: MARGIN - 8, "text-anchor": "end" } : { x: WIDTH - MARGIN + 8 };
	return times(count, (index) => {
		const [chosen, own] = [view.choice[axis] === index, { axis, index }];
		const state = { role: "button", tabindex: chosen ? 0 : -1, "aria-pressed": chosen, "data-axis": axis, "data-index": index };
		const text = makeSvg("text", { ...place, y: middle(index) + 4, ...state });
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
