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
  /** The numbers of one picture. */
  type Grid = { name: string; values: Numbers; rows: number; cols: number; rowAxis: Axis; colAxis: Axis };
  /** What the user looks at. */
  type Choice = { batch: number; head: number; query: number; key: number; stage: string };
  type Choose = (change: Partial<Choice>) => void;
  type Token = { axis: "query" | "key"; index: number };
  type Line = { query: number; key: number; weight: number; head: number };
  /** One thing that is wrong with a request. */
  type Fault = { pointer: string; text: string };
  type Make = <Tag extends keyof HTMLElementTagNameMap>(tag: Tag, attributes?: Fields, ...children: (Node | string)[]) => HTMLElementTagNameMap[Tag];
  type MakeSvg = (tag: string, attributes?: Fields, ...children: (Node | string)[]) => SVGElement;
  type Times = <Item>(count: number, action: (index: number) => Item) => Item[];
  // The functions of the modules, by name.

  // app.js
  type compute = (signal: AbortSignal) => Promise<void>;
  type fetchStages = (request: Fields, signal: AbortSignal) => Promise<Result>;
  type load = (request: Fields, changed?: Options) => void;

  // colours.js
  type parseColour = (text: string) => Colour;
  type mix = (one: Colour, other: Colour, share: number) => number[];
  type limitsOf = (grid: Grid) => Limits;
  type colourOf = (value: number, limits: Limits) => number[];
  type inkOn = ([red, green, blue]: Colour) => "#111" | "#fff";

  // compare.js
  type paintComparison = (comparison: Fields, view?: View) => void;
  type section = (title: string, items: any[], write: (item: any) => string) => (HTMLHeadingElement | HTMLUListElement)[];
  type paintDifference = (actual: any, limit: number, view: View) => void;

  // controls.js
  type readForm = (id: "options" | "source") => Options;
  type writeForm = (id: "options" | "source", values: Options) => void;
  type showOptions = (request: Fields, changed: Options) => void;
  type showFaults = (faults?: Fault[], title?: string) => void;
  type writeAddress = (request: Fields, choice: Fields) => void;

  // dom.js
  type find = <Id extends keyof PageElements>(id: Id) => PageElements[Id];
  type fillIn = (text: string, values: Fields) => string;
  type tableRow = (label: string, values: (number | string)[], attributes: Fields, digits?: number) => HTMLTableRowElement;

  // files.js
  type decode = (bytes: Uint8Array | ArrayBuffer) => string;
  type readSafetensors = (buffer: ArrayBuffer, field?: string) => Named;
  type readNpz = (buffer: ArrayBuffer) => Promise<Named>;

  // heads.js
  type tokenOf = (target?: EventTarget | null) => Token | undefined;
  type chooseToken = (view: View, target: EventTarget | null, step: number) => void;
  type linesOf = (view: View) => Line[];
  type drawTokens = (view: View, axis: "query" | "key", count: number) => SVGElement[];
  type writeToken = (view: View, text: SVGElement, other?: Token) => void;

  // heatmap.js
  type hiddenIn = (view: View, grid: Grid) => Numbers;
  type pixelsOf = (view: View, grid: Grid) => HTMLCanvasElement;
  type frameOf = (view: View, grid: Grid, size: number) => { x: number; y: number; width: number; height: number; };
  type choiceAt = (grid: Grid, event: MouseEvent) => Partial<Choice>;
  type drawGrid = (view: View, grid: Grid, most: number) => SVGElement;
  type drawCells = (view: View, grid: Grid, size: number, drawn?: Node[], left?: number, top?: number, right?: number) => SVGElement;
  type thumbnail = (view: View, name: string, most: number) => SVGElement;
  type roomFor = (view: View, axis: Axis, count: number) => number;
  type drawLabels = (view: View, axis: Axis, count: number, size: number, placeAt: (at: number) => Fields) => SVGElement[];
  type drawStripes = (view: View, grid: Grid, size: number) => SVGElement[];
  type drawNumbers = (view: View, grid: Grid, size: number) => SVGElement[];

  // long.js
  type showLong = (request: Fields, head: number, signal: AbortSignal) => Promise<void>;
  type showRows = (request: Fields, head: number, query: number) => Promise<void>;

  // request.js
  type optionsOf = (request: Fields) => Options;
  type withOptions = (request: Fields, options: Options) => Fields;
  type withLayout = (request: Fields, layout: string) => any;
  type layoutOf = (request: Fields) => string;
  type joinTensors = (named: Named) => Fields;
  type requestOfText = (text: string) => Fields;
  type readFiles = (files: Iterable<File>) => Promise<Fields>;

  // result.js
  type permuted = (values: Numbers, shape: number[], axes: string, order: string) => Numbers;

  // row.js
  type joined = (texts: string[], sign?: string, most?: number) => string;

  // sentence.js
  type sentenceRequest = (text: string, dim: number, seed: string) => { input: number[][]; query_tokens: string[]; key_tokens: string[]; };

  // service.js
  type post = (path: string, request: Fields, accept: string, signal?: AbortSignal) => Promise<Response>;

  // share.js
  type asProgram = (language: "curl" | "python", address: string, request: Fields) => string;
  type download = (name: string, href: string) => void;
  type collect = (name: string, found: Map<string, string>) => Promise<void>;

  // stages.js
  type describe = (view: View, grid: Grid) => string;

  // tensors.js
  type shapeOf = (data: unknown) => number[];

  /** The elements of index.html by id. */
  interface PageElements {
    "actual-file": HTMLInputElement; "all-heads": HTMLInputElement; "batch-label": HTMLElement; "copied-text": HTMLTextAreaElement;
    "copy-curl": HTMLElement; "copy-python": HTMLElement; "difference-text": HTMLElement; "exp-title": HTMLElement;
    "key-field": HTMLElement; "large-title": HTMLElement; "long-bins": HTMLSelectElement; "long-head": HTMLInputElement;
    "long-image": HTMLImageElement; "long-options": HTMLElement; "long-row": HTMLInputElement; "long-rows": HTMLElement;
    "long-stage": HTMLSelectElement; "long-zoom": HTMLElement; "row-title": HTMLElement; "save-html": HTMLElement;
    "save-json": HTMLElement; "save-png": HTMLElement; "save-svg": HTMLElement;
    actual: HTMLTextAreaElement; batch: HTMLInputElement; compare: HTMLElement; copied: HTMLDialogElement; curl: HTMLTemplateElement; data: HTMLFieldSetElement;
    difference: HTMLElement; examples: HTMLElement; file: HTMLInputElement;
    heads: HTMLElement; key: HTMLInputElement; large: HTMLElement; legend: HTMLElement; lines: SVGSVGElement; long: HTMLElement;
    numbers: HTMLDetailsElement; options: HTMLFormElement; pasted: HTMLTextAreaElement; pipeline: HTMLElement; problem: HTMLElement;
    python: HTMLTemplateElement; range: HTMLElement; readout: HTMLElement; reasons: HTMLTemplateElement; report: HTMLElement; row: HTMLElement; sentence: HTMLFieldSetElement; source: HTMLFormElement;
    short: HTMLElement; status: HTMLElement; steps: HTMLElement; table: HTMLElement; theme: HTMLElement;
  }
}
