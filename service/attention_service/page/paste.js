// Requests in the forms that people have at hand: tables of numbers, lists and arrays of Python and NumPy, assignments.

const NUMBER = String.raw`[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?`;
const CELL = new RegExp(`^(?:${NUMBER}|-inf(?:inity)?)$`, "i");
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
/** @type {Fields} */
const CONSTANTS = { __proto__: null, true: true, false: false, none: undefined, null: undefined, "-inf": -Infinity, "-infinity": -Infinity };
/** @type {Fields} */
const SHORT = { __proto__: null, q: "query", queries: "query", k: "key", keys: "key", v: "value", values: "value", x: "input", inputs: "input" };
/** Linear maps: x @ W_q of rows, omega_q @ x + beta_q of columns. */
export const MAP = /^(w|omega|beta|b)_?([qkvoc]|query|key|value|output)$/i;
export const SOURCES = ["query", "key", "value", "input", "context"];
/** @type {Fields} */
const PARTS = { w: "kernel", omega: "weight", o: "output", c: "output" };
/** Where a row starts, a block, and a matrix that no comma joins to another. */
const [ROW, NEXT_BLOCK, NEXT_LIST] = [/^[ \t,;]*[^\s,;#]/gm, /(?<=^[ \t\r,;]*\n)/m, /(?<=\]\](?:.*[^,\s])?[ \t\r]*\n)(?=\s*^(?:[\w.]+\()?\[\[)/m];
/** A name on a line of its own, with more words only before a colon: `Query matrix:`. */
const HEADING = /^[ \t#]*(?:the[ \t]+)?(quer(?:y|ies)|keys?|values?|inputs?|context|mask|bias|[qkvx]|(?:w|omega|beta|b)_?(?:[qkvoc]|query|key|value|output))(?:[ \t\r:=,;]*|[ \t(][^\n\d:]*:[ \t\r]*)$/im;
/** Brackets within each other. */
const DEEPEST = 32;

/** @type {fieldOf} */
export const fieldOf = (name) => SHORT[name.toLowerCase()] ?? name;

/** @type {withFields} */
export const withFields = (request) => {
	/** @type {Fields} */
	const fields = Object.create(null); // without __proto__
	for (const [name, value] of Object.entries(request)) {
		const [, kind, letter = ""] = MAP.exec(name.toLowerCase()) ?? [];
		const [field, role, part] = [fieldOf(name), PARTS[letter] ?? fieldOf(letter), PARTS[kind] ?? "bias"];
		if (!kind || request.projection || fields.projection?.[role]?.[part]) fields[Object.hasOwn(request, field) ? name : field] = value;
		else ((fields.projection ??= {})[role] ??= {})[part] = value;
		if (kind === "omega") fields.layout ??= "dl";
	}
	return fields;
};

/** @type {fail} */
function fail(text, at, expected, got = /^(?:[\w.+-]+|[^])/u.exec(text.slice(at, at + 20))?.[0] ?? "the end") {
	if (/^[\r\n]/.test(got)) got = "the end of the line";
	if (/^[\s\p{C}]/u.test(got)) got = `U+${got.codePointAt(0)?.toString(16).toUpperCase().padStart(4, "0")}`;
	const line = text.slice(0, at).split("\n");
	throw new Error(`line ${line.length}, column ${(line.at(-1) ?? "").length + 1}: expected ${expected}, got ${got}`);
}

/** @type {truths} */
const truths = (data) => (Array.isArray(data) ? data.map(truths) : data === 0 || data === 1 ? data === 1 : data);

/** @type {readPasted} */
export const readPasted = (text, field) => {
	/** @type {Fields} */
	const request = Object.create(null);
	let isTurned;
	for (const [name, part] of blocksOf(text, field)) {
		const value = isList(part) ? readLists(part) : readTable(part, name);
		const fields = Array.isArray(value) ? { [name]: value } : value;
		const isOther = !MAP.test(name) && (isTurned ??= !!fields.layout) !== !!fields.layout;
		if (isOther || request[name]) fail(part, part.search(/\S/), isOther ? "words above all blocks or none" : "each name once", name);
		Object.assign(request, fields);
	}
	return request.mask ? { ...request, mask: truths(request.mask) } : request;
};

/** @type {isList} */
const isList = (text) => {
	SKIPPED.lastIndex = 0;
	SKIPPED.test(text);
	LISTS.lastIndex = SKIPPED.lastIndex;
	return LISTS.test(text);
};

/** @type {blocksOf} */
const blocksOf = (text, field) => {
	const isLists = isList(text) && text.split(HEADING)[0].trim();
	const [before, ...named] = isLists ? [text] : text.split(HEADING);
	let lines = "";
	/** @type {placed} */
	const placed = (part) => [lines + part, (lines += part.replace(/.+/g, ""))][0];
	const parts = before.split(isLists ? NEXT_LIST : NEXT_BLOCK).map(placed).filter((part) => part.match(ROW));
	const rows = before.match(ROW)?.length ?? 0;
	const isOne = field !== "input" || parts.length < 2 || (parts.length === rows && !isLists); // double-spaced
	if (!isOne && parts.length !== 3) fail(parts[1], parts[1].search(/\S/), "one block (input), three (query, key, value), or names like q: above them", `${parts.length} blocks`);
	const unnamed = isOne ? [before].filter(() => rows || !named.length) : parts;
	return [...unnamed.map((part, n) => [isOne ? field : SOURCES[n], part]), ...named.flatMap((name, n) => (n % 2 ? [] : [[fieldOf(name.toLowerCase()), placed(named[n + 1])]]))];
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

	/** @type {readValue} */
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

	/** @type {readValue} */
	const readWord = (expected, depth) => {
		const [word, start] = [token.replace(MODULE, "$1").toLowerCase(), at];
		advance();
		if (word in CONSTANTS) return CONSTANTS[word];
		if (!ARRAYS.test(word) || !take("(")) fail(text, start, /^[-+]?(?:nan|inf)/.test(word) ? "a finite number or -inf" : expected);
		const inner = [at, readValue("a number or [", depth + 1)];
		for (let open = 1; open; advance()) {
			if (!kind) fail(text, at, ")");
			open += Number("([{".includes(kind)) - Number(")]}".includes(kind));
		}
		return typeof inner[1] === "string" ? CONSTANTS[inner[1]] ?? fail(text, inner[0], "a finite number or -inf") : inner[1];
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
	const decimal = lines.flatMap(({ cells }) => cells).find((cell) => /^[-+]?\d+,\d+$/.test(cell.text));
	if (decimal) fail(text, decimal.at, "a decimal point", decimal.text);
	/** @param {{ text: string }} cell */
	const isWord = ({ text }) => !CELL.test(text);
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
			return /^-i/i.test(cell.text) ? -Infinity : Number(cell.text);
		});
	});
	const labels = hasLabels ? body.map(({ cells }) => cells[0].text) : hasHeader && first.cells.map(({ text }) => text);
	if (labels && labels.length !== (hasLabels ? rows.length : width)) fail(text, first.cells[0].at, `a word for each of ${width} columns`);
	const tokens = /^(query|key|input)$/.test(field) && `${field.replace("input", "query")}_tokens`;
	return { [field]: rows, ...(labels && tokens && { [tokens]: labels }), ...(labels && !hasLabels && !MAP.test(field) && { layout: "dl" }) };
}
