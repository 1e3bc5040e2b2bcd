"""Laws: a right function keeps all of them; each broken one breaks one law, and the judge names it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from attention_service import attend
from attention_service.cli import main
from attention_service.commands.formats import checks_of_laws
from attention_service.conformance import Unsupported, laws
from attention_service.conformance.law_checks import LAWS
from attention_service.conformance.report import laws_as_json, laws_as_text

Function = Callable[..., Any]


def right(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    is_causal: bool = False,
    key_lengths: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Attention by its definition, head by head; hidden keys are left out."""
    groups = query.shape[1] // key.shape[1]
    output = np.empty((*query.shape[:3], value.shape[3]))
    logsumexp = np.empty(query.shape[:3])
    for b, h, i in np.ndindex(query.shape[:3]):
        keys = key.shape[2] if key_lengths is None else int(key_lengths[b])
        keys = min(keys, i + 1) if is_causal else keys
        scores = key[b, h // groups, :keys].astype("f8") @ query[b, h, i] / query.shape[3] ** 0.5
        largest = scores.max()
        weights = np.exp(scores - largest)
        logsumexp[b, h, i] = largest + np.log(weights.sum())
        output[b, h, i] = weights / weights.sum() @ value[b, h // groups, :keys]
    return {"output": output, "logsumexp": logsumexp}


def changed(change: Callable[[np.ndarray, dict[str, Any]], np.ndarray]) -> Function:
    """The right function with another output. change: of the output and the fields"""

    def function(
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        *,
        is_causal: bool = False,
        key_lengths: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        found = right(query, key, value, is_causal=is_causal, key_lengths=key_lengths)
        return found | {"output": change(found["output"], {"value": value, "is_causal": is_causal})}

    return function


def restless() -> Function:
    """The last bits differ from call to call."""
    calls = iter(range(10**6))
    return changed(lambda output, fields: output * (1 + 1e-9 * (next(calls) % 7)))


def by_batch(output: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """Rounds in another way in a batch."""
    found: np.ndarray = output * (1 + 1e-9 * (len(output) > 1))
    return found


def tiled(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> dict[str, np.ndarray]:
    """Query head n reads key/value head n % num_kv_heads."""
    groups = query.shape[1] // key.shape[1]
    return right(query, *(np.tile(array, (1, groups, 1, 1)) for array in (key, value)))


def leaking(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, is_causal: bool = False) -> np.ndarray:
    """Multiplies hidden values by weights of 0."""
    found: np.ndarray = right(query, key, value, is_causal=is_causal)["output"]
    return found + 0 * value[:, :, -1:].repeat(query.shape[1] // value.shape[1], axis=1) if is_causal else found


def beyond_a_tile(output: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """Of sequences of 65 causal tokens in one head the last is not computed."""
    if fields.get("is_causal") and output.shape[1:3] == (1, 65):
        output[:, :, -1] = 0
    return output


def logsumexp_in_bits(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> dict[str, np.ndarray]:
    found = right(query, key, value)
    return found | {"logsumexp": found["logsumexp"] / np.log(2)}


BROKEN: dict[str, Function] = {
    "deterministic": restless(),
    "batch_invariant": changed(by_batch),
    "heads_permuted": tiled,
    "ignores_hidden": leaking,
    "constant_values": changed(lambda output, fields: output * 0.9 if np.ptp(fields["value"]) == 0 else output),
    "mergeable": logsumexp_in_bits,
    "lengths": changed(beyond_a_tile),
}


def broken(function: Function) -> set[str]:
    result = laws(function)
    assert result.exit_status == 1
    return {law.name for law in result.laws if law.status == "broken"}


@pytest.mark.slow
def test_a_right_function_keeps_all_laws() -> None:
    result = laws(right)
    assert [(law.name, law.status, law.message) for law in result.laws] == [(name, "holds", None) for name in LAWS]
    assert result.exit_status == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_function_breaks_its_law(name: str) -> None:
    found = broken(BROKEN[name])
    # What differs from call to call differs between calls that other laws compare, too.
    assert found == ({name, "batch_invariant"} if name == "deterministic" else {name})


def in_one_buffer(function: Function) -> Function:
    """The function with a result that the next call overwrites, as a captured graph of a GPU has it."""
    buffers: dict[Any, np.ndarray] = {}

    def written(query: Any, key: Any, value: Any) -> np.ndarray:
        found: np.ndarray = np.asarray(function(query, key, value))
        buffer = buffers.setdefault((found.shape, found.dtype), np.empty_like(found))
        buffer[...] = found
        return buffer

    return written


def test_results_are_kept_until_the_next_call() -> None:
    def plain(query: Any, key: Any, value: Any) -> np.ndarray:
        return attend(query, key, value, layout="bhld").output

    calls = iter(range(10**6))
    result = laws(in_one_buffer(plain))
    assert not [law.name for law in result.laws if law.status == "broken"]
    other = in_one_buffer(lambda query, key, value: plain(query, key, value) * (1 + next(calls) % 2))
    assert "deterministic" in broken(other)


def test_what_is_left_unwritten() -> None:
    """The rest of a tile is not written: NaN stays in `out`. No other law sees it in the sizes that they try."""

    def partial(query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray) -> None:
        rows = query.shape[2] - (query.shape[:3] == (5, 2, 65))
        out[:, :, :rows] = right(query, key, value)["output"][:, :, :rows]

    result = {law.name: law for law in laws(partial).laws}
    assert result["writes_everything"].status == "broken"
    assert result["writes_everything"].message == "output[0, 0, 64, 0] is nan after memory was filled with NaN"
    assert result["writes_everything"].input == (
        "batch 5, num_heads 2, num_kv_heads 1, query_length 65, key_length 200, head_dim 64, dtype float32"
    )


@pytest.mark.slow
def test_the_smallest_input_is_named() -> None:
    [law] = [law for law in laws(BROKEN["batch_invariant"]).laws if law.status == "broken"]
    assert law.input == "batch 2, num_heads 2, num_kv_heads 2, query_length 3, key_length 3, head_dim 16, dtype float32"
    assert law.message is not None
    assert law.message.startswith("output[0, 0, 0, 0] is ")
    assert "where sequence 0 is alone" in law.message


def test_what_a_function_has_no_arguments_for_is_unsupported() -> None:
    def output_only(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        return np.asarray(right(query, key, value)["output"])

    result = laws(output_only)
    unsupported = {law.name: law.message for law in result.laws if law.status == "unsupported"}
    assert unsupported.keys() == {"ignores_hidden", "mergeable"}
    assert unsupported["mergeable"] == "got an unexpected keyword argument 'include'"
    assert result.exit_status == 0


def test_nothing_to_check_and_errors() -> None:
    def refusing(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        raise Unsupported("no GPU")

    def failing(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        raise RuntimeError("no")

    assert laws(refusing).exit_status == 2
    line = failing.__code__.co_firstlineno + 1
    message = f'RuntimeError: no (tests/test_laws.py, line {line}, in failing: raise RuntimeError("no"))'
    result = laws(failing)
    errors = [law for law in result.laws if law.status == "error"]
    assert len(errors) == len(LAWS) - 1, "it has no argument that hides keys"
    assert {law.message for law in errors} == {message}
    assert {law.input for law in errors} == {
        "batch 1, num_heads 1, num_kv_heads 1, query_length 2, key_length 2, head_dim 16, dtype float32"
    }
    assert result.exit_status == 1
    assert f"writes_everything: the smallest input that shows it: {result.laws[0].input}" in laws_as_text(result)
    assert [check.outcome for check in checks_of_laws(result)].count("error") == len(errors)


def test_the_place_of_what_a_function_with_out_raises() -> None:
    def failing(query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, query[:, :, :1, :1, None])

    message = laws(failing).laws[0].message
    assert message is not None
    assert message.startswith("ValueError: ")
    assert f"(tests/test_laws.py, line {failing.__code__.co_firstlineno + 1}, in failing: np.copyto(" in message


def vectorised(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output, rounded to the type of the query as kernels of half types do, and the logsumexp."""
    key, value = (np.repeat(array.astype("f8"), query.shape[1] // array.shape[1], axis=1) for array in (key, value))
    scores = query.astype("f8") @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    return (weights / total @ value).astype(query.dtype), (largest + np.log(total))[..., 0]


@pytest.mark.parametrize("raises", [None, NotImplementedError("no"), Unsupported("no")])
def test_a_function_with_out_may_refuse(raises: Exception | None) -> None:
    def refusing(query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray) -> Any:
        if raises is not None:
            raise raises
        return NotImplemented

    result = laws(refusing)
    assert {law.status for law in result.laws} == {"unsupported"}
    assert result.exit_status == 2


@pytest.mark.parametrize("as_pair", [True, False])
def test_what_a_function_with_out_returns_beside_is_judged(as_pair: bool) -> None:
    """A logsumexp in bits is broken, and one in nats is right, whether it is returned in a pair or by its name."""

    def function(factor: float) -> Function:
        def writing(query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray) -> Any:
            out[...], logsumexp = vectorised(query, key, value)
            return (out, logsumexp * factor) if as_pair else {"logsumexp": logsumexp * factor}

        return writing

    assert {law.name: law.status for law in laws(function(1.0)).laws}["mergeable"] == "holds"
    assert broken(function(1 / np.log(2))) == {"mergeable"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_laws_hold_for_other_types(dtype: str) -> None:
    types: set[str] = set()

    def function(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        types.update(array.dtype.name for array in (query, key, value))
        return vectorised(query, key, value)

    assert {law.status for law in laws(function, dtypes=[dtype]).laws} == {"holds", "unsupported"}
    assert types == {dtype}


def test_a_law_that_one_type_breaks_names_it() -> None:
    def function(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        output, _ = vectorised(query, key, value)
        return output * output.dtype.type(0.5) if query.dtype.name == "bfloat16" else output

    result = {law.name: law for law in laws(function, dtypes=["float32", "bfloat16"]).laws}
    assert {name for name, law in result.items() if law.status == "broken"} == {"constant_values"}
    assert (result["constant_values"].input or "").endswith("head_dim 16, dtype bfloat16")
    with pytest.raises(ValueError, match="dtypes: expected names of float32, bfloat16, float64, float16, got int8"):
        laws(function, dtypes=["int8"])


def service(backend: str) -> Function:
    def function(**fields: Any) -> dict[str, np.ndarray]:
        result = attend(**{"include": [], **fields, "backend": backend})
        return {name: result[name] for name in ("output", *fields.get("include", ()))}

    return function


def test_this_service_keeps_all_laws() -> None:
    assert {law.status for law in laws(service("numpy")).laws} == {"holds"}


@pytest.mark.torch
def test_this_service_keeps_all_laws_with_torch() -> None:
    """With one thread: the memory of others begins anywhere in torch's kernel, and with it the matrices of MKL."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert [law for law in laws(service("torch")).laws if law.status != "holds"] == []
    finally:
        torch.set_num_threads(threads)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lawful.py").write_text("def mean(query, key, value):\n    return query * 0 + 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["conformance", "laws", "lawful:mean"]) == 1
    text = capsys.readouterr().out
    assert "constant_values         broken       output[0, 0, 0, 0] is 2 where all values are 1, else 1" in text
    assert "constant_values: the smallest input that shows it: batch 1, num_heads 1" in text
    assert main(["conformance", "laws", "lawful:mean", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"holds": 5, "broken": 1, "error": 0, "unsupported": 2}
    assert [law["name"] for law in found["laws"]] == list(LAWS)
    assert found == laws_as_json(laws("lawful:mean"))
    assert main(["conformance", "laws", "lawful:mean", "--format", "junit"]) == 1
    suite = ElementTree.fromstring(capsys.readouterr().out)[0]
    assert (suite.attrib["failures"], suite.attrib["skipped"], suite.attrib["tests"]) == ("1", "2", "8")
    assert main(["conformance", "laws", "lawful:mean", "--dtypes", "float16", "bfloat16"]) == 1
    assert "head_dim 16, dtype float16" in capsys.readouterr().out
    assert main(["conformance", "laws", "lawful:absent"]) == 3
    assert capsys.readouterr().err == "lawful:absent: lawful has no absent\n"


@pytest.mark.torch
def test_the_command_with_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensors.py").write_text(
        "import torch\n\n\ndef attention(query, key, value, out, is_causal=False):\n"
        "    out.copy_(torch.nn.functional.scaled_dot_product_attention(\n"
        "        query, key, value, is_causal=is_causal, enable_gqa=True))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["conformance", "laws", "tensors:attention", "--torch", "--dtypes", "bfloat16"]) == 1
    assert "writes_everything       holds" in capsys.readouterr().out
    status = main(["conformance", "laws", "tensors:attention", "--torch", "--format", "json"])
    found = {law["name"]: law["status"] for law in json.loads(capsys.readouterr().out)["laws"]}
    # torch multiplies hidden values by weights of 0, and its sums may depend on the batch
    assert (status, found["ignores_hidden"], found["mergeable"]) == (1, "broken", "unsupported")
    assert {found[name] for name in ("writes_everything", "constant_values", "heads_permuted", "lengths")} == {"holds"}
