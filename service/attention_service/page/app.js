// From the forms of the page to a request, from its response to pictures.

import { bounded, clamp, fillIn, find, make, times } from "./dom.js";
import { fromText, toText } from "./tensors.js";
import { GRADIENT, LEFT_OUT, forStages, forWindow, readFiles, requestOfText, sentenceRequest, sizesOf, withOptions } from "./request.js";
import { post, postForTensors, session } from "./service.js";
import { withFields } from "./paste.js";
import { Result, View } from "./result.js";
import { paintStages } from "./stages.js";
import { paintHeads, paintLines } from "./heads.js";
import { paintRow } from "./row.js";
import { changedOptions, readForm, showFaults, showOptions, showPadding, writeAddress, writeForm } from "./controls.js";
import { paintComparison } from "./compare.js";
import { paintLayers } from "./layers.js";
import { showLong, watchWindow } from "./long.js";
import { MOST_TEXT, addressOf, asHtml, asProgram, copy, download, editable, pack, savePicture, unpack } from "./share.js";

const FIRST = { layer: 0, batch: 0, head: 0, query: 0, key: 0, feature: 0, stage: "attention_weights", colours: "", first: "" };
const [LONGEST, MOST_SCORES, DELAY, SLOW] = [512, 2 ** 20, 10, 300];

/** What a saved page holds. */
const saved = fromText(document.getElementById("saved")?.textContent ?? "null");
const base = saved?.base ?? new URL(".", document.baseURI).href;
/** @type {State} */
const state = { examples: {}, request: {}, choice: { ...FIRST } };
let controller = new AbortController();
let [timer, slow] = [0, 0];
/** Counts the sources: what an older one still reads is dropped. */
let turns = 0;
/** What the user changed last: errors stand there. @type {HTMLElement | undefined} */
let changed;

const currentRequest = () => withOptions(state.request, changedOptions());
/** What is shown of the source until the user chooses. @returns {Choice} */
const firstChoice = () => ({ ...FIRST, ...saved?.choice, ...state.examples[find("example").value]?.choice });
const readAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
/** @type {choiceOf} */
const choiceOf = (address) => {
	const known = Object.entries(address).filter(([name, value]) => name in FIRST && (name !== "stage" || find("pipeline").querySelector(`[value="${CSS.escape(value)}"]`)));
	return { ...firstChoice(), ...Object.fromEntries(known) };
};
const view = () => state.result && new View(state.result, state.choice, choose);

/** @type {Choose} */
function choose(change) {
	Object.assign(state.choice, change);
	state.result = state.layers?.[state.choice.layer] ?? state.result;
	paint();
}

/** Paints all that depends on the choice. */
function paint() {
	const shown = view();
	if (!shown) return;
	const { batch_size: batch, num_heads: head, query_length: query, key_length: key } = shown.result.metadata;
	/** @type {Fields} */
	const choice = state.choice;
	if (!shown.result.blocks[choice.stage]) choice.stage = FIRST.stage;
	const counts = { batch, head, query, key, feature: shown.block(choice.stage).cols };
	for (const [name, count] of Object.entries(counts)) choice[name] = clamp(choice[name], count - 1);
	find("batch").value = choice.batch;
	Object.assign(choice, { colours: find("colours").value, first: find("first").checked ? "true" : "" });
	const stage = choice.stage === "change" ? FIRST.stage : choice.stage; // no link has the former weights
	writeAddress({ ...choice, stage }, firstChoice(), saved ? {} : undefined);
	paintLayers(shown, state.layers); // first, as it changes the width of the others
	for (const part of [paintStages, paintHeads, paintLines, paintRow]) part(shown);
	if (state.comparison) paintComparison(state.comparison, shown);
}

/** A verdict is of one request only. */
function forgetComparison() {
	state.comparison = undefined;
	find("report").replaceChildren();
}

/** Sends the request, unless another change follows soon. */
function send() {
	find("long-image").alt = ""; // to be drawn again
	zoom(state.zoom);
}

/** @type {zoom} */
function zoom(window) {
	state.zoom = window;
	forgetComparison();
	controller.abort();
	controller = new AbortController();
	clearTimeout(timer);
	performance.mark("change");
	timer = setTimeout(compute, DELAY, controller.signal);
	showBusy(true);
}

/** @type {showBusy} */
function showBusy(isBusy) {
	clearTimeout(slow);
	find("pictures").ariaBusy = String(isBusy);
	if (isBusy) slow = setTimeout(() => (find("status").textContent = "Computing …"), SLOW);
}

/** @type {compute} */
const compute = async (signal) => {
	writeAddress({});
	showPadding();
	if (readForm("source").pasted === "" && !find("file").files?.length) throw new Error(); // no request yet
	const request = currentRequest();
	const { b, h, q, k } = sizesOf(request);
	find("batch-label").hidden = b === 1;
	const batch = bounded(find("batch"), b - 1);
	const long = Math.max(q, k) > LONGEST || b * h * q * k > MOST_SCORES;
	const window = long && state.zoom;
	const head = bounded(find("long-head"), h - 1);
	const one = { ...request, select_heads: [head] };
	if (long) watchWindow(request, clamp(MOST_SCORES / b / k, LONGEST), zoom);
	if (long && !window) {
		state.result = undefined;
		if (!find("long-image").alt) await showLong(one, batch, signal);
	} else {
		const { tensors, text } = await postForTensors(window ? forWindow(one, window.query) : forStages(request), signal);
		state.result = new Result(forStages(request), tensors, { ...JSON.parse(text), window }, state.former?.result);
		if (window) Object.assign(state.choice, { batch, head });
	}
	find("long").hidden = !long;
	find("short").hidden = long && !window;
	showStale(false);
	showBusy(false);
	showFaults();
	paint();
	find("options").num_heads.placeholder = state.result?.metadata.num_heads ?? h;
	performance.measure("repaint", "change");
	find("status").textContent = (statusOf() ?? `${q} queries · ${k} keys`) + LEFT_OUT.filter((name) => state.request[name]).map((name) => ` · without ${name}`).join("");
};

/** @type {showStale} */
function showStale(isStale) {
	for (const name of /** @type {const} */ (["short", "long-overview"])) find(name).inert = isStale;
	if (isStale) find("status").textContent = "Nothing computed";
}

function statusOf() {
	if (!state.result) return undefined;
	const { metadata } = state.result;
	const notes = metadata.warnings.map((/** @type {Fields} */ { message }) => ` · ${message}`).join("");
	return fillIn(find("status").dataset[metadata.num_heads === 1 ? "head" : "heads"], metadata) + notes;
}

/** @param {any} error */
function showError(error) {
	if (error.name === "AbortError") return;
	showBusy(false);
	showFaults(error.faults, error.message, error.retry ? undefined : changed);
	if (error.retry) find("problem").append(make("button", { type: "button", id: "retry" }, "Retry"));
	if (changed !== find("compare")) showStale(true);
	if (error.status === 401) find("key-field").hidden = false;
}

/** @type {load} */
const load = (request, changed) => {
	Object.assign(state, { request, choice: firstChoice(), former: undefined, zoom: undefined });
	showOptions(request, changed);
	send();
};

async function loadSource() {
	const shown = find("data").hidden && Object.keys(state.request).length ? currentRequest() : undefined;
	state.request = {};
	turns++;
	controller.abort(); // else the answer to an older source would hide what is wrong with this one
	clearTimeout(timer);
	find("notice").textContent = find("link-note").textContent = find("copy-link").title = find("packed").value = "";
	forgetComparison();
	const { example } = readForm("source");
	for (const kind of /** @type {const} */ (["sentence", "data"])) find(kind).hidden = find(kind).disabled = example !== kind;
	const { text, dim, seed } = readForm("source");
	find("lesson").textContent = state.examples[example]?.text ?? "";
	if (example in state.examples) load(state.examples[example].request, {});
	else if (example === "sentence") load(sentenceRequest(text, Math.max(1, Math.trunc(Number(dim))), seed), { num_heads: readForm("options").num_heads });
	else await loadOwn(shown);
}

/** @type {loadOwn} */
async function loadOwn(shown) {
	const turn = turns;
	const { choice } = state;
	const pasted = find("pasted");
	const files = [...(find("file").files ?? [])];
	const isNew = shown && !pasted.value && !files.length;
	const start = isNew && editable(shown);
	if (isNew) pasted.value = start || pasted.placeholder;
	const text = pasted.value.trim() && pasted.value;
	const request = text ? {} : await readFiles(files);
	const isLarge = files.reduce((size, file) => size + file.size, 0) > MOST_TEXT;
	const packed = text || (files.length && !isLarge) ? await pack(text || toText(request)) : "";
	if (turn !== turns) return;
	find("packed").value = packed;
	if ((text || files.length) && !packed) find("copy-link").title = find("copy-link").dataset.large ?? "";
	writeAddress({});
	const next = withFields(text ? requestOfText(text) : request);
	const [mine, other] = [next, state.result?.request ?? {}].map((one) => toText({ ...sizesOf(one), h: 0 }));
	const isEdited = !shown && mine === other;
	load(next, isEdited ? undefined : {});
	if (start || isEdited) state.choice = choice;
}

async function loadAddress() {
	let address = readAddress();
	let notice = "";
	try {
		if (address.data) address.pasted = await unpack(address.data);
	} catch {
		[address, notice = ""] = [{}, find("notice").dataset.unreadable];
	}
	if (address.data) changed = find("pasted");
	const source = { example: Object.keys(state.examples)[0], data: "" };
	writeForm("source", { ...source, ...address });
	if (!readForm("source").example) writeForm("source", source);
	await loadSource();
	if (readForm("source").pasted === "" && !find("file").files?.length) notice = find("notice").dataset.empty ?? "";
	find("notice").textContent = notice;
	showOptions(state.request, address);
	state.choice = choiceOf(address);
	showColours(address);
}

/** @type {showColours} */
function showColours({ colours = "", first }) {
	find("colours").value = colours;
	if (!find("colours").value) find("colours").value = ""; // the address named none that there is
	find("first").checked = first === "true";
}

/** @type {moveChoice} */
function moveChoice(event) {
	const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[String(event.key)];
	const grid = view()?.grid(state.choice.stage);
	if (!step || !grid) return;
	event.preventDefault();
	const { axis } = event.target.dataset;
	const { rowAxis, colAxis } = axis ? { rowAxis: axis, colAxis: "feature" } : grid;
	choose({ [rowAxis]: state.choice[rowAxis] + step[0], [colAxis]: state.choice[colAxis] + step[1] });
	event.currentTarget.querySelector(`[data-axis=${axis}][tabindex="0"]`)?.focus();
}

/** @type {oneHot} */
const oneHot = ([axis, ...axes], [count, ...shape], at, number = 1) => (axis ? times(count, (n) => oneHot(axes, shape, at, n === at[axis] ? number : 0)) : number);

/** Shows how the chosen number of the output depends on each score. */
async function askForGradient() {
	const { result, choice } = /** @type {View} */ (view());
	const { batch: b, query: l, feature: d } = choice;
	const { cols, h } = result.blocks.output;
	if (h === 1) choice.head = Math.floor((d * result.metadata.num_heads) / cols); // heads are joined
	choice.stage = GRADIENT;
	const { shape } = result.tensors.output;
	state.request = { ...currentRequest(), grad_output: oneHot([...result.axesOf("output", shape.length)], shape, { b, h: choice.head, l, d }) };
	const pasted = editable(state.request);
	if (!pasted) return send();
	find("file").value = "";
	writeForm("source", { example: "data", pasted });
	await loadSource();
	state.choice = choice;
}

async function compareKernel() {
	changed = find("compare");
	forgetComparison();
	const { signal } = controller;
	const files = find("actual-file").files;
	const given = withFields(files?.length ? await readFiles(files) : requestOfText(find("actual").value, "output"));
	const actual = given.actual ?? (given.input ? { output: given.input } : given);
	const response = await post("attention/compare", { ...currentRequest(), actual }, "application/json", signal);
	state.comparison = { actual, report: await response.json() };
	showFaults();
	paintComparison(state.comparison, view());
}

/** @type {dropFiles} */
function dropFiles(event) {
	const { files } = /** @type {DataTransfer} */ (event.dataTransfer);
	if (!files.length || saved) return;
	event.preventDefault();
	const isActual = find("compare").contains(/** @type {Node} */ (event.target));
	const input = find(isActual ? "actual-file" : "file");
	if (!isActual) writeForm("source", { example: "data" });
	input.files = files;
	input.dispatchEvent(new Event("input", { bubbles: true }));
}

function restore() {
	const { layers, source, options, note, ...own } = saved;
	Object.assign(state, own);
	state.layers = layers.map((/** @type {Fields} */ { request, tensors, answer }) => new Result(request, tensors, answer));
	writeForm("source", source);
	showOptions(state.request, options);
	document.querySelectorAll("form fieldset").forEach((inputs) => inputs.setAttribute("disabled", ""));
	const open = () => {
		state.choice = choiceOf(readAddress());
		showColours(state.choice);
		choose({ layer: clamp(state.choice.layer, layers.length - 1) });
	};
	window.onhashchange = open;
	open();
	find("status").textContent = note ?? `${find("status").dataset.saved} · ${statusOf()}`;
}

function listen() {
	document.addEventListener("input", ({ target }) => {
		changed = /** @type {HTMLInputElement} */ (target);
		const { other } = changed.dataset; // of a text and a file, the last counts
		if (other) find(/** @type {"file"} */ (other)).value = "";
	}, true);
	document.addEventListener("dragover", (event) => {
		if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); // else the browser opens the file in place of the page
	});
	document.addEventListener("drop", dropFiles);
	find("source").oninput = loadSource;
	find("long-options").oninput = find("long-head").oninput = send;
	find("zoom-out").onclick = () => zoom();
	find("options").oninput = ({ target }) => {
		if (target !== state.former?.option) state.former = { option: target, result: state.result };
		send();
	};
	find("change").onchange = () => choose({ stage: find("change").checked ? "change" : FIRST.stage });
	find("key").onchange = () => {
		session.key = find("key").value.trim();
		send();
	};
	find("batch").oninput = () => (state.result ? choose({ batch: find("batch").valueAsNumber }) : send());
	find("large").onkeydown = find("row").onkeydown = find("lines").onkeydown = moveChoice;
	find("ask").onclick = askForGradient;
	find("compare").onsubmit = compareKernel;
	find("all-heads").onchange = find("numbers").ontoggle = find("colours").onchange = find("first").onchange = window.onresize = paint;
	find("problem").onclick = ({ target }) => /** @type {HTMLElement} */ (target).id === "retry" && send();
	window.onbeforeprint = () => {
		find("numbers").open = true;
		paint();
	};
	window.onunhandledrejection = (event) => {
		event.preventDefault();
		showError(event.reason);
	};
}

function listenToShares() {
	const asked = () => state.result?.request ?? currentRequest();
	const answer = () => ({ ...state.result?.answer, ...state.result?.tensors });
	for (const language of /** @type {const} */ (["curl", "python"])) {
		find(`copy-${language}`).onclick = () => copy(asProgram(language, `${base}attention`, asked()));
	}
	find("copy-link").onclick = () => {
		find("link-note").textContent = find("copy-link").title; // why there is no link
		const isLocal = /^(localhost|127\..*|\[::1\])$/.test(location.hostname);
		if (!find("copy-link").title) return copy(location.href, isLocal ? find("copied-note").dataset.local : "");
	};
	find("save-json").onclick = () => download("attention.json", addressOf(toText({ request: asked(), answer: answer() })));
	find("save-svg").onclick = find("save-png").onclick = savePicture;
	find("save-html").onclick = async () => {
		const { examples, result, former, ...own } = state;
		const content = { ...own, base, source: readForm("source"), options: readForm("options"), layers: [{ request: asked(), answer: result?.answer, tensors: result?.tensors }] };
		download("attention.html", addressOf(await asHtml(content)));
	};
}

async function start() {
	if (!("popover" in HTMLElement.prototype)) return; // a browser before 2024: the notice says so
	find("notice").textContent = "";
	listen();
	listenToShares();
	if (saved) return restore();
	state.examples = await (await fetch("page/examples.json")).json();
	for (const [value, { text, title, source }] of Object.entries(state.examples)) {
		find(text ? "lessons" : "notebooks").append(make("option", { value, title: source }, title));
	}
	window.onhashchange = loadAddress;
	await loadAddress();
}

void start();
