"""Requests and outputs in files."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.named_tensors import REQUEST, dotted_tensors, plain_fields
from attention_service.codecs.safetensors import request_bytes
from attention_service.codecs.table import CODECS
from attention_service.errors import InvalidRequest, InvalidTensors, NotAcceptable, UnsupportedMediaType
from attention_service.pipeline.json_fields import json_fields
from attention_service.whole_file import whole_file

# Media types by the suffix of a file.
TYPES: Final = {".json": "application/json"} | {
    suffix: name for suffix in (".npz", ".safetensors") for name in CODECS if name.endswith(suffix[1:])
}
MAX_BYTES: Final = 2**40
STANDARD_INPUT: Final = "-"
# How files begin that are no text, by their suffix; safetensors begin with a length.
STARTS: Final = {b"PK": ".npz", b"\x93NUMPY": ".npy"}


def read_request(path: Path, names: Collection[str] = ()) -> Decoded:
    """The fields of a request in a file, in a wire format by its suffix, or of a dict of tensors saved by torch.

    names: of the arrays that a kernel returned, which a dict of torch may have beside its `request`: they are `actual`

    Errors: InvalidRequest of every kind, UnsupportedMediaType for another suffix, OSError.
    """
    if path.suffix != ".pt":
        suffix, content = _content(path)
        return CODECS[_type(path, suffix, ".pt")].decode(content, MAX_BYTES)
    from attention_service.library.tensor_files import read_torch

    fields = read_torch(path)
    if not isinstance(fields, Mapping):
        raise InvalidRequest.at("", "a dict of the request's fields", f"a tensor in {path.name}")
    if "request" not in fields:
        return Decoded(dict(fields), frozenset())
    if not isinstance(fields["request"], Mapping):
        raise InvalidRequest.of("/request", "a dict of the request's fields", fields["request"])
    sent = {name: value for name, value in fields.items() if name in names}
    unread = {str(name): ("", "the dict request") for name in fields if name not in names}
    return Decoded(dict(fields["request"]) | ({"actual": sent} if sent else {}), frozenset(), unread=unread)


def holds_call(decoded: Decoded) -> bool:
    """True for the fields of POST /attention/call, or its comparison, False for those of POST /attention."""
    return decoded.fields.get("call") is not None


def read_arrays(path: Path, names: Collection[str]) -> dict[str, Any]:
    """The arrays that a kernel returned, by name, from a file.

    A file with one array without a name (.npy, a list in .json, a tensor in .pt) holds the output. Others than `names`,
    like `metadata` in a stored response, are left out, unless there are only others.

    Errors: as of read_request.
    """
    if path.suffix == ".pt":
        from attention_service.library.tensor_files import read_torch

        found = read_torch(path)
        fields = dict(found) if isinstance(found, Mapping) else {"output": found}
        return _chosen(fields, names)
    suffix, content = _content(path)
    if suffix == ".npy":
        try:
            array = np.load(io.BytesIO(content), allow_pickle=False)
        except Exception as error:  # numpy.load raises what its parsers raise: EOFError, TokenError and others
            raise InvalidTensors.at("/actual", "an array in the format of npy", str(error)[:80]) from None
        # NumPy writes bfloat16 as two bytes of no type.
        return {"output": array.view(BFLOAT16) if array.dtype == np.dtype("V2") else array}
    if suffix == ".json" and content.lstrip()[:1] == b"[":
        content = b'{"output":' + content + b"}"
    return _chosen(CODECS[_type(path, suffix, ".npy", ".pt")].decode(content, MAX_BYTES).fields, names)


def write_request(fields: Mapping[str, Any], path: Path) -> None:
    """Write the fields of a request, arrays as ndarrays, in a wire format by the suffix of the file.

    Errors: UnsupportedMediaType for another suffix, OSError.
    """
    if path.suffix not in TYPES:
        raise UnsupportedMediaType.at("", f"a file {', '.join(TYPES)}", path.name)
    with whole_file(path) as file:
        if path.suffix == ".json":
            file.write((json.dumps(json_fields(fields)) + "\n").encode())
        elif TYPES[path.suffix] == TYPES[".npz"]:
            tensors = dict(dotted_tensors(fields))
            if any(tensor.dtype == BFLOAT16 for tensor in tensors.values()):
                raise NotAcceptable.at("", "another format than npz for bfloat16", path.name, "use .safetensors")
            members: dict[str, Any] = {REQUEST: np.array(json.dumps(plain_fields(fields)))} | tensors
            np.savez(file, **members)
        else:
            file.write(request_bytes(fields))


def _chosen(fields: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields with these names; all if there is none of them, for the error that names one."""
    return {name: value for name, value in fields.items() if name in names} or fields


def _content(path: Path) -> tuple[str, bytes]:
    """The suffix of a file and its bytes; of `-` those of standard input, with the suffix that its first bytes show.

    Errors: OSError.
    """
    if str(path) != STANDARD_INPUT:
        return path.suffix, path.read_bytes()
    content = sys.stdin.buffer.read()
    for start, suffix in STARTS.items():
        if content.startswith(start):
            return suffix, content
    # A header of safetensors is JSON behind its length, which no eight letters of a text are: they would be exabytes.
    is_header = content[8:9] == b"{" and int.from_bytes(content[:8], "little") < len(content)
    return ".safetensors" if is_header else ".json", content


def _type(path: Path, suffix: str, *others: str) -> str:
    """The media type of a suffix. others: suffixes that have none, for the error. Errors: UnsupportedMediaType."""
    if suffix not in TYPES:
        raise UnsupportedMediaType.at("", f"a file {', '.join([*TYPES, *others])}", path.name)
    return TYPES[suffix]
