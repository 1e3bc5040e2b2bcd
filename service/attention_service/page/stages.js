// The pipeline: small pictures of all stages, a large one of the chosen stage.

import { find, make, show, tableRow, times } from "./dom.js";
import { choiceAt, drawGrid, hiddenIn, limitsOf, pixelsOf } from "./heatmap.js";
import { whyHidden } from "./row.js";

/** @param {View} view */
export function paintStages(view) {
	const { choice, choose } = view;
	for (const button of find("pipeline").querySelectorAll("button")) {
		const { value: name, dataset } = button;
		const before = dataset.before && view.block(dataset.before).values; // equal, unless an option changes it
		button.classList.toggle("same", !!before && view.block(name).values.every((value, at) => value === before[at]));
		button.setAttribute("aria-pressed", String(name === choice.stage));
		button.querySelector("span")?.replaceChildren(pixelsOf(view, view.grid(name)));
		button.onclick = () => choose({ stage: name });
	}
	find("normalization").textContent = view.result.request.normalization ?? "softmax";
	paintLarge(view);
	if (find("numbers").open) paintNumbers(view);
}

/** @param {View} view */
function paintLarge(view) {
	const grid = view.grid(view.choice.stage);
	const large = find("large");
	large.replaceChildren(drawGrid(view, grid, Math.max(240, Math.min(600, large.clientWidth))));
	large.onclick = (event) => event.target instanceof SVGImageElement && view.choose(choiceAt(grid, event));
	const title = document.querySelector(`#pipeline [value=${grid.name}] b`)?.textContent ?? "";
	const hidden = /masked|weights/.test(grid.name) && whyHidden(view);
	const text = `${view.names(grid.name).join(", ")}: ${hidden || show(view.at(grid.name), 6)}`;
	large.setAttribute("aria-label", `${title}, ${grid.rows} rows, ${grid.cols} columns. ${text}`);
	find("large-title").textContent = title;
	find("readout").textContent = text;
	const { low, high, diverging } = limitsOf(grid);
	find("range").replaceChildren(show(low, 3), make("i", { class: diverging ? "diverging" : "" }), show(high, 3));
	const bits = Array.from(hiddenIn(view, grid)).reduce((all, one) => all | one, 0);
	const items = view.result.causesIn(bits).map((name) => make("li", {}, make("i", { class: name }), `hidden by ${name}`));
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
