"""Laws: what holds for every right attention function, checked by calling it, without a reference.

A law is a function of LAWS. It makes an input of a size, calls the implementation with it and with what should give
the same, and returns what is wrong, or None. It raises Unsupported for what the implementation has no arguments for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from attention_service.attention.arrays import FLOATS
from attention_service.comparison.errors import epsilon, largest_number
from attention_service.conformance.requests import Choice
from attention_service.conformance.target import Target, Unsupported, call, described, load_target
from attention_service.library.calls import named

LawStatus = Literal["holds", "broken", "error", "unsupported"]
LAW_STATUSES: Final[tuple[LawStatus, ...]] = ("holds", "broken", "error", "unsupported")
# The types that are checked unless others are asked for.
DTYPES: Final = ("float32",)
# What rounding may change at least, as a part of the largest number of the answer, where a law is not about bits:
# float32 products of tensor cores have 11 bits.
TOLERANCE: Final = 2.0**-9
# Keys that an implementation takes at a time, as far as lengths are tried: from 1 to two of these tiles and one.
TILE: Final = 64
HUGE: Final = 1e30


def tolerance_of(dtype: np.dtype) -> float:
    """What rounding may change: weights and outputs of half types are rounded, too, in both of two answers."""
    return max(TOLERANCE, 2 * epsilon(dtype))


class Size(NamedTuple):
    """The sizes of an input: batch, heads, key/value heads, queries, keys, features of a head; and its type."""

    b: int
    h: int
    g: int
    q: int
    k: int
    d: int
    dtype: str = DTYPES[0]

    @property
    def tolerance(self) -> float:
        """What rounding may change."""
        return tolerance_of(FLOATS[self.dtype])

    def __str__(self) -> str:
        names = ("batch", "num_heads", "num_kv_heads", "query_length", "key_length", "head_dim", "dtype")
        return ", ".join(f"{name} {number}" for name, number in zip(names, self, strict=True))


# In ascending order, so that the first that fails is the smallest. Matrices begin at a multiple of 64 bytes.
SIZES: Final = (
    Size(1, 1, 1, 2, 2, 16),
    Size(2, 2, 2, 3, 3, 16),
    Size(2, 4, 2, 5, 5, 16),
    Size(3, 4, 4, 1, 40, 32),
    Size(3, 2, 2, 17, 33, 16),
    Size(3, 4, 4, 64, 64, 32),
    Size(2, 4, 2, 129, 129, 16),
    Size(5, 2, 1, 65, 200, 64),
)


@dataclass(frozen=True)
class LawResult:
    """What was found of a law.

    message: what is wrong, what was raised and where, or why the law is not supported
    input:   the smallest that shows it
    """

    name: str
    status: LawStatus
    message: str | None = None
    input: str | None = None


@dataclass(frozen=True)
class LawsResult:
    """The results of all laws."""

    laws: tuple[LawResult, ...]

    def count(self, status: LawStatus) -> int:
        """How many laws have a status."""
        return sum(law.status == status for law in self.laws)

    @property
    def exit_status(self) -> int:
        """0: all laws that are supported hold; 1: some do not, or the function raises; 2: none could be checked."""
        return 1 if self.count("broken") or self.count("error") else 0 if self.count("holds") else 2


def laws(target: str | Target, *, dtypes: Sequence[str] = ()) -> LawsResult:
    """Which laws an implementation breaks.

    target: as of `run`; with a parameter `out` it writes its output there
    dtypes: the types of the inputs, for all of which a law must hold; none for float32

    Errors: ImportError and ValueError for a name that leads nowhere; ValueError for types that there are not.
    """
    types = Choice.of(None, (), dtypes).dtypes or DTYPES
    function = with_out(load_target(target) if isinstance(target, str) else target)
    sizes = [size._replace(dtype=dtype) for dtype in types for size in SIZES]
    return LawsResult(tuple(_checked(name, law, function, sizes) for name, law in LAWS.items()))


def _checked(name: str, law: Callable[[Target, Size], str | None], target: Target, sizes: Iterable[Size]) -> LawResult:
    reasons, held = [], False
    for size in sizes:
        try:
            message = law(target, size)
        except Unsupported as reason:
            reasons.append(str(reason))
            continue
        except (Exception, SystemExit) as error:  # whatever the implementation raises
            return LawResult(name, "error", described(error, target), str(size))
        if message is not None:
            return LawResult(name, "broken", message, str(size))
        held = True
    return LawResult(name, "holds") if held else LawResult(name, "unsupported", reasons[0])


def with_out(target: Target) -> Target:
    """The implementation as one that returns its output; its parameter `out`, if it has one, gets an array of NaN."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # a callable without a signature
        return target
    if "out" not in signature.parameters:
        return target

    @wraps(target)
    def returning(**fields: Any) -> Any:
        query, value = fields["query"], fields["value"]
        out = np.full((*query.shape[:3], value.shape[3]), np.nan, query.dtype)
        found = target(**fields, out=out)
        if found is NotImplemented:
            return found
        return {**({} if found is None else named(found)), "output": out}

    left = [parameter for name, parameter in signature.parameters.items() if name != "out"]
    returning.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]  # read by inspect
    return returning


def make_input(size: Size) -> dict[str, Any]:
    """Query, key and value of a size, in its type."""
    *lengths, dtype = size
    random, (b, h, g, q, k, d) = np.random.default_rng(lengths), lengths
    shapes = {"query": (b, h, q, d), "key": (b, g, k, d), "value": (b, g, k, d)}
    return {name: random.normal(size=shape).astype(FLOATS[dtype]) for name, shape in shapes.items()}


def deterministic(target: Target, size: Size) -> str | None:
    """The same input twice gives the same bits."""
    fields = make_input(size)
    return differ(call(target, fields), call(target, fields), "the second time")


def batch_invariant(target: Target, size: Size) -> str | None:
    """A sequence has the same bits alone as in a batch."""
    fields = make_input(size)
    whole = call(target, fields)
    for i in range(size.b):
        alone = call(target, {name: array[i : i + 1] for name, array in fields.items()})
        here = {name: array[i : i + 1] for name, array in whole.items()}
        if message := differ(here, alone, f"where sequence {i} is alone"):
            return message
    return None


def heads_permuted(target: Target, size: Size) -> str | None:
    """Heads in another order give the same outputs in that order; the heads of a group stay together."""
    fields, groups = make_input(size), size.h // size.g
    kv_heads = np.roll(np.arange(size.g), 1)
    heads = kv_heads[:, None] * groups + np.arange(groups)
    heads[::2] = heads[::2, ::-1]  # in some groups only, as a head that reads key n % g may else be where it was
    heads = heads.ravel()
    moved = {name: array[:, heads if name == "query" else kv_heads] for name, array in fields.items()}
    found, expected = call(target, moved)["output"], call(target, fields)["output"][:, heads]
    return apart(found, expected, "with its heads permuted", size.tolerance)


def writes_everything(target: Target, size: Size) -> str | None:
    """Every number of the output is written: none is left of memory that was full of NaN."""
    fields = make_input(size)
    first = call(target, fields)["output"]
    waste = [np.full(first.shape, np.nan, dtype) for dtype in (first.dtype, np.float32, np.float64) for _ in range(8)]
    del waste  # which the implementation may get again
    return _not_finite(call(target, fields)["output"], "after memory was filled with NaN")


def ignores_hidden(target: Target, size: Size) -> str | None:
    """NaN and huge numbers in hidden keys and values change nothing."""
    fields, seen = make_input(size), max(1, size.k - 2)
    huge = min(HUGE, largest_number(FLOATS[size.dtype]) / 2)
    hiding: dict[str, tuple[Any, int, int]] = {  # the field, the first key that is hidden, and from how many queries
        "key_lengths": (np.full(size.b, seen), seen, size.q),
        "key_mask": (np.arange(size.k) < seen, seen, size.q),
        "mask": (np.broadcast_to(np.arange(size.k) < seen, (size.q, size.k)), seen, size.q),
    }
    if size.q == size.k:
        hiding["is_causal"] = (True, size.k - 1, size.q - 1)
    reasons = []
    for name, (option, first, rows) in hiding.items():
        try:
            clean = call(target, fields | {name: option})["output"][:, :, :rows]
            for number in (np.nan, np.inf, huge):
                spoilt = {field: array.copy() for field, array in fields.items()}
                spoilt["key"][:, :, first:] = spoilt["value"][:, :, first:] = number
                try:
                    found = call(target, spoilt | {name: option})["output"][:, :, :rows]
                except Exception:
                    if rows == size.q or number == huge:
                        raise
                    continue  # it may be refused, as the last query sees it
                if message := apart(found, clean, f"with {number} in what {name} hides", size.tolerance):
                    return message
        except Unsupported as reason:
            reasons.append(str(reason))
    if len(reasons) == len(hiding):
        raise Unsupported(f"hides no keys: {reasons[0]}")
    return None


def constant_values(target: Target, size: Size) -> str | None:
    """Values that are all 1 give 1, as weights sum to 1."""
    fields = make_input(size)
    fields["value"] = np.ones_like(fields["value"])
    output = call(target, fields)["output"]
    return apart(output, np.ones(output.shape), "where all values are 1", size.tolerance)


def mergeable(target: Target, size: Size) -> str | None:
    """Keys cut in two, and the outputs merged by their logsumexp, give the output of all keys."""
    fields = make_input(size)
    whole = _with_logsumexp(target, fields)
    for cut in range(1, size.k, max(1, size.k // 16)):
        sides = [slice(0, cut), slice(cut, None)]
        cuts = [{name: fields[name][:, :, side] for name in ("key", "value")} for side in sides]
        parts = [_with_logsumexp(target, fields | part) for part in cuts]
        total = np.logaddexp(*(part["logsumexp"].astype(np.float64) for part in parts))
        merged = sum(np.exp(part["logsumexp"] - total)[..., None] * part["output"] for part in parts)
        for name, found in (("output", merged), ("logsumexp", total)):
            if message := apart(whole[name], found, f"cut before key {cut} and merged", size.tolerance, name):
                return message
    return None


def lengths(target: Target, size: Size) -> str | None:
    """Sequences of every length have finite outputs; with a causal mask those that they have in a longer sequence."""
    if size != SIZES[0]._replace(dtype=size.dtype):  # which stands for all lengths
        raise Unsupported("is checked once")
    most = 2 * TILE + 1
    fields = make_input(size._replace(q=most, k=most))
    try:
        longest = call(target, fields | {"is_causal": True})["output"]
    except Unsupported:
        longest = None
    for length in range(1, most + 1):
        cut = {name: array[:, :, :length] for name, array in fields.items()}
        if longest is None:
            message = _not_finite(call(target, cut)["output"], f"of length {length}")
        else:
            found, where = call(target, cut | {"is_causal": True})["output"], f"of length {length}, causal"
            message = _not_finite(found, where) or apart(found, longest[:, :, :length], where, size.tolerance)
        if message:
            return message
    return None


LAWS: Final[dict[str, Callable[[Target, Size], str | None]]] = {
    law.__name__: law
    for law in (
        *(deterministic, batch_invariant, heads_permuted, writes_everything),
        *(ignores_hidden, constant_values, mergeable, lengths),
    )
}


def _with_logsumexp(target: Target, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """The answer with its logsumexp, which some return only if they are asked. Errors: Unsupported without one."""
    found = call(target, fields)
    return found if "logsumexp" in found else call(target, fields | {"include": ["logsumexp"]})


def differ(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], when: str) -> str | None:
    """What to say if any array has other bits."""
    for name, array in one.items():
        if name not in other or not np.array_equal(array, other[name], equal_nan=True):
            found = apart(array, other[name], when, 0.0, name) if name in other else None
            return found or f"{name} has other bits {when}"
    return None


def apart(found: np.ndarray, expected: np.ndarray, when: str, tolerance: float, name: str = "output") -> str | None:
    """What to say of the first number that is further from the expected one than rounding explains."""
    if found.shape != expected.shape:
        return f"{name} has shape {found.shape} {when}, expected {expected.shape}"
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        bad = ~(np.abs(found - expected) <= tolerance * max(1.0, float(np.abs(expected).max())))
    return _first(bad, lambda at: f"{name}{at} is {found[tuple(at)]:.6g} {when}, else {expected[tuple(at)]:.6g}")


def _not_finite(output: np.ndarray, when: str) -> str | None:
    found = output.astype(np.float64)
    return _first(~np.isfinite(found), lambda at: f"output{at} is {found[tuple(at)]} {when}")


def _first(bad: np.ndarray, text: Callable[[list[int]], str]) -> str | None:
    places: Iterable[np.ndarray] = np.argwhere(bad)
    return next((text(place.tolist()) for place in places), None)
