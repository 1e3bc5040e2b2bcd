// What another implementation returned, beside what is right.

import { fillIn, find, make, show } from "./dom.js";
import { drawGrid } from "./heatmap.js";
import { Result, View } from "./result.js";
import { asTensor } from "./tensors.js";

/** @type {paintComparison} */
export const paintComparison = ({ report, actual }, view) => {
	const { verdict, hypotheses, errors, where, power, baseline } = report;
	const texts = find("report").dataset;
	const alike = (/** @type {string} */ kind) => hypotheses.filter((/** @type {Fields} */ { certainty }) => certainty === kind);
	/** @param {Fields} mistake */
	const write = ({ change, ...mistake }) => fillIn(texts.mistake, { ...mistake, change: change ? `; ${JSON.stringify(change)}` : "" });
	find("report").replaceChildren(
		make("p", { class: `verdict ${verdict.status}` }, make("b", {}, verdict.status), verdict.message),
		...section(texts.proof, alike("proof"), write),
		...section(texts.resembles, alike("resembles"), write),
		...section("Where", where, ({ message }) => message),
		...section("Errors", Object.keys(errors), (name) => fillIn(texts.error, { name, most: show(errors[name].max_abs), limit: show(baseline[name]?.limit) })),
		...section(fillIn(texts.power, power), power.survivors, String),
		...(view && !view.result.window && baseline.output && actual.output ? drawDifference(actual.output, baseline.output.limit, view) : []),
	);
};

/** @type {section} */
const section = (title = "", items, write) => (items.length ? [make("h3", {}, title), make("ul", {}, ...items.map((item) => make("li", {}, write(item))))] : []);

/** @type {drawDifference} */
const drawDifference = (actual, limit, view) => {
	const { request, answer } = view.result;
	const other = new View(new Result(request, { output: asTensor(actual) }, answer), view.choice, view.choose);
	const mine = other.grid("output");
	const right = view.grid("output").values;
	const values = Float64Array.from(mine.values, (value, at) => (value - right[at]) / limit);
	const grid = { ...mine, values, least: 10 };
	const most = values.reduce((all, value) => Math.max(all, Math.abs(value)), 0);
	const label = fillIn(find("report").dataset.difference, { most: show(most, 3), limit: show(limit, 8) });
	return [make("div", { id: "difference", role: "img", "aria-label": label }, drawGrid(other, grid, 520)), make("p", {}, label)];
};
