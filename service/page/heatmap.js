// Heatmaps: cells, hidden cells, labels, numbers, and the chosen row and column.

import { brief, make, makeSvg, times } from "./dom.js";
import { causeColour, colourOf, inkOn, limitsOf, mix, parseColour } from "./colours.js";

/** @param {string} name */
export const styleValue = (name) => getComputedStyle(document.body).getPropertyValue(name);

/** For each cell the bits of what hides it. @type {hiddenIn} */
const hiddenIn = (view, { name, values }) =>
	/masked|weights/.test(name) ? view.grid("hidden_by").values : new Uint8Array(values.length);

/** The cells as a canvas with one pixel each. @type {pixelsOf} */
const pixelsOf = (view, grid) => {
	const canvas = make("canvas", { width: grid.cols, height: grid.rows });
	const pixels = new ImageData(grid.cols, grid.rows);
	const [hidden, limits, neutral] = [hiddenIn(view, grid), limitsOf(grid), parseColour(styleValue("--masked"))];
	grid.values.forEach((value, at) => {
		const [cause] = view.result.causesIn(hidden[at]);
		const colour = cause ? mix(neutral, parseColour(causeColour(cause)), 0.3) : colourOf(value, limits);
		pixels.data.set([...colour, 255], 4 * at);
	});
	canvas.getContext("2d")?.putImageData(pixels, 0, 0);
	return canvas;
};

/** @type {frameOf} */
const frameOf = ({ choice }, { rowAxis, colAxis, rows, cols }, size) => {
	const [y, height] = rowAxis === "feature" ? [0, rows] : [choice[rowAxis], 1];
	const [x, width] = colAxis === "feature" ? [0, cols] : [choice[colAxis], 1];
	return { x: x * size, y: y * size, width: width * size, height: height * size };
};

/** The choice after a click on cells. @type {choiceAt} */
export const choiceAt = ({ rows, cols, rowAxis, colAxis }, { target, clientX, clientY }) => {
	const { left, top, width, height } = /** @type {Element} */ (target).getBoundingClientRect();
	const place = { [rowAxis]: Math.floor(((clientY - top) / height) * rows), [colAxis]: Math.floor(((clientX - left) / width) * cols) };
	delete place.feature;
	return place;
};

/** A grid with labels, numbers and stripes. @type {drawGrid} */
export const drawGrid = (view, grid, most) => {
	const { rows, cols } = grid;
	const [left, top] = [roomFor(view, grid.rowAxis, rows), 0.8 * roomFor(view, grid.colAxis, cols)];
	const size = Math.min((most - left - 20) / cols, (500 - top) / rows, 72);
	const sides = [
		...drawLabels(view, grid.rowAxis, rows, size, (at) => ({ transform: `translate(-7 ${at})`, "text-anchor": "end" })),
		...drawLabels(view, grid.colAxis, cols, size, (at) => ({ transform: `translate(${at} -7) rotate(-55)` })),
	];
	const drawn = [...drawStripes(view, grid, size), ...sides, ...(size < 30 ? [] : drawNumbers(view, grid, size))];
	return drawCells(view, grid, size, drawn, left, top, 20);
};

/** Cells, what is drawn on them, and a frame. @type {drawCells} */
const drawCells = (view, grid, size, drawn = [], left = 1, top = 1, right = 1) => {
	const [width, height] = [size * grid.cols, size * grid.rows];
	const image = makeSvg("image", { width, height, href: pixelsOf(view, grid).toDataURL(), preserveAspectRatio: "none" });
	image.style.imageRendering = "pixelated";
	const frame = { ...frameOf(view, grid, size), fill: "none" };
	const frames = [["#fff", 3], ["#111", 1]].map(([stroke, line]) => makeSvg("rect", { ...frame, stroke, "stroke-width": line }));
	const over = makeSvg("g", { "dominant-baseline": "central" }, ...drawn, ...frames);
	const all = { width: left + width + right, height: top + height + 1, "font-family": "system-ui, sans-serif", "font-size": 12 };
	return makeSvg("svg", { viewBox: `${-left} ${-top} ${all.width} ${all.height}`, ...all }, image, over);
};

/** @type {thumbnail} */
export const thumbnail = (view, name, most) => {
	const grid = view.grid(name);
	return drawCells(view, grid, most / Math.max(grid.rows, grid.cols));
};

/** @param {string} text */
export const shorten = (text) => (text.length > 14 ? `${[...text].slice(0, 13).join("")}…` : text);

/** @type {roomFor} */
const roomFor = (view, axis, count) => {
	const lengths = times(count, (index) => shorten(view.label(axis, index)).length);
	return 18 + 6.6 * Math.max(...lengths);
};

/** @type {drawLabels} */
const drawLabels = (view, axis, count, size, placeAt) => {
	const every = Math.ceil(13 / size);
	const [ink, soft] = ["--ink", "--soft"].map(styleValue);
	return times(Math.ceil(count / every), (n) => {
		const chosen = axis !== "feature" && view.choice[axis] === n * every;
		const style = { fill: chosen ? ink : soft, "font-weight": chosen ? 650 : 400 };
		return makeSvg("text", { ...placeAt((n * every + 0.5) * size), ...style }, shorten(view.label(axis, n * every)));
	});
};

/** Stripes on hidden cells: one path for all that are hidden alike. @type {drawStripes} */
const drawStripes = (view, grid, size) => {
	/** @type {Record<number, string>} */
	const paths = {};
	hiddenIn(view, grid).forEach((bits, at) => {
		if (bits) paths[bits] = `${paths[bits] ?? ""}M${(at % grid.cols) * size} ${Math.floor(at / grid.cols) * size}h${size}v${size}h${-size}z`;
	});
	return Object.entries(paths).flatMap(([bits, d]) => {
		const causes = view.result.causesIn(Number(bits));
		const stripes = causes.map((cause, n) => makeSvg("rect", { x: 5 * n, width: 1.7, height: 9, fill: causeColour(cause) }));
		const pattern = { id: `stripes${bits}`, width: 5 * causes.length, height: 9, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
		return [makeSvg("pattern", pattern, ...stripes), makeSvg("path", { d, fill: `url(#stripes${bits})` })];
	});
};

/** @type {drawNumbers} */
const drawNumbers = (view, grid, size) => {
	const [hidden, limits] = [hiddenIn(view, grid), limitsOf(grid)];
	return Array.from(grid.values, (value, at) => {
		const text = brief(value);
		const fill = hidden[at] ? styleValue("--ink") : inkOn(colourOf(value, limits));
		const place = { x: ((at % grid.cols) + 0.5) * size, y: (Math.floor(at / grid.cols) + 0.5) * size };
		return makeSvg("text", { ...place, fill, "text-anchor": "middle", "font-size": Math.min(13, (1.6 * size) / text.length) }, text);
	});
};
