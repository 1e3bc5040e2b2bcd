// Copies and downloads: curl, Python, SVG, PNG, and the page as one file.

import { fillIn, find, make } from "./dom.js";
import { toText } from "./tensors.js";
import { session } from "./service.js";
import { styleValue } from "./heatmap.js";
import { drawStage } from "./stages.js";

/** JSON that can stand between single quotes. @param {Fields} request */
const quotable = (request) => toText(request).replaceAll("'", "\\u0027");

/** A program, from a template of the page. @type {asProgram} */
export const asProgram = (language, address, request) => {
	const { content, dataset } = find(language);
	return fillIn(content.textContent ?? "", { address, key: session.key && dataset.key, request: quotable(request) });
};

/** Copies a text and shows it. @param {string} text */
export function copy(text) {
	find("copied-text").value = text;
	find("copied").showModal();
	find("copied-text").select();
	return navigator.clipboard?.writeText(text);
}

/** @type {download} */
export const download = (name, href) => make("a", { href, download: name }).click();

/** @param {string} text */
export const addressOf = (text) => URL.createObjectURL(new Blob([text]));

/** The address of the chosen stage as an SVG document. @param {View} view */
export function asSvg(view) {
	const svg = drawStage(view);
	svg.style.background = styleValue("--card");
	return `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
}

/** The same as a PNG, at twice its size. @param {View} view */
export async function asPng(view) {
	const image = new Image();
	image.src = asSvg(view);
	await image.decode();
	const canvas = make("canvas", { width: 2 * image.width, height: 2 * image.height });
	canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
	return canvas.toDataURL();
}

/** Collects a module without imports and exports, after those that it imports. @type {collect} */
const collect = async (name, found) => {
	if (found.has(name)) return;
	const text = await (await fetch(`page/${name}`)).text();
	for (const [, other] of text.matchAll(/^import .*"\.\/(.*)";$/gm)) await collect(other, found);
	found.set(name, text.replace(/^import .*$/gm, "").replace(/^export /gm, ""));
};

/** The page as one file that works without a server. @param {Fields} saved */
export async function asHtml(saved) {
	/** @type {Map<string, string>} */
	const modules = new Map();
	await collect("app.js", modules);
	const script = [...modules.values()].join("").replaceAll("</", "<\\/");
	const style = await (await fetch("page/page.css")).text();
	const page = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
	page.querySelectorAll("link, script, style, meta[http-equiv]").forEach((part) => part.remove());
	page.querySelectorAll("[style]").forEach((part) => part.removeAttribute("style")); // its policy allows none
	const nonce = crypto.getRandomValues(new Uint32Array(4)).join("");
	const content = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src data: blob:`;
	page.querySelector("head")?.append(make("meta", { "http-equiv": "Content-Security-Policy", content }), make("style", { nonce }, style));
	const data = toText(saved).replaceAll("<", "\\u003c");
	const scripts = [make("script", { type: "application/json", id: "saved" }, data), make("script", { type: "module", id: "bundle", nonce }, script)];
	page.querySelector("body")?.append(...scripts);
	return `<!doctype html>\n${page.outerHTML}`;
}
