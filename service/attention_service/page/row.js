// One number by hand: how it follows from query, key and value.

import { around, fillIn, find, make, show, signed, tableRow, times } from "./dom.js";
import { GRADIENT, SCORES, isMatrix } from "./request.js";
import { asTensor, numbers, shapeOf } from "./tensors.js";

/** @type {entry} */
const entry = (data, at) => {
	const all = numbers(asTensor(data));
	return all[at] ?? all[0];
};

/** @type {whyHidden} */
export function whyHidden(view) {
	const { window, chunk_size: chunk, query_offset, past_key } = view.result.request;
	const { batch, key } = view.choice;
	const place = view.index("query") + entry(query_offset ?? shapeOf(past_key).at(-2) ?? 0, batch);
	const first = Math.max(0, place - (window?.left ?? place));
	const last = Math.min(place + (window?.right ?? Infinity), view.block("all_weights").cols - 1);
	const [name, from, to] = [view.index("key", key), first, last].map((index) => view.place("key", index - view.index("key", 0)));
	const keys = first > last ? "no key" : `keys ${from} to ${to}`;
	const values = { key: name, place: signed(place), keys, chunk };
	const reasons = find("reasons").dataset;
	const causes = view.result.causesIn(view.at("hidden_by")).map((cause) => fillIn(reasons[cause], values));
	return causes.length ? `hidden by ${causes.join(" and ")}` : "";
}

/** @param {View} view */
const isHalf = (view) => /16/.test(view.result.metadata.dtype);

/** @type {partsOf} */
function partsOf(view) {
	const { normalization = "softmax", sinks } = view.result.request;
	const scores = [...view.row("all_scores"), ...(sinks ? [view.at("sinks")] : [])];
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

/** @type {rounded} */
const rounded = (value) => Number(Math.abs(value) < 1 ? value.toPrecision(6) : value.toFixed(6));

/** @type {formula} */
const formula = (text, ...numbers) => {
	const isExact = numbers.every((value) => Math.abs(value - rounded(value)) <= 1e-14 * Math.abs(value));
	const texts = numbers.map((value) => signed(rounded(value)));
	const left = fillIn(text, texts).replace(/(?<=[·×+−] ?)−[\d.e−]+/g, "($&)");
	return `${left} ${isExact ? "=" : "≈"} ${texts.at(-1)}`;
};

/** @type {products} */
const products = (factors, sum, bias = []) => {
	const all = factors[0].map((_, n) => factors.map((factor) => factor[n]));
	const texts = all.map((product, n) => product.map((_, i) => `{${n * product.length + i}}`).join("·"));
	return formula(joined([...texts, ...bias.map(() => `{${all.flat().length}}`)]), ...all.flat(), ...bias, sum);
};

/** @type {weightSteps} */
function weightSteps(view, { normalization, max, parts, sum }) {
	const { request, metadata } = view.result;
	const [score, scaled, capped, masked, weight] = SCORES.map((name) => view.at(name));
	const scale = metadata.scale[view.choice.head] ?? metadata.scale;
	const row = [view.row("query"), view.row("present_key", view.choice.key)];
	// What queries and keys of distances add is not sent by itself.
	const distance = request.relative_keys ? [row[0].reduce((left, number, n) => left - number * row[1][n], score)] : [];
	const title = distance.length ? "Score, with relative_keys" : "Score";
	const steps = scaled === undefined ? [] : [[title, products(row, score, distance)], ["Scaled", formula("{0} × {1}", score, scale, scaled)]];
	if (request.softcap) steps.push(["Capped", formula("{0} · tanh({1} / {0})", request.softcap, scaled, capped)]);
	else if (capped !== scaled) steps.push(["Capped", show(capped, 6)]);
	const hidden = whyHidden(view);
	if (hidden) return [...steps, ["Masked", `−∞: ${hidden}`], ["Weight", "0"]];
	const added = ["bias", "alibi_slopes"].filter((name) => request[name]).map((name) => ` (${name})`);
	if (masked !== capped) steps.push(["Masked", capped === undefined ? show(masked) : formula(`{0} + {1}${added.join("")}`, capped, masked - capped, masked)]);
	const part = parts[view.index("key")];
	if (normalization === "sigmoid") return [...steps, ["Weight", formula("1 / (1 + exp(−{0}))", masked, weight)]];
	if (normalization === "softmax") {
		const exponential = formula("exp({0} − {1})", masked, max, part);
		steps.push(["Largest score", signed(rounded(max)) + find("steps").dataset.largest], ["Exponential", masked === max ? exponential.replace("≈", "=") : exponential]);
	}
	const terms = parts.map((_, n) => `{${n}}${n === view.block("all_scores").cols ? " (sink)" : ""}`);
	return [...steps, ["Sum", formula(joined(terms), ...parts, sum)], ["Weight", sum ? formula("{0} / {1}", part, sum, weight) : "0 by definition, as the sum is 0"]];
}

/** @type {gradientSteps} */
function gradientSteps(view, { normalization }) {
	const [weight, value, hidden] = [view.at("attention_weights"), view.at(GRADIENT), whyHidden(view)];
	if (hidden) return [["Gradient", `0: ${hidden}`]];
	const values = view.row("present_value", view.choice.key);
	const outputs = view.row("head_outputs");
	const all = view.row("given.grad_output", view.index("query"));
	const given = all.slice((view.choice.head * values.length) % all.length); // from the chosen head on
	const [own, mean] = [values, outputs].map((factors) => factors.reduce((sum, factor, n) => sum + factor * given[n], 0));
	const isWhole = Math.abs(weight * (own - mean) - value) <= (isHalf(view) ? 0.02 : 1e-5) * weight * (Math.abs(own) + Math.abs(mean));
	if (normalization !== "softmax" || !isWhole) return [["Gradient", `${show(value, 6)}, after other options, not written out here`]];
	return [
		["Value · grad_output", products([values, given], own)],
		["Output · grad_output", products([outputs, given], mean)],
		["Gradient", formula("{0} × ({1} − {2})", weight, own, mean, value)],
	];
}

/** @type {featureStep} */
function featureStep(view) {
	const { stage, head, feature } = view.choice;
	const { request, metadata, blocks } = view.result;
	const value = view.at(stage);
	if (stage === "head_outputs" && view.result.window) return ["Weighted values", `${show(value, 6)}, of all keys`];
	if (stage === "head_outputs") {
		const values = times(metadata.key_length, (index) => view.with({ key: index }).at("present_value"));
		return ["Weighted values", products([view.row("attention_weights"), values], value)];
	}
	const part = stage.replace("present_", "");
	const row = part === stage ? view.index("query") : view.index("key") - (shapeOf(request.past_key).at(-2) ?? 0);
	if (row < 0) return ["From the past", `${show(value, 6)}, as sent`];
	const [map, isOutput] = [request.projection?.[part], part === "output"];
	if (!isOutput && !blocks[`given.${part}`]) return ["In the model", show(value)];
	const at = Math.floor((head * blocks[stage].h) / metadata.num_heads) * blocks[stage].cols + feature; // over all heads
	const source = isOutput ? view.allHeads("head_outputs") : view.row(`given.${part}`, row);
	const gates = isOutput && request.gate ? view.allHeads("gate") : [];
	let factors = [source];
	if (gates.length) factors.push(source.map((_, n) => gates[Math.floor((n * gates.length) / source.length)]));
	if (map) factors.push(view.row(`map.${part}`, at % blocks[`map.${part}`].rows));
	else factors = factors.map((all) => [all[at % all.length]]);
	const bias = map?.bias ? [entry(map.bias, at)] : [];
	const terms = [...factors[0].map((_, n) => factors.reduce((product, factor) => product * factor[n], 1)), ...bias];
	const rest = terms.reduce((left, term) => left - term, value);
	const size = terms.reduce((all, term) => all + Math.abs(term), 0);
	const left = ["layer", `${part}_norm`, /query|key/.test(part) ? "rotary" : ""].filter((name) => request[name]);
	if (!left.length && !(Math.abs(rest) <= (isHalf(view) ? 0.02 : 1e-5) * size)) left.push("other options");
	if (left.length) return ["Result", `${show(value, 6)}, after ${left.join(" and ")}, not written out here`];
	const other = isOutput ? "Heads joined" : "As sent";
	return [map ? "Linear map" : other, factors.length > 1 || isHalf(view) ? products(factors, value, bias) : show(value, 6)];
}

/** @param {View} view */
export function paintRow(view) {
	const { stage } = view.choice;
	const all = partsOf(view);
	const steps = stage === GRADIENT ? gradientSteps(view, all) : isMatrix(stage) ? weightSteps(view, all) : [featureStep(view)];
	if (view.result.answer.digits) steps[0][1] = steps[0][1].replace("=", "≈"); // of rounded factors
	if (view.result.window) {
		const weights = view.row("all_weights");
		const keys = [...weights.keys()].sort((one, other) => weights[other] - weights[one]).slice(0, 16);
		steps.push(["Largest weights", keys.map((key) => `${view.label("key", key - view.index("key", 0))} (${show(weights[key], 3)})`).join(", ")]);
	}
	for (const step of isHalf(view) ? steps : []) {
		if (!/Exp|Sum|rad/.test(step[0])) step[1] = step[1].replace(/ [=≈] (?=\S+$)/, `, rounded to ${view.result.metadata.dtype}: `);
	}
	find("row-title").textContent = `By hand: ${view.names(stage).join(" → ")}`;
	find("steps").replaceChildren(...steps.flatMap(([title, text]) => [make("dt", {}, title), make("dd", {}, text)]));
	paintTable(view, all);
}

/** What the table shows, of which layer in a page of a model. @type {{ result?: Result, row?: string }} */
let painted = {};

/** @type {paintTable} */
function paintTable(view, all) {
	const { batch, head, query, key } = view.choice;
	const keys = around(key, view.result.metadata.key_length);
	const row = [batch, head, query, keys[0]].join();
	if (painted.result !== view.result || painted.row !== row) find("row").replaceChildren(...rowsOf(view, all, keys));
	painted = { result: view.result, row };
	find("row").querySelector("[tabindex]")?.removeAttribute("tabindex");
	find("row").querySelector(`[data-key="${key}"]`)?.setAttribute("tabindex", "0");
	find("part-title").textContent = find("part-title").dataset[all.normalization] ?? "";
}

/** @type {rowsOf} */
function rowsOf(view, { normalization, parts, sum }, keys) {
	const [scores, scaled, capped, masked, weights] = SCORES.map((name) => view.row(name));
	/** @param {number[]} values */
	const listed = (values, factor = 1) => joined(values.map((value, n) => (n < 8 ? show(value * factor, 3) : "")), ", ", 8);
	const rows = keys.map((key) => {
		const numbers = [scores[key] ?? "", scaled[key] ?? "", capped[key] ?? "", masked[key], parts[view.index("key", key)], weights[key], listed(view.row("present_value", key), weights[key])];
		const row = tableRow(view.label("key", key), numbers, { "data-key": key, "data-axis": "key" });
		row.onclick = () => view.choose({ key });
		return row;
	});
	const all = view.row("all_weights");
	const more = all.length - keys.length;
	if (more) rows.push(tableRow("…", [`${more} more`], {}));
	if (view.result.request.sinks) rows.push(tableRow("sink", ["", "", "", view.at("sinks"), parts[all.length]], { class: "sink" }));
	const total = all.reduce((sum, weight) => sum + weight, 0);
	const numbers = ["", "", "", "", normalization === "sigmoid" ? "" : sum, total, listed(view.row("head_outputs"))];
	return [...rows, tableRow("Σ", numbers, { class: "sum" })];
}
