"""Random requests with combinations of options, and their results by torch's FlexAttention in float64 on the CPU.

FlexAttention calls functions for each score; they are written here anew from the definition in docs/attention.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attention_service.attention.arrays import FLOATS

OPTIONS = ("causal", "offset", "window", "segments", "key_mask", "key_lengths", "query_lengths", "mask", "bias",
           "alibi", "softcap", "sinks", "weights", "logsumexp")  # fmt: skip
# Relative to the largest number. For 16-bit types: the rounding of the output, and of the weights before it.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}
LAST_PLACE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class RandomRequest:
    """Fields of a request in layout bhld, the names of its options, and its dtype."""

    fields: dict[str, Any]
    options: frozenset[str]
    dtype: str

    def expected(self) -> dict[str, np.ndarray]:
        """The expected output, attention_weights and logsumexp, in float64."""
        query, key, value = (self.fields[name].astype(np.float64) for name in ("query", "key", "value"))
        (b, h, q, d), (_, g, k, _) = query.shape, key.shape
        seen, added = self._visible(b, q, k), self._bias(b, h, q, k)
        scale = self.fields.get("scale", 1 / np.sqrt(d))
        everything = np.concatenate([value, np.broadcast_to(np.eye(k), (b, g, k, k))], axis=-1)
        found, logsumexp = flex(query, key, everything, seen, added, scale, self.fields.get("softcap"))
        if "sinks" in self.options:
            sinks = self.fields["sinks"][:, None].astype(np.float64)
            with np.errstate(invalid="ignore"):
                together = np.logaddexp(logsumexp, sinks)
            found *= np.exp(logsumexp - together)[..., None]
            logsumexp = together
        e = value.shape[-1]
        return {"output": found[..., :e], "attention_weights": found[..., e:], "logsumexp": logsumexp}

    def _visible(self, b: int, q: int, k: int) -> np.ndarray:
        """True where query i may attend to key j, (b, h or 1, q, k)."""
        fields, i, j = self.fields, np.arange(q)[:, None], np.arange(k)[None]
        offset = np.atleast_1d(fields.get("query_offset", 0))[:, None, None, None]
        seen = np.ones((b, 1, q, k), bool)
        if fields.get("is_causal"):
            seen = seen & (j <= i + offset)
        window = fields.get("window", {})
        if "left" in window:
            seen = seen & (j >= i + offset - window["left"])
        if "right" in window:
            seen = seen & (j <= i + offset + window["right"])
        if "segment_ids" in fields:
            ids = fields["segment_ids"]
            seen = seen & (ids["query"][:, None, :, None] == ids["key"][:, None, None, :])
        if "key_mask" in fields:
            seen = seen & fields["key_mask"][:, None, None, :]
        if "key_lengths" in fields:
            seen = seen & (j < fields["key_lengths"][:, None, None, None])
        if "query_lengths" in fields:
            seen = seen & (i < fields["query_lengths"][:, None, None, None])
        if "mask" in fields:
            seen = seen & fields["mask"]
        return seen

    def _bias(self, b: int, h: int, q: int, k: int) -> np.ndarray:
        added = np.zeros((b, h, q, k))
        if "bias" in self.fields:
            added = added + self.fields["bias"].astype(np.float64)
        if "alibi_slopes" in self.fields:
            offset = np.atleast_1d(self.fields.get("query_offset", 0))[:, None, None, None]
            distance = np.abs(np.arange(q)[:, None] + offset - np.arange(k))
            added = added - self.fields["alibi_slopes"].astype(np.float64)[:, None, None] * distance
        return added


def random_request(seed: int, longest: int = 40) -> RandomRequest:
    """A random request with up to `longest` tokens. Half of all seeds give head sizes that fused kernels support."""
    random = np.random.default_rng(seed)
    fused_size = random.random() < 0.5
    b, g, groups, q, k = (int(random.integers(1, most)) for most in (4, 3, 4, longest, longest))
    d, e = (int(x) for x in random.integers(1, 40, 2))
    if fused_size:
        d = e = int(random.choice([16, 32, 64, 128]))
    h, dtype = g * groups, str(random.choice(["float64", "float32", "float16", "bfloat16"]))
    options = frozenset(name for name in OPTIONS if random.random() < 0.2)
    include = [name for name in ("logsumexp",) if name in options]
    include += ["attention_weights"] if "weights" in options else []

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(FLOATS[dtype])

    fields: dict[str, Any] = {"query": normal(b, h, q, d), "key": normal(b, g, k, d), "value": normal(b, g, k, e)}
    fields |= {"layout": "bhld", "include": include, "query_offset": random.integers(-3, 9, b) * ("offset" in options)}
    drawn: dict[str, Callable[[], dict[str, Any]]] = {
        "causal": lambda: {"is_causal": True},
        "window": lambda: {"window": {"left": int(random.integers(0, 9)), "right": int(random.integers(0, 9))}},
        "segments": lambda: {
            "segment_ids": {
                "query": np.sort(random.integers(0, 3, (b, q))),
                "key": np.sort(random.integers(0, 3, (b, k))),
            }
        },
        "key_mask": lambda: {"key_mask": random.random((b, k)) < 0.8},
        "key_lengths": lambda: {"key_lengths": random.integers(0, k + 1, b)},
        "query_lengths": lambda: {"query_lengths": random.integers(0, q + 1, b)},
        "mask": lambda: {"mask": random.random((1, h, q, k)) < 0.8},
        "bias": lambda: {"bias": random.normal(size=(b, 1, q, k)).astype(np.float32)},
        "alibi": lambda: {"alibi_slopes": random.random(h).astype(np.float32)},
        "softcap": lambda: {"softcap": float(random.uniform(0.5, 5))},
        "sinks": lambda: {"sinks": random.normal(size=h).astype(np.float32)},
    }
    for name in drawn.keys() & options:
        fields |= drawn[name]()
    return RandomRequest(fields, options, dtype)


def flex(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    seen: np.ndarray,
    added: np.ndarray,
    scale: float,
    softcap: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs and logsumexp by torch's FlexAttention, without compilation."""
    import torch
    from torch.nn.attention import flex_attention as module

    tensors = [torch.from_numpy(array) for array in (query, key, value)]
    visible, extra = (torch.from_numpy(np.broadcast_to(array, added.shape).copy()) for array in (seen, added))

    def score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        capped = score if softcap is None else softcap * torch.tanh(score / softcap)
        return torch.where(visible[b, h, i, j], capped + extra[b, h, i, j], -torch.inf)

    before = module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # so that it runs the definition step by step
    try:
        outputs, aux = module.flex_attention(
            *tensors, score_mod=score, scale=scale, enable_gqa=True, return_aux=module.AuxRequest(lse=True)
        )
    finally:
        module._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
    return outputs.numpy().copy(), aux.lse.numpy().copy()


def compare(ours: dict[str, np.ndarray], request: RandomRequest) -> None:
    """Assert that results agree: within 1e-12 in float64, 2e-6 √k in float32, and in 16-bit types within two units in
    the last place, plus one unit of the largest value where weights are rounded, too, as tensor cores do."""
    keys = request.fields["key"].shape[2]
    for name, theirs in request.expected().items():
        if name not in ours:
            continue
        mine = ours[name].astype(np.float64)
        finite = np.isfinite(theirs)
        np.testing.assert_array_equal(np.isfinite(mine), finite, err_msg=name)
        mine, theirs = mine[finite], theirs[finite]
        largest = np.max(np.abs(theirs), initial=0.0)
        computed = "float64" if request.dtype == "float64" else "float32"
        allowed = TOLERANCE[computed] * np.sqrt(keys) * np.maximum(1.0, largest)
        if request.dtype in LAST_PLACE and name != "logsumexp":
            unit = LAST_PLACE[request.dtype]
            allowed = allowed + 2 * unit * np.abs(theirs)
            if name == "output" and "attention_weights" not in ours:
                allowed = allowed + unit * np.max(np.abs(request.fields["value"].astype(np.float64)))
        assert np.all(np.abs(mine - theirs) <= allowed), (name, request.options, request.dtype)
