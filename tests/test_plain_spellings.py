"""What languages and tools write in the place of plain values: numbers as arrays or lists, strings as bytes."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any, Final

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.helpers.wire import JSON, NPZ, SAFETENSORS, typed_array, write

X: Final = np.array([[1.0, 2.0], [0.5, -1.0], [3.0, 0.25]])
# A request, and ways in which others write its options.
PLAIN: Final = {"num_heads": 2, "is_causal": True, "scale": 0.5, "query_offset": 1, "softcap": 2.0, "layout": "ld"}
WINDOW: Final = {"left": 1}
LISTS: Final = {name: [value] for name, value in PLAIN.items()}
JSON_FORMS: Final[dict[str, dict[str, Any]]] = {
    "whole floats": PLAIN | {"num_heads": 2.0, "query_offset": 1.0, "window": {"left": 1.0}},
    "lists of one, as R": LISTS | {"window": {"left": [1]}},
    "lists of one float": LISTS | {"num_heads": [2.0], "query_offset": [1.0], "window": {"left": [1.0]}},
}
INFER: Final = "/v2/models/attention/infer"


def posted(client: httpx.Client, body: bytes, media_type: str, path: str = "/attention") -> httpx.Response:
    return client.post(path, content=body, headers={"Content-Type": media_type, "Accept": JSON})


@pytest.fixture(scope="module")
def expected(client: httpx.Client) -> Any:
    answer = posted(client, write({"input": X.tolist(), "window": WINDOW} | PLAIN, JSON), JSON)
    assert answer.status_code == 200, answer.text
    return answer.json()["output"]


@pytest.mark.parametrize("form", JSON_FORMS)
def test_json_of_other_languages(form: str, client: httpx.Client, expected: Any) -> None:
    answer = posted(client, json.dumps({"input": X.tolist()} | JSON_FORMS[form]).encode(), JSON)
    assert answer.json().get("output") == expected, answer.text


@pytest.mark.parametrize("shape", [(), (1,)])
def test_options_as_arrays(shape: tuple[int, ...], client: httpx.Client, expected: Any) -> None:
    """As `np.savez(file, input=x, is_causal=True)` writes them; safetensors has no strings."""
    arrays = {name: np.full(shape, value) for name, value in PLAIN.items()}
    arrays |= {"input": X, "window.left": np.full(shape, 1.0)}
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]  # names of arrays, which numpy's stubs take for its options
    answer = posted(client, stream.getvalue(), NPZ)
    assert answer.json().get("output") == expected, answer.text
    del arrays["layout"]
    if shape:  # safetensors.numpy.save writes no array without axes
        answer = posted(client, bytes(safetensors.numpy.save(arrays)), SAFETENSORS)
        assert answer.json().get("output") == expected, answer.text


# A body with names and flags that are read before the schema reads them: both forms have the same answer.
LISTED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "encoding": ("/attention", {"input": X.tolist()}, {"encoding": "base64"}),
    "encoding of merge": ("/attention/merge", {"parts": [{"output": [[1]], "logsumexp": [0]}]}, {"encoding": "base64"}),
    "layer": ("/attention", {"input": X.tolist()}, {"layer": "none-such"}),
    "call": (
        "/attention/call",
        {},
        {
            "call": "flashinfer.single_prefill_with_kv_cache",
            "encoding": "base64",
            "arguments": {"q": [[[1]]], "k": [[[1]]], "v": [[[3]]]} | {"causal": True, "kv_layout": "HND"},
        },
    ),
    "typed array": ("/attention", {}, {"input": typed_array(X)}),
}


def listed(value: Any) -> Any:
    """A value as R writes it: texts and booleans as lists of one."""
    if isinstance(value, dict):
        return {name: listed(one) for name, one in value.items()}
    return [value] if isinstance(value, str | bool) else value


@pytest.mark.parametrize("name", LISTED)
def test_texts_and_flags_may_stand_in_lists_of_one(name: str, client: httpx.Client) -> None:
    path, fields, options = LISTED[name]
    plain, other = (
        posted(client, json.dumps(fields | form).encode(), JSON, path).json() for form in (options, listed(options))
    )
    for answer in (plain, other):
        answer.pop("request_id", None)
        answer.get("metadata", {}).pop("request_id", None)
    assert other == plain
    if name != "layer":
        assert isinstance(other["output"], dict) == ("encoding" in options)


def test_several_values_are_no_single_one(client: httpx.Client) -> None:
    for value in ([2, 2], [], [[2], [2]]):
        answer = posted(client, json.dumps({"input": X.tolist(), "num_heads": value}).encode(), JSON)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["pointer"] == "/num_heads"
    for name, other in {"num_heads": 1.5, "query_offset": 0.5, "is_causal": 1, "softcap": True}.items():
        answer = posted(client, json.dumps({"input": X.tolist(), name: [other]}).encode(), JSON)
        assert answer.status_code == 422, name
        assert answer.json()["errors"][0]["pointer"].startswith(f"/{name}")
    for name in ("num_heads", "query_offset"):
        answer = posted(client, json.dumps({"input": X.tolist(), name: 1e300}).encode(), JSON)
        assert (answer.status_code, answer.json()["errors"][0]["got"]) == (422, "number 1e+300"), name


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"backend": [[2, 2]]}, "/backend"),
        ({"device": [1, 2]}, "/device"),
        ({"device": ["a", "b"]}, "/device"),
    ],
)
def test_arrays_in_the_place_of_names_are_refused(fields: dict[str, Any], pointer: str, client: httpx.Client) -> None:
    answer = posted(client, json.dumps({"input": X.tolist()} | fields).encode(), JSON)
    assert (answer.status_code, answer.json()["errors"][0]["pointer"]) == (422, pointer)


def test_a_label_without_axes_is_refused(client: httpx.Client) -> None:
    label = {"name": "query_tokens", "shape": [], "datatype": "INT64", "data": [1]}
    inputs = [{"name": "input", "shape": [1, 1], "datatype": "FP64", "data": [1.0]}, label]
    assert posted(client, json.dumps({"inputs": inputs}).encode(), JSON, INFER).status_code == 422


@pytest.mark.parametrize("kind", [np.str_, np.bytes_, lambda text: np.frombuffer(text.encode(), np.uint8)])
def test_json_text_of_npz_as_string_and_as_bytes(kind: Any, client: httpx.Client, expected: Any) -> None:
    stream = io.BytesIO()
    np.savez(stream, input=X, request=kind(json.dumps(PLAIN | {"window": WINDOW})))
    answer = posted(client, stream.getvalue(), NPZ)
    assert answer.json().get("output") == expected, answer.text


def test_archives_of_folders(client: httpx.Client, expected: Any) -> None:
    """As `zip -r request.npz .` makes them, and Finder of macOS."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("./", b"")
        for name, array in {"input": X, "request": np.array(json.dumps(PLAIN | {"window": WINDOW}))}.items():
            content = io.BytesIO()
            np.save(content, array)
            archive.writestr(f"./{name}.npy", content.getvalue())
        archive.writestr("__MACOSX/._input.npy", b"\0\5\26\7")
    answer = posted(client, stream.getvalue(), NPZ)
    assert answer.json().get("output") == expected, answer.text


def test_a_file_without_a_name_is_refused(client: httpx.Client) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("input.npy", b"")
    body = stream.getvalue().replace(b"input.npy", b"")
    local, entry = body.index(b"PK\3\4"), body.index(b"PK\1\2")
    # Lengths of the names, and of the directory and where it begins.
    body = body[: local + 26] + b"\0\0" + body[local + 28 : entry + 28] + b"\0\0" + body[entry + 30 :]
    end = body.index(b"PK\5\6")
    body = body[: end + 12] + (46).to_bytes(4, "little") + (30).to_bytes(4, "little") + body[end + 20 :]
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert [file.filename for file in archive.infolist()] == [""]
    answer = posted(client, body, NPZ)
    assert answer.status_code == 400, answer.text


INTEGERS: Final = {"I16": "<i2", "U16": "<u2", "U32": "<u4", "U64": "<u8"}


@pytest.mark.parametrize("code", INTEGERS)
def test_every_size_of_integers(code: str, client: httpx.Client) -> None:
    array = np.array([[1, 2], [3, 5]], INTEGERS[code])
    plain = posted(client, write({"input": array.tolist(), "select_queries": [1]}, JSON), JSON).json()["output"]
    fields = {"input": array, "select_queries": np.array([1], INTEGERS[code])}
    for media_type in (NPZ, SAFETENSORS):
        answer = posted(client, write(fields, media_type), media_type)
        assert answer.json().get("output") == plain, (media_type, answer.text)
    typed = {name: typed_array(one) for name, one in fields.items()}
    assert posted(client, json.dumps(typed).encode(), JSON).json().get("output") == plain
    datatype = code.replace("U", "UINT").replace("I16", "INT16")
    inputs = [
        {"name": name, "shape": one.shape, "datatype": datatype, "data": one.tolist()} for name, one in fields.items()
    ]
    answer = posted(client, json.dumps({"inputs": inputs}).encode(), JSON, INFER)
    assert answer.json()["outputs"][0]["data"] == np.ravel(plain).tolist(), answer.text


def test_strings_of_mlserver(client: httpx.Client) -> None:
    """Its codec gives n strings the shape [n, 1]."""
    labels = {"name": "query_tokens", "shape": [3, 1], "datatype": "BYTES", "data": ["a", "b", "c"]}
    for shape in ([3, 2], [3, 1, 2]):  # three tokens; three entries of one token, which have these labels as they are
        inputs = [{"name": "input", "shape": shape, "datatype": "FP64", "data": X.ravel().tolist()}, labels]
        answer = posted(client, json.dumps({"inputs": inputs}).encode(), JSON, INFER)
        assert answer.status_code == 200, answer.text


POINTER: Final = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.mark.parametrize(
    ("body", "media_type", "path", "words"),
    [
        (POINTER, SAFETENSORS, "/attention", "a pointer of Git LFS to it (git lfs pull fetches the file)"),
        (POINTER, NPZ, "/attention", "a pointer of Git LFS to it (git lfs pull fetches the file)"),
        (b'{"input": [[1]], "include": "weights"}', JSON, "/attention", '(write ["attention_weights"])'),
        (b'{"input": [[1]], "bias": [[-Infinity]]}', JSON, "/attention", "(in a bias, null is minus infinity)"),
        (b'{"input": [[1]], "bias": [["-Inf"]]}', JSON, "/attention", "(in a bias, null is minus infinity)"),
        (
            b'{"call": "vllm.paged", "arguments": {}}',
            JSON,
            "/attention/call",
            "vllm.attention, got string 'vllm.paged'",
        ),
    ],
)
def test_what_a_user_can_do_about_it(body: bytes, media_type: str, path: str, words: str, client: httpx.Client) -> None:
    answer = posted(client, body, media_type, path)
    assert answer.status_code in (400, 422)
    assert words in answer.json()["detail"]
