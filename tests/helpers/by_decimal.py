"""Attention in fifty digits, row by row, from the definition in docs/attention.md; no code of the service."""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np

DIGITS = 50
MINUS_INFINITY = Decimal("-Infinity")
Vector = list[Decimal]
# The fields of requests that are computed here.
KNOWN = set(
    """
query key value layout num_heads num_kv_heads past_key past_value projection include
query_norm key_norm value_norm clip_qkv rotary scale softcap relative_keys bias alibi_slopes
mask key_mask is_causal query_offset window chunk_size query_lengths key_lengths segment_ids selected_keys
normalization sinks gate
""".split()  # noqa: SIM905  # thirty strings would be harder to read
)


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


class Row(NamedTuple):
    """The answer for a query of a head. logsumexp: None for another normalization than softmax

    size:  how large the numbers are that a row sums, weighted values and gates
    reach: the largest magnitude of its scores
    """

    output: Vector
    logsumexp: Decimal | None
    weights_without_sinks: Vector
    size: float
    reach: float


ACTIVATIONS = {
    "none": lambda x: x,
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "silu": lambda x: x / (1 + (-x).exp()),
    "softplus": lambda x: (1 + x.exp()).ln(),
}


class Exact:
    """A request, whose rows are computed one by one. Arrays are brought into the axes b, h, l, d first."""

    def __init__(self, fields: dict[str, Any]) -> None:
        if unknown := sorted(fields.keys() - KNOWN):
            raise NotImplementedError(f"tests/helpers/by_decimal.py does not compute {', '.join(unknown)}")
        self.fields = fields
        layout = fields.get("layout", "bhld")
        heads, kv_heads = fields.get("num_heads", 0), fields.get("num_kv_heads", fields.get("num_heads", 0))
        self.query = canonical(fields["query"], layout, heads)
        self.key = canonical(fields["key"], layout, kv_heads)
        self.value = canonical(fields["value"], layout, kv_heads)
        self.past = fields["past_key"].shape[2] if "past_key" in fields else 0
        self.group = self.query.shape[1] // self.key.shape[1]
        self.keys = self.key.shape[2] + self.past
        self.normalization = fields.get("normalization", "softmax")
        self.kept: dict[tuple[str, int, int], list[Vector]] = {}
        b, _, q, k = self.matrix = (*self.query.shape[:3], self.keys)
        self.offsets = np.broadcast_to(fields.get("query_offset", self.past), b)
        shapes = {"mask": self.matrix, "key_mask": (b, k), "key_lengths": b, "query_lengths": b, "bias": self.matrix}
        ends = {"key_lengths": k, "query_lengths": q}
        self.of = {name: np.broadcast_to(fields.get(name, ends.get(name, True)), at) for name, at in shapes.items()}

    def row(self, b: int, h: int, i: int) -> Row:
        """What is computed of a row."""
        with localcontext() as context:
            context.prec = DIGITS
            scores = {j: self.score(b, h, i, j) for j in range(self.keys) if self.sees(b, h, i, j)}
            scores = {j: score for j, score in scores.items() if score != MINUS_INFINITY}
            reach = max((abs(float(score)) for score in scores.values()), default=0.0)
            weights, logsumexp = self.weights(scores, b, h, i)
            output, sizes = [Decimal(0)] * self.value.shape[-1], [Decimal(0)]
            for j, weight in weights.items():
                value = self.token("value", b, h, j)
                output = [x + weight * y for x, y in zip(output, value, strict=True)]
                sizes.append(max(abs(y) for y in value))
            gates = self.gates(b, h, i)
            size = max(sizes) * max(Decimal(1), sum(map(abs, weights.values()))) * max(map(abs, gates))
            output = [x * gates[e % len(gates)] for e, x in enumerate(output)]
            alone = weights if "sinks" not in self.fields else self.weights(scores, b, h, i, sinks=False)[0]
            alone = {} if logsumexp is None else alone
            return Row(output, logsumexp, [alone.get(j, Decimal(0)) for j in range(self.keys)], float(size), reach)

    def weights(
        self, scores: dict[int, Decimal], b: int, h: int, i: int, *, sinks: bool = True
    ) -> tuple[dict[int, Decimal], Decimal | None]:
        """The weights of visible keys, and the logsumexp. sinks: False for the softmax over the keys alone"""
        if self.normalization == "sigmoid":
            return {j: ACTIVATIONS["sigmoid"](score) for j, score in scores.items()}, None
        if self.normalization == "sum":
            total = sum(scores.values(), Decimal(0))
            return {j: score / total for j, score in scores.items()}, None
        exponentials = {j: score.exp() for j, score in scores.items()}
        total = sum(exponentials.values(), Decimal(0))
        if sinks and "sinks" in self.fields:
            given = self.fields["sinks"]
            total += Decimal(float(given[h] if given.ndim == 1 else given[b, h, i])).exp()
        logsumexp = total.ln() if total else MINUS_INFINITY
        return {j: weight / total for j, weight in exponentials.items()}, logsumexp

    def gates(self, b: int, h: int, i: int) -> Vector:
        """What the output of a row is multiplied by: one number, or one for each feature."""
        if "gate" in self.fields:
            return exact(self.fields["gate"][b, h, i])
        gate = self.fields.get("projection", {}).get("gate")
        if gate is None:
            return [Decimal(1)]
        source, of_head = exact(self.query[b, :, i].ravel()), len(gate["weight"]) // self.query.shape[1]
        found = []
        for place in range(h * of_head, (h + 1) * of_head):
            number = sum((x * y for x, y in zip(source, exact(gate["weight"][place]), strict=True)), Decimal(0))
            number += Decimal(float(gate["bias"][place])) if "bias" in gate else 0
            found.append(ACTIVATIONS[gate.get("activation", "sigmoid")](number))
        return found

    def score(self, b: int, h: int, i: int, j: int) -> Decimal:
        """The score of a query and a key, with everything added."""
        query, key = self.prepared("query", b, i)[h], self.token("key", b, h, j)
        product = sum((x * y for x, y in zip(query, key, strict=True)), Decimal(0)) + self.relative(query, b, h, i, j)
        default = 1 / Decimal(len(query)).sqrt()
        given = self.fields.get("scale")
        score = product * (default if given is None else Decimal(float(given if np.ndim(given) == 0 else given[h])))
        if "softcap" in self.fields:
            cap = Decimal(float(self.fields["softcap"]))
            grown = (2 * score / cap).exp()
            score = cap * (grown - 1) / (grown + 1)
        if "bias" in self.fields:
            score += Decimal(float(self.of["bias"][b, h, i, j]))
        if "alibi_slopes" in self.fields:
            score -= Decimal(float(self.fields["alibi_slopes"][h])) * abs(i + int(self.offsets[b]) - j)
        return score

    def relative(self, query: Vector, b: int, h: int, i: int, j: int) -> Decimal:
        """(query + bias) · key of the distance, by Shaw et al. and Dai et al.; 0 without relative keys."""
        given = self.fields.get("relative_keys")
        if given is None:
            return Decimal(0)
        keys = np.asarray(given["key"])
        keys = keys[h] if keys.ndim == 3 else keys
        place = j - i - int(self.offsets[b]) - given.get("first", -(len(keys) // 2))
        key = exact(keys[max(0, min(len(keys) - 1, place))])
        bias = exact(given["query_bias"][h]) if "query_bias" in given else [Decimal(0)] * len(query)
        return sum(((x + u) * y for x, u, y in zip(query, bias, key, strict=True)), Decimal(0))

    def token(self, role: str, b: int, h: int, j: int) -> Vector:
        """The key or value that a head reads at a place: of the cache as it is, or a new one."""
        if j < self.past:
            return exact(self.fields[f"past_{role}"][b, h // self.group, j])
        return self.prepared(role, b, j - self.past)[h // self.group]

    def sees(self, b: int, h: int, i: int, j: int) -> bool:
        """True if a query sees a key; a bias of −∞ is not looked at."""
        given, at = self.fields, i + int(self.offsets[b])
        window, size = given.get("window", {}), given.get("chunk_size", self.keys * 1000)
        ids = given.get("segment_ids")
        chosen = given.get("selected_keys")
        if chosen is not None and j not in np.broadcast_to(chosen, (*self.matrix[:3], chosen.shape[-1]))[b, h, i]:
            return False
        return (
            bool(self.of["mask"][b, h, i, j])
            and bool(self.of["key_mask"][b, j])
            and j < self.of["key_lengths"][b]
            and i < self.of["query_lengths"][b]
            and (ids is None or bool(ids["query"][b, i] == ids["key"][b, j]))
            and (not given.get("is_causal") or j <= at)
            and at - window.get("left", at + self.keys) <= j <= at + window.get("right", abs(at) + self.keys)
            and ("chunk_size" not in given or at // size == j // size)
        )

    def prepared(self, role: str, b: int, place: int) -> list[Vector]:
        """A query, new key or new value of each head after norm, clipping and rotation."""
        if (role, b, place) not in self.kept:
            with localcontext() as context:
                context.prec = DIGITS
                self.kept[role, b, place] = self.norm_and_rotation(role, b, place)
        return self.kept[role, b, place]

    def norm_and_rotation(self, role: str, b: int, place: int) -> list[Vector]:
        heads = [exact(token) for token in getattr(self, role)[b, :, place]]
        norm: Any = self.fields.get(f"{role}_norm")
        rotary = self.fields.get("rotary")
        position = None if norm is None else norm.get("position", "before")
        if position == "before":
            heads = normalised(heads, norm)
        if "clip_qkv" in self.fields:
            limit = Decimal(float(self.fields["clip_qkv"]))
            heads = [[max(-limit, min(limit, number)) for number in head] for head in heads]
        if rotary is not None and role != "value":
            heads = [self.rotated(token, rotary, role, b, place) for token in heads]
        return normalised(heads, norm) if position == "after" else heads

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


def normalised(heads: list[Vector], norm: dict[str, Any]) -> list[Vector]:
    """x / √(mean(x²) + eps) · weight + bias of each head, or of all of them as one."""
    if norm.get("over") == "all":
        joined = one_normalised([x for head in heads for x in head], norm)
        width = len(heads[0])
        return [joined[start : start + width] for start in range(0, len(joined), width)]
    return [one_normalised(head, norm) for head in heads]


def one_normalised(x: Vector, norm: dict[str, Any]) -> Vector:
    if norm.get("kind") == "layer":
        mean = sum(x, Decimal(0)) / len(x)
        x = [number - mean for number in x]
    size = (sum((number * number for number in x), Decimal(0)) / len(x) + Decimal(norm.get("eps", 1e-6))).sqrt()
    x = [number / size * weight for number, weight in zip(x, exact(norm["weight"]), strict=True)]
    return [number + bias for number, bias in zip(x, exact(norm["bias"]), strict=True)] if "bias" in norm else x


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
