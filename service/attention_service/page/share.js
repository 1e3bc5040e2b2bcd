// Copies and downloads: own data in a link, curl, Python, SVG, PNG, and the page as one file.

import { decorate, fillIn, find, make, makeSvg } from "./dom.js";
import { fromBase64, toBase64, toText } from "./tensors.js";
import { session } from "./service.js";

/** Bytes of text that a link or the text to edit may have. */
export const MOST_TEXT = 30_000;

/** @param {string} text */
const isShort = (text) => new TextEncoder().encode(text.slice(0, MOST_TEXT + 1)).length <= MOST_TEXT;

/** @type {asRows} */
const asRows = (value) => toText(value, 1).replace(/\[\s+([^[\]{}]*?)\s+\]/g, (_, row) => `[${row.replace(/\n\s*/g, " ")}]`);

/** @type {editable} */
export const editable = ({ include, ...request }) => {
	const text = isShort(toText(request)) ? asRows(request) : "";
	return isShort(text) ? text : "";
};

/** @type {pack} */
export const pack = async (text) => {
	if (!isShort(text)) return "";
	const stream = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
	const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
	return toBase64(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
};

/** @type {unpack} */
export const unpack = async (packed) => {
	const bytes = fromBase64(packed.replaceAll("-", "+").replaceAll("_", "/"));
	const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
	const reader = stream.pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
	let text = "";
	for (let part = await reader.read(); !part.done; part = await reader.read()) {
		text += part.value;
		if (!isShort(text)) throw new Error("too long"); // a few bytes may stand for millions
	}
	return text;
};

/** @type {asProgram} */
export const asProgram = (language, address, request) => {
	const { content, dataset } = find(language);
	const quoted = toText(request).replaceAll("'", "\\u0027"); // can stand between single quotes
	return fillIn(content.textContent ?? "", { address, key: session.key && dataset.key, request: quoted });
};

/** @type {copy} */
export async function copy(text, note = "") {
	const line = find("copied-note");
	find("copied-text").value = text;
	line.textContent = "";
	find("copied").showModal();
	find("copied-text").select();
	const isCopied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
	line.textContent = `${line.dataset[isCopied ? "done" : "failed"]} ${note}`;
}

/** @type {download} */
export const download = (name, href) => make("a", { href, download: name }).click();

/** @param {string} text */
export const addressOf = (text, type = "") => URL.createObjectURL(new Blob([text], { type }));

/** @type {asPicture} */
function asPicture(what) {
	const shown = /** @type {SVGSVGElement} */ (document.querySelector(`#${what} svg`));
	const { x, y, width, height } = shown.viewBox.baseVal;
	const copy = /** @type {SVGElement} */ (shown.cloneNode(true));
	const parts = copy.querySelectorAll("*");
	shown.style.colorScheme = "light";
	shown.querySelectorAll("*").forEach((part, at) => {
		const style = getComputedStyle(part);
		for (const name of ["fill", "stroke", "text-anchor", "dominant-baseline", "image-rendering"]) parts[at].setAttribute(name, style.getPropertyValue(name));
	});
	shown.removeAttribute("style");
	copy.querySelector(".frame")?.remove();
	const title = find("save-title").value || document.querySelector(`#${what}-title`)?.firstChild?.textContent;
	const box = { x, y: y - 34, width, height: height + 44 };
	copy.prepend(makeSvg("rect", { ...box, fill: "#fff" }), makeSvg("text", { x: x + 8, y: y - 14, "font-size": 15 }, title ?? ""));
	const { value, dataset } = find("save-size").selectedOptions[0];
	const unit = Math.min(Number(value) / width, Number(dataset.height) / box.height);
	decorate(copy, { viewBox: Object.values(box).join(" "), width: `${unit * width}mm`, height: `${unit * box.height}mm`, "font-family": "sans-serif", "font-size": 12 });
	return addressOf(new XMLSerializer().serializeToString(copy), "image/svg+xml");
}

// The chunk of a PNG file that says 300 pixels to the inch, which a canvas does not write, and the bytes before it.
const PHYS = new Uint8Array([0, 0, 0, 9, 112, 72, 89, 115, 0, 0, 46, 35, 0, 0, 46, 35, 1, 120, 165, 63, 118]);
const HEADER = 33;

/** @type {savePicture} */
export const savePicture = async ({ target }) => {
	const picture = asPicture(find("save-what").value);
	if (target === find("save-svg")) return download("attention.svg", picture);
	const image = make("img", { src: picture });
	await image.decode();
	const [width, height] = [image.width, image.height].map((side) => (side * 300) / 96);
	const canvas = make("canvas", { width, height });
	canvas.getContext("2d")?.drawImage(image, 0, 0, width, height);
	const png = fromBase64(canvas.toDataURL().split(",")[1]);
	download("attention.png", URL.createObjectURL(new Blob([png.slice(0, HEADER), PHYS, png.slice(HEADER)])));
};

/** @param {string} path */
const fetchText = async (path) => (await fetch(path)).text();

/** @type {asHtml} */
export async function asHtml(saved) {
	const links = [...document.querySelectorAll("link")].filter(({ rel }) => rel === "modulepreload"); // in the order of their imports
	const modules = await Promise.all(links.map(({ href }) => fetchText(href)));
	const script = modules.join("").replace(/^import .*$/gm, "").replace(/^export /gm, "").replaceAll("</", "<\\/");
	const style = await fetchText("page/page.css");
	const page = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
	page.querySelectorAll("link, script").forEach((part) => part.remove());
	page.querySelectorAll("a").forEach((link) => link.setAttribute("href", link.href));
	const nonce = crypto.getRandomValues(new Uint32Array(4)).join("");
	const content = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src data: blob:`;
	page.querySelector("head")?.append(make("meta", { "http-equiv": "Content-Security-Policy", content }), make("style", { nonce }, style));
	const data = toText(saved).replaceAll("<", "\\u003c");
	page.append(make("script", { type: "application/json", id: "saved" }, data), make("script", { type: "module", nonce }, script));
	return `<!doctype html>\n${page.outerHTML}`;
}
