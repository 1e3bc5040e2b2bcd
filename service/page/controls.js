// The controls: their values, what was wrong with them, and the address that restores them.

import { find, make } from "./dom.js";
import { hasTensors, optionsOf } from "./request.js";

/** @type {readForm} */
export const readForm = (id) => {
	const entries = Object.fromEntries(new FormData(find(id)));
	return /** @type {Options} */ (id === "options" ? { is_causal: "", ...entries } : entries);
};

/** @param {"options" | "source"} id @returns {Iterable<HTMLInputElement>} */
const controlsOf = (id) => /** @type {any} */ (find(id).elements);

/** @type {writeForm} */
export const writeForm = (id, values) => {
	for (const control of controlsOf(id)) {
		if (control.type === "checkbox") control.checked = values[control.name] === "true";
		else if (control.type !== "file" && values[control.name] !== undefined) control.value = values[control.name];
	}
};

/** @type {showOptions} */
export const showOptions = (request, changed) => {
	find("options").reset();
	writeForm("options", { ...optionsOf(request), ...changed });
	for (const control of controlsOf("options")) {
		control.disabled = request[control.name] instanceof Object || (control.name === "layout" && (!control.value || hasTensors(request)));
	}
};

/** @type {showFaults} */
export const showFaults = (faults = [], title = "", near = find("batch-label")) => {
	for (const old of document.querySelectorAll(".fault")) {
		old.previousElementSibling?.removeAttribute("aria-invalid");
		old.remove();
	}
	const others = faults.filter((fault) => !showAtControl(fault));
	const problem = find("problem");
	near.after(problem);
	problem.hidden = !title || (faults.length > 0 && !others.length);
	problem.replaceChildren(title, ...others.map(({ pointer, text }) => make("p", {}, `${pointer}: ${text}`)));
};

/** Shows a fault at the control of its field; false if there is none. @param {Fault} fault */
function showAtControl({ pointer, text }) {
	const path = pointer.slice(1).replaceAll("/", ".");
	const target = path && find("options").querySelector(`[name="${CSS.escape(path)}"], [name^="${CSS.escape(path)}."]`);
	if (!target) return false;
	const fault = make("small", { class: "fault", id: `fault-${path}` }, text);
	target.setAttribute("aria-invalid", "true");
	target.setAttribute("aria-describedby", fault.id);
	target.after(fault);
	return true;
}

/** @type {writeAddress} */
export const writeAddress = (request, choice) => {
	const { pasted, ...source } = readForm("source");
	const own = optionsOf(request);
	const changed = Object.entries(readForm("options")).filter(([name, value]) => value !== (own[name] ?? ""));
	const chosen = Object.entries(choice).filter(([, value]) => value);
	history.replaceState(null, "", `#${new URLSearchParams([...Object.entries(source), ...changed, ...chosen])}`);
};
