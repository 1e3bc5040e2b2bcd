"""Laws of ragged batches and paged caches: they hold for exact answers, and are broken by what breaks them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from attention_service import call
from attention_service.conformance import call_laws
from attention_service.conformance.addressing_laws import Subject, mergeable
from attention_service.conformance.target import Unsupported
from tests.helpers.engine_calls import Draw
from tests.helpers.engine_draws import DRAWS

NAMES = ("deterministic", "pages_permuted", "unused_ignored", "alone", "mergeable")


def statuses(function: Any, name: str, arguments: dict[str, Any], version: int | None = None) -> dict[str, str]:
    found = call_laws(function, call=name, version=version, **arguments).laws
    assert [law.name for law in found] == [*NAMES]
    return {law.name: law.status if law.message is None else f"{law.status}: {law.message}" for law in found}


def paged(lengths: list[int], page: int = 4, **more: Any) -> dict[str, Any]:
    """A call of flash_attn_with_kvcache whose last pages are not full, with pages in any order."""
    random, b = np.random.default_rng(0), len(lengths)
    columns = -(-max(lengths) // page)
    cache = random.normal(size=(2, b * columns + 2, page, 2, 8)).astype(np.float32)
    table = random.permutation(b * columns + 2)[: b * columns].reshape(b, columns).astype(np.int32)
    q = random.normal(size=(b, 1, 4, 8)).astype(np.float32)
    arrays = {"q": q, "k_cache": cache[0], "v_cache": cache[1], "block_table": table}
    return arrays | {"cache_seqlens": np.array(lengths, np.int32), **more}


def gathered(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, block_table: np.ndarray,
             cache_seqlens: np.ndarray, fault: str = "") -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """A kernel of one query for each sequence, with a fault: output and logsumexp."""
    page = k_cache.shape[1]
    outputs, sums = np.zeros_like(q), np.zeros((len(q), q.shape[2], 1), np.float32)
    for n, length in enumerate(cache_seqlens.tolist()):
        used = block_table[n][: -(-length // page)]
        used = np.sort(used) if fault == "order" else used
        k, v = (cache[used].reshape(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        seen = np.arange(len(k)) < length
        if fault != "stale":
            k, v, seen = k[:length], v[:length], seen[:length]
        for head in range(q.shape[2]):
            scores = np.where(seen, k[:, head // 2] @ q[n, 0, head], -np.inf)
            weights = np.exp(scores - scores.max())
            outputs[n, 0, head] = weights / weights.sum() @ v[:, head // 2]
            sums[n, head] = scores.max() + np.log(weights.sum())
    if fault == "batch":
        outputs += 1e-7 * outputs.sum(axis=0)
    return outputs, sums / math.log(2) if fault == "base" else sums


BROKEN = {
    "": set(),
    "order": {"pages_permuted", "unused_ignored"},
    "stale": {"unused_ignored"},
    "batch": {"alone"},
    "base": {"mergeable"},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_breaks_its_law(fault: str) -> None:
    def kernel(**arguments: Any) -> Any:
        return gathered(**arguments, fault=fault)

    found = statuses(kernel, "flash_attn.flash_attn_with_kvcache", paged([5, 9, 1, 8]))
    assert {name for name, status in found.items() if status != "holds"} == BROKEN[fault], found
    assert all(found[name].startswith("broken: output[") for name in BROKEN[fault])


def test_a_function_that_changes_by_itself_is_not_deterministic() -> None:
    random = np.random.default_rng(0)
    found = statuses(
        lambda **arguments: gathered(**arguments)[0] + random.normal(),
        "flash_attn.flash_attn_with_kvcache", paged([5, 9]),
    )  # fmt: skip
    assert found["deterministic"].startswith("broken: output[0, 0, 0] is ")


def test_a_function_that_raises_is_an_error() -> None:
    def kernel(**arguments: Any) -> Any:
        raise KeyError("no kernel")

    found = statuses(kernel, "flash_attn.flash_attn_with_kvcache", paged([5, 9]))
    assert all(status.startswith("error: KeyError: 'no kernel'") for status in found.values())


# Of functions without pages, or without a batch.
HELD = {
    "flash_attn_func": {"deterministic", "alone"},
    "flashinfer single": {"deterministic"},
    "torch SDPA": {"deterministic"},
}


@pytest.mark.parametrize("name", DRAWS)
def test_laws_hold_for_exact_answers_of_random_calls(name: str) -> None:
    """In the words of every library; where a call has nothing that a law is about, it is unsupported."""
    held: set[str] = set()
    for seed in range(12):
        drawn = DRAWS[name](Draw(seed))
        exact = lambda **given: call(drawn.function, version=drawn.version, **given)  # noqa: B023, E731
        found = statuses(exact, drawn.function, drawn.arguments, drawn.version)
        for law, status in found.items():
            assert status == "holds" or status.startswith("unsupported: "), (seed, law, status, drawn.arguments.keys())
        held |= {law for law, status in found.items() if status == "holds"}
    few = {"mergeable"}  # of few calls
    assert held - few == HELD.get(name, {*NAMES} - few)


@pytest.mark.parametrize("name", sorted(DRAWS.keys() - {"flashinfer single", "torch SDPA"}))
def test_parts_of_the_keys_are_merged_in_every_vocabulary(name: str) -> None:
    """The law holds for exact answers, and notices a logsumexp of another base, wherever it can be checked."""
    found = []
    for seed in range(400):
        drawn = DRAWS[name](Draw(seed))
        arguments = {one: value for one, value in drawn.arguments.items() if value is not None}

        def exact(unit: float, drawn: Any = drawn, **given: Any) -> Any:
            answer = call(drawn.function, version=drawn.version, **given)
            return answer.output, answer.logsumexp * unit

        law = {unit: Subject(partial(exact, unit), drawn.function, drawn.version, arguments) for unit in (1.0, 2.0)}
        try:
            assert mergeable(law[1.0]) is None, seed
            found.append(mergeable(law[2.0]) is not None)
        except Unsupported:
            continue
        if len(found) == 8:
            break
    assert sum(found) > len(found) / 2  # where one key has all the weight, the base does not matter


def returning(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, block_table: np.ndarray,
              cache_seqlens: np.ndarray, return_softmax_lse: bool = False) -> Any:  # fmt: skip
    """A kernel that returns its logsumexp if it is asked for it."""
    found = gathered(q, k_cache, v_cache, block_table, cache_seqlens)
    return found if return_softmax_lse else found[0]


def test_a_function_is_asked_for_its_logsumexp() -> None:
    name = "flash_attn.flash_attn_with_kvcache"
    assert statuses(returning, name, paged([5, 9]))["mergeable"] == "holds"
    only = statuses(lambda **arguments: gathered(**arguments)[0], name, paged([5, 9]))
    assert only["mergeable"] == "unsupported: returns no logsumexp"
    for arguments in (paged([1, 4]), paged([9, 9], window_size=(2, 0))):
        assert statuses(partial(call, name), name, arguments)["mergeable"].startswith("unsupported: no query that sees")

    def infinite(**given: Any) -> list[np.ndarray]:
        return [array * np.nan for array in call(name, **given)[:2]]

    assert "sequence 0 cut before key 4: /parts/0/logsumexp" in statuses(infinite, name, paged([5, 9]))["mergeable"]
