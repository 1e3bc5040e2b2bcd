// Arrays: nested lists, or tensors as the binary formats have them.

/** A typed array with its bytes (little-endian, row-major). */
export class Tensor {
	/** @param {string} dtype @param {number[]} shape @param {Uint8Array} bytes */
	constructor(dtype, shape, bytes) {
		this.dtype = dtype;
		this.shape = shape;
		this.bytes = bytes;
	}
}

/** @type {Record<string, (buffer: any) => Numbers>} */
const READERS = {
	bool: (buffer) => new Uint8Array(buffer),
	int8: (buffer) => new Int8Array(buffer),
	int16: (buffer) => new Int16Array(buffer),
	int32: (buffer) => new Int32Array(buffer),
	int64: (buffer) => Float64Array.from(new BigInt64Array(buffer), Number),
	uint8: (buffer) => new Uint8Array(buffer),
	uint16: (buffer) => new Uint16Array(buffer),
	uint32: (buffer) => new Uint32Array(buffer),
	uint64: (buffer) => Float64Array.from(new BigUint64Array(buffer), Number),
	float16: (buffer) => Float32Array.from(new Float16Array(buffer)),
	bfloat16: (buffer) => new Float32Array(Uint32Array.from(new Uint16Array(buffer), (bits) => bits << 16).buffer),
	float32: (buffer) => new Float32Array(buffer),
	float64: (buffer) => new Float64Array(buffer),
};

/** @type {numbers} */
export const numbers = ({ dtype, bytes }) => READERS[dtype](bytes.slice().buffer);

/** @type {asTensor} */
export function asTensor(data) {
	if (data instanceof Tensor) return data;
	const values = Float64Array.from([data].flat(9), (value) => value ?? -Infinity);
	return new Tensor("float64", shapeOf(data), new Uint8Array(values.buffer));
}

/** @type {shapeOf} */
export const shapeOf = (data) => {
	if (data instanceof Tensor) return data.shape;
	return Array.isArray(data) ? [data.length, ...shapeOf(data[0])] : [];
};

/** @type {transposed} */
export const transposed = (data) => (Array.isArray(data?.[0]) ? data[0].map((_, column) => data.map((/** @type {unknown[]} */ row) => row[column])) : data);

/** @type {toBase64} */
export const toBase64 = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));

/** @type {fromBase64} */
export const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

/** @type {toText} */
export const toText = (value, indent = 0) => JSON.stringify(value, (_, part) => (part instanceof Tensor ? { ...part, bytes: undefined, data: toBase64(part.bytes) } : part), indent);

/** @type {fromText} */
export function fromText(text) {
	return JSON.parse(text, (_, part) => {
		if (typeof part?.data !== "string" || !Array.isArray(part.shape)) return part ?? undefined; // null is an absent field
		return new Tensor(part.dtype, part.shape, fromBase64(part.data));
	});
}
