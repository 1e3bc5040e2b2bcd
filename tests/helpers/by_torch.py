"""Attention as docs/attention.md defines it, composed of torch's functions in float64, so that torch differentiates it.

No code of the service. Arrays that have gradients are leaves of torch's graph, by the dotted names of their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

DIFFERENTIABLE = (
    *("query", "key", "value", "input", "context", "projection", "past_key", "past_value"),
    *("query_norm", "key_norm", "value_norm", "output_norm", "relative_keys"),
    *("scale", "bias", "alibi_slopes", "sinks", "gate"),
)
ACTIVATIONS = {
    "none": lambda x: x,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


class Composed(NamedTuple):
    """output: in the axes of the request; logsumexp: (b, h, q); leaves: by field; stages: scores by name

    seen: which keys a query sees, (b, h, q, k)
    """

    output: torch.Tensor
    logsumexp: torch.Tensor | None
    leaves: dict[str, torch.Tensor]
    stages: dict[str, torch.Tensor]
    seen: torch.Tensor


def leaf(array: Any) -> torch.Tensor:
    """A copy in float64 that torch differentiates."""
    return torch.tensor(np.asarray(array, np.float64), requires_grad=True)


class _Composition:
    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.leaves: dict[str, torch.Tensor] = {}
        self.fields = {name: self.tensor(name, getattr(spec, name)) for name in DIFFERENTIABLE}

    def tensor(self, place: str, value: Any) -> Any:
        """A leaf for an array or number, a dict of them for an object."""
        if value is None:
            return None
        if dataclasses.is_dataclass(value):
            parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {
                name: self.tensor(f"{place}.{name}", part)
                if isinstance(part, np.ndarray) or dataclasses.is_dataclass(part)
                else part
                for name, part in parts.items()
            }
        self.leaves[place] = leaf(value)
        return self.leaves[place]

    def tokens(self, array: torch.Tensor) -> torch.Tensor:
        """(b, l, features), or (b, h, l, d) in layouts with heads."""
        layout = self.layout
        if array.ndim == 1:
            array = array[None] if layout == "ld" else array[:, None]
        missing = "" if "b" in layout else "b"
        array = array[None] if missing else array
        wanted = "bhld" if "h" in layout else "bld"
        return array.permute([(missing + layout).index(axis) for axis in wanted])

    def role(self, name: str, source: torch.Tensor, heads: int) -> torch.Tensor:
        """Query, key or value (b, h, l, d) before its steps."""
        tokens = self.tokens(source)
        linear = (self.fields["projection"] or {}).get(name)
        if linear:
            tokens = mapped(tokens, linear)
        if tokens.ndim == 4:
            return tokens
        return tokens.reshape(*tokens.shape[:2], heads, -1).transpose(1, 2)

    def compose(self) -> Composed:
        spec, fields = self.spec, self.fields
        rank = max(getattr(spec, name).ndim for name in ("query", "key", "value", "input", "context")
                   if getattr(spec, name) is not None)  # fmt: skip
        self.layout = spec.layout or {2: "ld", 3: "bld", 4: "bhld"}[rank]
        x, context = fields["input"], fields["context"] if fields["context"] is not None else fields["input"]
        sources = (x, context, context) if x is not None else (fields["query"], fields["key"], fields["value"])
        h, g = self.heads(sources)
        query, key, value = (
            self.role(name, source, heads)
            for name, source, heads in zip(("query", "key", "value"), sources, (h, g, g), strict=True)
        )
        past = 0 if fields["past_key"] is None else fields["past_key"].shape[-2]
        query = self.steps(query, "query", past)
        key, value = self.steps(key, "key", past), self.steps(value, "value", past)
        if past:
            b = len(key)
            key = torch.cat([fields["past_key"].reshape(b, g, past, -1), key], 2)
            value = torch.cat([fields["past_value"].reshape(b, g, past, -1), value], 2)
        key, value = (array.repeat_interleave(h // g, 1) for array in (key, value))
        weights, logsumexp, stages, seen = self.weights(query, key)
        outputs = self.normalised(weights @ value, "output")
        joined = self.joined(self.gated(outputs, sources[0]))
        return Composed(joined, logsumexp, self.leaves, stages, seen)

    def heads(self, sources: tuple[torch.Tensor, ...]) -> tuple[int, int]:
        spec, projection = self.spec, self.fields["projection"] or {}
        found = []
        for name, source, asked in (("query", sources[0], spec.num_heads), ("key", sources[1], spec.num_kv_heads)):
            linear = projection.get(name)
            own = None
            if "h" in self.layout:
                own = source.shape[self.layout.index("h")]
            elif linear:
                matrix = linear["weight"] if linear["weight"] is not None else linear["kernel"]
                own = len(matrix) if matrix.ndim == 3 else None
            found.append(asked or own)
        h = found[0] or 1
        return h, found[1] or h

    def steps(self, array: torch.Tensor, name: str, past: int) -> torch.Tensor:
        """Norm, clip and rotation."""
        norm = self.fields[f"{name}_norm"]
        if norm and norm["position"] == "before":
            array = self.normalised(array, name)
        if self.spec.clip_qkv is not None:
            array = array.clamp(-self.spec.clip_qkv, self.spec.clip_qkv)
        if self.spec.rotary is not None and name != "value":
            array = self.rotated(array, name, past)
        return self.normalised(array, name) if norm and norm["position"] == "after" else array

    def normalised(self, array: torch.Tensor, name: str) -> torch.Tensor:
        norm = self.fields[f"{name}_norm"]
        if norm is None:
            return array
        axes = (1, 3) if norm["over"] == "all" else (3,)
        if norm["kind"] == "layer":
            array = array - array.mean(axes, keepdim=True)
        array = array * (array.square().mean(axes, keepdim=True) + norm["eps"]).rsqrt()
        h, d = array.shape[1], array.shape[3]

        def shaped(parameter: torch.Tensor) -> torch.Tensor:
            return parameter.reshape(-1, 1, d) if parameter.numel() == h * d else parameter

        if norm["weight"] is not None:
            array = array * shaped(norm["weight"])
        return array if norm["bias"] is None else array + shaped(norm["bias"])

    def rotated(self, array: torch.Tensor, name: str, past: int) -> torch.Tensor:
        rotary, (_, _, length, d) = self.spec.rotary, array.shape
        positions = getattr(rotary, f"{name}_positions")
        positions = past + np.arange(length) if positions is None else positions
        if rotary.cos is not None:
            tables = rotary.cos, rotary.sin
            cos, sin = tables if rotary.cos.ndim == 3 else (table[positions] for table in tables)
        else:
            dim = rotary.dim or d
            angles = np.multiply.outer(positions, (rotary.base or 10000.0) ** (-np.arange(0, dim, 2) / dim))
            cos, sin = np.cos(angles), np.sin(angles)
        cos, sin = (torch.tensor(table if table.ndim == 2 else table[:, None]) for table in (cos, sin))
        half = cos.shape[-1]
        if rotary.interleaved:
            x, y = array[..., 0 : 2 * half : 2], array[..., 1 : 2 * half : 2]
            turned = torch.stack([x * cos - y * sin, x * sin + y * cos], -1).flatten(-2)
        else:
            x, y = array[..., :half], array[..., half : 2 * half]
            turned = torch.cat([x * cos - y * sin, x * sin + y * cos], -1)
        return torch.cat([turned, array[..., 2 * half :]], -1)

    def weights(
        self, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor], torch.Tensor]:
        """Weights (b, h, q, k), logsumexp, the scores by their names, and what is seen of them."""
        spec, fields = self.spec, self.fields
        b, h, q, d = query.shape
        k = key.shape[2]
        scores = query @ key.transpose(2, 3)
        offset = self.offset(b, q, k)
        distances = np.arange(k) - np.arange(q)[:, None] - offset[:, None, None]  # b q k
        if fields["relative_keys"] is not None:
            relative = fields["relative_keys"]
            table = relative["key"] if relative["key"].ndim == 3 else relative["key"].expand(h, -1, -1)
            count = table.shape[1]
            first = -(count // 2) if relative["first"] is None else relative["first"]
            places = np.broadcast_to(np.clip(distances - first, 0, count - 1), (b, q, k))
            turned = query if relative["query_bias"] is None else query + relative["query_bias"][:, None]
            every = torch.einsum("bhqd,hnd->bhqn", turned, table)
            scores = scores + every.gather(3, torch.tensor(places.copy())[:, None].expand(b, h, q, k))
        scale = fields["scale"] if fields["scale"] is not None else 1 / np.sqrt(d)
        scaled = scores * (scale[:, None, None] if torch.is_tensor(scale) and scale.ndim else scale)
        capped = scaled if spec.softcap is None else spec.softcap * torch.tanh(scaled / spec.softcap)
        masked = capped
        if fields["bias"] is not None:
            masked = masked + self.broadcast(fields["bias"], b, h)
        if fields["alibi_slopes"] is not None:
            masked = masked - fields["alibi_slopes"][:, None, None] * torch.tensor(np.abs(distances))[:, None]
        seen = torch.tensor(self.seen(b, h, q, k, distances, offset))
        stages = {"grad_scores": scores, "grad_scaled_scores": scaled, "grad_masked_scores": masked}
        for stage in stages.values():
            stage.retain_grad()
        hidden = masked.masked_fill(~seen, -torch.inf)
        if spec.normalization == "sigmoid":
            return torch.sigmoid(hidden), None, stages, seen
        if spec.normalization == "sum":
            shown = masked.masked_fill(~seen, 0.0)
            total = shown.sum(-1, keepdim=True)
            return torch.where(total == 0, 0.0, shown / torch.where(total == 0, 1.0, total)), None, stages, seen
        if fields["sinks"] is None:
            sees = seen.any(-1, keepdim=True)
            weights = torch.softmax(hidden.masked_fill(~sees, 0.0), -1).masked_fill(~sees, 0.0)
            lse = torch.logsumexp(hidden.masked_fill(~sees, 0.0), -1)
            return weights, torch.where(sees[..., 0], lse, 0.0), stages, seen
        sinks = fields["sinks"]
        column = sinks[:, None].expand(h, q) if sinks.ndim == 1 else sinks.reshape(b, h, q)
        extended = torch.cat([hidden, column.expand(b, h, q)[..., None]], -1)
        return torch.softmax(extended, -1)[..., :-1], torch.logsumexp(extended, -1), stages, seen

    def offset(self, b: int, q: int, k: int) -> np.ndarray:
        past = self.spec.past_key
        given = self.spec.query_offset
        if given is None:
            given = np.array(0 if past is None else past.shape[-2])
        return np.broadcast_to(given, (b,))

    def broadcast(self, array: Any, b: int, h: int) -> Any:
        """A mask or bias with axes that broadcast to (b, h, q, k)."""
        if "b" in self.layout and array.ndim == 3:
            return array[None]
        if array.ndim > 1 and self.layout in ("dl", "bdl"):
            array = array.swapaxes(-1, -2)
        return array

    def seen(self, b: int, h: int, q: int, k: int, distances: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Which keys a query sees, (b, h, q, k)."""
        spec, seen = self.spec, np.ones((b, h, q, k), bool)
        i, j = np.arange(q), np.arange(k)
        if spec.mask is not None:
            seen &= self.broadcast(spec.mask, b, h)
        if spec.key_mask is not None:
            seen &= np.broadcast_to(spec.key_mask, (b, k))[:, None, None]
        seen &= self.near(q, distances, offset)[:, None]
        if spec.query_lengths is not None:
            seen &= (i < np.broadcast_to(spec.query_lengths, (b,))[:, None])[:, None, :, None]
        if spec.key_lengths is not None:
            seen &= (j < np.broadcast_to(spec.key_lengths, (b,))[:, None])[:, None, None]
        if spec.segment_ids is not None:
            of_queries = np.broadcast_to(spec.segment_ids.query, (b, q))
            of_keys = np.broadcast_to(spec.segment_ids.key, (b, k))
            seen &= (of_queries[:, :, None] == of_keys[:, None])[:, None]
        if spec.selected_keys is not None:
            indices = spec.selected_keys
            indices = np.broadcast_to(indices if indices.ndim != 3 else indices[None], (b, h, q, indices.shape[-1]))
            seen &= (indices[..., None] == j).any(-2)
        if spec.bias is not None:
            seen &= ~np.isneginf(np.asarray(self.broadcast(spec.bias, b, h)))
        return seen

    def near(self, q: int, distances: np.ndarray, offset: np.ndarray) -> np.ndarray:
        """Which keys a query sees by its position, (b, q, k)."""
        spec, seen = self.spec, np.ones(distances.shape, bool)
        if spec.is_causal:
            seen &= distances <= 0
        if spec.window is not None:
            left, right = spec.window.left, spec.window.right
            seen &= distances >= (-np.inf if left is None else -left)
            seen &= distances <= (np.inf if right is None else right)
        if spec.chunk_size is not None:
            chunks = (np.arange(q) + offset[:, None]) // spec.chunk_size
            seen &= chunks[..., None] == np.arange(distances.shape[2]) // spec.chunk_size
        return seen

    def gated(self, outputs: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        gate, (b, h, q, _) = self.fields["gate"], outputs.shape
        linear = (self.fields["projection"] or {}).get("gate")
        if linear:
            gate = ACTIVATIONS[linear["activation"]](mapped(self.tokens(source), linear))
            gate = gate.reshape(b, q, h, -1).transpose(1, 2)
        return outputs if gate is None else outputs * gate.reshape(b, h, q, -1)

    def joined(self, outputs: torch.Tensor) -> torch.Tensor:
        """The output in the axes of the request."""
        layout = self.layout
        tokens, axes = outputs, "bhld"
        if "h" not in layout:
            tokens, axes = outputs.transpose(1, 2).flatten(2), "bld"
            linear = (self.fields["projection"] or {}).get("output")
            if linear:
                tokens = mapped(tokens, linear)
        if "b" not in layout:
            tokens, axes = tokens[0], axes[1:]
        tokens = tokens.permute([axes.index(axis) for axis in layout])
        query = self.spec.query
        return tokens.squeeze(layout.index("l")) if query is not None and query.ndim == 1 else tokens


def mapped(tokens: torch.Tensor, linear: Mapping[str, Any]) -> torch.Tensor:
    """x Wᵀ + bias, all heads after each other."""
    matrix = linear["weight"] if linear["weight"] is not None else linear["kernel"].transpose(-1, -2)
    found = tokens @ matrix.reshape(-1, matrix.shape[-1]).T
    return found if linear["bias"] is None else found + linear["bias"].reshape(-1)


def composed(spec: Any) -> Composed:
    """The request, composed. spec: its fields, as attributes"""
    return _Composition(spec).compose()
