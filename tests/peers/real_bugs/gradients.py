"""Bugs of backward passes: the output and the logsumexp are right, gradients are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.peers.real_bugs.parts import F32, LOG2E, Arrays, Bug, Fields, asks, named, normal


@dataclass(slots=True)
class Pass:
    """A backward pass in float32 in layout bhld, one query head for each key/value head, with all that kernels keep.

    scores: capped and masked; slope: of the softcap
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: np.ndarray
    scores: np.ndarray
    slope: np.ndarray
    logsumexp: np.ndarray
    delta: np.ndarray

    @classmethod
    def of(cls, fields: Fields) -> Pass:
        q, do = fields["query"].astype(F32), fields["grad_output"].astype(F32)
        group = q.shape[1] // fields["key"].shape[1]
        k, v = (np.repeat(fields[name].astype(F32), group, axis=1) for name in ("key", "value"))
        scale = F32(fields.get("scale", q.shape[-1] ** -0.5))
        scores = q @ k.swapaxes(-1, -2) * scale
        slope = np.ones_like(scores)
        if cap := fields.get("softcap"):
            scores = F32(cap) * np.tanh(scores / F32(cap))
            slope = 1 - np.square(scores / F32(cap))
        if fields.get("is_causal"):
            scores = np.where(mask(q.shape[2], k.shape[2], int(fields["query_offset"])), scores, -np.inf)
        if "query_lengths" in fields:
            real = np.arange(q.shape[2]) < np.asarray(fields["query_lengths"])[:, None]
            scores = np.where(real[:, None, :, None], scores, -np.inf)
        sums = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), -1e30))
        total = sums.sum(axis=-1, keepdims=True)
        logsumexp = np.maximum(scores.max(axis=-1, keepdims=True), -1e30) + np.log(np.where(total == 0, 1, total))
        if "sinks" in fields:
            logsumexp = np.logaddexp(logsumexp, fields["sinks"][:, None, None].astype(F32))
        output = np.exp(scores - logsumexp) @ v
        return cls(q, k, v, do, scale, scores, slope, logsumexp, (output * do).sum(axis=-1, keepdims=True))

    def gradients(self, weights: np.ndarray | None = None, dp: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """What the pass returns for one query head for each key/value head."""
        weights = np.exp(self.scores - self.logsumexp) if weights is None else weights
        dp = self.do @ self.v.swapaxes(-1, -2) if dp is None else dp
        ds = weights * (dp - self.delta) * self.slope * self.scale
        return {
            "grad_query": ds @ self.k,
            "grad_key": ds.swapaxes(-1, -2) @ self.q,
            "grad_value": weights.swapaxes(-1, -2) @ self.do,
        }


def mask(queries: int, keys: int, offset: int) -> np.ndarray:
    """(q, k), True where a causal mask lets a query see a key."""
    found: np.ndarray = np.arange(keys) <= np.arange(queries)[:, None] + offset
    return found


def differentiable(**options: Any) -> Callable[[np.random.Generator], Fields]:
    """A request with a random cotangent; as many key/value heads as heads."""
    b, h, q, d = (options.get(name, least) for name, least in (("b", 1), ("h", 4), ("q", 128), ("d", 64)))
    e = options.get("e", d)
    return asks(**{"g": h} | options, grad_output=normal(b, h, q, e))


def logsumexp_without_gradient(fields: Fields, wrong: bool) -> Arrays:
    found = Pass.of(fields)
    if not wrong:
        found.delta = found.delta - fields["grad_logsumexp"][..., None]
    return found.gradients()


def logsumexp_of_the_merge(fields: Fields, wrong: bool) -> Arrays:
    """The backward pass takes powers of two, of a logsumexp that the merge of the ring left in base e."""
    found = Pass.of(fields)
    in_base_two = found.logsumexp * (1 if wrong else F32(LOG2E))
    return found.gradients(np.exp2(found.scores * F32(LOG2E) - in_base_two))


def softcap_of_masked_scores(fields: Fields, wrong: bool) -> Arrays:
    found = Pass.of(fields)
    if wrong:
        found.slope = 1 - np.square(found.scores / F32(fields["softcap"]))
    return found.gradients()


def causal_of_square_matrices(fields: Fields, wrong: bool) -> Arrays:
    found = Pass.of(fields)
    weights = np.exp(found.q @ found.k.swapaxes(-1, -2) * found.scale - found.logsumexp)
    offset = 0 if wrong else int(fields["query_offset"])
    return found.gradients(np.where(mask(found.q.shape[2], found.k.shape[2], offset), weights, 0))


def delta_of_other_memory(fields: Fields, wrong: bool) -> Arrays:
    """Output and cotangent have tokens before heads, and are read as if heads came first."""
    found = Pass.of(fields)
    if wrong:
        b, h, q, _ = found.delta.shape
        found.delta = found.delta.swapaxes(1, 2).reshape(b, h, q, 1)
    return found.gradients()


def value_channels_of_the_query(fields: Fields, wrong: bool) -> Arrays:
    """dP of the gradient of the query sums over as many features of a value as a key has; values have more."""
    found = Pass.of(fields)
    right = found.gradients()
    if wrong:
        d = found.q.shape[-1]
        right["grad_query"] = found.gradients(dp=found.do[..., :d] @ found.v[..., :d].swapaxes(-1, -2))["grad_query"]
    return right


def sink_of_padded_rows(fields: Fields, wrong: bool) -> Arrays:
    found = Pass.of(fields)
    sinks = fields["sinks"][:, None, None].astype(F32)
    # The delta of padded rows is what memory holds there: of the output of a batch without padding.
    rows = np.exp(sinks - found.logsumexp) * -found.delta
    if wrong:
        whole = Pass.of({name: value for name, value in fields.items() if name != "query_lengths"})
        rows = np.exp(sinks - whole.logsumexp) * -whole.delta
    return {"grad_sinks": rows.sum(axis=(0, 2, 3))}


def tail_over_the_next_head(fields: Fields, wrong: bool) -> Arrays:
    """The last tile of 64 keys of a head ends in the next head, whose first rows it overwrites with zeros."""
    found = Pass.of(fields).gradients()
    if wrong:
        beyond = -found["grad_value"].shape[2] % 64
        found["grad_value"][:, 1:, :beyond] = 0
    return found


def row_sums_of_weights(fields: Fields, wrong: bool) -> Arrays:
    """D as rowsum(P ⊙ dP) or as rowsum(O ⊙ dO): one is taken for a mistake of the other, and is none."""
    found = Pass.of(fields)
    if wrong:
        dp = found.do @ found.v.swapaxes(-1, -2)
        found.delta = (np.exp(found.scores - found.logsumexp) * dp).sum(axis=-1, keepdims=True)
    return found.gradients()


BUGS: Final[tuple[Bug, ...]] = (
    Bug(
        "Dao-AILab/flash-attention#889",
        "the gradient with respect to the logsumexp is not passed on",
        differentiable(grad_logsumexp=normal(1, 4, 128)),
        logsumexp_without_gradient,
        named("grad.lse_cotangent_ignored"),
    ),
    Bug(
        "meta-pytorch/attention-gym#200",
        "the logsumexp of a ring, in base e, reaches a backward pass that takes powers of two",
        differentiable(),
        logsumexp_of_the_merge,
        named("grad.lse_base2"),
    ),
    Bug(
        "openxla/tokamax#1121",
        "the derivative of the softcap is captured after masking, where the square overflows",
        differentiable(softcap=5.0, is_causal=True, query_offset=np.asarray(0)),
        softcap_of_masked_scores,
        named("grad.softcap_after_mask"),
    ),
    Bug(
        "xlite-dev/ffpa-attn#300",
        "forward aligns the last query with the last key, backward the first with the first",
        differentiable(q=48, k=128, is_causal=True, query_offset=np.asarray(80)),
        causal_of_square_matrices,
        named("grad.causal_shifted"),
    ),
    Bug(
        "FlagOpen/FlagAttention#1",
        "delta is computed as if the output had heads before tokens in memory",
        differentiable(),
        delta_of_other_memory,
        named("grad.delta_layout"),
    ),
    Bug(
        "XunhaoLai/native-sparse-attention-triton#27",
        "the gradient of the query reads as many features of a value as a key has",
        differentiable(d=32, e=64),
        value_channels_of_the_query,
        named("grad.value_features"),
    ),
    Bug(
        "NVIDIA/cudnn-frontend#557",
        "padded queries add to the gradient of the sinks",
        differentiable(sinks=normal(4), query_lengths=np.asarray([100])),
        sink_of_padded_rows,
        named("grad.sink_padding"),
    ),
    Bug(
        "FlagOpen/FlagGems#898",
        "the padded tail of a head overwrites the first rows of the next head's dV",
        differentiable(q=100),
        tail_over_the_next_head,
    ),
    Bug(
        "huggingface/picotron#37",
        "D as rowsum(dO · O), which is reported as a mistake for rowsum(dP · P)",
        differentiable(),
        row_sums_of_weights,
        is_visible=False,
    ),
)
