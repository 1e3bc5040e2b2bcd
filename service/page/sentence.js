// Sentences whose words get vectors from a seed: the same word, the same vector.

import { times } from "./dom.js";

/** Uniform random numbers in [0, 1) for a text (FNV-1a, mulberry32). @param {string} text */
function randomOf(text) {
	let seed = 0x811c9dc5;
	for (const byte of new TextEncoder().encode(text)) seed = Math.imul(seed ^ byte, 0x01000193);
	return () => {
		seed = (seed + 0x6d2b79f5) | 0;
		let value = Math.imul(seed ^ (seed >>> 15), 1 | seed);
		value = (value + Math.imul(value ^ (value >>> 7), 61 | value)) ^ value;
		return ((value ^ (value >>> 14)) >>> 0) / 2 ** 32;
	};
}

/** @type {sentenceRequest} */
export const sentenceRequest = (text, dim, seed) => {
	const words = text.trim().split(/\s+/);
	const input = words.map((word) => {
		const random = randomOf(`${seed}:${word}`);
		const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
		return times(dim, () => Math.round(100 * normal()) / 100);
	});
	return { input, query_tokens: words };
};
