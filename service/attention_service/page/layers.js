// A model in a saved page: all heads of all layers in front, and a tab for each layer.

import { find, keep, make } from "./dom.js";
import { pixelsOf } from "./heatmap.js";
import { View } from "./result.js";

/** @type {paintLayers} */
export function paintLayers({ choice, choose }, results = []) {
	if (!results[0]?.answer.name) return; // not of a model
	if (find("model").hidden) build(results);
	for (const button of find("model").querySelectorAll("button")) {
		const [layer, head = choice.head] = button.value.split(" ").map(Number);
		const isChosen = layer === choice.layer && head === choice.head;
		button.setAttribute(button.role ? "aria-selected" : "aria-pressed", String(isChosen));
		button.tabIndex = isChosen ? 0 : -1; // arrow keys reach the others
		button.onclick = () => choose({ layer, head });
		const own = new View(results[layer], { ...choice, head }, choose);
		if (!button.role) keep(button.firstElementChild, pixelsOf(own, own.grid("attention_weights"), "overview"));
	}
}

/** @type {build} */
function build(results) {
	const { heads } = results[0].answer;
	const rows = results.map(({ answer }, layer) => {
		const buttons = answer.heads.map((/** @type {number} */ name, /** @type {number} */ head) => {
			return make("td", {}, make("button", { value: `${layer} ${head}`, title: `${answer.name}, head ${name}` }, make("span")));
		});
		return make("tr", {}, make("th", { scope: "row" }, answer.name), ...buttons);
	});
	find("overview").append(make("tr", {}, make("td"), ...heads.map((/** @type {string} */ name) => make("th", { scope: "col" }, name))), ...rows);
	find("tabs").append(...results.map(({ answer }, value) => make("button", { role: "tab", "aria-controls": "short", value }, answer.name)));
	find("model").hidden = false;
	find("model").onkeydown = (event) => {
		const { role } = /** @type {HTMLButtonElement} */ (event.target);
		const buttons = [...find(role ? "tabs" : "overview").querySelectorAll("button")];
		const at = buttons.findIndex(({ tabIndex }) => tabIndex === 0);
		const down = role ? NaN : heads.length;
		const next = buttons[at + ({ ArrowLeft: -1, ArrowRight: 1, ArrowUp: -down, ArrowDown: down, Home: -at, End: buttons.length - 1 - at }[event.key] ?? NaN)];
		if (!next) return;
		event.preventDefault(); // else the page would scroll
		next.click();
		next.focus();
	};
}
