"""Conformance of gradients by torch and JAX: what is right passes each corner, a wrong backward pass does not."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from attention_service.conformance.runner import CornerResult, run_cases
from attention_service.conformance.target import WithTensors
from tests.helpers.corners import GRADIENTS_BY_NAME, make_corner_cases

torch = pytest.importorskip("torch")
TYPES: Final = ("float32", "bfloat16", "float64", "float16")
# Each mistake, a corner in which it is wrong, and one that does not show it.
MISTAKES: Final = (
    ("group_not_summed", "gradients.grouped_heads", "gradients"),
    ("slope_absent", "gradients.softcap", "gradients"),
    ("slope_absent", "gradients.softcap_near", "gradients"),
    ("delta_absent", "gradients", "gradients.logsumexp_alone"),
    ("delta_absent", "gradients.cancellation", "gradients.zero"),
    ("scale_twice", "gradients.more_queries", "gradients.zero"),
    ("empty_nan", "gradients.empty_row", "gradients.mask"),
    ("empty_nan", "gradients.causal_empty_rows", "gradients.causal"),
    ("sink_absent", "gradients.sinks", "gradients"),
    ("causal_first", "gradients.causal_last", "gradients.causal"),
    ("logsumexp_ignored", "gradients.logsumexp", "gradients"),
    ("logsumexp_ignored", "gradients.logsumexp_alone", "gradients"),
    ("exponential_overflows", "gradients.large_scores", "gradients"),
    ("zero_divided", "gradients.zero", "gradients"),
)
# Corners whose options torch's own function has, and those of steps in a half type that do not hide a whole row.
OF_TORCH: Final = (
    *("gradients", "gradients.more_queries", "gradients.long", "gradients.value_dim", "gradients.grouped_heads"),
    *("gradients.large_scores", "gradients.bias", "gradients.mask", "gradients.empty_row", "gradients.causal"),
    *("gradients.causal_first", "gradients.causal_more_queries", "gradients.cancellation", "gradients.zero"),
)
IN_STEPS: Final = (
    *("gradients", "gradients.more_queries", "gradients.long", "gradients.value_dim", "gradients.grouped_heads"),
    *("gradients.mask", "gradients.softcap", "gradients.zero"),
)


def seen_by(b: int, q: int, k: int, options: dict[str, Any]) -> Any:
    """Which keys a query sees, (b, 1 or h, q, k)."""
    seen = torch.ones(b, 1, q, k, dtype=torch.bool)
    distances = torch.arange(k) - torch.arange(q)[:, None] - options.get("query_offset", 0)
    if "mask" in options:
        seen = seen & options["mask"]
    if "key_mask" in options:
        seen = seen & options["key_mask"][:, None, None]
    if "key_lengths" in options:
        seen = seen & (torch.arange(k) < options["key_lengths"][:, None])[:, None, None]
    if options.get("is_causal"):
        seen = seen & (distances <= 0)
    if "window" in options:
        seen = seen & (distances >= -options["window"]["left"]) & (distances <= options["window"]["right"])
    return seen


def weighed(query: Any, key: Any, options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Weights and logsumexp of (b, h, q, d) and (b, h, k, d), tanh of the softcap, and which keys are seen."""
    seen = seen_by(*query.shape[::2], key.shape[2], options)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    bent = torch.zeros_like(scores)
    if "softcap" in options:
        bent = torch.tanh(scores / options["softcap"])
        scores = options["softcap"] * bent
    if "bias" in options:
        scores = scores + options["bias"]
    scores = scores.masked_fill(~seen, -torch.inf)
    if "sinks" in options:
        sinks = options["sinks"].to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        joined = torch.cat([scores, sinks], -1)
        return torch.softmax(joined, -1)[..., :-1], torch.logsumexp(joined, -1), bent, seen
    sees = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~sees, 0)
    weights = torch.softmax(scores, -1).masked_fill(~seen, 0)
    return weights, torch.logsumexp(scores, -1), bent, seen


def differentiated(query: Any, key: Any, value: Any, **options: Any) -> dict[str, Any]:
    """Attention composed of torch's functions, in at least float32, for autograd."""
    layout, heads = options.get("layout", "bhld"), options.get("num_heads", 1)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (canonical(tensor.to(wide), layout, heads) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    weights, logsumexp, _, _ = weighed(q, k, options)
    return {"output": restored(weights @ v, layout).to(query.dtype), "logsumexp": logsumexp}


def canonical(tensor: Any, layout: str, heads: int) -> Any:
    """An array of a request with the axes (b, h, l, d)."""
    axes = "b" * ("b" in layout) + ("hld" if "h" in layout else "ld")
    found = tensor.permute([layout.index(letter) for letter in axes])
    found = found if "b" in layout else found[None]
    return found if "h" in layout else found.unflatten(-1, (heads, -1)).transpose(1, 2)


def restored(output: Any, layout: str) -> Any:
    """An output (b, h, q, e) in the axes of a request."""
    found = output if "h" in layout else output.transpose(1, 2).flatten(2)
    found = found if "b" in layout else found[0]
    axes = "b" * ("b" in layout) + ("hld" if "h" in layout else "ld")
    return found.permute([axes.index(letter) for letter in layout])


class Kernel(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """A kernel with a backward pass of its own. mistake: the first of a row of MISTAKES, or none"""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, sinks: Any, options: dict[str, Any], mistake: str) -> Any:
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        group = query.shape[1] // key.shape[1]
        q, k, v = query.to(wide), *(tensor.to(wide).repeat_interleave(group, 1) for tensor in (key, value))
        weights, logsumexp, bent, seen = weighed(q, k, options)
        output = weights @ v
        ctx.saved, ctx.arguments = (q, k, v, weights, output, logsumexp, bent, seen), (group, sinks, options, mistake)
        ctx.kind = query.dtype
        return output.to(query.dtype), logsumexp

    @staticmethod
    def backward(ctx: Any, of_output: Any, of_logsumexp: Any) -> Any:
        (q, k, v, weights, output, logsumexp, bent, seen), (group, sinks, options, mistake) = ctx.saved, ctx.arguments
        scale, dout = q.shape[-1] ** -0.5, of_output.to(q.dtype)
        if mistake == "causal_first" and "query_offset" in options:
            weights = weighed(q, k, options | {"query_offset": 0})[0]
        if mistake == "sink_absent":
            weights = weighed(q, k, {name: value for name, value in options.items() if name != "sinks"})[0]
        if mistake == "exponential_overflows":
            weights = torch.exp(q @ k.mT * scale) / torch.exp(logsumexp)[..., None]
        if mistake == "empty_nan":
            weights = weights / seen.any(-1, keepdim=True)
        delta = (output * dout).sum(-1, keepdim=True) * (mistake != "delta_absent")
        delta = delta - of_logsumexp[..., None] * (mistake != "logsumexp_ignored")
        gradient = weights * (dout @ v.mT - delta)
        of_sinks = None
        if sinks is not None:
            taken = torch.exp(sinks.to(q.dtype)[:, None] - logsumexp)
            of_sinks = -(taken * delta[..., 0]).sum((0, 2)).to(sinks.dtype)
        if mistake != "slope_absent":
            gradient = gradient * (1 - bent**2)
        if mistake == "zero_divided":
            gradient = gradient / dout.abs().amax() * dout.abs().amax()
        of_query = gradient @ k * scale ** (2 if mistake == "scale_twice" else 1)
        of_key, of_value = gradient.mT @ q * scale, weights.mT @ dout
        of_key, of_value = (one.unflatten(1, (-1, group)) for one in (of_key, of_value))
        of_key = of_key[:, :, 0] if mistake == "group_not_summed" else of_key.sum(2)
        found = (one.to(ctx.kind) for one in (of_query, of_key, of_value.sum(2)))
        return *found, of_sinks, None, None


def planted(
    query: Any, key: Any, value: Any, *, mistake: str = "", sinks: Any = None, include: Any = (), **options: Any
) -> Any:
    """Output and logsumexp of the kernel; a bias, which it does not differentiate, and layouts are not supported."""
    if options.keys() & {"bias", "layout"}:
        return NotImplemented
    options |= {} if sinks is None else {"sinks": sinks.detach()}
    return Kernel.apply(query, key, value, sinks, options, mistake)


def judged(name: str, target: Any, types: tuple[str, ...] = TYPES) -> CornerResult:
    """What is found of a target for two cases of each type."""
    cases = list(make_corner_cases(name, 2 * len(types), 3, types))
    return run_cases(cases, target, explain=False).corners[0]


@pytest.mark.parametrize("name", GRADIENTS_BY_NAME)
def test_what_torch_differentiates_is_right_in_every_corner(name: str) -> None:
    found = judged(name, WithTensors(differentiated, "cpu"))
    assert {outcome.status for outcome in found.outcomes} == {"correct"}, found.first_failure


@pytest.mark.parametrize(
    "name", [name for name in GRADIENTS_BY_NAME if name not in ("gradients.bias", "gradients.layouts")]
)
def test_a_right_backward_pass_is_right_in_every_corner(name: str) -> None:
    found = judged(name, WithTensors(planted, "cpu"))
    assert {outcome.status for outcome in found.outcomes} == {"correct"}, found.first_failure


def of_torch(
    query: Any, key: Any, value: Any, mask: Any = None, bias: Any = None, is_causal: bool = False, query_offset: int = 0
) -> Any:
    """torch's own function, whose causal mask aligns the first query with the first key."""
    if query_offset:
        return NotImplemented
    hidden = {"attn_mask": bias if mask is None else mask, "is_causal": is_causal}
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **hidden)


def in_steps(query: Any, key: Any, value: Any, mask: Any = None, softcap: float | None = None) -> Any:
    """Each step in the type of the query but the softmax, as models of Hugging Face compute it."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, torch.finfo(scores.dtype).min).to(scores.dtype)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_itself_computes_is_right(name: str) -> None:
    assert {outcome.status for outcome in judged(name, WithTensors(of_torch, "cpu")).outcomes} == {"correct"}


@pytest.mark.parametrize("name", IN_STEPS)
def test_steps_that_are_rounded_are_right(name: str) -> None:
    """Also where gradients of weights are rounded to a half type before D is subtracted."""
    types = ("float32", "bfloat16", "float16")
    assert {outcome.status for outcome in judged(name, WithTensors(in_steps, "cpu"), types).outcomes} == {"correct"}


@pytest.mark.parametrize(("mistake", "wrong", "right"), MISTAKES)
def test_a_mistake_is_wrong_in_its_corner(mistake: str, wrong: str, right: str) -> None:
    target = WithTensors(partial(planted, mistake=mistake), "cpu")
    assert {outcome.status for outcome in judged(wrong, target, ("float32", "float64")).outcomes} == {"wrong"}
    assert {outcome.status for outcome in judged(right, target).outcomes} == {"correct"}


def test_what_autograd_does_not_know_is_not_asked() -> None:
    def detached(query: Any, key: Any, value: Any, include: Any = ()) -> Any:
        return differentiated(query, key, value)["output"].detach()

    def silent(query: Any, key: Any, value: Any, include: Any = ()) -> Any:
        found = differentiated(query, key, value)
        return {**found, "logsumexp": found["logsumexp"].detach()}

    def refuses(query: Any, key: Any, value: Any) -> Any:
        return Refuses.apply(query)

    for target, name, reason in (
        (detached, "gradients", "not asked for gradients: autograd does not know where its output comes from"),
        (detached, "gradients.logsumexp", "returns no logsumexp"),
        (
            silent,
            "gradients.logsumexp",
            "not asked for gradients: autograd does not know where its logsumexp comes from",
        ),
        (refuses, "gradients", "not asked for gradients: no backward pass"),
    ):
        found = judged(name, WithTensors(target, "cpu"), ("float32",))
        assert (found.status, found.reason) == ("unsupported", reason)
    assert judged("gradients", WithTensors(silent, "cpu")).status == "correct"


class Refuses(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """A kernel without a backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Any) -> Any:
        return query.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("no backward pass")


def test_a_function_of_tensors_may_return_gradients_by_name() -> None:
    """And is given those of the output as tensors; autograd is not asked."""

    def named(query: Any, key: Any, value: Any, grad_output: Any) -> Any:
        leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        differentiated(*leaves)["output"].backward(grad_output)
        return {f"grad_{name}": leaf.grad for name, leaf in zip(("query", "key", "value"), leaves, strict=True)}

    assert judged("gradients.grouped_heads", WithTensors(named, "cpu")).status == "correct"


def test_jax_differentiates_what_returns_its_arrays() -> None:
    """Whether it takes any field, or names its parameters; what JAX cannot trace, or stops, is not asked."""
    jax = pytest.importorskip("jax")

    def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        operands = (jax.numpy.swapaxes(array, 1, 2) for array in (query, key, value))
        output, logsumexp = jax.nn.dot_product_attention(*operands, mask=mask, return_residual=True)
        return jax.numpy.swapaxes(output, 1, 2), jax.numpy.swapaxes(logsumexp, 1, 2)

    def any_fields(**fields: Any) -> Any:
        return attention(**fields) if fields.keys() <= {"query", "key", "value", "mask"} else NotImplemented

    def wrong(query: Any, key: Any, value: Any) -> Any:
        return attention(query, jax.lax.stop_gradient(key), value)[0]

    def untraceable(query: Any, key: Any, value: Any) -> Any:
        return jax.numpy.asarray(np.asarray(query))

    def found(target: Any, name: str, dtype: str = "float32") -> CornerResult:
        return run_cases(make_corner_cases(name, 1, 3, (dtype,)), target, explain=False).corners[0]

    assert found(attention, "gradients").status == "correct"
    assert found(attention, "gradients", "bfloat16").status == "correct"
    assert found(any_fields, "gradients.mask").status == "correct"
    assert found(wrong, "gradients").status == "wrong"
    assert (found(untraceable, "gradients").reason or "").startswith("not asked for gradients: JAX cannot trace it")
    stopped = found(attention, "gradients.logsumexp")
    assert stopped.reason == "not asked for gradients: JAX is told to stop those of its logsumexp"
