// Heatmaps: colours, cells, hidden cells, labels, numbers, and the chosen cell.

import { find, make, makeSvg, show, times } from "./dom.js";
import { isMatrix } from "./request.js";

/** @type {interpolate} */
function interpolate(name) {
	const anchors = getComputedStyle(document.body).getPropertyValue(name).match(/#\w+/g) ?? [];
	const colours = anchors.map((text) => (text.match(/\w\w/g) ?? []).map((part) => parseInt(part, 16)));
	return times(256, (index) => {
		const place = (index / 255) * 10;
		const from = Math.min(Math.floor(place), 9);
		return colours[from].map((part, i) => Math.round(part + (colours[from + 1][i] - part) * (place - from)));
	});
}

const [sequential, diverging] = ["--sequential", "--diverging"].map(interpolate);

/** @type {limitsOf} */
const limitsOf = (view, { name, values, least }) => view.once(`${name} limits ${least}`, () => {
	const { colours } = view.choice;
	const [shown, cols] = [least || colours === "head" ? values : view.allBlocks(name), isLeftOut(view, name) ? view.block(name).cols : 0];
	let [low, high] = [0, least ?? 0];
	for (let at = 0; at < shown.length; at++) {
		const value = shown[at];
		if (cols && at % cols === 0) continue;
		if (value < low && value !== -Infinity) low = value;
		if (value > high) high = value;
	}
	const most = Math.max(high, -low) || 1;
	if (name !== "attention_weights" || low < 0) return { low: -most, high: most, diverging: true };
	if (colours === "log") return { low: high / 1e6, high, log: true };
	return { low, high: colours === "unit" ? 1 : high };
});

/** True if the pictures and colours of a stage leave out the first key. @type {isLeftOut} */
const isLeftOut = (view, name) => !!view.choice.first && isMatrix(name) && !view.index("key", 0);

/** @type {colourOf} */
const colourOf = (value, { low, high, diverging: isDiverging, log }) => {
	const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1);
	return (isDiverging ? diverging : sequential)[Math.round(255 * Math.min(1, Math.max(0, share || 0)))];
};

/** @type {inkOn} */
const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111" : "#fff");

/** @type {hiddenIn} */
const hiddenIn = (view, { name, values }) => (/masked|weights/.test(name) ? view.grid("hidden_by").values : new Uint8Array(values.length));

/** @type {faintIn} */
const faintIn = (view, grid) => {
	const [hidden, isFirst] = [hiddenIn(view, grid), isLeftOut(view, grid.name)];
	return (at) => !!hidden[at] || (isFirst && (grid.colAxis === "key" ? at % grid.cols === 0 : at < grid.cols));
};

/** @type {pixelsOf} */
export const pixelsOf = (view, grid, place) => view.once(`${grid.name} ${place}`, () => {
	const canvas = make("canvas", { width: grid.cols, height: grid.rows });
	const pixels = new ImageData(grid.cols, grid.rows);
	const words = new Uint32Array(pixels.data.buffer); // a pixel each, red in the lowest byte
	const [isFaint, limits] = [faintIn(view, grid), limitsOf(view, grid)];
	grid.values.forEach((value, at) => {
		const [red, green, blue] = colourOf(value, limits);
		words[at] = isFaint(at) ? 0x26808080 : (255 << 24) | (blue << 16) | (green << 8) | red;
	});
	canvas.getContext("2d")?.putImageData(pixels, 0, 0);
	return canvas;
});

/** @type {choiceAt} */
export const choiceAt = ({ rows, cols, rowAxis, colAxis }, { target, clientX, clientY }) => {
	const { left, top, width, height } = /** @type {Element} */ (target).getBoundingClientRect();
	return { [rowAxis]: Math.floor(((clientY - top) / height) * rows), [colAxis]: Math.floor(((clientX - left) / width) * cols) };
};

/** @type {drawGrid} */
export const drawGrid = (view, grid, most) => {
	const { rows, cols, rowAxis, colAxis } = grid;
	const [left, room] = [16 + roomFor(view, rowAxis, rows), roomFor(view, colAxis, cols)];
	const turned = 16 + 0.8 * room;
	const size = Math.min((most - left - 20) / cols, (500 - turned) / rows, 72);
	const isFlat = 1.5 * (room - 18) < size * Math.ceil(13 / size); // of wide letters
	const top = isFlat ? 36 : turned;
	const place = { width: size * cols, height: size * rows };
	const href = pixelsOf(view, grid, "large").toDataURL();
	const stripes = drawStripes(view, grid, size, 8 - left);
	const over = makeSvg(
		"g",
		{},
		...stripes,
		...drawScale(view, grid, 8 - left, place.height + 12),
		...drawLabels(view, rowAxis, rows, size, (at) => ({ transform: `translate(-7 ${at})`, "text-anchor": "end" })),
		...drawLabels(view, colAxis, cols, size, (at) => (isFlat ? { transform: `translate(${at} -11)` } : { transform: `translate(${at} -7) rotate(-55)`, "text-anchor": "start" })),
		makeSvg("text", { transform: `translate(${8 - left} ${place.height / 2}) rotate(-90)` }, rowAxis),
		makeSvg("text", { transform: `translate(${place.width / 2} ${8 - top})` }, colAxis),
		...(size < 30 ? [] : drawNumbers(view, grid, size)),
		makeSvg("rect", { width: size, height: size, class: "frame" }),
	);
	const hidden = stripes.filter(({ classList }) => classList.contains("legend")).length;
	const all = { width: Math.max(left + place.width + 20, 262), height: top + place.height + 28 + 20 * hidden };
	const image = makeSvg("image", { ...place, href, preserveAspectRatio: "none" });
	const svg = makeSvg("svg", { viewBox: `${-left} ${-top} ${all.width} ${all.height}`, ...all }, image, over);
	markChosen(view, grid, svg);
	return svg;
};

/** @type {markChosen} */
export const markChosen = ({ choice }, { rowAxis, colAxis }, svg) => {
	const frame = svg.querySelector(".frame");
	const size = Number(frame?.getAttribute("width"));
	frame?.setAttribute("transform", `translate(${choice[colAxis] * size} ${choice[rowAxis] * size})`);
	svg.querySelectorAll(".chosen").forEach((label) => label.classList.remove("chosen"));
	for (const axis of [rowAxis, colAxis]) svg.querySelector(`[data-${axis}="${choice[axis]}"]`)?.classList.add("chosen");
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
	return times(Math.ceil(count / every), (n) => {
		return makeSvg("text", { ...placeAt((n * every + 0.5) * size), [`data-${axis}`]: n * every }, shorten(view.label(axis, n * every)));
	});
};

/** @type {drawStripes} */
const drawStripes = (view, grid, size, x) => {
	const hidden = hiddenIn(view, grid);
	let y = size * grid.rows + 20;
	return Object.entries(view.result.metadata.hidden_by).flatMap(([cause, bit], n, causes) => {
		const runs = [];
		for (let at = 0; at < hidden.length; at++) {
			const from = at;
			const last = from - (from % grid.cols) + grid.cols - 1;
			if (!(hidden[from] & bit)) continue;
			while (at < last && hidden[at + 1] & bit) at++;
			const width = size * (at - from + 1);
			runs.push(`M${(from % grid.cols) * size} ${Math.floor(from / grid.cols) * size}h${width}v${size}h${-width}z`);
		}
		const turn = `rotate(${45 + (180 / causes.length) * n})`;
		const pattern = { id: `stripes-${cause}`, width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: turn };
		const stripe = makeSvg("rect", { width: 1.7, height: 7, fill: `var(--${cause})` });
		const fill = `url(#stripes-${cause})`;
		const shapes = [makeSvg("pattern", pattern, stripe), makeSvg("path", { d: runs.join(""), fill })];
		if (!runs.length) return shapes;
		y += 20;
		return [...shapes, makeSvg("rect", { x, y: y - 6, width: 15, height: 12, fill }), makeSvg("text", { x: x + 22, y, class: "legend", "text-anchor": "start" }, `hidden by ${find("reasons").dataset[cause]?.split(" (")[0]}`)];
	});
};

/** @type {drawScale} */
const drawScale = (view, grid, x, y) => {
	const { low, high, diverging: isDiverging } = limitsOf(view, grid);
	const bar = times(64, (n) => makeSvg("rect", { x: x + 66 + 2 * n, y, width: 2.5, height: 10, fill: `rgb(${(isDiverging ? diverging : sequential)[4 * n]})` }));
	const ends = [low, high].map((value, n) => makeSvg("text", { x: x + 201 * n, y: y + 5, class: "range", "text-anchor": "start" }, show(value, 3)));
	return [...bar, ...ends];
};

/** @type {drawNumbers} */
const drawNumbers = (view, grid, size) => {
	const [isFaint, limits] = [faintIn(view, grid), limitsOf(view, grid)];
	const digits = grid.values.every(Number.isInteger) ? 0 : 3;
	return Array.from(grid.values, (value, at) => {
		const text = isFaint(at) && !value ? "" : show(value, digits);
		const fill = isFaint(at) ? "var(--ink)" : inkOn(colourOf(value, limits));
		const place = { x: ((at % grid.cols) + 0.5) * size, y: (Math.floor(at / grid.cols) + 0.5) * size };
		return makeSvg("text", { ...place, fill, "font-size": Math.min(13, (1.45 * size) / text.length) }, text);
	});
};
