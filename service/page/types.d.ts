// Types of the page's modules, for the type checker only: browsers never load this file.

import type { Tensor as TensorClass } from "./tensors.js";
import type { Result as ResultClass, View as ViewClass } from "./result.js";

declare global {
  type Tensor = TensorClass;
  type Result = ResultClass;
  type View = ViewClass;
  type Numbers = Float64Array | Float32Array | Int32Array | Uint8Array;
  /** The fields of a request, a response or a report. Arrays are lists or tensors. */
  type Fields = Record<string, any>;
  /** The values of the controls by field, "" where the field is absent. */
  type Options = Record<string, string>;
  /** Tensors by name, and the JSON text beside them. */
  type Named = { tensors: Record<string, Tensor>; text: string };
  /** Red, green and blue from 0 to 255. */
  type Colour = number[];
  /** The numbers at both ends of a colour map. */
  type Limits = { low: number; high: number; diverging: boolean };
  type Axis = "query" | "key" | "feature";
  /** Rows and columns of numbers, one after the other for each batch entry and head. */
  type Blocks = { b: number; h: number; rows: number; cols: number; values: Numbers };
  /** The numbers of one picture, whose colours reach at least to `least`. */
  type Grid = { name: string; values: Numbers; rows: number; cols: number; rowAxis: Axis; colAxis: Axis; least?: number };
  /** What the user looks at. */
  type Choice = { batch: number; head: number; query: number; key: number; feature: number; stage: string };
  type State = { examples: Fields; request: Fields; choice: Choice; result?: Result; comparison?: Fields };
  type Choose = (change: Partial<Choice>) => void;
  type Token = { axis: "query" | "key"; index: number };
  type Line = { query: number; key: number; weight: number; head: number };
  /** One thing that is wrong with a request. */
  type Fault = { pointer: string; text: string };
  type Make = <Tag extends keyof HTMLElementTagNameMap>(tag: Tag, attributes?: Fields, ...children: (Node | string)[]) => HTMLElementTagNameMap[Tag];
  type Decorate = (made: any, attributes: Fields | undefined, children: (Node | string)[]) => any;
  type MakeSvg = (tag: string, attributes?: Fields, ...children: (Node | string)[]) => SVGElement;
  type Times = <Item>(count: number, action: (index: number) => Item) => Item[];
  // The functions of the modules, by name: what they do, and their types. Functions with a comment in their module are not here.

  // app.js
  type compute = (signal: AbortSignal) => Promise<void>;
  /** Shows a request with its own options, some changed. */
  type load = (request: Fields, changed?: Options) => void;

  // colours.js
  /** Limits from 0 for weights, symmetric about 0 for all else. */
  type limitsOf = (grid: Grid) => Limits;
  type colourOf = (value: number, limits: Limits) => number[];
  /** Black or white, whichever reads better. */
  type inkOn = ([red, green, blue]: Colour) => "#111" | "#fff";

  // compare.js
  /** Shows a report, and a map of the difference. */
  type paintComparison = (comparison: Fields, view?: View) => void;
  type section = (title: string | undefined, items: any[], write: (item: any) => string) => HTMLElement[];
  /** A map of actual − right in units of `limit`, what rounding alone explains; up to ten of it are pale. */
  type drawDifference = (actual: any, limit: number, view: View) => HTMLElement[];

  // controls.js
  /** The values of a form, without disabled controls. */
  type readForm = (id: "options" | "source") => Options;
  type writeForm = (id: "options" | "source", values: Options) => void;
  /** Shows the options of a request. Lists cannot be changed. */
  type showOptions = (request: Fields, changed: Options) => void;
  /** Shows faults at their controls, all others after `near`, by default above the pictures. */
  type showFaults = (faults?: Fault[], title?: string, near?: Element) => void;
  /** Puts the source, changed options, and the choice into the address. */
  type writeAddress = (request: Fields, choice: Fields) => void;

  // dom.js
  type find = <Id extends keyof PageElements>(id: Id) => PageElements[Id];
  /** A text with values for the names between braces. */
  type fillIn = (text: string | undefined, values: Fields) => string;
  type tableRow = (label: string, values: (number | string)[], attributes: Fields, digits?: number) => HTMLTableRowElement;

  // files.js
  type decode = (bytes: Uint8Array | ArrayBuffer) => string;
  /** The tensors of a safetensors file, and the JSON text of its `field`. */
  type readSafetensors = (buffer: ArrayBuffer, field?: string) => Named;
  /** The arrays of an .npz file, and its JSON text. */
  type readNpz = (buffer: ArrayBuffer) => Promise<Named>;

  // heads.js
  /** Shows the lines of one token, or of all. */
  type Point = (token?: Token) => void;
  /** The visible weights of a head. */
  type linesOf = (view: View) => Line[];
  type tokensOf = (view: View, axis: "query" | "key", count: number, point: Point) => { own: Token; text: SVGElement }[];
  /** Writes a token, with its weight for another one. */
  type writeToken = (view: View, text: SVGElement, own: Token, other?: Token) => void;

  // heatmap.js
  /** For each cell the bits of what hides it, 0 in stages before the masks. */
  type hiddenIn = (view: View, grid: Grid) => Numbers;
  /** The cells as a canvas with one pixel each. */
  type pixelsOf = (view: View, grid: Grid) => HTMLCanvasElement;
  /** The choice after a click on cells. */
  type choiceAt = (grid: Grid, event: MouseEvent) => Partial<Choice>;
  /** A grid with axes, labels, numbers, stripes, and a frame around the chosen cell. */
  type drawGrid = (view: View, grid: Grid, most: number) => SVGElement;
  type roomFor = (view: View, axis: Axis, count: number) => number;
  type drawLabels = (view: View, axis: Axis, count: number, size: number, placeAt: (at: number) => Fields) => SVGElement[];
  /** Stripes on hidden cells: one path for each cause. */
  type drawStripes = (view: View, grid: Grid, size: number) => SVGElement[];
  type drawNumbers = (view: View, grid: Grid, size: number) => SVGElement[];

  // long.js
  /** Shows a stage of one head, drawn by the service. */
  type showLong = (request: Fields, batch: number, signal: AbortSignal) => Promise<void>;
  /** Shows the largest weights of the rows around a query. */
  type showRows = (request: Fields, batch: number, query: number) => Promise<void>;

  // request.js
  /** The values of the controls for a request. */
  type optionsOf = (request: Fields) => Options;
  /** A request with the values of the controls. */
  type withOptions = (request: Fields, options: Options) => Fields;
  /** A request with its matrices turned to this layout. */
  type withLayout = (request: Fields, layout: string) => any;
  /** The axes of the sources as letters. */
  type layoutOf = (request: Fields) => string;
  /** A request from tensors with dotted names. */
  type joinTensors = (named: Named) => Fields;
  /** The request in a JSON text. An array is its input. */
  type requestOfText = (text: string) => Fields;
  /** The request in files. An .npy file is named for its field, or is the input. */
  type readFiles = (files: Iterable<File>) => Promise<Fields>;

  // result.js
  /** Numbers with their axes in another order. */
  type permuted = (values: Numbers, shape: number[], axes: string, order: string) => Numbers;

  // row.js
  /** A calculation with numbers, of which the last is its result. */
  type formula = (text: string, ...numbers: number[]) => string;
  /** Products added up, and a bias. */
  type products = (ones: number[], others: number[], sum: number, bias?: number[]) => string;
  type joined = (texts: string[], sign?: string, most?: number) => string;

  // sentence.js
  /** Self-attention over words, with normal random numbers of two decimals. */
  type sentenceRequest = (text: string, dim: number, seed: string) => { input: number[][]; query_tokens: string[]; };

  // service.js
  /** The response to a request. Errors have `status` and `faults`. */
  type post = (path: string, request: Fields, accept: string, signal?: AbortSignal) => Promise<Response>;

  /** The tensors that the service computes, and the JSON text beside them. */
  type postForTensors = (request: Fields, signal?: AbortSignal) => Promise<Named>;

  // share.js
  /** A program, from a template of the page. */
  type asProgram = (language: "curl" | "python", address: string, request: Fields) => string;
  type download = (name: string, href: string) => void;

  // tensors.js
  /** The shape of an array, by its first elements. */
  type shapeOf = (data: unknown) => number[];

  /** The elements of index.html by id. */
  interface PageElements {
    "actual-file": HTMLInputElement; "all-heads": HTMLInputElement; "batch-label": HTMLElement; "copied-text": HTMLTextAreaElement;
    "copy-curl": HTMLElement; "copy-python": HTMLElement; "part-title": HTMLElement;
    "key-field": HTMLElement; "large-title": HTMLElement; "long-bins": HTMLSelectElement; "long-head": HTMLInputElement;
    "long-image": HTMLImageElement; "long-options": HTMLElement; "long-row": HTMLInputElement; "long-rows": HTMLElement;
    "long-stage": HTMLSelectElement; "long-zoom": HTMLElement; "row-title": HTMLElement; "save-html": HTMLElement;
    "save-json": HTMLElement; "save-png": HTMLButtonElement; "save-svg": HTMLButtonElement;
    actual: HTMLTextAreaElement; batch: HTMLInputElement; compare: HTMLElement; copied: HTMLDialogElement; curl: HTMLTemplateElement; data: HTMLFieldSetElement;
    example: HTMLElement; file: HTMLInputElement;
    heads: HTMLElement; key: HTMLInputElement; large: HTMLElement; legend: HTMLElement; lines: SVGSVGElement; long: HTMLElement;
    normalization: HTMLElement; numbers: HTMLDetailsElement; options: HTMLFormElement; pasted: HTMLTextAreaElement; pictures: HTMLElement; pipeline: HTMLElement; problem: HTMLElement;
    python: HTMLTemplateElement; range: HTMLElement; readout: HTMLElement; reasons: HTMLTemplateElement; report: HTMLElement; row: HTMLElement; sentence: HTMLFieldSetElement; source: HTMLFormElement;
    short: HTMLElement; status: HTMLElement; steps: HTMLElement; table: HTMLElement; theme: HTMLElement;
  }
}
