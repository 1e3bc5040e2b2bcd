// One number by hand: how a weight and its part of the output follow from query, key and value.

import { brief, fillIn, find, make, show, tableRow } from "./dom.js";

/** Why the chosen key is hidden, "" if it is visible. @param {View} view */
export function whyHidden(view) {
	const { window, chunk_size: chunk, query_offset, past_key } = view.result.request;
	const { key_length, query_length } = view.result.metadata;
	const { batch, query, key } = view.choice;
	const offset = query_offset ?? (past_key ? key_length - query_length : 0);
	const place = query + (Array.isArray(offset) ? offset[batch] : offset);
	const [first, last] = [Math.max(0, place - (window?.left ?? place)), place + (window?.right ?? Infinity)];
	const values = { key, place, first, last, "query-chunk": Math.floor(place / chunk), "key-chunk": Math.floor(key / chunk) };
	const reasons = find("reasons").dataset;
	const causes = view.result.causesIn(view.at("hidden_by")).map((name) => `${name} (${fillIn(reasons[name] ?? "", values)})`);
	return causes.length ? `hidden by ${causes.join(" and ")}` : "";
}

/** The exponentials of the chosen row, and their sum. @param {View} view */
function softmaxOf(view) {
	const { normalization = "softmax", sinks } = view.result.request;
	const softmax = normalization === "softmax";
	const scores = view.row("masked_scores");
	const max = softmax ? Math.max(...scores) : 0;
	const exps = scores.map((score) => (score === -Infinity ? 0 : softmax ? Math.exp(score - max) : score));
	const sum = exps.reduce((total, part) => total + part, 0);
	const sink = sinks && softmax ? Math.exp(view.block("logsumexp").values[view.choice.query] - max) - sum : 0;
	return { normalization, max, exps, sink, sum: sum + sink };
}

/** @param {number} value */
const bracket = (value) => (value < 0 ? `(${brief(value)})` : brief(value));

/** @type {joined} */
const joined = (texts, sign = " + ", most = 12) => texts.slice(0, most).join(sign) + (texts.length > most ? `${sign}… (${texts.length - most} more)` : "");

/** The steps to the weight of the chosen cell. @param {View} view */
function stepsOf(view) {
	const { softcap } = view.result.request;
	const [score, scaled, capped, masked, weight] = ["scores", "scaled_scores", "capped_scores", "masked_scores", "attention_weights"].map((name) => view.at(name));
	const key = view.row("present_key", view.choice.key);
	const products = view.row("query").map((value, n) => `${bracket(value)}·${bracket(key[n])}`);
	const scale = view.result.metadata.scale[view.choice.head] ?? view.result.metadata.scale;
	const steps = [["Score", `${joined(products)} = ${show(score)}`], ["Scaled", `${show(score)} × ${show(scale)} = ${show(scaled)}`]];
	if (softcap) steps.push(["Capped", `${softcap} · tanh(${show(scaled)} / ${softcap}) = ${show(capped)}`]);
	const hidden = whyHidden(view);
	if (hidden) return [...steps, ["Masked", `−∞: ${hidden}`], ["Weight", "0"]];
	if (masked !== capped) steps.push(["Masked", `${show(capped)} + ${bracket(masked - capped)} = ${show(masked)}`]);
	const { normalization, max, exps, sink, sum } = softmaxOf(view);
	const part = show(exps[view.choice.key], 6);
	if (normalization === "softmax") steps.push(["Exponential", `exp(${show(masked)} − ${bracket(max)}) = ${part}; ${brief(max)} is the largest of the row`]);
	const parts = [...exps.map(brief), ...(sink ? [`${brief(sink)} (sink)`] : [])];
	return [...steps, ["Sum", `${joined(parts)} = ${show(sum)}`], ["Weight", `${part} / ${show(sum)} = ${show(weight, 6)}`]];
}

/** @param {View} view */
export function paintRow(view) {
	find("row-title").textContent = `By hand: \u2068${view.label("query")}\u2069 → \u2068${view.label("key")}\u2069`;
	find("steps").replaceChildren(...stepsOf(view).flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]));
	const { normalization, exps, sum } = softmaxOf(view);
	const [scaled, masked, weights] = ["scaled_scores", "masked_scores", "attention_weights"].map((name) => view.row(name));
	const rows = weights.map((weight, key) => {
		const weighted = view.row("present_value", key).map((value) => brief(value * weight));
		const numbers = [scaled[key], masked[key], exps[key], weight, joined(weighted, ", ", 6)];
		const row = tableRow(view.label("key", key), numbers, { class: key === view.choice.key ? "chosen" : "" });
		row.onclick = () => view.choose({ key });
		return row;
	});
	const output = joined(view.row("head_outputs").map(brief), ", ", 6);
	const total = weights.reduce((all, weight) => all + weight, 0);
	find("row").replaceChildren(...rows, tableRow("Σ", ["", "", sum, total, output], { class: "sum" }));
	find("exp-title").textContent = normalization === "softmax" ? "exp(· − max)" : "score";
}
