// Long sequences, whose scores the page never holds: a binned picture, and a window of it with all numbers.

import { bounded, clamp, find } from "./dom.js";
import { layoutOf, sizesOf } from "./request.js";
import { post } from "./service.js";

/** Fewest queries and keys of a window, and most keys. */
const [FEWEST, MOST_KEYS] = [32, 512];

/** Where the cells of the picture are: x, y, width, height. @type {number[]} */
let frame = [];

/** @type {watchWindow} */
export const watchWindow = (request, most, zoom) => {
	const { q, k } = sizesOf(request);
	const all = [{ axis: "key", control: find("long-key"), count: k, most: MOST_KEYS }, { axis: "query", control: find("long-query"), count: q, most }];
	const sides = layoutOf(request).endsWith("dl") ? all.reverse() : all;
	const [image, brush] = [find("long-image"), find("brush")];
	/** @type {number[] | undefined} */
	let start;
	/** The tokens there. @param {MouseEvent} event */
	const tokensAt = ({ offsetX, offsetY }) => sides.map(({ count }, n) => {
		const pixel = ((n ? offsetY : offsetX) * image.naturalWidth) / image.clientWidth;
		return clamp(((pixel - frame[n]) / frame[n + 2]) * count, count - 1);
	});
	/** The window between two places. @param {number[]} from */
	const windowOf = (from, to = from) => sides.map(({ axis, count, most }, n) => {
		const size = Math.min(Math.max(Math.abs(to[n] - from[n]) + 1, FEWEST), most, count);
		const first = clamp(to[n] < from[n] ? from[n] + 1 - size : from[n], count - size);
		return /** @type {const} */ ([axis, [first, first + size]]);
	});
	image.onpointerdown = (event) => {
		start = tokensAt(event);
		image.setPointerCapture(event.pointerId);
	};
	image.onpointermove = (event) => {
		brush.hidden = !start;
		windowOf(start ?? [0, 0], tokensAt(event)).forEach(([, [from, to]], n) => {
			const unit = frame[n + 2] / sides[n].count;
			const whole = (n ? image.naturalHeight : image.naturalWidth) / 100;
			brush.style.setProperty(n ? "top" : "left", `${(frame[n] + from * unit) / whole}%`);
			brush.style.setProperty(n ? "height" : "width", `${((to - from) * unit) / whole}%`);
		});
	};
	image.onpointerup = (event) => {
		zoom(Object.fromEntries(windowOf(start ?? [0, 0], tokensAt(event))));
		start = undefined;
		brush.hidden = true;
	};
	find("long-window").onsubmit = () => zoom(Object.fromEntries(windowOf(sides.map(({ control, count }) => bounded(control, count - 1)))));
};

/** @type {showLong} */
export const showLong = async (request, batch, signal) => {
	const { q, k } = sizesOf(request);
	const [stage, bins] = [find("long-stage").value, find("long-bins").value];
	const scale = stage === "attention_weights" ? "log" : "linear"; // of thousands of weights, nearly all are small
	const response = await post("attention/heatmap", { ...request, heatmap: { stage, bins, scale, batch_entry: batch } }, "image/svg+xml", signal);
	const blob = await response.blob();
	const [, ...places] = /<image x="(.*?)" y="(.*?)" width="(.*?)" height="(?!10")(.*?)"/.exec(await blob.text()) ?? []; // the legend has height 10
	frame = places.map(Number);
	const image = find("long-image");
	URL.revokeObjectURL(image.src);
	image.src = URL.createObjectURL(blob);
	image.alt = `${stage} of ${q} queries and ${k} keys`;
};
