// The controls: their values, what was wrong with them, and the address that restores them.

import { find, make } from "./dom.js";
import { hasTensors, optionsOf } from "./request.js";

/** The values of a form, without disabled controls. @type {readForm} */
export const readForm = (id) => {
	const entries = Object.fromEntries(new FormData(find(id)));
	return /** @type {Options} */ (id === "options" ? { is_causal: "", ...entries } : entries);
};

/** @param {"options" | "source"} id @returns {Iterable<HTMLInputElement>} */
const controlsOf = (id) => /** @type {any} */ (find(id).elements);

/** Shows values in a form. @type {writeForm} */
export const writeForm = (id, values) => {
	for (const control of controlsOf(id)) {
		if (control.type === "checkbox") control.checked = values[control.name] === "true";
		else if (control.type !== "file" && values[control.name] !== undefined) control.value = values[control.name];
	}
};

/** Shows the options of a request. Lists cannot be changed. @type {showOptions} */
export const showOptions = (request, changed) => {
	find("options").reset();
	writeForm("options", { ...optionsOf(request), ...changed });
	for (const control of controlsOf("options")) {
		control.disabled = typeof request[control.name] === "object" || (control.name === "layout" && (!control.value || hasTensors(request)));
	}
};

/** Shows faults at their controls, all others above the pictures. @type {showFaults} */
export const showFaults = (faults = [], title = "") => {
	for (const old of document.querySelectorAll(".fault")) {
		old.previousElementSibling?.removeAttribute("aria-invalid");
		old.remove();
	}
	const others = faults.filter((fault) => !showAtControl(fault));
	find("problem").hidden = !title;
	find("problem").replaceChildren(title, ...others.map(({ pointer, text }) => make("p", {}, `${pointer} ${text}`)));
};

/** Shows a fault at the control of its field or of pasted data; false if there is none. @param {Fault} fault */
function showAtControl({ pointer, text }) {
	const path = pointer.slice(1).replaceAll("/", ".");
	const own = path && find("options").querySelector(`[name="${CSS.escape(path)}"], [name^="${CSS.escape(path)}."]`);
	const target = own || (path && !find("data").hidden && find("pasted"));
	if (!target) return false;
	const fault = make("small", { class: "fault", id: `fault-${path}` }, own ? text : `${pointer}: ${text}`);
	target.setAttribute("aria-invalid", "true");
	target.setAttribute("aria-describedby", fault.id);
	target.after(fault);
	return true;
}

/** Puts the source, changed options, and the choice into the address. @type {writeAddress} */
export const writeAddress = (request, choice) => {
	const { pasted, ...source } = readForm("source");
	const own = optionsOf(request);
	const changed = Object.entries(readForm("options")).filter(([name, value]) => value !== (own[name] ?? ""));
	const chosen = Object.entries(choice).flatMap(([name, value]) => (value ? [[name, String(value)]] : []));
	history.replaceState(null, "", `#${new URLSearchParams([...Object.entries(source), ...changed, ...chosen])}`);
};
