// Copies and downloads: curl, Python, SVG, PNG, and the page as one file.

import { fillIn, find, make } from "./dom.js";
import { toText } from "./tensors.js";
import { session } from "./service.js";

/** @type {asProgram} */
export const asProgram = (language, address, request) => {
	const { content, dataset } = find(language);
	const quoted = toText(request).replaceAll("'", "\\u0027"); // can stand between single quotes
	return fillIn(content.textContent ?? "", { address, key: session.key && dataset.key, request: quoted });
};

/** @type {copy} */
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
	page.querySelectorAll("[style]").forEach((part) => part.removeAttribute("style")); // painted again when it is opened
	page.querySelectorAll("a").forEach((link) => link.setAttribute("href", link.href));
	const nonce = crypto.getRandomValues(new Uint32Array(4)).join("");
	const content = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'nonce-${nonce}'; img-src data: blob:`;
	page.querySelector("head")?.append(make("meta", { "http-equiv": "Content-Security-Policy", content }), make("style", { nonce }, style));
	const data = toText(saved).replaceAll("<", "\\u003c");
	page.append(make("script", { type: "application/json", id: "saved" }, data), make("script", { type: "module", nonce }, script));
	return `<!doctype html>\n${page.outerHTML}`;
}
