"""Archives of arrays (npz) that others read and write: the JDK, npyjs, fflate and unzipper of npm, stream-unzip.

All but one read an archive from its first byte on, as it arrives, so that the list at its end is of no use to them.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from stream_unzip import stream_unzip

from tests.clients.programs import HERE
from tests.helpers.wire import JSON, NPZ

RANDOM = np.random.default_rng(0)
REQUEST: dict[str, Any] = {
    "query": RANDOM.normal(size=(2, 3, 4)).tolist(),  # 2 heads of 3 queries and 5 keys
    "key": RANDOM.normal(size=(2, 5, 4)).tolist(),
    "value": RANDOM.normal(size=(2, 5, 3)).tolist(),
    "layout": "hld",
    "is_causal": True,
    "query_offset": 0,
    "include": ["attention_weights", "scores", "masked_scores", "logsumexp"],
    "top_k": 1,
}
# softmax of (1, 0), of which the first token sees itself only
CAUSAL = np.array([[1, 0], np.array([1, np.e]) / (1 + np.e)])


def piped(*command: str | Path, stdin: bytes = b"") -> bytes:
    """What a command writes. Errors: AssertionError if it fails."""
    done = subprocess.run(list(map(str, command)), input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def by_java(answer: bytes, _: Path) -> dict[str, Any]:
    """ZipInputStream of the JDK."""
    return dict(json.loads(piped("java", HERE / "java" / "Archives.java", "read", stdin=answer)))


def by_npm(reader: str) -> Callable[[bytes, Path], dict[str, Any]]:
    def read(answer: bytes, folder: Path) -> dict[str, Any]:
        (folder / "answer.npz").write_bytes(answer)
        printed = piped("node", HERE / "typescript" / "archives.js", reader, folder / "answer.npz")
        return dict(json.loads(printed))

    return read


def by_stream_unzip(answer: bytes, _: Path) -> dict[str, Any]:
    """Reads a few bytes at a time."""
    parts = (answer[at : at + 97] for at in range(0, len(answer), 97))
    found = {}
    for name, _size, content in stream_unzip(parts):
        array = np.load(io.BytesIO(b"".join(content)))
        values = np.where(np.isneginf(array), None, array) if array.dtype.kind == "f" else array
        found[name.decode()] = {
            "dtype": array.dtype.str[1:],
            "shape": list(array.shape),
            "values": values.ravel().tolist(),
        }
    return found


READERS: dict[str, Callable[[bytes, Path], dict[str, Any]]] = {
    "java.util.zip.ZipInputStream": by_java,
    "stream-unzip": by_stream_unzip,
    **{f"npyjs with {name}": by_npm(name) for name in ("fflate.unzipSync", "fflate.Unzip", "unzipper.Parse")},
}
WRITERS: dict[str, tuple[str | Path, ...]] = {
    "java.util.zip.ZipOutputStream": ("java", HERE / "java" / "Archives.java", "write"),
    "fflate.zipSync": ("node", HERE / "typescript" / "archives.js", "fflate.zipSync"),
    "fflate.Zip": ("node", HERE / "typescript" / "archives.js", "fflate.Zip"),
}


def flat(answer: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of an answer in JSON by dotted names."""
    found: dict[str, Any] = {}
    for name, value in answer.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def numbers(value: Any) -> np.ndarray:
    """Nested lists as an array of numbers: null is minus infinity."""
    array = np.array(value, dtype=object)
    return np.where(np.equal(array, None), -np.inf, array).astype(float)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reader", READERS)
def test_an_answer_has_the_numbers_of_json(reader: str, dtype: str, client: httpx.Client, tmp_path: Path) -> None:
    request = REQUEST | {"dtype": dtype}
    answer = client.post("/attention", json=request, headers={"Accept": NPZ})
    assert answer.status_code == 200, answer.text
    in_json = flat(client.post("/attention", json=request, headers={"Accept": JSON}).raise_for_status().json())
    found = READERS[reader](answer.content, tmp_path)
    rest = json.loads(bytes(map(int, found.pop("response.npy")["values"])))
    assert rest["metadata"]["query_length"] == 3
    names = {name.removesuffix(".npy") for name in found}
    assert names == {"output", "scores", "masked_scores", "logsumexp", "top_weights.indices", "top_weights.values"}
    for name in names:
        file, expected = found[f"{name}.npy"], numbers(in_json[name])
        assert file["dtype"] == ("i8" if name == "top_weights.indices" else {"float32": "f4", "float64": "f8"}[dtype])
        assert file["shape"] == list(expected.shape)
        kind = np.dtype(file["dtype"])  # JSON has as many digits as the type
        assert np.array_equal(numbers(file["values"]).astype(kind), expected.ravel().astype(kind)), name
    assert numbers(found["masked_scores.npy"]["values"])[1] == -np.inf  # the first query does not see the second key


@pytest.mark.parametrize("writer", WRITERS)
def test_a_request_that_others_write_is_answered(writer: str, client: httpx.Client) -> None:
    archive = piped(*WRITERS[writer])
    answer = client.post("/attention", content=archive, headers={"Content-Type": NPZ, "Accept": JSON})
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(answer.json()["attention_weights"], CAUSAL, rtol=1e-6)
    np.testing.assert_allclose(answer.json()["output"], CAUSAL, rtol=1e-6)
