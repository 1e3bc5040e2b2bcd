// Files of arrays: safetensors, .npz (a zip file of .npy files) and .npy.

import { times } from "./dom.js";
import { Tensor } from "./tensors.js";

/** @type {Record<string, string>} */
const DTYPES = {
	BOOL: "bool", I8: "int8", I16: "int16", I32: "int32", I64: "int64", U8: "uint8", U16: "uint16", U32: "uint32", U64: "uint64", F16: "float16", BF16: "bfloat16", F32: "float32", F64: "float64",
	"|b1": "bool", "|i1": "int8", "<i2": "int16", "<i4": "int32", "<i8": "int64", "|u1": "uint8", "<u2": "uint16", "<u4": "uint32", "<u8": "uint64",
	"<f2": "float16", "<f4": "float32", "<f8": "float64",
};

/** @type {decode} */
const decode = (bytes) => new TextDecoder().decode(bytes);

/** @type {readSafetensors} */
export const readSafetensors = (buffer, field = "request") => {
	const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
	const { __metadata__: metadata, ...entries } = JSON.parse(decode(buffer.slice(8, start)));
	const tensors = Object.entries(entries).map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
		return [name, new Tensor(DTYPES[dtype], shape, new Uint8Array(buffer, start + from, to - from))];
	});
	return { tensors: Object.fromEntries(tensors), text: metadata?.[field] ?? "{}" };
};

/** @type {readNpy} */
export function readNpy(bytes) {
	const view = new DataView(bytes.buffer, bytes.byteOffset);
	const start = bytes[6] === 1 ? 10 + view.getUint16(8, true) : 12 + view.getUint32(8, true);
	const header = decode(bytes.subarray(0, start));
	const [, code, order, shape] = /'descr': '(.*)', 'fortran_order': (\w+), 'shape': \((.*)\)/.exec(header) ?? [];
	const dtype = code?.startsWith("<U") ? "text" : DTYPES[code];
	if (!dtype || order === "True") throw new Error(`NumPy arrays of type ${code} in this order are not supported`);
	return new Tensor(dtype, shape.split(",").filter((part) => part.trim()).map(Number), bytes.subarray(start));
}

/** @type {readNpz} */
export const readNpz = async (buffer) => {
	const found = await Promise.all(zipEntries(buffer).map(async ({ name, packed, method }) => {
		const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
		return [name.replace(/\.npy$/, ""), readNpy(method ? new Uint8Array(await new Response(stream).arrayBuffer()) : packed)];
	}));
	const { request, ...tensors } = Object.fromEntries(found);
	const { dtype, bytes } = request ?? { bytes: new TextEncoder().encode("{}") };
	const utf32 = () => String.fromCodePoint(...new Uint32Array(bytes.slice().buffer));
	return { tensors, text: dtype === "text" ? utf32() : decode(bytes) };
};

/** @type {zipEntries} */
function zipEntries(buffer) {
	const view = new DataView(buffer);
	let end = buffer.byteLength - 22;
	while (view.getUint32(end, true) !== 0x06054b50) end--;
	let at = view.getUint32(end + 16, true);
	return times(view.getUint16(end + 10, true), () => {
		const [method, length, extra, comment] = [10, 28, 30, 32].map((field) => view.getUint16(at + field, true));
		const [size, local] = [view.getUint32(at + 20, true), view.getUint32(at + 42, true)];
		const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
		const name = decode(buffer.slice(at + 46, (at += 46 + length)));
		at += extra + comment;
		return { name, method, packed: new Uint8Array(buffer, start, size) };
	});
}
