// Archives of arrays (npz) by what is installed from npm: npyjs knows arrays, fflate and unzipper archives.
//   node archives.js READER FILE    prints {name: {dtype, shape, values}} of an answer
//   node archives.js WRITER         writes a request to standard output
import { createReadStream, readFileSync } from "node:fs";
import { strToU8, Unzip, UnzipPassThrough, unzipSync, Zip, ZipDeflate, zipSync } from "fflate";
import { dump, parse } from "npyjs";
import unzipper from "unzipper";

const [task, path] = process.argv.slice(2);

const readers = {
  // By the list at the end of the archive.
  "fflate.unzipSync": () => unzipSync(readFileSync(path)),
  // The others by the headers before each file, from the first byte on.
  "fflate.Unzip": () => {
    const found = {};
    const archive = new Unzip((file) => {
      const parts = (found[file.name] = []);
      file.ondata = (error, part) => {
        if (error) throw error;
        parts.push(Buffer.from(part));
      };
      file.start();
    });
    archive.register(UnzipPassThrough);
    const bytes = readFileSync(path);
    for (let at = 0; at < bytes.length; at += 97) archive.push(bytes.subarray(at, at + 97), at + 97 >= bytes.length);
    return Object.fromEntries(Object.entries(found).map(([name, parts]) => [name, Buffer.concat(parts)]));
  },
  "unzipper.Parse": async () => {
    const found = {};
    const entries = createReadStream(path, { highWaterMark: 97 }).pipe(unzipper.Parse({ forceStream: true }));
    for await (const entry of entries) found[entry.path] = await entry.buffer();
    return found;
  },
};

const tokens = dump(new Float64Array([1, 0, 0, 1]), [2, 2]);
const files = {
  "input.npy": new Uint8Array(tokens),
  "num_heads.npy": new Uint8Array(dump(new Int32Array([1]), [1])),
  "request.npy": new Uint8Array(dump(['{"scale": 1, "is_causal": true}'], [1])),
};

const writers = {
  "fflate.zipSync": () => zipSync(files),
  // The size of each file is behind its bytes.
  "fflate.Zip": () => {
    const parts = [];
    const archive = new Zip((error, part) => {
      if (error) throw error;
      parts.push(Buffer.from(part));
    });
    for (const [name, bytes] of Object.entries({ ...files, "__MACOSX/._input.npy": strToU8("of a Mac") })) {
      const file = new ZipDeflate(name);
      archive.add(file);
      file.push(bytes, true);
    }
    archive.end();
    return Buffer.concat(parts);
  },
};

function shown(bytes) {
  const { data, dtype, shape, fortranOrder } = parse(Uint8Array.from(bytes).buffer);
  if (fortranOrder) throw new Error("columns first");
  return { dtype, shape, values: Array.from(data, Number) }; // minus infinity is printed as null
}

if (task in readers) {
  const found = Object.entries(await readers[task]()).map(([name, bytes]) => [name, shown(bytes)]);
  process.stdout.write(JSON.stringify(Object.fromEntries(found)));
} else {
  process.stdout.write(writers[task]());
}
