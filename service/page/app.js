// From the forms of the page to a request, from its response to pictures.

import { find, make } from "./dom.js";
import { Tensor, fromText, toText } from "./tensors.js";
import { readSafetensors } from "./files.js";
import { forStages, readFiles, requestOfText, sizesOf, withOptions } from "./request.js";
import { sentenceRequest } from "./sentence.js";
import { post, session } from "./service.js";
import { Result, View } from "./result.js";
import { paintStages } from "./stages.js";
import { paintHeads, paintLines } from "./heads.js";
import { paintRow } from "./row.js";
import { readForm, showFaults, showOptions, writeAddress, writeForm } from "./controls.js";
import { paintComparison } from "./compare.js";
import { showLong } from "./long.js";
import { addressOf, asHtml, asPng, asProgram, asSvg, copy, download } from "./share.js";

const FIRST = { batch: 0, head: 0, query: 0, key: 0, stage: "attention_weights" };
const [LONGEST, MOST_SCORES, DELAY] = [512, 2 ** 20, 10];

/** What a saved page holds, else null. */
const saved = fromText(document.getElementById("saved")?.textContent ?? "null");
const base = saved?.base ?? new URL(".", document.baseURI).href;
/** @type {{examples: Fields, request: Fields, choice: Choice, result?: Result, comparison?: Fields}} */
const state = { examples: {}, request: {}, choice: { ...FIRST } };
let controller = new AbortController();
let timer = 0;

const currentRequest = () => withOptions(state.request, saved?.options ?? readForm("options"));
const view = () => state.result && new View(state.result, state.choice, choose);

/** @type {Choose} */
function choose(change) {
	Object.assign(state.choice, change);
	paint();
}

/** Paints all that depends on the choice. */
function paint() {
	const shown = view();
	if (!shown) return;
	const { batch_size: batch, num_heads: head, query_length: query, key_length: key } = shown.result.metadata;
	/** @type {Fields} */
	const choice = state.choice;
	for (const [name, count] of Object.entries({ batch, head, query, key })) choice[name] = Math.max(0, Math.min(choice[name] ?? 0, count - 1));
	if (!saved) writeAddress(state.request, choice);
	find("batch-label").hidden = batch === 1;
	for (const part of [paintStages, paintHeads, paintLines, paintRow]) part(shown);
	if (state.comparison) paintComparison(state.comparison, shown);
}

/** Sends the request, unless another change follows soon. */
function send() {
	controller.abort();
	controller = new AbortController();
	clearTimeout(timer);
	performance.mark("change");
	timer = window.setTimeout(compute, DELAY, controller.signal);
}

/** @type {compute} */
const compute = async (signal) => {
	const request = currentRequest();
	const { b, h, q, k } = sizesOf(request);
	const long = Math.max(q, k) > LONGEST || b * h * q * k > MOST_SCORES;
	find("long").hidden = !long;
	find("short").hidden = long;
	if (long) find("status").textContent = "Computing …";
	if (long) await showLong(request, Math.min(find("long-head").valueAsNumber || 0, h - 1), signal);
	state.result = long ? undefined : await fetchStages(forStages(request), signal);
	showFaults();
	paint();
	performance.measure("repaint", "change");
	find("status").textContent = statusOf() ?? `${q} queries · ${k} keys`;
};

/** @type {fetchStages} */
const fetchStages = async (request, signal) => {
	const response = await post("attention", request, "application/vnd.safetensors", signal);
	const { tensors, text } = readSafetensors(await response.arrayBuffer(), "response");
	return new Result(request, tensors, JSON.parse(text));
};

function statusOf() {
	if (!state.result) return undefined;
	const { backend, dtype, num_heads: heads, query_length, key_length, warnings } = state.result.metadata;
	const notes = warnings.map((/** @type {Fields} */ { message }) => ` · ${message}`).join("");
	return `${query_length} × ${key_length} · ${heads} ${heads === 1 ? "head" : "heads"} · ${dtype} · ${backend}${notes}`;
}

/** @param {any} error */
function showError(error) {
	if (error.name === "AbortError") return;
	showFaults(error.faults ?? [], error.message);
	if (error.status === 401) find("key-field").hidden = false;
}

/** Shows a request with its own options, some changed. @type {load} */
const load = (request, changed = {}) => {
	Object.assign(state, { request, choice: { ...FIRST }, comparison: undefined });
	for (const id of /** @type {const} */ (["report", "difference", "difference-text"])) find(id).replaceChildren();
	showOptions(request, changed);
	send();
};

async function loadSource() {
	const { example } = readForm("source");
	for (const kind of /** @type {const} */ (["sentence", "data"])) find(kind).hidden = find(kind).disabled = example !== kind;
	const { text, dim, seed, pasted } = readForm("source");
	const files = find("file").files ?? [];
	if (example in state.examples) load(state.examples[example].request);
	else if (example === "sentence") load(sentenceRequest(text, Number(dim) || 1, seed), { num_heads: readForm("options").num_heads });
	else if (pasted?.trim()) load(requestOfText(pasted));
	else if (files.length) load(await readFiles(files));
}

/** Restores the address. */
async function loadAddress() {
	const address = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
	writeForm("source", { example: "six_tokens_trained", ...address });
	await loadSource();
	showOptions(state.request, address);
	const { batch, head, query, key, stage = FIRST.stage } = /** @type {Fields} */ (address);
	state.choice = { batch, head, query, key, stage };
}

/** Moves the chosen cell by an arrow key. @param {KeyboardEvent} event */
function moveChoice({ key: name }) {
	const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[name];
	if (!step) return;
	const [query, key] = state.result?.columns ? step.toReversed() : step;
	choose({ query: state.choice.query + query, key: state.choice.key + key });
}

async function compareKernel() {
	const files = find("actual-file").files;
	const given = files?.length ? await readFiles(files) : requestOfText(find("actual").value);
	const actual = given.actual ?? (given.input ? { output: given.input } : given);
	const response = await post("attention/compare", { ...currentRequest(), actual }, "application/json");
	state.comparison = { actual, report: await response.json() };
	showFaults();
	paintComparison(state.comparison, view());
}

function restore() {
	const { asked, answer, source, options, ...own } = saved;
	const tensors = Object.entries(answer).filter(([, value]) => value instanceof Tensor);
	Object.assign(state, { ...own, result: new Result(asked, Object.fromEntries(tensors), answer) });
	writeForm("source", source);
	writeForm("options", options);
	document.querySelectorAll("form fieldset").forEach((inputs) => inputs.setAttribute("disabled", ""));
	find("status").textContent = `A saved page, which computes nothing new · ${statusOf()}`;
	paint();
}

function listen() {
	find("source").oninput = loadSource;
	find("options").oninput = find("long-options").oninput = send;
	find("key").onchange = () => {
		session.key = find("key").value.trim();
		send();
	};
	find("batch").oninput = () => choose({ batch: find("batch").valueAsNumber || 0 });
	find("large").onkeydown = moveChoice;
	find("compare").onsubmit = compareKernel;
	find("all-heads").onchange = find("theme").onchange = find("numbers").ontoggle = window.onresize = paint;
	window.onhashchange = loadAddress;
	window.onunhandledrejection = (event) => {
		event.preventDefault();
		showError(event.reason);
	};
}

function listenToShares() {
	const asked = () => state.result?.request ?? currentRequest();
	const answer = () => ({ ...state.result?.answer, ...state.result?.tensors });
	const picture = () => /** @type {View} */ (view());
	find("copy-curl").onclick = () => copy(asProgram("curl", `${base}attention`, asked()));
	find("copy-python").onclick = () => copy(asProgram("python", `${base}attention`, asked()));
	find("save-json").onclick = () => download("attention.json", addressOf(toText({ request: asked(), answer: answer() })));
	find("save-svg").onclick = () => download("attention.svg", asSvg(picture()));
	find("save-png").onclick = async () => download("attention.png", await asPng(picture()));
	find("save-html").onclick = async () => {
		const { examples, result, ...own } = state;
		const content = { ...own, base, source: readForm("source"), options: readForm("options"), asked: asked(), answer: answer() };
		download("attention.html", addressOf(await asHtml(content)));
	};
}

async function start() {
	listen();
	listenToShares();
	if (saved) return restore();
	state.examples = await (await fetch("page/examples.json")).json();
	find("examples").append(...Object.entries(state.examples).map(([value, { title }]) => make("option", { value }, title)));
	await loadAddress();
}

void start();
