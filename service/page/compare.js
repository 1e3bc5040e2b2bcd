// What another implementation returned, beside what is right.

import { find, make, show } from "./dom.js";
import { limitsOf } from "./colours.js";
import { drawGrid } from "./heatmap.js";
import { Result, View } from "./result.js";
import { Tensor, shapeOf } from "./tensors.js";

/** Shows a report, and a map of the difference. @type {paintComparison} */
export const paintComparison = ({ report, actual }, view) => {
	const { verdict, hypotheses, errors, where, power, baseline } = report;
	find("report").replaceChildren(
		make("p", { class: `verdict ${verdict.status}` }, make("b", {}, verdict.status), verdict.message),
		...section("Mistakes that explain it", hypotheses, ({ name, message, certainty, change }) => `${message} (${name}, ${certainty}; ${JSON.stringify(change)})`),
		...section("Where", where, ({ message }) => message),
		...section("Errors", Object.keys(errors), (name) => `${name}: at most ${errors[name].max_abs}, the limit is ${baseline[name]?.limit}`),
		...section(`These inputs show ${power.killed} of ${power.mutants} known mistakes, but not`, power.survivors, String),
	);
	find("difference").replaceChildren();
	find("difference-text").textContent = "";
	if (view && baseline.output && actual.output) paintDifference(actual.output, baseline.output.limit, view);
};

/** @type {section} */
const section = (title, items, write) => (items.length ? [make("h3", {}, title), make("ul", {}, ...items.map((item) => make("li", {}, write(item))))] : []);

/** Draws actual − right, in units of the limit. @type {paintDifference} */
const paintDifference = (actual, limit, view) => {
	const { request, answer } = view.result;
	const bytes = () => new Uint8Array(Float64Array.from(actual.flat(9)).buffer);
	const output = actual instanceof Tensor ? actual : new Tensor("float64", shapeOf(actual), bytes());
	const mine = new View(new Result(request, { output }, answer), view.choice, view.choose).grid("output");
	const right = view.grid("output").values;
	const grid = { ...mine, values: Float64Array.from(mine.values, (value, at) => (value - right[at]) / limit) };
	find("difference").replaceChildren(drawGrid(view, grid, 520));
	const most = show(limitsOf(grid).high, 2);
	find("difference-text").textContent = `The difference of the output in units of its limit, ${show(limit, 8)}: from −${most} (blue) to ${most} (red).`;
};
