// The pipeline: small pictures of all stages, a large one of the chosen stage.

import { find, make, show, tableRow, times } from "./dom.js";
import { causeColour, limitsOf } from "./colours.js";
import { choiceAt, drawGrid, thumbnail } from "./heatmap.js";
import { whyHidden } from "./row.js";

/** @param {View} view */
export const drawStage = (view) => drawGrid(view, view.grid(view.choice.stage), Math.max(240, Math.min(600, find("large").clientWidth)));

/** @param {View} view */
export function paintStages(view) {
	const { choice, choose } = view;
	for (const button of find("pipeline").querySelectorAll("button")) {
		const { value: name, dataset } = button;
		const before = dataset.before && view.block(dataset.before).values; // equal, unless an option changes it
		button.classList.toggle("same", !!before && view.block(name).values.every((value, at) => value === before[at]));
		button.setAttribute("aria-pressed", String(name === choice.stage));
		button.querySelector("span")?.replaceChildren(thumbnail(view, name, 84));
		button.onclick = (event) => choose({ stage: name, ...(event.target instanceof SVGImageElement && choiceAt(view.grid(name), event)) });
	}
	paintLarge(view);
	paintLegend(view);
	if (find("numbers").open) paintNumbers(view);
}

/** @param {View} view */
function paintLarge(view) {
	const grid = view.grid(view.choice.stage);
	const large = find("large");
	large.replaceChildren(drawStage(view));
	large.onclick = (event) => event.target instanceof SVGImageElement && view.choose(choiceAt(grid, event));
	const title = document.querySelector(`#pipeline [value=${grid.name}] b`)?.textContent ?? "";
	const text = describe(view, grid);
	large.setAttribute("aria-label", `${title}, ${grid.rows} rows, ${grid.cols} columns. ${text}`);
	find("large-title").textContent = title;
	find("readout").textContent = text;
	const { low, high, diverging } = limitsOf(grid);
	find("range").replaceChildren(show(low, 3), make("i", { class: diverging ? "diverging" : "" }), show(high, 3));
}

/** @type {describe} */
const describe = (view, { name, rowAxis, colAxis }) => {
	const [query, key] = /** @type {const} */ (["query", "key"]).map((axis) => `${axis} ${view.choice[axis]} “\u2068${view.label(axis)}\u2069”`);
	if (rowAxis === "feature" || colAxis === "feature") return name.startsWith("present_") ? key : query;
	return `${query}, ${key}: ${whyHidden(view) || show(view.at(name), 6)}`;
};

/** @param {View} view */
function paintLegend(view) {
	const bits = Array.from(view.block("hidden_by").values).reduce((all, one) => all | one, 0);
	const items = view.result.causesIn(bits).map((name) => {
		const swatch = make("i");
		swatch.style.setProperty("--colour", causeColour(name));
		return make("li", {}, swatch, name);
	});
	find("legend").replaceChildren(...items);
}

/** @param {View} view */
function paintNumbers(view) {
	const { rows, cols, values, rowAxis, colAxis } = view.grid(view.choice.stage);
	const shown = Math.min(cols, 64);
	const head = times(shown, (col) => make("th", { scope: "col" }, view.label(colAxis, col)));
	const body = times(Math.min(rows, 64), (row) => {
		return tableRow(view.label(rowAxis, row), [...values.subarray(row * cols, row * cols + shown)], {}, 8);
	});
	find("table").replaceChildren(make("tr", {}, make("td"), ...head), ...body);
}
