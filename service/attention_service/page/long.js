// Long sequences, whose scores the page never holds: a binned picture, and rows on request.

import { bounded, find, make, show, times } from "./dom.js";
import { layoutOf, sizesOf } from "./request.js";
import { post, postForTensors } from "./service.js";
import { numbers } from "./tensors.js";

const [ROWS, TOP] = [64, 16];

/** @type {showLong} */
export const showLong = async (request, batch, signal) => {
	const { h, q, k } = sizesOf(request);
	const [stage, bins] = [find("long-stage").value, find("long-bins").value];
	const one = { ...request, select_heads: [bounded(find("long-head"), h - 1)] };
	find("long-query").onsubmit = () => showRows(one, batch, bounded(find("long-row"), q - 1), signal);
	find("long-rows").replaceChildren();
	const scale = stage === "attention_weights" ? "log" : "linear"; // of thousands of weights, nearly all are small
	const response = await post("attention/heatmap", { ...one, heatmap: { stage, bins, scale, batch_entry: batch } }, "image/svg+xml", signal);
	const blob = await response.blob();
	const frame = /<image x="(.*?)" y="(.*?)" width="(.*?)" height="(?!10")(.*?)"/.exec(await blob.text()); // the legend has height 10
	const image = find("long-image");
	URL.revokeObjectURL(image.src);
	image.src = URL.createObjectURL(blob);
	image.alt = `${stage} of ${q} queries and ${k} keys`;
	image.onclick = ({ offsetX, offsetY }) => {
		const [, x, y, width, height] = Array.from(frame ?? [], Number);
		const [at, start, length] = layoutOf(request).endsWith("dl") ? [offsetX, x, width] : [offsetY, y, height];
		const query = Math.floor((((at * image.naturalWidth) / image.clientWidth - start) / length) * q);
		if (query >= 0 && query < q) void showRows(one, batch, query, signal);
	};
};

/** @type {showRows} */
const showRows = async (request, batch, query, signal) => {
	const { q } = sizesOf(request);
	const first = Math.max(0, Math.min(query - ROWS / 2, q - ROWS));
	const rows = times(Math.min(ROWS, q), (row) => first + row);
	const query_lengths = request.query_lengths ?? first + rows.length; // the queries after these rows are left out
	const own = { ...request, include: ["attention_weights"], select_queries: rows, top_k: TOP, query_lengths };
	const { tensors } = await postForTensors(own, signal);
	const [keys, weights] = ["indices", "values"].map((name) => numbers(tensors[`top_weights.${name}`]));
	const items = rows.map((row, n) => {
		const count = tensors["top_weights.values"].shape.at(-1) ?? 0; // fewer for fewer keys
		const start = (batch * rows.length + n) * count;
		const places = times(count, (i) => start + i).filter((place) => weights[place]);
		const texts = places.map((place) => `${keys[place]} (${show(weights[place], 3)})`);
		return make("li", row === query ? { "aria-current": "true" } : {}, make("b", {}, `head ${request.select_heads}, query ${row}: `), texts.join(", "));
	});
	find("long-rows").replaceChildren(...items);
	find("long-rows").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
};
