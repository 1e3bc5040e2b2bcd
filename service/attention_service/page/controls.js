// The controls: their values, what was wrong with them, and the address that restores them.

import { fillIn, find, make } from "./dom.js";
import { hasTensors, layoutOf, optionsOf, sizesOf } from "./request.js";

/** @type {readForm} */
export const readForm = (id) => {
	for (const control of controlsOf(id)) {
		if (control.validity.rangeOverflow) control.value = control.max; // the address may hold any number
	}
	const entries = Object.fromEntries(new FormData(find(id)));
	return /** @type {Options} */ (id === "options" ? { is_causal: "", ...entries } : entries);
};

/** @type {controlsOf} */
const controlsOf = (id) => /** @type {any} */ (find(id).elements);

/** @type {writeForm} */
export const writeForm = (id, values) => {
	for (const control of controlsOf(id)) {
		const value = values[control.name];
		if (control.type === "checkbox") control.checked = value === "true";
		else if (control.type === "number" && value && !Number.isFinite(Number(value))) control.value = "";
		else if (control.type !== "file" && value !== undefined) control.value = value;
	}
};

/** The options of the request as shown. @type {Options} */
let own = {};

/** @type {changedOptions} */
export const changedOptions = () => Object.fromEntries(Object.entries(readForm("options")).filter(([name, value]) => value !== own[name]));

/** @type {showOptions} */
export const showOptions = (request, changed) => {
	const [options, more] = [find("options"), find("more")];
	const [former, mine] = [own, Object.entries(changedOptions())];
	const keys = sizesOf(request).k;
	options.reset();
	options.key_lengths.max = keys;
	find("other-layout").text = layoutOf(request); // the others than ld and dl
	writeForm("options", { key_lengths: String(keys), ...optionsOf(request) });
	for (const control of controlsOf("options")) {
		control.disabled = request[control.name] instanceof Object || (control.name === "layout" && (!/^(ld|dl)$/.test(control.value) || hasTensors(request)));
	}
	own = readForm("options");
	writeForm("options", { ...own, ...(changed ?? Object.fromEntries(mine.filter(([name]) => own[name] === former[name]))) });
	more.open ||= !!more.querySelector("option:checked:not(:first-child, [hidden]), input:not(:placeholder-shown)");
};

/** @type {showPadding} */
export const showPadding = () => {
	const { disabled, value, max } = find("options").key_lengths;
	find("padding").textContent = fillIn(find("padding").dataset[disabled ? "own" : value === max ? "all" : "some"], { value, max });
};

/** @type {showFaults} */
export const showFaults = (faults = [], title = "", near = find("batch-label")) => {
	for (const old of document.querySelectorAll(".fault")) old.remove();
	for (const control of document.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
	const others = faults.filter((fault) => !showAtControl(fault));
	const problem = find("problem");
	near.after(problem);
	problem.hidden = !title || (faults.length > 0 && !others.length);
	problem.replaceChildren(title, ...others.map(({ pointer, text }) => make("p", {}, `${pointer}: ${text}`)));
};

/** @type {showAtControl} */
function showAtControl({ pointer, text }) {
	const path = pointer.slice(1).replaceAll("/", ".");
	const target = path && find("options").querySelector(`[name="${CSS.escape(path)}"], [name^="${CSS.escape(path)}."]`);
	if (!target) return false;
	const fault = make("small", { class: "fault", id: `fault-${path}` }, text);
	target.setAttribute("aria-invalid", "true");
	target.setAttribute("aria-describedby", fault.id);
	target.after(fault);
	if (find("more").contains(target)) find("more").open = true;
	return true;
}

/** @type {writeAddress} */
export const writeAddress = (choice, first = {}, fields = { ...readForm("source"), ...changedOptions() }) => {
	const { pasted, data, ...others } = fields;
	const chosen = Object.entries(choice).filter(([name, value]) => value !== first[name]);
	const [page] = location.href.split("#"); // within a notebook, a relative address would be of the notebook
	history.replaceState(null, "", `${page}#${new URLSearchParams({ ...others, ...Object.fromEntries(chosen), ...(data && { data }) })}`);
};
