// One number by hand: how it follows from query, key and value.

import { fillIn, find, make, show, tableRow, times } from "./dom.js";
import { SCORES } from "./request.js";
import { asTensor, numbers, shapeOf } from "./tensors.js";

/** One of the numbers of an array, or the only one. @param {any} data @param {number} at */
const entry = (data, at) => {
	const all = numbers(asTensor(data));
	return all[at] ?? all[0];
};

/** Why the chosen key is hidden, "" if it is visible. @param {View} view */
export function whyHidden(view) {
	const { window, chunk_size: chunk, query_offset, past_key } = view.result.request;
	const { batch, query, key } = view.choice;
	const place = query + entry(query_offset ?? shapeOf(past_key).at(-2) ?? 0, batch);
	const last = Math.min(place + (window?.right ?? Infinity), view.result.metadata.key_length - 1);
	const [name, from, to] = [key, Math.max(0, place - (window?.left ?? place)), last].map((index) => view.place("key", index));
	const values = { key: name, place, first: from, last: to, "query-chunk": Math.floor(place / chunk), "key-chunk": Math.floor(key / chunk) };
	const reasons = find("reasons").dataset;
	const causes = view.result.causesIn(view.at("hidden_by")).map((cause) => `${cause} (${fillIn(reasons[cause], values)})`);
	return causes.length ? `hidden by ${causes.join(" and ")}` : "";
}

/** The parts of the chosen row, and their sum. @param {View} view */
function partsOf(view) {
	const { normalization = "softmax", sinks } = view.result.request;
	const scores = [...view.row("masked_scores"), ...(sinks ? [view.at("sinks")] : [])];
	const max = Math.max(...scores);
	const parts = scores.map((score) => {
		if (score === -Infinity) return 0;
		if (normalization === "sum") return score;
		return normalization === "sigmoid" ? 1 / (1 + Math.exp(-score)) : Math.exp(score - max);
	});
	return { normalization, max, parts, sum: parts.reduce((total, part) => total + part, 0) };
}

/** @type {joined} */
const joined = (texts, sign = " + ", most = 12) => texts.slice(0, most).join(sign) + (texts.length > most ? `${sign}… (${texts.length - most} more)` : "");

/** A number with six digits. @param {number} value */
const rounded = (value) => Number(Math.abs(value) < 1 ? value.toPrecision(6) : value.toFixed(6));

/** @type {formula} */
const formula = (text, ...numbers) => {
	const isExact = numbers.every((value) => Math.abs(value - rounded(value)) <= 1e-14 * Math.abs(value));
	const texts = numbers.map((value) => String(rounded(value)).replaceAll("-", "−"));
	const left = fillIn(text, texts).replace(/(?<=[·×+−] ?)−[\d.e−]+/g, "($&)");
	return `${left} ${isExact ? "=" : "≈"} ${texts.at(-1)}`;
};

/** @type {products} */
const products = (ones, others, sum, bias = []) => {
	const texts = [...ones.map((_, n) => `{${2 * n}}·{${2 * n + 1}}`), ...bias.map(() => `{${2 * ones.length}}`)];
	return formula(joined(texts), ...ones.flatMap((one, n) => [one, others[n]]), ...bias, sum);
};

/** The steps to the weight of the chosen cell. @param {View} view */
function weightSteps(view) {
	const { request, metadata, columns } = view.result;
	const [score, scaled, capped, masked, weight] = SCORES.map((name) => view.at(name));
	const scale = metadata.scale[view.choice.head] ?? metadata.scale;
	const steps = [["Score", products(view.row("query"), view.row("present_key", view.choice.key), score)], ["Scaled", formula("{0} × {1}", score, scale, scaled)]];
	if (request.softcap) steps.push(["Capped", formula("{0} · tanh({1} / {0})", request.softcap, scaled, capped)]);
	const hidden = whyHidden(view);
	if (hidden) return [...steps, ["Masked", `−∞: ${hidden}`], ["Weight", "0"]];
	if (masked !== capped) steps.push(["Masked", formula("{0} + {1}", capped, masked - capped, masked)]);
	const { normalization, max, parts, sum } = partsOf(view);
	const part = parts[view.choice.key];
	if (normalization === "sigmoid") return [...steps, ["Weight", formula("1 / (1 + exp(−{0}))", masked, weight)]];
	if (normalization === "softmax") steps.push([`Largest of the ${columns ? "column" : "row"}`, String(rounded(max)).replace("-", "−")], ["Exponential", formula("exp({0} − {1})", masked, max, part)]);
	const terms = parts.map((_, n) => `{${n}}${n === metadata.key_length ? " (sink)" : ""}`);
	return [...steps, ["Sum", formula(joined(terms), ...parts, sum)], ["Weight", formula("{0} / {1}", part, sum, weight)]];
}

/** How a feature of a query, key, value or output follows. @param {View} view */
function featureStep(view) {
	const { stage, head, feature, query, key } = view.choice;
	const { request, metadata, blocks } = view.result;
	const value = view.at(stage);
	if (stage === "head_outputs") {
		const values = times(metadata.key_length, (index) => view.with({ key: index }).at("present_value"));
		return products(view.row("attention_weights"), values, value);
	}
	const part = stage.replace("present_", "");
	const [map, name, isOutput] = [request.projection?.[part], `map.${part}`, part === "output"];
	const at = Math.floor((head * blocks[stage].h) / metadata.num_heads) * blocks[stage].cols + feature; // over all heads
	const row = part === stage ? query : key - (shapeOf(request.past_key).at(-2) ?? 0);
	const source = isOutput ? view.allHeads("head_outputs") : view.row(`given.${part}`, row);
	const gates = isOutput && request.gate ? view.allHeads("gate") : [];
	const ones = map ? source : [source[at % source.length]];
	const others = map ? view.row(name, at % blocks[name].rows) : gates.slice(Math.floor((at * gates.length) / source.length));
	const bias = map?.bias ? [entry(map.bias, at)] : [];
	const terms = [...ones.map((one, n) => one * (others[n] ?? 1)), ...bias];
	const rest = terms.reduce((left, term) => left - term, value);
	if (!(Math.abs(rest) < 0.02 * Math.max(1e-9, ...terms.map(Math.abs)))) return `${show(value, 6)}, after options not written out here`;
	return others.length ? products(ones, others, value, bias) : show(value, 6);
}

/** @param {View} view */
export function paintRow(view) {
	const { stage } = view.choice;
	const steps = SCORES.includes(stage) ? weightSteps(view) : [["Number", featureStep(view)]];
	find("row-title").textContent = `By hand: ${view.names(stage).join(" → ")}`;
	find("steps").replaceChildren(...steps.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]));
	const { normalization, parts, sum } = partsOf(view);
	const [, scaled, , masked, weights] = SCORES.map((name) => view.row(name));
	/** @param {number[]} values */
	const listed = (values) => joined(values.map((value) => show(value, 3)), ", ", 8);
	const rows = weights.map((weight, key) => {
		const weighted = view.row("present_value", key).map((value) => value * weight);
		const numbers = [scaled[key], masked[key], parts[key], weight, listed(weighted)];
		const row = tableRow(view.label("key", key), numbers, { class: key === view.choice.key ? "chosen" : "" });
		row.onclick = () => view.choose({ key });
		return row;
	});
	if (view.result.request.sinks) rows.push(tableRow("sink", ["", "", parts[weights.length], "", ""], {}));
	const total = weights.reduce((all, weight) => all + weight, 0);
	const numbers = ["", "", normalization === "sigmoid" ? "" : sum, total, listed(view.row("head_outputs"))];
	find("row").replaceChildren(...rows, tableRow("Σ", numbers, { class: "sum" }));
	find("part-title").textContent = find("part-title").dataset[normalization] ?? "";
}
