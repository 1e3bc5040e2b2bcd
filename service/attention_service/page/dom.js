// Elements of the page and the text of numbers. Text is set as text, never parsed as HTML.

/** Half as many of a long list are shown at a time: a browser lays out all of them again for each change. */
const SHOWN = 64;

/** @template {keyof PageElements} Id @type {find} */
export const find = (id) => /** @type {any} */ (document.getElementById(id));

/** @type {clamp} */
export const clamp = (value, max) => Math.max(0, Math.min(Math.trunc(value) || 0, max));

/** @type {bounded} */
export const bounded = (control, max) => {
	const value = clamp(control.valueAsNumber, max);
	Object.assign(control, { max, value });
	return value;
};

/** @type {Make} */
export const make = (tag, attributes, ...children) => decorate(document.createElement(tag), attributes, children);

/** @type {MakeSvg} */
export const makeSvg = (tag, attributes, ...children) => decorate(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** @type {Decorate} */
export function decorate(made, attributes = {}, children = []) {
	for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
	made.append(...children);
	return made;
}

/** @type {keep} */
export const keep = (parent, child) => {
	if (parent?.firstChild !== child) parent?.replaceChildren(child);
};

/** @type {Times} */
export const times = (count, action) => Array.from({ length: count }, (_, index) => action(index));

/** @type {around} */
export const around = (index, count) => {
	const first = Math.max(0, Math.min(SHOWN * Math.floor(index / SHOWN) - SHOWN / 2, count - 2 * SHOWN));
	return times(Math.min(count, 2 * SHOWN), (at) => first + at);
};

/** @type {fillIn} */
export const fillIn = (text = "", values) => text.replace(/\{([\w-]+)\}/g, (_, name) => values[name]);

/** @type {signed} */
export const signed = (value) => String(value).replaceAll("-", "−");

/** @type {show} */
export function show(value, digits = 4) {
	if (!Number.isFinite(value)) return signed(value).replace("Infinity", "∞");
	const size = Math.abs(value);
	const text = size && (size >= 1e6 || size < 10 ** -digits) ? value.toExponential(2) : value.toFixed(digits);
	return signed(text).replace("e+", "e");
}

/** @type {tableRow} */
export const tableRow = (label, values, attributes, digits = 4) => {
	const cells = values.map((value) => make("td", { "data-value": value }, typeof value === "string" ? value : show(value, digits)));
	return make("tr", attributes, make("th", { scope: "row" }, label), ...cells);
};
