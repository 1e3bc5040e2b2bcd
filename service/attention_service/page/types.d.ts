// Types of the page's modules, for the type checker only: browsers never load this file.

import type { Tensor as TensorClass } from "./tensors.js";
import type { Result as ResultClass, View as ViewClass } from "./result.js";

declare global {
  type Tensor = TensorClass;
  type Result = ResultClass;
  type View = ViewClass;
  type Numbers = Int8Array | Int16Array | Int32Array | Uint8Array | Uint16Array | Uint32Array | Float32Array | Float64Array;
  /** The fields of a request, a response or a report. Arrays are lists or tensors. */
  type Fields = Record<string, any>;
  /** The values of the controls by field, "" where the field is absent. */
  type Options = Record<string, string>;
  /** Tensors by name, and the JSON text beside them. */
  type Named = { tensors: Record<string, Tensor>; text: string };
  /** Red, green and blue from 0 to 255. */
  type Colour = number[];
  /** The numbers at both ends of a colour map. */
  type Limits = { low: number; high: number; diverging?: boolean; log?: boolean };
  type Axis = "query" | "key" | "feature";
  /** Rows and columns of numbers, one after the other for each batch entry and head. */
  type Blocks = { b: number; h: number; rows: number; cols: number; values: Numbers };
  /** The numbers of one picture, whose colours reach at least to `least`. */
  type Grid = { name: string; values: Numbers; rows: number; cols: number; rowAxis: Axis; colAxis: Axis; least?: number };
  /** What the user looks at. */
  type Choice = { [axis: string]: any; layer: number; batch: number; head: number; query: number; key: number; feature: number; stage: string; colours: string; first: string };
  /** `former` is the result before an option changed, until another one changes. */
  type State = { examples: Fields; request: Fields; choice: Choice; result?: Result; comparison?: Fields; layers?: Result[]; zoom?: Zoom; former?: { option: EventTarget | null; result?: Result } };
  /** The first query and key of a window of a long sequence, and those after the last. */
  type Zoom = Record<string, readonly [number, number] | number[]>;
  type Choose = (change: Partial<Choice>) => void;
  type Token = { axis: "query" | "key"; index: number };
  type Line = { query: number; key: number; weight: number; head: number };
  /** One thing that is wrong with a request. */
  type Fault = { pointer: string; text: string };
  type Make = <Tag extends keyof HTMLElementTagNameMap>(tag: Tag, attributes?: Fields, ...children: (Node | string)[]) => HTMLElementTagNameMap[Tag];
  type Decorate = (made: any, attributes?: Fields, children?: (Node | string)[]) => any;
  type MakeSvg = (tag: string, attributes?: Fields, ...children: (Node | string)[]) => SVGElement;
  type Times = <Item>(count: number, action: (index: number) => Item) => Item[];
  // The functions of the modules, by name: what they do, and their types. Functions with a comment in their module are not here.

  // app.js
  /** Shows whether the numbers are those of an older request. */
  type showStale = (isStale: boolean) => void;
  /** Takes files that are dropped: on the comparison as its output, elsewhere as the request. */
  type dropFiles = (event: DragEvent) => void;
  /** Moves the chosen cell by an arrow key. */
  type moveChoice = (event: any) => void;
  /** Shows that a request is being computed: pales the pictures after a moment, and says so after another one. */
  type showBusy = (isBusy: boolean) => void;
  /** What is shown for an address. */
  type choiceOf = (address: Options) => Choice;
  /** Shows how a choice colours pictures. */
  type showColours = (choice: Fields) => void;
  /** Shows a window of a long sequence, or all of it. */
  type zoom = (window?: Zoom) => void;
  /** Nested lists with these axes and lengths: 1 where each axis has this index, 0 elsewhere. */
  type oneHot = (axes: string[], shape: number[], at: Record<string, number>, number?: number) => any;
  type compute = (signal: AbortSignal) => Promise<void>;
  /** Shows a request with its own options, some changed: by default those that the user has changed before. */
  type load = (request: Fields, changed?: Options) => void;
  /** Shows the user's own request: from the text, else from the files, else from what was shown before. */
  type loadOwn = (shown?: Fields) => Promise<void>;

  // compare.js
  /** Shows a report, and a map of the difference. */
  type paintComparison = (comparison: Fields, view?: View) => void;
  type section = (title: string | undefined, items: any[], write: (item: any) => string) => HTMLElement[];
  /** A map of actual − right in units of `limit`, what rounding alone explains; up to ten of it are pale. */
  type drawDifference = (actual: any, limit: number, view: View) => HTMLElement[];

  // controls.js
  /** Shows a fault at the control of its field; false if there is none. */
  type showAtControl = (fault: Fault) => boolean;
  /** The values of a form, without disabled controls. */
  type readForm = (id: "options" | "source") => Options;
  type controlsOf = (id: "options" | "source") => Iterable<HTMLInputElement>;
  type writeForm = (id: "options" | "source", values: Options) => void;
  /** Shows the options of a request, some changed: by default those that the user has changed, and the request has not. Lists cannot be changed. */
  type showOptions = (request: Fields, changed?: Options) => void;
  /** Shows faults at their controls, all others after `near`, by default above the pictures. */
  type showFaults = (faults?: Fault[], title?: string, near?: Element) => void;
  /** The options whose controls the user has changed: all others are sent as the request has them. */
  type changedOptions = () => Options;
  /** Writes how many keys count beside their slider. */
  type showPadding = () => void;
  /** Puts the source, changed options, and what of the choice differs from the first one into the address. */
  /** Keeps in the address what is not as at first. fields: what else stands there, by default of the forms. */
  type writeAddress = (choice: Fields, first?: Fields, fields?: Options) => void;

  // dom.js
  /** A number as text, with a minus in place of hyphens. */
  type signed = (value: number | string) => string;
  /** A number with some decimals, or an exponent. */
  type show = (value: number, digits?: number) => string;
  /** Puts a child in the place of all, unless it is there. */
  type keep = (parent: Element | null, child: Element) => void;
  type find = <Id extends keyof PageElements>(id: Id) => PageElements[Id];
  /** An integer from 0 to `max`. */
  type clamp = (value: number, max: number) => number;
  /** The integer in a control, from 0 to `max`, which the control then shows. */
  type bounded = (control: HTMLInputElement, max: number) => number;
  /** The places of a list that are shown with one of them: all, or 128 that change only after several steps. */
  type around = (index: number, count: number) => number[];
  /** A text with values for the names between braces. */
  type fillIn = (text: string | undefined, values: Fields) => string;
  type tableRow = (label: string, values: (number | string)[], attributes: Fields, digits?: number) => HTMLTableRowElement;

  // files.js
  /** The entries of a zip file, by its directory. */
  type zipEntries = (buffer: ArrayBuffer) => { name: string; method: number; packed: Uint8Array<ArrayBuffer> }[];
  /** The array of an .npy file. */
  type readNpy = (bytes: Uint8Array) => Tensor;
  type decode = (bytes: Uint8Array | ArrayBuffer) => string;
  /** The tensors of a safetensors file, and the JSON text of its `field`. */
  type readSafetensors = (buffer: ArrayBuffer, field?: string) => Named;
  /** The arrays of an .npz file, and its JSON text. */
  type readNpz = (buffer: ArrayBuffer) => Promise<Named>;

  // heads.js
  /** Paints tokens and lines. A token that is pointed at shows its own lines only. */
  type paintLines = (view: View) => void;
  /** Shows the lines of one token, or of all. */
  type Point = (token?: Token) => void;
  type Shown = { query: number[]; key: number[] };
  type drawLine = (line: Line, shown: Shown) => SVGElement;
  type drawLines = (view: View, all: boolean, shown: Shown) => { svg: SVGElement; tokens: { own: Token; text: SVGElement }[] };
  /** The visible weights of a head. */
  type linesOf = (view: View, shown: Shown) => Line[];
  type tokensOf = (view: View, axis: "query" | "key", shown: number[], point: Point) => { own: Token; text: SVGElement }[];
  /** Writes a token, with its weight for another one. */
  type writeToken = (view: View, text: SVGElement, own: Token, other?: Token) => void;

  // heatmap.js
  /** 256 colours between the anchors of a style, linear in sRGB. */
  type interpolate = (name: string) => Colour[];
  /** Limits from 0 for weights, symmetric about 0 for all else: of all heads, unless the choice says otherwise. */
  type limitsOf = (view: View, grid: Grid) => Limits;
  type isLeftOut = (view: View, name: string) => boolean;
  type colourOf = (value: number, limits: Limits) => number[];
  /** Black or white, whichever reads better. */
  type inkOn = ([red, green, blue]: Colour) => "#111" | "#fff";
  /** True for cells that are drawn as a faint grey: hidden ones, and the first key if it is left out. */
  type faintIn = (view: View, grid: Grid) => (at: number) => boolean;
  /** For each cell the bits of what hides it, 0 in stages before the masks. */
  type hiddenIn = (view: View, grid: Grid) => Numbers;
  /** The cells as a canvas with one pixel each: one for each place. */
  type pixelsOf = (view: View, grid: Grid, place: string) => HTMLCanvasElement;
  /** Moves the frame to the chosen cell, and marks its labels. */
  type markChosen = (view: View, grid: Grid, svg: SVGElement) => void;
  /** The choice after a click on cells. */
  type choiceAt = (grid: Grid, event: MouseEvent) => Partial<Choice>;
  /** A grid with axes, labels, numbers, stripes, and a frame around the chosen cell. */
  type drawGrid = (view: View, grid: Grid, most: number) => SVGElement;
  type roomFor = (view: View, axis: Axis, count: number) => number;
  type drawLabels = (view: View, axis: Axis, count: number, size: number, placeAt: (at: number) => Fields) => SVGElement[];
  /** Stripes on hidden cells: one path for each cause, and below all cells, from `x`, what they mean. */
  type drawStripes = (view: View, grid: Grid, size: number, x: number) => SVGElement[];
  /** The colours, with the numbers at their ends. */
  type drawScale = (view: View, grid: Grid, x: number, y: number) => SVGElement[];
  type drawNumbers = (view: View, grid: Grid, size: number) => SVGElement[];

  // layers.js
  /** Shows which layer and head are chosen, and the weights of all. */
  type paintLayers = (view: View, results?: Result[]) => void;
  /** Makes the table of all heads and the tabs, in which arrow keys move. */
  type build = (results: Result[]) => void;

  // long.js
  /** Shows a stage of one head, drawn by the service. */
  type showLong = (request: Fields, batch: number, signal: AbortSignal) => Promise<void>;
  /** Zooms into what is clicked, dragged or typed: windows of at most so many queries. */
  type watchWindow = (request: Fields, most: number, zoom: zoom) => void;

  // paste.js
  /** The field that a name stands for: `query` for `q`. */
  type fieldOf = (name: string) => string;
  /** A request with the names of its fields in full. */
  type withFields = (request: Fields) => Fields;
  /** Says what was expected at a place of a text, and what is there. */
  type fail = (text: string, at: number, expected: string, got?: string) => never;
  /** A mask of 0 and 1 as one of false and true. */
  type truths = (data: any) => any;
  /** The request in a text that is no JSON. A table or a list is its `field`. */
  type readPasted = (text: string, field: string) => Fields;
  /** True for lists, objects, arrays and assignments. */
  type isList = (text: string) => boolean;
  /** The fields of a text and their parts of it: below a name, of a table also those between empty lines. */
  type blocksOf = (text: string, field: string) => string[][];
  /** Lists, objects, arrays and assignments; rows without a name are one list. */
  type readLists = (text: string) => any;
  /** A value, and of a word: a constant, or an array with what else Python prints of it. */
  type readValue = (expected: string, depth: number) => any;
  /** A part of a text below as many empty lines as stand before it, so that errors name its lines. */
  type placed = (part: string) => string;
  /** A text without its quotation marks. */
  type unquoted = (quoted: string) => string;
  /** Rows of numbers. A first column of words, else a first row of words, are tokens. */
  type readTable = (text: string, field: string) => Fields;

  // request.js
  /** Uniform random numbers in [0, 1) for a text: a linear congruential generator that takes in its letters. */
  type randomOf = (text: string) => () => number;
  /** Self-attention over words, with normal random numbers of two decimals. */
  type sentenceRequest = (text: string, dim: number, seed: string) => { input: number[][]; query_tokens: string[]; };
  /** The values of the controls for a request. */
  type optionsOf = (request: Fields) => Options;
  /** A request with other values of options, "" for none. All else stays as it is. */
  type withOptions = (request: Fields, changed: Options) => Fields;
  /** A request with its matrices turned to this layout. */
  type withLayout = (request: Fields, layout: string) => any;
  /** The axes of the sources as letters. */
  type layoutOf = (request: Fields) => string;
  /** True for arrays with the axes q and k. */
  type isMatrix = (name: string) => boolean;
  /** Entries of an array along an axis. */
  type sliced = (data: any, axis: number, first: number, last: number) => any;
  /** The request for all numbers of some queries: of these alone, if the request allows it. */
  type forWindow = (request: Fields, queries: readonly number[]) => Fields;
  /** An object or a list, if it may have a field of this name: one of its own, or a new one. */
  type ownField = (part: any, name: string) => any;
  /** A request from tensors with dotted names. */
  type joinTensors = (named: Named) => Fields;
  /** The request in a text. An array is its `field`, by default its input. */
  type requestOfText = (text: string, field?: string) => Fields;
  /** The request in files. */
  type readFiles = (files: Iterable<File>) => Promise<Fields>;
  /** The request in a file. An array is the field for which the file is named, or the input. */
  type readFile = (file: File) => Promise<Fields>;

  // result.js
  /** Numbers with their axes in another order. */
  type permuted = (values: Numbers, shape: number[], axes: string, order: string) => Numbers;

  // row.js
  /** What a feature of a query, key, value or output is, and how it follows. */
  type featureStep = (view: View) => string[];
  /** One of the numbers of an array, or the only one. */
  type entry = (data: any, at: number) => number;
  /** Why the chosen key is hidden, "" if it is visible. */
  type whyHidden = (view: View) => string;
  /** The steps to the gradient of the chosen masked score: its weight × (grad_output · value − grad_output · output). */
  type gradientSteps = (view: View, row: ReturnType<partsOf>) => string[][];
  /** The steps to the weight of the chosen cell. */
  type weightSteps = (view: View, row: ReturnType<partsOf>) => string[][];
  /** The parts of the chosen row, and their sum. */
  type partsOf = (view: View) => { normalization: string; max: number; parts: number[]; sum: number };
  /** Shows the whole row of the chosen query. */
  type paintTable = (view: View, row: ReturnType<partsOf>) => void;
  type rowsOf = (view: View, row: ReturnType<partsOf>, keys: number[]) => HTMLTableRowElement[];
  /** A number with six digits. */
  type rounded = (value: number) => number;
  /** A calculation with numbers, of which the last is its result. */
  type formula = (text: string, ...numbers: number[]) => string;
  /** Products of the factors in several lists, added up, and a bias. */
  type products = (factors: number[][], sum: number, bias?: number[]) => string;
  type joined = (texts: string[], sign?: string, most?: number) => string;

  // service.js
  /** The response to a request. Errors have `status` and `faults`. */
  type post = (path: string, request: Fields, accept: string, signal?: AbortSignal) => Promise<Response>;

  /** The tensors that the service computes, and the JSON text beside them. */
  type postForTensors = (request: Fields, signal?: AbortSignal) => Promise<Named>;

  // share.js
  /** The page as one file that works without a server. */
  type asHtml = (saved: Fields) => Promise<string>;
  /** Shows a text and copies it; then says if the browser allowed it, which it does not without https, and a note. */
  type copy = (text: string, note?: string) => Promise<void>;
  /** A program, from a template of the page. */
  type asProgram = (language: "curl" | "python", address: string, request: Fields) => string;
  /** The address of a picture as SVG with its title and size: styles are attributes of its parts, in the light theme. */
  type asPicture = (what: string) => string;
  /** Saves the chosen picture as SVG, or as PNG with 300 pixels an inch. */
  type savePicture = (event: Event) => Promise<void>;
  type download = (name: string, href: string) => void;
  /** JSON text with one row of a matrix in a line, indented. */
  type asRows = (value: any) => string;
  /** A request as text to edit, "" if it is too long. */
  type editable = (request: Fields) => string;
  /** A text as it stands in an address: deflated, in base64url; "" if it is too long. */
  type pack = (text: string) => Promise<string>;
  /** The inverse of `pack`. */
  type unpack = (packed: string) => Promise<string>;

  // tensors.js
  /** A list of rows as a list of columns; any other array as it is. */
  type transposed = (data: any) => any;
  /** A list as a tensor; a tensor as it is. */
  type asTensor = (data: any) => Tensor;
  /** The numbers of a tensor in row-major order. */
  type numbers = (tensor: Tensor) => Numbers;
  /** JSON text with tensors as typed arrays. */
  type toText = (value: unknown, indent?: number) => string;
  /** The inverse of `toText`. */
  type fromText = (text: string) => any;
  type toBase64 = (bytes: Uint8Array) => string;
  type fromBase64 = (text: string) => Uint8Array<ArrayBuffer>;
  /** The shape of an array, by its first elements. */
  type shapeOf = (data: unknown) => number[];

  /** The elements of index.html by id. */
  interface PageElements {
    "actual-file": HTMLInputElement; "all-heads": HTMLInputElement; "batch-label": HTMLElement; "copied-text": HTMLTextAreaElement; "copied-note": HTMLElement;
    "copy-curl": HTMLElement; "copy-link": HTMLElement; "copy-python": HTMLElement; "part-title": HTMLElement;
    joined: HTMLElement; "other-layout": HTMLOptionElement; "key-field": HTMLElement; "large-title": HTMLElement; "link-note": HTMLElement; "long-bins": HTMLSelectElement; "long-head": HTMLInputElement;
    "long-image": HTMLImageElement; "long-options": HTMLElement; "long-query": HTMLInputElement; "long-key": HTMLInputElement; "long-window": HTMLElement;
    brush: HTMLElement; "long-overview": HTMLElement; "zoom-out": HTMLElement;
    "long-stage": HTMLSelectElement; "row-title": HTMLElement; "save-html": HTMLElement;
    "save-json": HTMLElement; "save-png": HTMLElement; "save-svg": HTMLElement;
    "save-size": HTMLSelectElement; "save-title": HTMLInputElement; "save-what": HTMLSelectElement; "lines-title": HTMLElement;
    actual: HTMLTextAreaElement; ask: HTMLElement; batch: HTMLInputElement; compare: HTMLElement; copied: HTMLDialogElement; curl: HTMLTemplateElement; data: HTMLFieldSetElement;
    example: HTMLSelectElement; lesson: HTMLElement; lessons: HTMLElement; more: HTMLDetailsElement; notebooks: HTMLElement; padding: HTMLElement; file: HTMLInputElement;
    heads: HTMLElement; key: HTMLInputElement; large: HTMLElement; lines: HTMLElement; long: HTMLElement;
    colours: HTMLSelectElement; first: HTMLInputElement; change: HTMLInputElement; "change-label": HTMLElement; hint: HTMLElement; pictures: HTMLElement;
    model: HTMLElement; normalization: HTMLElement; notice: HTMLElement; numbers: HTMLDetailsElement; options: HTMLFormElement; overview: HTMLElement; packed: HTMLInputElement; pasted: HTMLTextAreaElement; pipeline: HTMLElement; problem: HTMLElement;
    python: HTMLTemplateElement; readout: HTMLElement; reasons: HTMLTemplateElement; report: HTMLElement; row: HTMLTableSectionElement; sentence: HTMLFieldSetElement; source: HTMLFormElement;
    short: HTMLElement; status: HTMLElement; steps: HTMLElement; table: HTMLElement; tabs: HTMLElement; theme: HTMLElement;
  }
}
