"""Wrong kernels with a known number in them, and whether the numbers that a fact prints are that one.

Kernels compute in float32 as right ones of half types may, the numbers that are right in float64; nothing of the
service computes in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.outputs import facts_of
from attention_service.comparison.question import make_question
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.truth import reference_and_baseline
from attention_service.library import compare
from attention_service.library.calls import backends
from attention_service.schemas.compare import Fact

TYPES: Final = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
LOG2E: Final = math.log2(math.e)
# A number as facts print it: with its error, with the digits that are known, or exact.
NUMBER: Final = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?: ± (\d+(?:\.\d+)?(?:e[+-]?\d+)?))?")
LIST: Final = r"[-\d., ±e]*"
EXACT: Final = 1e-9


Truths = Callable[[np.ndarray, str], list[np.ndarray]]


@dataclass(frozen=True)
class Claim:
    """A sentence with numbers, found by a pattern, of which group 1 lists the numbers that are printed.

    truths: from the wrong rows (b, h, q) and the sentence, what each of them may be, or, if it is of all of these, is
    is_shifted: words of a sentence in which one number may be added to all of them
    """

    pattern: str
    truths: Truths
    of_all: bool = False
    is_shifted: str = ""


@dataclass(frozen=True)
class Planted:
    """What a wrong kernel returned, the request, and what facts may say, by the name of the fact.

    right: the right output (b, h, q, e) in float64
    """

    kind: str
    fields: dict[str, Any]
    actual: dict[str, np.ndarray]
    claims: dict[str, list[Claim]]
    right: np.ndarray


@dataclass(frozen=True)
class Made:
    """A request, and what a right kernel computes for it in float32.

    scores: (b, h, q, k), scaled, -inf where they are hidden; value: (b, h, k, e); rounds: True if weights are rounded
    before the product with values
    """

    fields: dict[str, Any]
    dtype: np.dtype
    scores: np.ndarray
    value: np.ndarray
    rounds: bool

    @property
    def exact(self) -> np.ndarray:
        """The scaled scores (b, h, q, k) in float64, -inf where they are hidden."""
        return _scores(self.fields, np.float64)

    def powers(self, scores: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The exponentials (b, h, q, k) of scores as the product with values has them, and their sums (b, h, q, 1)."""
        scores = self.scores if scores is None else scores
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total = powers.sum(axis=-1, keepdims=True)
        return (powers.astype(self.dtype).astype(np.float32) if self.rounds else powers), total

    def output(self, scores: np.ndarray | None = None, value: np.ndarray | None = None) -> np.ndarray:
        """The output (b, h, q, e) in float32."""
        powers, total = self.powers(scores)
        return np.asarray(powers @ (self.value if value is None else value) / total)

    @property
    def right(self) -> np.ndarray:
        """The right output (b, h, q, e) in float64."""
        powers = np.exp(self.exact - self.exact.max(axis=-1, keepdims=True))
        groups = self.fields["query"].shape[1] // self.fields["value"].shape[1]
        value = np.repeat(self.fields["value"].astype(np.float64), groups, axis=1)
        return np.asarray(powers @ value / powers.sum(axis=-1, keepdims=True))

    def planted(self, kind: str, output: np.ndarray, claims: dict[str, list[Claim]], **others: np.ndarray) -> Planted:
        """What is planted, if an output was made."""
        actual = {"output": output.astype(self.dtype)} | others
        return Planted(kind, self.fields, actual, claims, self.right)


def _scores(fields: dict[str, Any], wide: type, *, folds: bool = False) -> np.ndarray:
    """The scaled scores (b, h, q, k) in a type. folds: True to round the query after it was multiplied by the scale"""
    query, key = (fields[name].astype(wide) for name in ("query", "key"))
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1)
    scale = wide(1 / math.sqrt(query.shape[-1]))
    query = (query * scale).astype(fields["query"].dtype).astype(wide) if folds else query * scale
    scores = query @ key.swapaxes(-1, -2)
    if "alibi_slopes" in fields:
        by: np.ndarray = np.asarray(fields["alibi_slopes"]).astype(wide)[:, None, None]
        apart = np.arange(scores.shape[-1]) - np.arange(scores.shape[-2])[:, None]
        scores = scores - by * np.abs(apart - fields.get("query_offset", 0))
    if fields.get("is_causal"):
        seen = np.arange(scores.shape[-1]) <= np.arange(scores.shape[-2])[:, None] + fields["query_offset"]
        scores = np.where(seen, scores, -np.inf)
    return np.asarray(scores)


def made(random: np.random.Generator, **more: Any) -> Made:
    """A random request, and what is rounded by the kernel that answers it. more: fields"""
    dtype = TYPES[int(random.integers(3))]
    batch, group, heads = (int(random.choice(sizes)) for sizes in ((1, 1, 2), (1, 2), (1, 2, 3)))
    d, e = (int(random.choice([16, 32, 64, 128])) for _ in range(2))
    queries = int(random.choice([1, 4, 20, 40, 70]))
    keys = queries + int(random.choice([0, 30, 67, 100, 300]))
    keys = max(keys, 8)
    fields: dict[str, Any] = {
        "query": random.normal(size=(batch, heads * group, queries, d)) * random.choice([0.3, 1.0, 2.0]),
        "key": random.normal(size=(batch, heads, keys, d)),
        "value": random.normal(size=(batch, heads, keys, e)),
    }
    fields = {name: array.astype(dtype) for name, array in fields.items()} | {"layout": "bhld"}
    if random.random() < 0.5:
        fields |= {"is_causal": True, "query_offset": keys - queries}
    elif keys > queries:
        fields["query_offset"] = 0
    fields |= {name: make(heads * group) if callable(make) else make for name, make in more.items()}
    is_half = dtype.itemsize == 2
    scores = _scores(fields, np.float32, folds=is_half and bool(random.random() < 0.3))
    value = np.repeat(fields["value"].astype(np.float32), group, axis=1)
    return Made(fields, dtype, scores, value, is_half and bool(random.random() < 0.5))


def some(random: np.random.Generator, size: Any = None) -> np.ndarray:
    """Factors, near 1 or not."""
    spread = random.choice([0.02, 0.1, 0.5])
    return np.asarray(np.exp(random.normal(size=size) * spread))


def each(*numbers: Any) -> Truths:
    """Truths that do not depend on the rows."""
    return lambda *_: [np.atleast_1d(one) for one in numbers]


def ends(numbers: np.ndarray) -> list[Claim]:
    """The claims of a range of numbers (b, h, q) or (b, h, q, n): the least and most of wrong rows, or some of them."""

    def own(rows: np.ndarray) -> np.ndarray:
        return np.asarray(numbers[rows])

    return [
        Claim(r"from (.*? to [^;]*)", lambda rows, _: [own(rows).min()[None], own(rows).max()[None]]),
        Claim(r", as (.*) in another", lambda rows, _: [own(rows).ravel()] * 2),
    ]


def factor(random: np.random.Generator) -> Planted:
    """One factor of all."""
    case, by = made(random), float(random.choice([-1, 1, 1, 1]) * some(random) * random.choice([1, 1, 2, 16]))
    claims = {"factor": [Claim(r"output is (.*) times", each(by))]}
    return case.planted("factor", case.output() * np.float32(by), claims | _rows_by(np.full(case.right.shape[:3], by)))


def _rows_by(by: np.ndarray) -> dict[str, list[Claim]]:
    """What may be said of factors (b, h, q) of rows, and of heads if it is one of each."""
    heads = [np.atleast_1d(one) for one in np.moveaxis(by, 1, 0).reshape(by.shape[1], -1)]
    return {
        "row_factor": ends(by),
        "head_factor": [Claim(rf" is ({LIST}) times the right one", each(*heads))],
        "factor": [Claim(r"output is (.*) times", lambda rows, _: [by[rows]])],
    }


def head_factor(random: np.random.Generator) -> Planted:
    """A factor of each head, of some of them about 1."""
    case = made(random)
    by = np.where(random.random(case.right.shape[1]) < 0.3, 1, some(random, case.right.shape[1]))
    by = np.where(random.random(len(by)) < 0.2, 1 + 2e-3 * random.normal(size=len(by)), by)
    whole = np.broadcast_to(by[:, None], case.right.shape[:3])
    claims = _rows_by(whole) | {"head_factor": [Claim(rf" is ({LIST}) times the right one", each(*by))]}
    return case.planted("head_factor", case.output() * by[:, None, None].astype(np.float32), claims)


def row_factor(random: np.random.Generator) -> Planted:
    """A factor of each row."""
    case = made(random)
    by = some(random, case.right.shape[:3])
    return case.planted("row_factor", case.output() * by[..., None].astype(np.float32), _rows_by(by))


def extra_sum(random: np.random.Generator) -> Planted:
    """Sums of the softmax that are too large or too small, by a number of each head or of all."""
    case = made(random)
    powers, total = case.powers()
    shape, most = case.right.shape[:3], case.scores.max(axis=-1, keepdims=True)
    more = random.choice([-0.3, 0.1, 1, 3, 20]) * random.random(shape[1])
    more = np.where(random.random(shape[1]) < 0.3, random.choice([0, 1e-3, 1e-2, 0.1]), more)
    more = np.full(shape[1], more[0]) if random.random() < 0.3 else more
    kind = str(random.choice(["zero", "largest", "hidden"]))
    hidden = np.isneginf(case.exact).sum(axis=-1, keepdims=True)
    unit = {"zero": np.exp(-most), "largest": np.ones_like(most), "hidden": np.exp(-most) * hidden}[kind]
    added = more[:, None, None] * unit.astype(np.float64)
    by = total / (total + added)
    tail = {"zero": r"(?<!key), where", "largest": " times its largest", "hidden": " for each hidden key"}[kind]
    small, large = (rf"{words} by ({LIST}){tail}" for words in ("too small", "(?:off|too large)"))
    claims = _rows_by(by[..., 0])
    claims["extra_sum"] = [
        claim
        for sign, pattern in ((-1, small), (1, large))
        for claim in (
            Claim(pattern, each(*(sign * more))),
            Claim(pattern, partial(_of_wrong_heads, sign * more), of_all=True),
        )
    ]
    return case.planted(f"extra_sum, {kind}", powers @ case.value / (total + added).astype(np.float32), claims)


def _of_wrong_heads(numbers: np.ndarray, rows: np.ndarray, _: str) -> list[np.ndarray]:
    """The numbers of heads with wrong rows (b, h, q)."""
    return [numbers[rows.any(axis=(0, 2))]]


def parts(random: np.random.Generator) -> Planted:
    """A factor of each part of the keys of a row."""
    case = made(random)
    powers, _ = case.powers()
    keys, shape = powers.shape[-1], case.right.shape[:3]
    size = -(-keys // int(random.integers(2, 5))) if random.random() < 0.5 else int(random.choice([16, 32, 64]))
    count = -(-keys // size)
    own = np.arange(keys) // size
    exact = np.exp(case.exact - case.exact.max(axis=-1, keepdims=True))
    sums = np.stack([exact[..., own == one].sum(axis=-1) for one in range(count)], axis=-1)
    shares, logs = sums / sums.sum(axis=-1, keepdims=True), np.log(np.maximum(sums, 1e-300))
    how = str(random.choice(["base 2", "clamped", "random", "a tile"]))
    if how == "base 2":
        weights = np.exp2(logs - logs.max(axis=-1, keepdims=True)) * (sums > 0)
        by = np.divide(
            weights / weights.sum(axis=-1, keepdims=True), shares, out=np.ones_like(shares), where=shares > 0
        )
    elif how == "clamped":
        weights = np.exp(np.maximum(logs - logs.max(axis=-1, keepdims=True), -1)) * (sums > 0)
        by = np.divide(
            weights / weights.sum(axis=-1, keepdims=True), shares, out=np.ones_like(shares), where=shares > 0
        )
    elif how == "random":
        by = some(random, (*shape, count))
    else:
        by = np.where(np.arange(count) == random.integers(count), float(some(random)), np.ones((*shape, 1)))
    whole = np.repeat(by, size, axis=-1)[..., :keys].astype(np.float32)
    total = np.exp(case.scores - case.scores.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)
    seen = np.where(shares > 0, by, np.nan)

    def known(rows: np.ndarray) -> np.ndarray:
        found = seen[rows]
        return np.asarray(found[np.isfinite(found)])

    claims = {
        "part_factors": [
            Claim(r"from (.*? to [^;]*)", lambda rows, _: [known(rows).min()[None], known(rows).max()[None]]),
            Claim(r", as (.*) in another", lambda rows, _: [known(rows)] * 2),
        ]
    }
    return case.planted(f"parts, {how}", (powers * whole) @ case.value / total, claims)


def scales(random: np.random.Generator) -> Planted:
    """Another scale of each head, and a factor."""
    case = made(random)
    count = case.right.shape[1]
    by = some(random, count) if random.random() < 0.5 else np.full(count, float(some(random)))
    times = some(random, count) if random.random() < 0.5 else np.ones(count)
    output = case.output(case.scores * by[:, None, None].astype(np.float32)) * times[:, None, None].astype(np.float32)
    return case.planted("scales", output, _of_heads("scale", by, times))


def slopes(random: np.random.Generator) -> Planted:
    """Other slopes of ALiBi of each head."""
    case = made(random, alibi_slopes=lambda heads: 2.0 ** -(1 + np.arange(heads)).astype(np.float32))
    count = case.right.shape[1]
    by = some(random, count)
    other = case.fields | {"alibi_slopes": case.fields["alibi_slopes"] * by}
    return case.planted("slopes", case.output(_scores(other, np.float32)), _of_heads("slope", by, np.ones(count)))


def _of_heads(what: str, by: np.ndarray, times: np.ndarray) -> dict[str, list[Claim]]:
    """What may be said of numbers of heads: all of them, or one."""
    found = []
    for a in (by, by[:1]):
        for b in (times, times[:1]):
            found += [Claim(rf"{what} times ({LIST}), and multiplied by ({LIST})\.", each(*a, *b))]
        found += [Claim(rf"{what} times ({LIST})\.", each(*a))]
    return {"head_numbers": found}


def caps(random: np.random.Generator) -> Planted:
    """Another softcap."""
    cap = float(random.choice([0.5, 1.5, 3]))
    case = made(random)
    fields, seen = case.fields | {"softcap": cap}, ~np.isneginf(case.scores)
    plain = np.where(seen, case.scores, 0)
    exact = np.where(seen, np.where(seen, case.exact, 0), 0)
    other = cap * float(some(random)) * random.choice([1, 1.5])
    sent = np.where(seen, other * np.tanh(plain / np.float32(other)), -np.inf).astype(np.float32)
    right = np.where(seen, cap * np.tanh(exact / cap), -np.inf)
    powers = np.exp(right - right.max(axis=-1, keepdims=True))
    output = powers @ case.value.astype(np.float64) / powers.sum(axis=-1, keepdims=True)
    claims = {"score_curve": [Claim(r"with c = (.*)\.", each(other))]}
    return Planted("caps", fields, {"output": case.output(sent).astype(case.dtype)}, claims, output)


def values(random: np.random.Generator) -> Planted:
    """Some keys add another multiple of what is right."""
    case, by = made(random), float(random.choice([0.5, 0.9, 1.1, 2, -1]) * some(random))
    keys = np.arange(case.value.shape[2])
    chosen = keys % 4 == 3 if random.random() < 0.5 else (keys >= 16) & (keys < 32)
    value = np.where(chosen[:, None], case.value * np.float32(by), case.value)
    return case.planted(
        "values", case.output(value=value), {"other_values": [Claim(r"adds (.*) times what", each(by))]}
    )


def offset(random: np.random.Generator) -> Planted:
    """A number added to the logsumexp."""
    case, by = made(random), float(random.choice([-1, 1]) * random.choice([1e-3, 0.01, 0.1, 1]) * some(random))
    _, total = case.powers()
    sums = (case.scores.max(axis=-1) + np.log(total[..., 0])).astype(np.float32) + np.float32(by)
    claims = {"offset": [Claim(r"too (?:small|large) by ([^(]*?)(?: \(.*\))?\.$", each(abs(by)))]}
    return case.planted("offset", case.output(), claims, logsumexp=sums)


def curve(random: np.random.Generator) -> Planted:
    """Weights of other scores: times a number, or capped."""
    case, by, cap = made(random), float(some(random)), float(random.choice([0.5, 1, 3]))
    is_line = random.random() < 0.5
    seen = ~np.isneginf(case.scores)
    plain = np.where(seen, case.scores, 0)
    scores = plain * np.float32(by) if is_line else np.float32(cap) * np.tanh(plain / np.float32(cap))
    weights = _softmax(np.where(seen, scores, -np.inf).astype(np.float32)).astype(case.dtype)

    def told(_: np.ndarray, message: str) -> list[np.ndarray]:
        points = [float(x) for x in re.findall(r" for (\S*[\d])", message)]  # of four digits
        around = [x * np.linspace(1 - 5e-4, 1 + 5e-4, 501) for x in points]
        return [x * by if is_line else cap * np.tanh(x / cap) for x in around]

    values = "alone: " + ", ".join([rf"({LIST}) for \S*"] * 5)
    claims = {
        "score_curve": [
            Claim(r"scaled scores alone: (.*) times these", each(by)),
            Claim(values, told, is_shifted="and a number of the row"),
        ]
    }
    actual = {"scaled_scores": scores} if random.random() < 0.3 else {"attention_weights": weights}
    return Planted("curve", case.fields, actual, claims, case.right)


def row_sums(random: np.random.Generator) -> Planted:
    """A backward pass with another D."""
    case = made(random)
    cotangent = random.normal(size=case.right.shape).astype(case.dtype)
    wide = cotangent.astype(np.float64)
    weights, do = _softmax(case.scores), cotangent.astype(np.float32)
    delta = (case.output() * do).sum(axis=-1, keepdims=True)
    how = str(random.choice(["another row", "random", "half"]))
    others = {
        "another row": np.roll(delta, 1, axis=2),
        "random": delta * some(random, delta.shape),
        "half": (case.output() * do)[..., ::2].sum(axis=-1, keepdims=True),
    }
    other = others[how].astype(np.float32)
    right = (case.right * wide).sum(axis=-1)
    off = (other[..., 0] - right).astype(np.float64)
    of_scores = (
        weights * (do @ case.value.swapaxes(-1, -2) - other) * np.float32(case.fields["query"].shape[-1] ** -0.5)
    )
    actual = _of_products(case, of_scores)
    claims = {"row_sums": [Claim(r"off by (.* to .*)\.", lambda rows, _: [off.min()[None], off.max()[None]])]}
    claims["row_sums"] += [Claim(r"off by (.*) in one row and (.*) in another", each(off.ravel(), off.ravel()))]
    return Planted(f"row_sums, {how}", case.fields | {"grad_output": cotangent}, actual, claims, case.right)


def terms(random: np.random.Generator) -> Planted:
    """A backward pass that has the terms of the gradient of a score in other numbers."""
    case = made(random)
    cotangent = random.normal(size=case.right.shape).astype(case.dtype)
    weights, do = _softmax(case.scores), cotangent.astype(np.float32)
    delta = (case.output() * do).sum(axis=-1, keepdims=True)
    first, second = some(random, 2)
    of_scores = weights * (np.float32(first) * (do @ case.value.swapaxes(-1, -2)) - np.float32(second) * delta)
    actual = _of_products(case, of_scores * np.float32(case.fields["query"].shape[-1] ** -0.5))
    found = [Claim(r"that has P ⊙ dP (.*) times, - P ⊙ D (.*) times in the place", each(first, second))]
    return Planted("terms", case.fields | {"grad_output": cotangent}, actual, {"terms": found}, case.right)


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def _of_products(case: Made, of_scores: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of query and key in the type of the request. of_scores: (b, h, q, k)"""
    query, key = (case.fields[name].astype(np.float32) for name in ("query", "key"))
    group = query.shape[1] // key.shape[1]
    of_key = of_scores.swapaxes(-1, -2) @ query
    of_key = of_key.reshape(len(of_key), -1, group, *of_key.shape[2:]).sum(axis=2)
    found = {"grad_query": of_scores @ np.repeat(key, group, axis=1), "grad_key": of_key}
    return {name: array.astype(case.dtype) for name, array in found.items()}


KINDS: Final[dict[str, Callable[[np.random.Generator], Planted]]] = {
    one.__name__: one
    for one in (
        factor, head_factor, row_factor, extra_sum, parts, scales, slopes, caps, values, offset, curve, row_sums, terms,
    )
}  # fmt: skip


def facts_about(planted: Planted) -> tuple[list[Fact], float]:
    """All facts about what was planted, and the largest error of a right output."""
    if planted.fields.keys() & {"grad_output"}:
        return compare(planted.actual, **planted.fields).facts, 0.0
    return facts_of_outputs(planted.fields, planted.actual)


def facts_of_outputs(fields: dict[str, Any], actual: dict[str, np.ndarray]) -> tuple[list[Fact], float]:
    """All facts about arrays of a request, also beside a proof, and the largest error of a right output."""
    question = make_question(Decoded({**fields, "actual": actual}, frozenset()))
    truth = reference_and_baseline(question, backends().choose("numpy", "cpu"))
    limit = truth.judged["output"].limit if "output" in truth.judged else 0.0
    return list(facts_of(truth)), CORRECT * limit


def misses(planted: Planted, name: str, message: str, limit: float) -> list[str] | None:
    """The numbers of a sentence that are not the planted ones; None if it is none that is known.

    limit: the largest error of a right output
    """
    rows = np.ones(planted.right.shape[:3], bool)
    if "output" in planted.actual:
        apart = np.abs(planted.actual["output"].astype(np.float64) - planted.right)
        rows = (apart > limit).any(axis=-1)
    best: list[str] | None = None
    for claim in planted.claims.get(name, []):
        found = re.search(claim.pattern, message)
        if found is None:
            continue
        printed = [pair for group in found.groups() for pair in NUMBER.findall(group)]
        truths = claim.truths(rows, message)
        if len(printed) != len(truths):
            continue
        if claim.is_shifted and claim.is_shifted in message:
            by = np.median([float(number) - truth[0] for (number, _), truth in zip(printed, truths, strict=True)])
            truths = [truth + by for truth in truths]
        wrong = [
            f"{number}{' ± ' * bool(error)}{error} is {truth[np.abs(truth - float(number)).argmin()]:.6g}"
            for (number, error), truth in zip(printed, truths, strict=True)
            if not covers(number, error, truth, of_all=claim.of_all)
        ]
        best = wrong if best is None or len(wrong) < len(best) else best
    return best


def covers(number: str, error: str, truths: np.ndarray, *, of_all: bool = False) -> bool:
    """True if a printed number is a true one, or all of these, up to its error, or one unit of its last digit."""
    digits, _, power = number.partition("e")
    decimals = len(digits.partition(".")[2])
    unit = 10.0 ** (int(power or 0) - decimals) if decimals else 0.0
    apart = np.abs(truths - float(number))
    most = max(float(error or unit), EXACT * abs(float(number))) * (1 + 1e-6)
    return bool((apart.max() if of_all else apart.min()) <= most)


def draws(count: int, seed: int) -> Iterator[tuple[int, Planted]]:
    """So many planted numbers, as many of each kind, each with its seed."""
    for n in range(seed, seed + count):
        kind = list(KINDS.values())[n % len(KINDS)]
        with np.errstate(all="ignore"):
            yield n, kind(np.random.default_rng(n))
