"""Fast paths are safe: each of them refuses an option, or gives the same results as the general path."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from attention_service.attention import merging
from attention_service.attention.operands import make_operands
from attention_service.attention.options import ALWAYS
from attention_service.attention.outputs import OUTPUTS as TABLE
from attention_service.attention.plan import Plan, make_plan
from attention_service.attention.result import Result, make_result
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.spec import (
    SOURCES,
    AttentionSpec,
    GateMap,
    LinearMap,
    Norm,
    Projection,
    Rotary,
    SegmentIds,
    Window,
)
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.numpy.small import fits
from attention_service.library import attend
from tests.helpers.backends import HAS_TORCH

B, H, L, D = 2, 2, 4, 6


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


ARRAYS: dict[str, Any] = {name: numbers(B, L, H * D, seed=seed) for seed, name in enumerate(("query", "key", "value"))}
PLAIN = AttentionSpec(**ARRAYS, num_heads=H, include=("attention_weights",))

# For each field of a request, and each nested field, a value that differs from its default.
UNUSUAL: dict[str, dict[str, Any]] = {
    "projection.query.weight": {"projection": Projection(query=LinearMap(weight=numbers(12, 12)))},
    "projection.query.kernel": {"projection": Projection(query=LinearMap(kernel=numbers(12, 12)))},
    "projection.query.bias": {"projection": Projection(query=LinearMap(weight=numbers(12, 12), bias=numbers(12)))},
    "projection.key": {"projection": Projection(key=LinearMap(weight=numbers(12, 12)))},
    "projection.value": {"projection": Projection(value=LinearMap(weight=numbers(12, 12)))},
    "projection.output": {"projection": Projection(output=LinearMap(weight=numbers(5, 12)))},
    "projection.gate": {"projection": Projection(gate=GateMap(weight=numbers(12, 12), bias=numbers(12)))},
    "projection.gate of heads": {"projection": Projection(gate=GateMap(kernel=numbers(12, H), activation="none"))},
    "projection.gate by softplus": {
        "projection": Projection(gate=GateMap(weight=numbers(12, 12), activation="softplus"))
    },
    "projection.gate by silu": {"projection": Projection(gate=GateMap(weight=numbers(H, D, 12), activation="silu"))},
    "gate": {"gate": numbers(B, H, L, D)},
    "gate of heads": {"gate": numbers(B, H, L, 1), "include": ("attention_weights", "head_outputs")},
    "layout": {"layout": "lbd"},
    "num_heads": {"num_heads": 1},
    "num_kv_heads": {"num_kv_heads": 1, "key": numbers(B, L, D), "value": numbers(B, L, D, seed=1)},
    "past_key": {"past_key": numbers(B, H, 3, D), "past_value": numbers(B, H, 3, D, seed=1)},
    "past_value": {"past_key": numbers(B, H, 1, D), "past_value": numbers(B, H, 1, D, seed=1)},
    "query_norm.weight": {"query_norm": Norm(weight=numbers(D))},
    "query_norm.eps": {"query_norm": Norm(eps=0.5)},
    "query_norm.kind": {"query_norm": Norm(kind="layer")},
    "query_norm.over": {"query_norm": Norm(over="all", weight=numbers(H * D), bias=numbers(H * D, seed=1))},
    "query_norm.position": {"query_norm": Norm(position="after", weight=numbers(D)), "rotary": Rotary()},
    "query_norm.bias": {"query_norm": Norm(bias=numbers(D))},
    "key_norm": {"key_norm": Norm()},
    "value_norm": {"value_norm": Norm()},
    "value_norm of layers": {"value_norm": Norm(kind="layer", over="all", weight=numbers(H * D))},
    "rotary.base": {"rotary": Rotary(base=100.0)},
    "rotary.cos": {"rotary": Rotary(cos=numbers(L, 3), sin=numbers(L, 3, seed=1))},
    "rotary.sin": {"rotary": Rotary(cos=numbers(L, 2), sin=numbers(L, 2, seed=1))},
    "rotary.dim": {"rotary": Rotary(dim=4)},
    "rotary.interleaved": {"rotary": Rotary(interleaved=True)},
    "rotary.query_positions": {"rotary": Rotary(query_positions=np.arange(L) + 3)},
    "rotary.key_positions": {"rotary": Rotary(key_positions=np.arange(L) * 2)},
    "scale": {"scale": 3.0},
    "scale of each head": {"scale": np.array([0.5, -2.0])},
    "softcap": {"softcap": 0.5},
    "bias": {"bias": numbers(L, L)},
    "alibi_slopes": {"alibi_slopes": np.array([0.5, 2.0])},
    "mask": {"mask": numbers(L, L) > 0},
    "key_mask": {"key_mask": np.arange(L) != 1},
    "is_causal": {"is_causal": True},
    "query_offset": {"is_causal": True, "query_offset": np.array(-2)},
    "chunk_size": {"chunk_size": 3, "query_offset": np.array(-1)},
    "window.left": {"window": Window(left=1)},
    "window.right": {"window": Window(right=0)},
    "query_lengths": {"query_lengths": np.array(2)},
    "key_lengths": {"key_lengths": np.array(2)},
    "key_lengths of each entry": {"key_lengths": np.array([2, 3])},
    "query_offset of each entry": {"is_causal": True, "query_offset": np.array([0, -2])},
    "segment_ids.query": {"segment_ids": SegmentIds(np.array([0, 0, 1, 2]), np.arange(L))},
    "segment_ids.key": {"segment_ids": SegmentIds(np.arange(L), np.array([0, 0, 1, 2]))},
    "selected_keys": {"selected_keys": np.array([[0, 0, 3], [-1, 2, 1], [-1, -1, -1], [3, 2, 1]])},
    "selected_keys of each head": {"selected_keys": np.arange(B * H * L).reshape(B, H, L, 1) % (L + 1) - 1},
    "sinks": {"sinks": np.array([1.0, -2.0])},
    "sinks of each row": {"sinks": numbers(B, H, L) * 3},
    "sinks of each row, weights without them": {
        "sinks": numbers(B, H, L) * 3,
        "include": ("attention_weights", "weights_without_sinks", "logsumexp"),
    },
    "normalization": {"normalization": "sum"},
    "normalization by the sigmoid": {"normalization": "sigmoid"},
    "dtype": {"dtype": "float16"},
    "device": {"device": "cpu"},
    "backend": {"backend": "numpy"},
    "select_heads": {"select_heads": np.array([1])},
    "select_queries": {"select_queries": np.array([3, 1])},
    "average_heads": {"average_heads": True},
    "top_k": {"top_k": 2},
    "query_tokens": {"query_tokens": ("a",) * L},
    "key_tokens": {"key_tokens": ("a",) * L},
    "untyped": {"untyped": frozenset({"query"})},
    "allow_non_finite": {"allow_non_finite": True},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    f"include {name}": {"include": ("attention_weights", name)} for name in TABLE if name != "attention_weights"
}
CHANGES = UNUSUAL | OUTPUTS | {"include nothing": {"include": ()}, "one vector": {"query": numbers(12)}}


def changed(name: str) -> AttentionSpec:
    if name == "one vector":
        two = {role: numbers(L, 12, seed=seed) for seed, role in enumerate(("key", "value"))}
        return PLAIN._replace(**CHANGES[name] | two)
    return PLAIN._replace(**CHANGES[name])


def without_weights(name: str) -> AttentionSpec:
    """The changed request, without outputs that a fused kernel cannot return."""
    spec = changed(name)
    kept = tuple(output for output in spec.include if output != "attention_weights")
    return spec._replace(include=spec.include if spec.top_k else kept)


def general(spec: AttentionSpec) -> Result:
    """The result of the general path, with tiles of one score."""
    backend = NumpyBackend()
    backend.small_scores = 0
    backend.tiling = replace(backend.tiling, scores=1, fast_rows=1, fast_columns=2, divide_last_above=0)
    return backend.run(make_plan(spec), spec, spec.sources)


def arrays(result: Result) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in result.arrays.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def assert_same(found: Result, expected: Result, *, dtype: str = "float64") -> None:
    tolerance = 1e-12 if dtype == "float64" else 1e-2
    theirs = dict(arrays(expected))
    for name, array in arrays(found):
        other = theirs.pop(name)
        assert (array.shape, array.dtype) == (other.shape, other.dtype), name
        np.testing.assert_allclose(array.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance)
    assert not theirs
    assert found.metadata.fully_masked_rows == expected.metadata.fully_masked_rows


def names(kind: Any, prefix: str = "") -> Iterator[str]:
    """The names of all fields of a request, with dots for nested fields."""
    nested = {"projection": Projection, "rotary": Rotary, "query_norm": Norm, "key_norm": Norm, "value_norm": Norm,
              "window": Window, "segment_ids": SegmentIds}  # fmt: skip
    for name in kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]:
        yield prefix + name
        if name in nested:
            yield from names(nested[name], f"{prefix}{name}.")


def test_every_field_of_a_request_has_an_unusual_value() -> None:
    missing = [
        name
        for name in names(AttentionSpec)
        if name not in SOURCES and name != "include" and not any(given.startswith(name) for given in UNUSUAL)
    ]
    # Norms and projections of other sources have the same fields as those tested.
    fields = ("kind", "over", "position", "weight", "bias", "eps")
    assert missing == [f"{role}_norm.{name}" for role in ("key", "value") for name in fields]


def test_a_plain_plan_has_no_other_options() -> None:
    plan = make_plan(PLAIN._replace(include=()))
    assert plan.options == ALWAYS


@pytest.mark.parametrize("name", CHANGES)
def test_the_small_path_refuses_or_agrees_with_the_general_path(name: str) -> None:
    spec = changed(name)
    assert_same(NumpyBackend().run(make_plan(spec), spec, spec.sources), general(spec), dtype=spec.dtype or "float64")


@pytest.mark.parametrize("name", CHANGES)
def test_merged_requests_agree_with_single_requests(name: str) -> None:
    """Requests that can be merged into a batch give the same results as alone."""
    spec = changed(name)
    plan = make_plan(spec)
    if not merging.can_be_merged(plan):
        return
    given: dict[str, Any] = {role: numbers(*array.shape, seed=9) for role, array in spec.sources.items()}
    specs = [spec, spec._replace(**given)]
    merged = merging.merge([plan, plan])
    operands = merging.merge_operands(merged, [make_operands(one, plan, one.sources) for one in specs])
    with np.errstate(all="ignore"):
        computed = NumpyBackend().execute(merged, operands, "cpu")
    for one, part in zip(specs, merging.split([plan, plan], computed), strict=True):
        assert_same(make_result(plan, part), general(one))


def test_only_requests_with_known_options_can_be_merged() -> None:
    mergeable = {name for name in CHANGES if merging.can_be_merged(make_plan(changed(name)))}
    assert mergeable >= {"is_causal", "softcap", "scale", "layout", "top_k", "include logsumexp"}
    assert not mergeable & {
        "bias",
        "mask",
        "rotary.base",
        "projection.query.weight",
        "past_key",
        "normalization",
        "sinks",
    }


@pytest.mark.torch
@pytest.mark.parametrize("name", CHANGES)
def test_fused_kernels_refuse_or_agree_with_the_general_path(name: str) -> None:
    from attention_service.backends.torch.backend import TorchBackend

    spec = without_weights(name)._replace(backend="torch")
    found = TorchBackend().run(make_plan(spec), spec, spec.sources)
    assert_same(found, general(spec), dtype=spec.dtype or "float64")


@pytest.mark.torch
@pytest.mark.parametrize("name", CHANGES)
def test_flex_attention_refuses_or_agrees_with_the_general_path(name: str) -> None:
    import torch

    from attention_service.backends.dense.operands import load_operands
    from attention_service.backends.torch import devices, flex
    from attention_service.backends.torch.backend import TorchBackend

    spec = without_weights(name)
    plan = make_plan(spec)
    lib = TorchBackend().library(plan, devices.CPU)
    with torch.inference_mode():
        loaded = load_operands(plan, make_operands(spec, plan, spec.sources), lib)
        if flex.can_express(plan, loaded):
            found = make_result(plan, flex.compute(plan, lib, loaded))
            assert_same(found, general(spec), dtype=spec.dtype or "float64")


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanWithAnOption(Plan):
    """A plan with an option that no fast path knows."""

    future: int = 0


@dataclass(frozen=True, slots=True)
class UnknownTerm(ScoreTerm):
    """A score term that no fast path knows."""


def unknown_options() -> dict[str, Plan]:
    plan = make_plan(PLAIN._replace(include=()))
    fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(Plan)}
    output = frozenset({"made_up"})
    return {
        "an option": PlanWithAnOption(**fields, future=1),
        "a term": replace(plan, terms=(UnknownTerm(),)),
        "an output": replace(plan, selection=replace(plan.selection, include=output)),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", ["an option", "a term", "an output"])
def test_all_fast_paths_refuse_an_unknown_option(name: str) -> None:
    plan = unknown_options()[name]
    assert len(plan.options - ALWAYS) == 1
    assert not fits(plan)
    assert not merging.can_be_merged(plan)
    if HAS_TORCH:
        from attention_service.backends.dense.operands import load_operands
        from attention_service.backends.torch import devices, flex, sdpa
        from attention_service.backends.torch.backend import TorchBackend

        lib = TorchBackend().library(plan, devices.CPU)
        loaded = load_operands(plan, make_operands(PLAIN, plan, PLAIN.sources), lib)
        assert not sdpa.fits(plan, loaded)
        assert not flex.can_express(plan, loaded)


def test_an_option_with_its_neutral_value_does_not_count() -> None:
    plan = unknown_options()["an option"]
    assert replace(plan, future=0).options == ALWAYS  # type: ignore[call-arg]  # a made-up field


def test_buffers_of_results_hold_nan_in_tests() -> None:
    """An output that was not computed is NaN, or -1 if it has integers, and cannot pass."""
    from attention_service.backends.dense.library import ArrayLibrary
    from attention_service.backends.numpy.backend import NumpyLibrary

    plan = make_plan(PLAIN)
    backend = NumpyBackend()
    assert ArrayLibrary.fill is not None
    assert math.isnan(ArrayLibrary.fill)
    lib = NumpyLibrary(plan, backend.tiling, None)
    assert np.isnan(lib.empty((2, 3), plan.dtype)).all()
    assert (lib.empty((2, 3), np.dtype(np.int32)) == -1).all()


def test_small_requests_take_the_small_path() -> None:
    assert attend(**ARRAYS).metadata.kernel == "small"
    assert attend(**ARRAYS, is_causal=True).metadata.kernel == "dense"
