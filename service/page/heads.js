// All heads as thumbnails, and the lines between queries and keys, as in BertViz's head view.

import { find, make, makeSvg, show, times } from "./dom.js";
import { headColour } from "./colours.js";
import { shorten, thumbnail } from "./heatmap.js";

const [STEP, WIDTH, MARGIN, MOST_LINES] = [22, 440, 140, 800];

/** Paints a thumbnail of each head. @param {View} view */
export function paintHeads(view) {
	const list = find("heads");
	const count = view.result.metadata.num_heads;
	while (list.children.length > count) list.lastChild?.remove();
	while (list.children.length < count) list.append(make("button", { type: "button" }, make("b"), make("span")));
	list.querySelectorAll("button").forEach((button, head) => {
		button.setAttribute("aria-pressed", String(head === view.choice.head));
		button.onclick = () => view.choose({ head });
		const dot = make("i");
		dot.style.background = headColour(head);
		button.children[0].replaceChildren(dot, `Head ${head}`);
		button.children[1].replaceChildren(thumbnail(view.with({ head }), "attention_weights", 80));
	});
}

/** Paints tokens and lines. A token that is pointed at shows its own lines only. @param {View} view */
export function paintLines(view) {
	const { query_length, key_length, num_heads } = view.result.metadata;
	const heads = find("all-heads").checked ? [...Array(num_heads).keys()] : [view.choice.head];
	const lines = heads.flatMap((head) => linesOf(view.with({ head })));
	const group = makeSvg("g");
	const tokens = [...drawTokens(view, "query", query_length), ...drawTokens(view, "key", key_length)];
	/** @param {EventTarget | null} [target] */
	const point = (target) => {
		const token = tokenOf(target);
		const shown = token ? lines.filter((line) => line[token.axis] === token.index) : lines;
		group.replaceChildren(...shown.slice(0, MOST_LINES).map(drawLine));
		tokens.forEach((text) => writeToken(view, text, token));
	};
	const svg = find("lines");
	svg.setAttribute("viewBox", `0 0 ${WIDTH} ${STEP * Math.max(query_length, key_length) + 8}`);
	svg.replaceChildren(group, ...tokens);
	svg.onpointerover = ({ target }) => point(target);
	svg.onpointerleave = () => point();
	svg.onclick = ({ target }) => chooseToken(view, target, 0);
	svg.onkeydown = ({ key, target }) => key in KEYS && chooseToken(view, target, KEYS[key]);
	tokens.forEach((text) => (text.onfocus = () => point(text)));
	point();
}

/** @type {Record<string, number>} */
const KEYS = { ArrowDown: 1, ArrowUp: -1, Enter: 0 };

/** @type {tokenOf} */
const tokenOf = (target) => {
	const { axis, index } = target instanceof SVGElement ? target.dataset : {};
	return axis ? { axis: axis === "key" ? "key" : "query", index: Number(index) } : undefined;
};

/** Chooses the token some steps below. @type {chooseToken} */
const chooseToken = (view, target, step) => {
	const token = tokenOf(target);
	if (!token) return;
	view.choose({ [token.axis]: token.index + step });
	/** @type {SVGElement} */ (find("lines").querySelector(`[data-axis=${token.axis}][tabindex="0"]`)).focus();
};

/** @param {number} index */
const middle = (index) => STEP * (index + 0.5) + 4;

/** The visible weights of a head, largest first. @type {linesOf} */
const linesOf = (view) => {
	const { cols, values } = view.block("attention_weights");
	const lines = Array.from(values, (weight, at) => ({ query: Math.floor(at / cols), key: at % cols, weight, head: view.choice.head }));
	return lines.filter(({ weight }) => Math.abs(weight) > 0.004).sort((one, other) => other.weight - one.weight);
};

/** @param {Line} line */
function drawLine({ query, key, weight, head }) {
	const [from, to, strength] = [middle(query), middle(key), Math.min(1, Math.abs(weight))];
	const d = `M${MARGIN} ${from}C${WIDTH / 2} ${from} ${WIDTH / 2} ${to} ${WIDTH - MARGIN} ${to}`;
	const style = { "stroke-width": 0.5 + 4 * strength, "stroke-opacity": 0.1 + 0.9 * strength, "stroke-dasharray": weight < 0 ? "4 3" : "none" };
	return makeSvg("path", { d, fill: "none", stroke: headColour(head), ...style });
}

/** @type {drawTokens} */
const drawTokens = (view, axis, count) => {
	const place = axis === "query" ? { x: MARGIN - 8, "text-anchor": "end" } : { x: WIDTH - MARGIN + 8 };
	return times(count, (index) => {
		const chosen = view.choice[axis] === index;
		const state = { role: "button", tabindex: chosen ? 0 : -1, "aria-pressed": chosen };
		return makeSvg("text", { ...place, y: middle(index) + 4, "data-axis": axis, "data-index": index, ...state });
	});
};

/** Writes a token, with its weight for another one. @type {writeToken} */
const writeToken = (view, text, other) => {
	const { axis, index } = /** @type {Token} */ (tokenOf(text));
	const pair = other && other.axis !== axis && view.with({ [axis]: index, [other.axis]: other.index });
	text.textContent = `${shorten(view.label(axis, index))} ${pair ? show(pair.at("attention_weights"), 3) : ""}`;
	text.setAttribute("aria-label", `${axis} ${index}: ${text.textContent}`);
};
