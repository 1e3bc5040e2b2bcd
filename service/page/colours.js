// Colours of numbers, heads and causes. The maps have the same anchors as the pictures that the service draws.

import { times } from "./dom.js";

const SEQUENTIAL = [
	"#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725",
];
const DIVERGING = [
	"#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f",
];
/** Colours of what hides a key, by field; also of heads. @type {Record<string, string>} */
const CAUSES = {
	is_causal: "#7a68c8", window: "#1c8c8c", chunk_size: "#b0762a", mask: "#c2477f", key_mask: "#4c7fc4",
	key_lengths: "#6a8f2f", query_lengths: "#8a6d5c", segment_ids: "#b5533c", bias: "#a06bb8",
};

/** The numbers in a colour like #rrggbb or rgb(r, g, b). @type {parseColour} */
export const parseColour = (text) => {
	const hex = text.startsWith("#");
	return (text.match(hex ? /\w\w/g : /\d+/g) ?? []).map((part) => parseInt(part, hex ? 16 : 10));
};

/** A mix of two colours. @type {mix} */
export const mix = (one, other, share) => one.map((part, i) => Math.round(part + (other[i] - part) * share));

/** 256 colours between anchors, linear in sRGB. @param {string[]} anchors */
function interpolate(anchors) {
	const colours = anchors.map(parseColour);
	return times(256, (index) => {
		const place = (index / 255) * 10;
		const from = Math.min(Math.floor(place), 9);
		return mix(colours[from], colours[from + 1], place - from);
	});
}

const [sequential, diverging] = [SEQUENTIAL, DIVERGING].map(interpolate);

/** Limits from 0 for weights, symmetric about 0 for all else. @type {limitsOf} */
export const limitsOf = ({ name, values }) => {
	let [low, high] = [0, 0];
	for (const value of values) {
		if (value < low && value !== -Infinity) low = value;
		if (value > high) high = value;
	}
	const most = Math.max(high, -low);
	return name === "attention_weights" && low === 0 ? { low, high, diverging: false } : { low: -most, high: most, diverging: true };
};

/** @type {colourOf} */
export const colourOf = (value, limits) => {
	const share = (value - limits.low) / (limits.high - limits.low || 1);
	return (limits.diverging ? diverging : sequential)[Math.round(255 * Math.min(1, Math.max(0, share)))];
};

/** @param {number} head */
export const headColour = (head) => Object.values(CAUSES)[head % 9];

/** @param {string} name */
export const causeColour = (name) => CAUSES[name] ?? "#7d8590";

/** Black or white, whichever reads better. @type {inkOn} */
export const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111" : "#fff");
