"""Gradients of random requests in float64, as torch differentiates a composition of its own functions.

A request has options of two kinds: some of the table of all options, or those of recipes with corners, such as rows
without a key, biases of -∞ and weights that underflow. Where no query sees a token, or a token sees no key, NaN and
infinity stand in half of the requests that the service gets.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from attention_service.attention.planning import make_plan
from attention_service.attention.spec import AttentionSpec
from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.inputs import OPTIONS, make_input
from attention_service.comparison.recipes import Recipe
from attention_service.conformance import changes
from attention_service.errors import InvalidRequest
from attention_service.pipeline.prepare import make_spec_and_plan
from tests.helpers.by_torch import Composed, composed
from tests.helpers.options import plain, unusual
from tests.peers.gradients_of_jax import by_jax
from tests.peers.run import run_seeds
from tests.test_gradients import OPTIONS as OF_TABLE
from tests.test_gradients import TOLERANCE, leaves

MOST_OF_TABLE = 6
SHARE = 0.25  # of requests that have an option of a recipe
# Options of layouts without a batch axis.
WITHOUT_BATCH = sorted(
    {"is_causal", "window", "chunk_size", "alibi_slopes", "relative_keys", "softcap", "clip_qkv", "sinks", "rotary"}
    | {"query_norm", "key_norm", "value_norm", "output_norm"}
)
# What edits a request that has an option, None for any.
CORNERS: tuple[tuple[str | None, changes.Change], ...] = (
    ("bias", changes.bias_with_infinities),
    ("bias", changes.bias_with_empty_row),
    ("mask", changes.mask_with_empty_rows),
    ("segment_ids", changes.lonely_segment),
    ("key_lengths", changes.no_keys),
    ("selected_keys", changes.select_repeatedly),
    ("selected_keys", changes.select_nothing),
    ("query_norm", changes.biased_norms),
    (None, changes.query_lengths),
    (None, changes.gate_by_head),
    (None, changes.large_scores),
)
# Differences of scores whose exponentials are 0.
UNDERFLOWS = -800.0
# Scores whose roundoff, which norms enlarge, is more than what is allowed elsewhere.
LARGE = 100.0
POISON = (np.nan, np.inf, -np.inf)


def of_table(random: np.random.Generator) -> AttentionSpec:
    """A request with up to six options of the table, as far as they go together."""
    heads, length, pairs = (int(x) for x in random.integers((1, 4, 1), (4, 9, 3)))
    sizes = 2, heads, length, 6 * pairs
    spec, table, fields = plain(*sizes), unusual(*sizes), set[str]()
    for name in random.choice(OF_TABLE, int(random.integers(1, MOST_OF_TABLE + 1)), replace=False):
        changed = spec._replace(**table[name])
        if fields & table[name].keys() or not _is_valid(changed):
            continue
        spec, fields = changed, fields | table[name].keys()
    spec = AttentionSpec(*(_redrawn(value, random) for value in spec))
    inputs = {"input": spec.query, "query": None, "key": None, "value": None}
    with_input = spec._replace(**inputs, context=spec.key if random.random() < 0.5 else None)
    return with_input if random.random() < 0.3 and _is_valid(with_input) else spec


def _is_valid(spec: AttentionSpec) -> bool:
    try:
        make_plan(spec)
    except InvalidRequest:
        return False
    return True


def _redrawn(value: Any, random: np.random.Generator) -> Any:
    """Other floats of the same shape; integers and booleans in another order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _redrawn(getattr(value, name), random) for name in names})
    if isinstance(value, float):
        return value * random.uniform(0.5, 2)
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "f":
        return random.normal(size=value.shape)
    return random.permutation(value.ravel()).reshape(value.shape)


def of_recipe(random: np.random.Generator) -> AttentionSpec:
    """A request with options of a recipe, and corners."""
    groups, kv_heads, pairs, past = (int(x) for x in random.integers(1, (4, 4, 7, 5)))
    queries, keys = int(random.integers(3, 13)), int(random.integers(12, 24))  # of which a third is selected
    sizes: dict[str, Any] = {"queries": min(queries, keys + 4), "keys": keys, "past": past, "kv_heads": kv_heads}
    sizes |= {"heads": groups * kv_heads, "head_dim": 2 * pairs, "value_dim": int(random.integers(1, 13))}
    kinds = {"kind": ("rms", "layer"), "over": ("head", "all"), "position": ("before", "after")}
    sizes["norm"] = {name: str(random.choice(names)) for name, names in kinds.items()}
    sizes |= {"softcap": random.uniform(0.5, 5), "clip": random.uniform(0.5, 2)}
    sizes |= {name: bool(random.random() < SHARE) for name in ("scales_heads", "has_row_sinks")}
    keeps_batch = random.random() < 0.8
    sizes["has_row_sinks"] &= keeps_batch
    names = sorted({*OPTIONS, "past"} - {"query_lengths"}) if keeps_batch else WITHOUT_BATCH
    options = {name for name in names if random.random() < SHARE}
    normalization = str(random.choice(["softmax", "sigmoid", "sum"], p=[0.8, 0.1, 0.1]))
    if normalization != "softmax":
        options.discard("sinks")
    sizes |= {"alignment": "each" if keeps_batch else "last"}
    sizes |= {"normalization": "sigmoid"} if normalization == "sigmoid" else {}
    fields = make_input(Recipe(frozenset(options), dtype="float64", **sizes), int(random.integers(2**31)))
    if normalization == "sum":
        changes.sum_of_scores(fields, random)
    for option, change in CORNERS if keeps_batch else ():
        if option in {None, *options} and random.random() < SHARE:
            change(fields, random)
    (_any_layout if keeps_batch else _without_batch)(fields, random)
    return make_spec_and_plan(Decoded(fields, frozenset()))[0]


def _any_layout(fields: changes.Fields, random: np.random.Generator) -> None:
    """Set the layout and what options leave open, or add a map of gates."""
    if "gate" in fields or random.random() < 1 - SHARE:
        changes.combined(lambda name: True)(fields, random)
        return
    activation = str(random.choice(["sigmoid", "softplus", "silu", "none"]))
    fields["num_kv_heads"] = fields["key"].shape[1]
    changes.mapped_gate(activation, None if random.random() < 0.5 else 1)(fields, random)


def _without_batch(fields: changes.Fields, random: np.random.Generator) -> None:
    """Take another layout, with a mask and a bias for all heads."""
    q, k = changes.lengths(fields)
    heads, kv_heads = fields["query"].shape[1], fields["key"].shape[1]
    layout = str(random.choice(["hld", "ld", "dl", "bdl", "blhd"]))
    changes.to_layout(fields, layout)
    if "h" not in layout:
        fields |= {"num_heads": heads, "num_kv_heads": kv_heads}
    shape = (k, q) if layout in ("dl", "bdl") else (q, k)
    if random.random() < SHARE:
        fields["mask"] = random.random(shape) < 0.6
    if random.random() < SHARE:
        fields["bias"] = np.where(random.random(shape) < 0.2, -np.inf, random.normal(size=shape))


def poisoned(spec: AttentionSpec, right: Composed, random: np.random.Generator) -> AttentionSpec:
    """The request with NaN and infinity in tokens that no query sees, and in queries that see no key.

    An output norm may turn the 0 of such a query into its bias, which a gate of NaN multiplies: these queries stay.
    """
    if spec.input is not None or spec.query is None or spec.query.ndim == 1:
        return spec
    seen = right.seen.numpy()
    past = 0 if spec.past_key is None else spec.past_key.shape[-2]
    hidden = dict.fromkeys(("key", "value"), ~seen.any((1, 2)))
    hidden |= {"query": ~seen.any((1, 3))} if spec.output_norm is None else {}
    layout, changed = spec.layout or {2: "ld", 3: "bld", 4: "bhld"}[spec.query.ndim], {}
    for name, tokens in hidden.items():
        array = np.array(getattr(spec, name))
        moved = np.moveaxis(array if "b" in layout else array[None], _axes(layout), (0, 1))
        moved[tokens[:, past:] if name != "query" else tokens] = random.choice(POISON)
        changed[name] = array
    for name in ("past_key", "past_value") if past and "b" in layout else ():
        array = np.array(getattr(spec, name))
        np.moveaxis(array, -2, 1)[hidden["key"][:, :past]] = random.choice(POISON)
        changed[name] = array
    return spec._replace(**changed, allow_non_finite=True)


def _axes(layout: str) -> tuple[int, int]:
    """Where batch and tokens are, in a layout with a batch axis in front if it has none."""
    layout = layout if "b" in layout else f"b{layout}"
    return layout.index("b"), layout.index("l")


def by_torch(random: np.random.Generator) -> float:
    """The largest deviation of the gradients of a random request, divided by what is allowed.

    Infinite for a gradient that is not exactly 0 where a key is hidden or its weight underflows.
    """
    spec = of_table(random) if random.random() < 0.5 else of_recipe(random)
    right = composed(spec)
    output, logsumexp = _cotangents(right, random)
    loss = (right.output * torch.tensor(output)).sum()
    if right.logsumexp is not None:
        loss = loss + (right.logsumexp * torch.tensor(logsumexp)).sum()
    loss.backward()
    stages = right.stages if spec.select_heads is None and spec.select_queries is None else {}
    if logsumexp is not None:
        logsumexp = logsumexp.reshape(_shown(spec, logsumexp))
    include = tuple(name for name in spec.include if spec.top_k or name != "attention_weights")
    request = spec._replace(grad_output=output, grad_logsumexp=logsumexp, gradients="all", include=(*include, *stages))
    if random.random() < 0.5:
        request = poisoned(request, right, random)
    expected = {f"grad_{name}": leaf.grad for name, leaf in right.leaves.items()}
    expected |= {name: _transposed(stage.grad, spec) for name, stage in stages.items()}
    # The gradient of a scale is 0 with normalization sum: what is added to that is large where the sum is small.
    terms = right.stages["grad_scaled_scores"].grad * right.stages["grad_scores"].detach()
    sizes = {"grad_scale": float(terms.abs().sum())}
    scores = right.stages["grad_scaled_scores"].detach().masked_fill(~right.seen, 0)
    condition = max(1.0, float(scores.abs().max()) / LARGE)
    plan = make_plan(request)
    worst = 0.0
    for backend in ("numpy", "torch"):
        arrays = Backends().choose(backend, "cpu").run(plan, request, request.sources).arrays
        found = dict(leaf for name in arrays if name.startswith("grad_") for leaf in leaves(name, arrays[name]))
        assert found.keys() == expected.keys()
        worst = max(
            worst, *(_deviation(found[name], gradient, sizes.get(name, 0.0)) for name, gradient in expected.items())
        )
        if not _has_zeros(found, request, right, stages):
            return np.inf
    return worst / condition


def _cotangents(right: Composed, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
    """Random cotangents of output and logsumexp."""
    output = random.normal(size=tuple(right.output.shape))
    return output, None if right.logsumexp is None else random.normal(size=tuple(right.logsumexp.shape))


def _transposed(scores: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Scores (b, h, q, k) with the axes of a response: where tokens are columns, queries are, too."""
    return scores.mT.contiguous() if spec.layout in ("dl", "bdl") else scores


def _shown(spec: AttentionSpec, logsumexp: np.ndarray) -> tuple[int, ...]:
    """The shape of a logsumexp in a request."""
    b, h, q = logsumexp.shape
    layout = spec.layout or "bld"
    return (*((b,) if "b" in layout else ()), *((h,) if "h" in layout or h > 1 else ()), q)


def _deviation(found: np.ndarray, gradient: torch.Tensor | None, size: float) -> float:
    """The largest deviation of a gradient, divided by the tolerance of the largest number, or of 1.

    size: of the terms of a sum, where this is more
    """
    right = np.zeros(found.shape) if gradient is None else gradient.numpy().reshape(found.shape)
    allowed = TOLERANCE * (1 + max(size, float(np.abs(right).max(initial=0))))
    deviation = np.abs(found - right).max(initial=0) / allowed
    return float(deviation) if np.isfinite(deviation) else np.inf


def _has_zeros(
    found: Mapping[str, np.ndarray], request: AttentionSpec, right: Composed, stages: Mapping[str, torch.Tensor]
) -> bool:
    """True if gradients are exactly 0 where keys are hidden, have no weight, or are not finite."""
    hidden = ~right.seen
    if request.normalization == "softmax" and stages:
        scores = stages["grad_masked_scores"].detach().masked_fill(hidden, -torch.inf)
        hidden = hidden | (scores - scores.amax(-1, keepdim=True).clamp_min(-1e300) < UNDERFLOWS)
    hidden = _transposed(hidden, request)
    zeros = [found[name][hidden.numpy().reshape(found[name].shape)] for name in stages]
    for name in ("query", "key", "value", "past_key", "past_value"):
        array = getattr(request, name)
        zeros += [] if array is None else [found[f"grad_{name}"][~np.isfinite(array)]]
    return not any(array.any() for array in zeros)


# By name: what makes a configuration and compares it, and returns the ratio of the deviation to what is allowed.
GRADIENTS: dict[str, Callable[[np.random.Generator], float]] = {"gradients": by_torch, "gradients of JAX": by_jax}


def ratio(name: str, seed: int) -> float:
    """The largest deviation of both backends in the configuration of a seed, divided by what is allowed."""
    return GRADIENTS[name](np.random.default_rng([zlib.crc32(name.encode()), seed]))


def run_gradients(name: str, examples: int, first_seed: int) -> tuple[int, float]:
    """Compare so many configurations, as `run_seeds` does."""
    return run_seeds(name, ratio, examples, first_seed)
