"""Attention in fifty digits, row by row, from the definition in docs/attention.md; no code of the service."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np

DIGITS = 50
MINUS_INFINITY = Decimal("-Infinity")
Vector = list[Decimal]


def exact(numbers: Any) -> Vector:
    return [Decimal(float(x)) for x in numbers]


@cache
def turn(position: int, base: float, exponent: tuple[int, int]) -> tuple[Decimal, Decimal]:
    """Cosine and sine of position · base^(-n/dim), by their series. exponent: n, dim"""
    with localcontext() as context:
        context.prec = 2 * DIGITS
        angle = position * Decimal(base) ** (-Decimal(exponent[0]) / Decimal(exponent[1]))
        sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
        while n < 2 or abs(term) > Decimal(10) ** -(DIGITS + 5):
            sums[n % 2] += term if n % 4 < 2 else -term
            n += 1
            term = term * angle / n
        return sums[0], sums[1]


class Exact:
    """A request, whose rows are computed one by one. Arrays are brought into the axes b, h, l, d first."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        layout = fields.get("layout", "bhld")
        heads, kv_heads = fields.get("num_heads", 0), fields.get("num_kv_heads", fields.get("num_heads", 0))
        self.query = canonical(fields["query"], layout, heads)
        self.key = canonical(fields["key"], layout, kv_heads)
        self.value = canonical(fields["value"], layout, kv_heads)
        self.past = fields["past_key"].shape[2] if "past_key" in fields else 0
        self.group = self.query.shape[1] // self.key.shape[1]
        self.keys = self.key.shape[2] + self.past

    def reach(self, b: int, h: int, i: int) -> float:
        """The largest magnitude of the scores of a row."""
        query = self.prepared(exact(self.query[b, h, i]), "query", b, i)
        scores = [self.score(query, b, h, i, j) for j in range(self.keys) if self.sees(b, h, i, j)]
        return max((abs(float(score)) for score in scores if score.is_finite()), default=0.0)

    def row(self, b: int, h: int, i: int) -> tuple[Vector, Decimal | None]:
        """Output and logsumexp of a row."""
        with localcontext() as context:
            context.prec = DIGITS
            query = self.prepared(exact(self.query[b, h, i]), "query", b, i)
            logsumexp: Decimal | None = None
            keys = [j for j in range(self.keys) if self.sees(b, h, i, j)]
            scores = {j: self.score(query, b, h, i, j) for j in keys}
            keys = [j for j in keys if scores[j] != MINUS_INFINITY]
            if self.fields.get("normalization") == "sum":
                weights = {j: scores[j] for j in keys}
            else:
                weights = {j: scores[j].exp() for j in keys}
            total = sum(weights.values(), Decimal(0))
            if "sinks" in self.fields:
                total += Decimal(float(self.fields["sinks"][h])).exp()
            if self.fields.get("normalization") != "sum":
                logsumexp = total.ln() if total else MINUS_INFINITY
            output = [Decimal(0)] * self.value.shape[-1]
            for j in keys:
                value = self.token("value", b, h, j)
                output = [x + weights[j] / total * y for x, y in zip(output, exact(value), strict=True)]
            return output, logsumexp

    def score(self, query: Vector, b: int, h: int, i: int, j: int) -> Decimal:
        """The score of a query and a key, with everything added."""
        key = exact(self.token("key", b, h, j))
        if j >= self.past:
            key = self.prepared(key, "key", b, j - self.past)
        product = sum((x * y for x, y in zip(query, key, strict=True)), Decimal(0))
        default = 1 / Decimal(len(query)).sqrt()
        score = product * (Decimal(self.fields["scale"]) if "scale" in self.fields else default)
        if "softcap" in self.fields:
            cap = Decimal(float(self.fields["softcap"]))
            grown = (2 * score / cap).exp()
            score = cap * (grown - 1) / (grown + 1)
        if "bias" in self.fields:
            score += Decimal(float(np.broadcast_to(self.fields["bias"], self.matrix)[b, h, i, j]))
        if "alibi_slopes" in self.fields:
            score -= Decimal(float(self.fields["alibi_slopes"][h])) * abs(i + self.offset(b) - j)
        return score

    @property
    def matrix(self) -> tuple[int, ...]:
        return (*self.query.shape[:3], self.keys)

    def offset(self, b: int) -> int:
        return int(np.broadcast_to(self.fields.get("query_offset", self.past), self.query.shape[:1])[b])

    def token(self, role: str, b: int, h: int, j: int) -> np.ndarray:
        """The key or value of a token, of the cache if it is one of its."""
        new: np.ndarray = getattr(self, role)
        token: np.ndarray = (
            self.fields[f"past_{role}"][b, h // self.group, j]
            if j < self.past
            else new[b, h // self.group, j - self.past]
        )
        return token

    def sees(self, b: int, h: int, i: int, j: int) -> bool:
        """True if a query sees a key; a bias of −∞ is not looked at."""
        given, at = self.fields, i + self.offset(b)
        window, size = given.get("window", {}), given.get("chunk_size", self.keys * 1000)
        ids = given.get("segment_ids")
        return (
            bool(np.broadcast_to(given.get("mask", True), self.matrix)[b, h, i, j])
            and bool(np.broadcast_to(given.get("key_mask", True), (len(self.query), self.keys))[b, j])
            and j < np.broadcast_to(given.get("key_lengths", self.keys), len(self.query))[b]
            and i < np.broadcast_to(given.get("query_lengths", i + 1), len(self.query))[b]
            and (ids is None or bool(ids["query"][b, i] == ids["key"][b, j]))
            and (not given.get("is_causal") or j <= at)
            and at - window.get("left", at + self.keys) <= j <= at + window.get("right", abs(at) + self.keys)
            and ("chunk_size" not in given or at // size == j // size)
        )

    def prepared(self, token: Vector, role: str, b: int, place: int) -> Vector:
        """A query or new key after norm and rotation."""
        norm = self.fields.get(f"{role}_norm")
        if norm is not None:
            mean = sum((x * x for x in token), Decimal(0)) / len(token)
            size = (mean + Decimal(norm.get("eps", 1e-6))).sqrt()
            token = [x / size * w for x, w in zip(token, exact(norm["weight"]), strict=True)]
        rotary = self.fields.get("rotary")
        return token if rotary is None else self.rotated(token, rotary, role, b, place)

    def rotated(self, token: Vector, rotary: dict[str, Any], role: str, b: int, place: int) -> Vector:
        dim = rotary.get("dim", len(token))
        length = (self.query if role == "query" else self.key).shape[2]
        positions = rotary.get(f"{role}_positions", self.past + np.arange(length))
        position = int(np.broadcast_to(positions, (len(self.query), length))[b, place])
        turned = list(token)
        for n in range(dim // 2):
            if "cos" in rotary:
                cos, sin = (Decimal(float(rotary[name][position, n])) for name in ("cos", "sin"))
            else:
                cos, sin = turn(position, rotary["base"], (2 * n, dim))
            first, second = (2 * n, 2 * n + 1) if rotary.get("interleaved") else (n, n + dim // 2)
            turned[first] = token[first] * cos - token[second] * sin
            turned[second] = token[first] * sin + token[second] * cos
        return turned


def canonical(array: np.ndarray, layout: str, heads: int) -> np.ndarray:
    """An array with the axes b, h, l, d."""
    if "b" not in layout:
        array, layout = array[None], "b" + layout
    if "h" not in layout:
        array = np.moveaxis(array, layout.index("d"), -1).reshape(
            *(n for n, axis in zip(array.shape, layout, strict=True) if axis != "d"), heads, -1
        )
        layout = layout.replace("d", "") + "hd"
    return array.transpose([layout.index(axis) for axis in "bhld"])
