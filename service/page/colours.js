// Colours of numbers. Styles are read once, as each reading lays out the page.

import { times } from "./dom.js";

/** 256 colours between the anchors of a style, linear in sRGB. @param {string} name */
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
export const limitsOf = ({ name, values, least = 0 }) => {
	let [low, high] = [0, least];
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
	return (limits.diverging ? diverging : sequential)[Math.round(255 * Math.min(1, Math.max(0, share || 0)))];
};

/** @type {inkOn} */
export const inkOn = ([red, green, blue]) => (0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#111" : "#fff");
