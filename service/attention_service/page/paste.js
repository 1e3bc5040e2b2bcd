// Requests in the forms that people have at hand: tables of numbers, lists and arrays of Python and NumPy, assignments.

const NUMBER = String.raw`[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?`;
const CELL = new RegExp(`^${NUMBER}$`, "i");
/** What stands between tokens: white space, comments, prompts and imports of Python. */
const SKIPPED = /(?:\s+|(?:#|\/\/).*|^(?:>>>|(?:import|from) .*))*/my;
/** A number, a text, a word, or a sign. */
const TOKEN = new RegExp(String.raw`(${NUMBER})(?![\w.+-])|('[^'\\\n]*(?:\\.[^'\\\n]*)*'|"[^"\\\n]*(?:\\.[^"\\\n]*)*")|(-?[a-z_][\w.]*)|([\[\](){},:=;])`, "iy");
/** How lists, objects, assignments and arrays begin; all else is a table. */
const LISTS = /[[{(]|[a-z_][\w.]*\s*(?:[=:]|\(\s*[[(])/iy;
const ASSIGNS = /\s*[=:]/y;
const MODULE = /^(-?)(?:np|numpy|math|torch)\./;
/** Functions whose first argument is what they return. */
const ARRAYS = /^(?:\w+\.)*(?:(?:as)?array|(?:as_)?tensor|\w*float\d*)$/i;
const CONSTANTS = new Map(/** @type {[string, any][]} */ ([["true", true], ["false", false], ["none", undefined], ["null", undefined], ["-inf", -Infinity], ["-infinity", -Infinity]]));
const SHORT = new Map([["q", "query"], ["k", "key"], ["v", "value"], ["x", "input"]]);
const TOKENS = new Map([["input", "query_tokens"], ["query", "query_tokens"], ["key", "key_tokens"]]);
/** Brackets within each other. */
const DEEPEST = 32;

/** @type {fieldOf} */
export const fieldOf = (name) => SHORT.get(name.length === 1 ? name.toLowerCase() : name) ?? name;

/** @type {withFields} */
export const withFields = (request) => {
	const fields = Object.entries(request).map(([name, value]) => [Object.hasOwn(request, fieldOf(name)) ? name : fieldOf(name), value]);
	return Object.fromEntries(fields);
};

/** @type {fail} */
function fail(text, at, expected) {
	const line = text.slice(0, at).split("\n");
	const got = /^(?:[\w.+-]+|[^])/u.exec(text.slice(at, at + 20))?.[0] ?? "the end";
	throw new Error(`line ${line.length}, column ${(line.at(-1) ?? "").length + 1}: expected ${expected}, got ${got}`);
}

/** @type {truths} */
const truths = (data) => (Array.isArray(data) ? data.map(truths) : data === 0 || data === 1 ? data === 1 : data);

/** @type {readPasted} */
export const readPasted = (text, field) => {
	SKIPPED.lastIndex = 0;
	SKIPPED.test(text);
	LISTS.lastIndex = SKIPPED.lastIndex;
	const value = LISTS.test(text) ? readLists(text) : readTable(text, field);
	const request = withFields(Array.isArray(value) ? { [field]: value } : value);
	return request.mask ? { ...request, mask: truths(request.mask) } : request;
};

/** @type {readLists} */
function readLists(text) {
	let [kind, token, at, end] = ["", "", 0, 0];

	const advance = () => {
		SKIPPED.lastIndex = end;
		SKIPPED.test(text);
		TOKEN.lastIndex = at = SKIPPED.lastIndex;
		const [all = text.charAt(at), number, quoted, word, sign] = TOKEN.exec(text) ?? [];
		[token, end] = [all, at + all.length];
		kind = sign ?? (number ? "number" : quoted ? "text" : word ? "word" : all && "unknown");
	};
	/** @param {string} sign */
	const take = (sign) => {
		const isThere = kind === sign;
		if (isThere) advance();
		return isThere;
	};

	/** @param {string} expected @param {number} depth @returns {any} */
	const readValue = (expected, depth) => {
		if (depth > DEEPEST) fail(text, at, `at most ${DEEPEST} brackets within each other`);
		const [first, start] = [token, at];
		if (kind === "[" || kind === "(") return readList(depth);
		if (kind === "{") return readObject(depth);
		if (kind === "word") return readWord(expected, depth);
		if (kind !== "number" && kind !== "text") fail(text, start, expected);
		const isNumber = kind === "number";
		advance();
		return isNumber ? Number(first) : unquoted(first);
	};

	/** @param {number} depth */
	const readList = (depth) => {
		const close = token === "[" ? "]" : ")";
		/** @type {any[]} */
		const items = [];
		let comma = true;
		for (advance(); !take(close); comma = take(",")) items.push(readValue(comma ? `a number, [ or ${close}` : `a number, a comma or ${close}`, depth + 1));
		return close === ")" && items.length === 1 && !comma ? items[0] : items;
	};

	/** @param {number} depth */
	const readObject = (depth) => {
		const entries = [];
		for (advance(); !take("}"); ) {
			if (!["text", "word"].includes(kind)) fail(text, at, "a name or }");
			const name = kind === "text" ? unquoted(token) : token;
			advance();
			if (!take(":")) fail(text, at, "a colon");
			entries.push([name, readValue("a value", depth + 1)]);
			if (!take(",") && kind !== "}") fail(text, at, "a comma or }");
		}
		return Object.fromEntries(entries);
	};

	/** A constant, or an array with what else Python prints of it. @param {string} expected @param {number} depth */
	const readWord = (expected, depth) => {
		const [word, start] = [token.replace(MODULE, "$1").toLowerCase(), at];
		advance();
		if (CONSTANTS.has(word)) return CONSTANTS.get(word);
		if (!ARRAYS.test(word) || !take("(")) fail(text, start, /^[-+]?(?:nan|inf)/.test(word) ? "a finite number or -inf" : expected);
		const inner = [at, readValue("a number or [", depth + 1)];
		for (let open = 1; open; advance()) {
			if (!kind) fail(text, at, ")");
			open += Number("([{".includes(kind)) - Number(")]}".includes(kind));
		}
		return typeof inner[1] === "string" ? CONSTANTS.get(inner[1]) ?? fail(text, inner[0], "a finite number or -inf") : inner[1];
	};

	/** @type {[string, any][]} */
	const fields = [];
	/** @type {any[]} */
	const values = [];
	advance();
	while (kind) {
		ASSIGNS.lastIndex = end;
		if (kind === "word" && !values.length && ASSIGNS.test(text)) {
			const name = token;
			advance();
			advance();
			fields.push([name, readValue("a number, a list or an array", 0)]);
		} else if (fields.length) fail(text, at, "a name with = or the end");
		else values.push(readValue(values.length ? "a row or the end" : "a list, an object or a name with =", 0));
		while (take(",") || take(";"));
	}
	return fields.length ? Object.fromEntries(fields) : values.length > 1 ? values : values[0];
}

/** @type {unquoted} */
const unquoted = (quoted) => quoted.slice(1, -1).replace(/\\(u[\da-f]{4}|[^])/gi, (_, code) => {
	if (code.length > 1) return String.fromCharCode(parseInt(code.slice(1), 16));
	return { n: "\n", t: "\t" }[/** @type {string} */ (code)] ?? code;
});

/** @type {readTable} */
function readTable(text, field) {
	const separator = ["\t", ";", ","].find((sign) => text.includes(sign));
	const cell = separator ? `(?<=^|${separator})(?: *"((?:[^"]|"")*)" *(?=${separator}|$)|([^${separator}]*))` : String.raw`"((?:[^"]|"")*)"(?=\s|$)|(\S+)`;
	const cellsOf = new RegExp(cell, "g");
	let start = 0;
	const lines = text.split("\n").map((line, number) => {
		const content = line.replace(/(?<![,;\s])[,;\s]+$/, "");
		const cells = Array.from(content.matchAll(cellsOf), ({ 1: quoted, 2: plain = "", index }) => {
			return { text: quoted?.replaceAll('""', '"') ?? plain.trim(), at: start + index + (plain.length - plain.trimStart().length) };
		});
		const end = start + content.length;
		start += line.length + 1;
		return { number: number + 1, cells, end, isEmpty: /^\s*(#|$)/.test(content) };
	}).filter(({ isEmpty }) => !isEmpty);
	/** @param {{ text: string }} cell */
	const isWord = ({ text }) => !CELL.test(text) && !/^-inf/i.test(text);
	const [first = { cells: [] }, second] = lines;
	const hasHeader = second && (first.cells[0].text === "" || first.cells.every(isWord));
	const body = lines.slice(hasHeader ? 1 : 0);
	if (!body.length) fail(text, text.length, "rows of numbers");
	const [{ cells: { length: width }, number: model }] = body;
	const hasLabels = width > 1 && (isWord(body[0].cells[0]) || (hasHeader && first.cells[0].text === ""));
	const rows = body.map(({ number, cells, end }) => {
		if (cells.length !== width) fail(text, cells[width]?.at ?? end, `${width} columns as in line ${model}`);
		return cells.slice(hasLabels ? 1 : 0).map((cell) => {
			if (isWord(cell)) fail(text, cell.at, cell === first.cells[0] ? "a number, [ or {" : "a number");
			return cell.text.startsWith("-i") ? -Infinity : Number(cell.text);
		});
	});
	const labels = hasLabels ? body.map(({ cells }) => cells[0].text) : hasHeader && first.cells.map(({ text }) => text);
	if (labels && labels.length !== (hasLabels ? rows.length : width)) fail(text, first.cells[0].at, `a word for each of ${width} columns`);
	const tokens = TOKENS.get(field);
	return { [field]: rows, ...(labels && tokens && { [tokens]: labels }), ...(labels && !hasLabels && { layout: "dl" }) };
}
