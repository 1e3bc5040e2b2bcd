"""The gradients that torch's attention and JAX compute on a CPU, judged: right in every type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from attention_service.library import compare

torch = pytest.importorskip("torch")
CORES: Final = {
    "math": torch.nn.attention.SDPBackend.MATH,
    "flash": torch.nn.attention.SDPBackend.FLASH_ATTENTION,
}
TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES: Final = ("grad_query", "grad_key", "grad_value")


def requests(count: int, seed: int, dtype: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Random requests, and what torch's function takes beside query, key and value."""
    for n in range(seed, seed + count):
        random, generator = np.random.default_rng(n), torch.Generator().manual_seed(n)
        d, heads = int(random.choice([4, 16, 64, 128])), int(random.integers(1, 5))
        keys = int(random.integers(1, 400))
        queries = keys if random.random() < 0.5 else int(random.integers(1, 200))
        lengths = {"query": queries, "key": keys, "value": keys, "grad_output": queries}
        arrays = {
            name: (torch.randn(2, heads, length, d, generator=generator) * float(random.choice([0.3, 1, 3]))).to(dtype)
            for name, length in lengths.items()
        }
        options: dict[str, Any] = {}
        if random.random() < 0.5:
            options = {"is_causal": True}  # aligns the first query with the first key
        elif random.random() < 0.3:
            options = {"attn_mask": torch.from_numpy(random.random((queries, keys)) < 0.7)}
            options["attn_mask"][:, 0] = True
        if random.random() < 0.3:
            options["scale"] = 0.5
        yield {**arrays, "layout": "bhld"}, options


def gradients_of_torch(core: str, fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The gradients of torch's own function."""
    inputs = [fields[name].clone().requires_grad_() for name in ("query", "key", "value")]
    with torch.nn.attention.sdpa_kernel(CORES[core]):
        output = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
    output.backward(fields["grad_output"])
    return dict(zip(NAMES, (one.grad for one in inputs), strict=True))


def judged(actual: dict[str, Any], fields: dict[str, Any], options: dict[str, Any]) -> Any:
    """The verdict. options: of torch's function"""
    request = fields | {name: value for name, value in options.items() if name != "attn_mask"}
    if options.get("is_causal"):
        request["query_offset"] = 0
    if "attn_mask" in options:
        request["mask"] = options["attn_mask"]
    return compare(actual, **request, time_limit=1e-3).verdict


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_torch_are_right(dtype: str, core: str) -> None:
    check_torch(core, dtype, 6, 0)


def check_torch(core: str, dtype: str, count: int, seed: int) -> float:
    """Judge so many gradients. Returns the largest ratio."""
    largest = 0.0
    for fields, options in requests(count, seed, TYPES[dtype]):
        try:
            actual = gradients_of_torch(core, fields, options)
        except RuntimeError as error:  # a mask, or a type, that the core does not take
            assert "No available kernel" in str(error)
            continue
        verdict = judged(actual, fields, options)
        assert verdict.ratio is not None, (fields["query"].shape, options, verdict)
        assert verdict.ratio <= 2, (fields["query"].shape, fields["key"].shape, options, verdict)
        largest = max(largest, verdict.ratio)
    return largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_jax_are_right(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    for fields, options in requests(1, 101, TYPES[dtype]):
        arrays = {
            name: jax.numpy.asarray(fields[name].float().numpy()).astype(dtype).swapaxes(1, 2)
            for name in ("query", "key", "value", "grad_output")
        }
        scale, is_causal = options.get("scale"), options.get("is_causal", False)
        mask = None if "attn_mask" not in options else options["attn_mask"].numpy()[None, None]
        call = partial(jax.nn.dot_product_attention, bias=None, mask=mask, scale=scale, is_causal=is_causal)
        _, pull = jax.vjp(call, arrays["query"], arrays["key"], arrays["value"])
        found = pull(arrays["grad_output"])
        actual = {name: one.swapaxes(1, 2) for name, one in zip(NAMES, found, strict=True)}
        verdict = judged(actual, fields, options)
        assert verdict.ratio is not None
        assert verdict.ratio <= 2, (fields["query"].shape, options, verdict)


def by_rounded_weights(fields: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Gradients as torch's efficient attention computes them in float16 on a GPU: dS is made of rounded weights."""
    half, inputs = torch.float16, {name: fields[name].double() for name in ("query", "key", "value", "grad_output")}
    query, key, value, cotangent = inputs.values()
    scale = options.get("scale", query.shape[-1] ** -0.5)
    seen = options.get("attn_mask", torch.ones(query.shape[2], key.shape[2], dtype=torch.bool))
    seen = seen.tril() if options.get("is_causal") else seen
    weights = torch.softmax((query @ key.mT * scale).masked_fill(~seen, -torch.inf), -1)
    delta = (cotangent * (weights @ value).to(half)).sum(-1, keepdim=True)
    weights = weights.to(half).double()
    of_scores = (weights * (cotangent @ value.mT - delta) * scale).to(half).double()
    found = of_scores @ key, of_scores.mT @ query, weights.mT @ cotangent
    return {name: array.to(half) for name, array in zip(NAMES, found, strict=True)}


def test_gradients_of_rounded_weights_are_right() -> None:
    """Each by itself, too: what is drawn for one must not depend on the others."""
    for fields, options in requests(8, 0, torch.float16):
        found = by_rounded_weights(fields, options)
        for actual in (found, *({name: array} for name, array in found.items())):
            verdict = judged(actual, fields, options)
            assert verdict.ratio <= 2, (fields["query"].shape, options, verdict)
