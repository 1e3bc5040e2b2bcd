// The pipeline: small pictures of all stages, a large one of the chosen stage.

import { find, keep, make, show, tableRow, times } from "./dom.js";
import { choiceAt, drawGrid, markChosen, pixelsOf } from "./heatmap.js";
import { whyHidden } from "./row.js";

/** @param {View} view */
export function paintStages(view) {
	const { choice, choose } = view;
	paintLarge(view);
	const strip = find("pipeline");
	for (const button of strip.querySelectorAll("button")) {
		const { value: name, dataset } = button;
		button.hidden = !view.result.blocks[name];
		const isNew = name === choice.stage && button.ariaPressed !== "true";
		button.ariaPressed = String(name === choice.stage);
		if (button.hidden) continue;
		const before = dataset.before; // equal, unless an option changes it
		button.classList.toggle("same", !!before && view.once(`${name} same`, () => {
			const { values } = view.block(before);
			return view.block(name).values.every((value, at) => value === values[at]);
		}));
		keep(button.querySelector("span"), pixelsOf(view, view.grid(name), "stage"));
		button.onclick = () => choose({ stage: name });
		if (!isNew) continue;
		const left = button.offsetLeft - strip.offsetLeft; // without scrolling the page
		strip.scrollLeft = Math.min(left - 20, Math.max(strip.scrollLeft, left + button.offsetWidth + 20 - strip.clientWidth));
	}
	const { layer, projection, normalization = "softmax" } = view.result.request;
	find("normalization").textContent = normalization;
	find("joined").textContent = find("joined").dataset[layer || projection?.output ? "map" : /h/.test(view.result.layout) ? "heads" : "joined"] ?? "";
	find("change").checked = view.choice.stage === "change";
	find("change-label").hidden = !view.result.blocks.change;
	if (find("numbers").open) paintNumbers(view);
}

/** @param {View} view */
function paintLarge(view) {
	const grid = view.grid(view.choice.stage);
	const large = find("large");
	const most = Math.max(240, Math.min(600, large.clientWidth));
	const svg = view.once(`${grid.name} of ${most} pixels`, () => drawGrid(view, grid, most));
	markChosen(view, grid, svg);
	keep(large, svg);
	large.onclick = (event) => event.target instanceof SVGImageElement && view.choose(choiceAt(grid, event));
	/** @param {View} shown */
	const textOf = (shown) => {
		const hidden = /masked|weights/.test(grid.name) && whyHidden(shown);
		return `${shown.names(grid.name).join(", ")}: ${hidden || show(shown.at(grid.name), view.result.answer.digits ?? 6)}`;
	};
	large.onpointermove = large.onpointerleave = (event) => {
		const isCell = event.target instanceof SVGImageElement;
		find("hint").textContent = isCell ? textOf(view.with(choiceAt(grid, event))) : find("hint").dataset.hint ?? "";
	};
	const title = document.querySelector(`#pipeline [value=${grid.name}] b`)?.textContent ?? "Change of the weights";
	const text = textOf(view);
	large.setAttribute("aria-label", `${title}, ${grid.rows} rows, ${grid.cols} columns. ${text}`);
	const { name = "" } = view.result.answer; // of a layer
	find("large-title").textContent = title + (name && `, ${name}`) + (view.result.metadata.num_heads > 1 ? `, head ${view.head()}` : "");
	find("readout").textContent = text;
}

/** @param {View} view */
function paintNumbers(view) {
	const { rows, cols, values, rowAxis, colAxis } = view.grid(view.choice.stage);
	const shown = Math.min(cols, 64);
	const digits = shown > 9 ? 4 : 8; // that a row of fifteen tokens fits on paper beside its picture
	const head = times(shown, (col) => make("th", { scope: "col" }, view.label(colAxis, col)));
	const body = times(Math.min(rows, 64), (row) => {
		return tableRow(view.label(rowAxis, row), [...values.subarray(row * cols, row * cols + shown)], {}, digits);
	});
	find("table").replaceChildren(make("tr", {}, make("td"), ...head), ...body);
}
