// Long sequences, whose scores the page never holds: a binned picture, and rows on request.

import { find, make, show, times } from "./dom.js";
import { sizesOf } from "./request.js";
import { post } from "./service.js";
import { readSafetensors } from "./files.js";
import { numbers } from "./tensors.js";

const [ROWS, TOP] = [64, 16];

/** Shows a stage of one head, drawn by the service. @type {showLong} */
export const showLong = async (request, head, signal) => {
	const { q, k } = sizesOf(request);
	const [stage, bins] = [find("long-stage").value, find("long-bins").value];
	const own = { ...request, select_heads: [head], heatmap: { stage, bins, max_cells: 512, bare: true } };
	const response = await post("attention/heatmap", own, "image/png", signal);
	const image = find("long-image");
	URL.revokeObjectURL(image.src);
	image.src = URL.createObjectURL(await response.blob());
	image.alt = `${stage} of ${q} queries (rows) and ${k} keys`;
	image.onclick = ({ offsetY }) => void showRows(request, head, Math.floor((offsetY / image.clientHeight) * q));
	find("long-zoom").onclick = () => void showRows(request, head, find("long-row").valueAsNumber || 0);
};

/** Shows the largest weights of the rows around a query. @type {showRows} */
const showRows = async (request, head, query) => {
	const { q } = sizesOf(request);
	const first = Math.max(0, Math.min(query - ROWS / 2, q - ROWS));
	const rows = times(Math.min(ROWS, q), (row) => first + row);
	const query_lengths = request.query_lengths ?? first + rows.length; // the queries after these rows are left out
	const own = { ...request, include: ["attention_weights"], select_heads: [head], select_queries: rows, top_k: TOP, query_lengths };
	const response = await post("attention", own, "application/vnd.safetensors");
	const { tensors } = readSafetensors(await response.arrayBuffer(), "response");
	const [keys, weights] = ["indices", "values"].map((name) => Array.from(numbers(tensors[`top_weights.${name}`])));
	const items = rows.map((row, n) => {
		const texts = keys.slice(n * TOP, (n + 1) * TOP).map((key, i) => `${key} (${show(weights[n * TOP + i], 3)})`);
		return make("li", row === query ? { "aria-current": "true" } : {}, make("b", {}, `query ${row}: `), texts.join(", "));
	});
	find("long-rows").replaceChildren(...items);
	find("long-rows").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
};
