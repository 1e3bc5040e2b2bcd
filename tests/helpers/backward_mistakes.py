"""Backward passes with a mistake, by formulas in float64 that share nothing with the service.

Dao et al. 2022, "FlashAttention", appendix B.2; the softmax, its masks and its derivative are written out once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16

Arrays = dict[str, np.ndarray]
Random = np.random.Generator
QUERY, KEY, VALUE, BIAS, SINKS = "grad_query", "grad_key", "grad_value", "grad_bias", "grad_sinks"
TILES: Final = (16, 32, 64)
# The facts that say where right numbers are, and which terms a sum has.
PLACES: Final = ("moved", "places", "elsewhere", "permuted", "reordered")
TERMS: Final = ("terms", "factor", "constant")


@dataclass(frozen=True, eq=False)
class Pass:
    """What a backward pass is computed from, in float64. Keys and values are repeated for the heads of a group.

    q, k, v, do: (b, h, l, d or e); scores: (b, h, q, k), scaled; seen: booleans, masks by name; added: a bias, or 0
    slope: the derivative of the softcap; logsumexp, delta, of_lse: (b, h, q, 1); fields: of the request
    rounded: rounds weights and gradients of scores, as tensor cores take them
    """

    fields: dict[str, Any]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    scale: float
    group: int
    scores: np.ndarray
    slope: np.ndarray
    masks: Arrays
    added: np.ndarray
    sinks: np.ndarray | None
    of_lse: np.ndarray
    rounded: Callable[[np.ndarray], np.ndarray]
    logsumexp: np.ndarray = field(default_factory=lambda: np.zeros(0))
    delta: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def seen(self) -> np.ndarray:
        """(b, h, q, k), True where a key is visible."""
        found = np.ones(self.scores.shape, bool)
        for mask in self.masks.values():
            found = found & mask
        return found

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """b, h, q, k."""
        b, h, q, k = self.scores.shape
        return b, h, q, k

    def forward(self) -> Pass:
        """This pass with the logsumexp and D that its own scores and masks make."""
        masked = np.where(self.seen, self.scores + self.added, -np.inf)
        own = np.full((*masked.shape[:3], 1), -np.inf) if self.sinks is None else self.sinks[None, :, None, None]
        most = np.maximum(masked.max(axis=-1, keepdims=True), own)
        shift = np.where(np.isfinite(most), most, 0.0)
        total = np.exp(masked - shift).sum(axis=-1, keepdims=True) + np.exp(own - shift)
        logsumexp = shift + np.log(total)
        found = replace(self, logsumexp=logsumexp)
        delta = ((found.weights() @ self.v) * self.do).sum(axis=-1, keepdims=True)
        return replace(found, delta=delta)

    def weights(self) -> np.ndarray:
        """The weights that a backward pass computes again, of the logsumexp."""
        safe = np.where(np.isfinite(self.logsumexp), self.logsumexp, np.inf)
        found: np.ndarray = np.where(self.seen, np.exp(self.scores + self.added - safe), 0.0)
        return found

    def of_scores(self, weights: np.ndarray) -> np.ndarray:
        """The gradient of the masked scores."""
        found: np.ndarray = weights * (self.do @ self.v.swapaxes(-1, -2) - self.delta + self.of_lse)
        return found

    def gradients(
        self,
        weights: np.ndarray | None = None,
        of_scores: np.ndarray | None = None,
        of_keys: Any = 1.0,
        of_query: Any = 1.0,
    ) -> Arrays:
        """The gradients. of_keys, of_query: how often each term counts in dk and dv, and in dq, (b, h, q, k)"""
        p = self.weights() if weights is None else weights
        dz = self.of_scores(p) if of_scores is None else of_scores
        ds = self.rounded(dz * self.slope * self.scale)
        found = {
            QUERY: (ds * of_query) @ self.k,
            KEY: self.grouped((ds * of_keys).swapaxes(-1, -2) @ self.q),
            VALUE: self.grouped((self.rounded(p) * of_keys).swapaxes(-1, -2) @ self.do),
        }
        if "bias" in self.fields:
            found[BIAS] = summed(dz, self.fields["bias"].shape)
        if self.sinks is not None:
            of_sinks = np.exp(self.sinks[None, :, None, None] - self.logsumexp) * (self.of_lse - self.delta)
            found[SINKS] = of_sinks.sum(axis=(0, 2, 3))
        return found

    def grouped(self, array: np.ndarray) -> np.ndarray:
        """The sums (b, g, k, x) over the heads of groups."""
        b, h, k, x = array.shape
        found: np.ndarray = array.reshape(b, h // self.group, self.group, k, x).sum(axis=2)
        return found


def summed(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient (b, h, q, k) summed up to the shape that it was broadcast from."""
    whole = (1,) * (array.ndim - len(shape)) + shape
    axes = tuple(axis for axis, size in enumerate(whole) if size == 1 < array.shape[axis])
    found: np.ndarray = array.sum(axis=axes, keepdims=True).reshape(shape)
    return found


# From a right pass to the gradients of a wrong one; None where the mistake does not apply.
Make = Callable[[Pass, Random], Arrays | None]


@dataclass(frozen=True)
class Mistake:
    """A mistake. names: of the hypotheses that name it; facts: that explain it; needs: the options that it needs

    kernels: the gradients that one kernel computes, of which one or all may have the mistake
    """

    make: Make
    names: tuple[str, ...]
    facts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    kernels: tuple[tuple[str, ...], ...] = ((QUERY,), (KEY, VALUE))


MISTAKES: Final[dict[str, Mistake]] = {}


def mistake(names: str, *needs: str, facts: tuple[str, ...] = (), kernels: Any = None) -> Callable[[Make], Make]:
    """Put a function into the table. names: separated by blanks"""

    def add(make: Make) -> Make:
        one = Mistake(make, tuple(names.split()), facts, needs)
        MISTAKES[make.__name__] = one if kernels is None else replace(one, kernels=kernels)
        return make

    return add


def hidden_differently(p: Pass, name: str, mask: np.ndarray | None) -> Arrays:
    """The gradients with another mask, or none, from the right logsumexp and D."""
    others = {key: value for key, value in p.masks.items() if key != name}
    return replace(p, masks=others if mask is None else {**others, name: mask}).gradients()


@mistake("grad.causal_absent", "is_causal")
def causal_left_out(p: Pass, random: Random) -> Arrays | None:
    return hidden_differently(p, "is_causal", None)


@mistake("grad.causal_shifted", "is_causal")
def causal_by_one(p: Pass, random: Random) -> Arrays | None:
    return hidden_differently(p, "is_causal", causal(p.shape, offset_of(p) + int(random.choice([-1, 1]))))


@mistake("grad.causal_shifted", "is_causal")
def causal_by_some(p: Pass, random: Random) -> Arrays | None:
    by = int(random.choice([-7, -3, -2, 2, 3, 8]))
    return hidden_differently(p, "is_causal", causal(p.shape, offset_of(p) + by))


@mistake("grad.mask_absent", "mask")
def mask_left_out(p: Pass, random: Random) -> Arrays | None:
    return hidden_differently(p, "mask", None)


@mistake("grad.padding_counted", "key_mask")
def padding_seen(p: Pass, random: Random) -> Arrays | None:
    return hidden_differently(p, "key_mask", None)


@mistake("grad.bias_absent", "bias")
def bias_left_out(p: Pass, random: Random) -> Arrays | None:
    return replace(p, added=np.zeros(())).gradients()


@mistake("grad.causal_added")
def causal_too_much(p: Pass, random: Random) -> Arrays | None:
    return None if "is_causal" in p.masks else hidden_differently(p, "is_causal", causal(p.shape, offset_of(p)))


@mistake("causal.absent", "is_causal")
def causal_left_out_of_all(p: Pass, random: Random) -> Arrays | None:
    """Also of the logsumexp."""
    return replace(p, masks={key: mask for key, mask in p.masks.items() if key != "is_causal"}).forward().gradients()


@mistake("mask.absent", "mask")
def mask_left_out_of_all(p: Pass, random: Random) -> Arrays | None:
    return replace(p, masks={key: mask for key, mask in p.masks.items() if key != "mask"}).forward().gradients()


@mistake("bias.absent", "bias")
def bias_left_out_of_all(p: Pass, random: Random) -> Arrays | None:
    return replace(p, added=np.zeros(())).forward().gradients()


def view(array: np.ndarray, which: str, fill: float) -> np.ndarray | None:
    """Another view of an array (b, h, q, k); None if it is the same."""
    b, h, q, k = array.shape
    moved = {
        "transposed": lambda: array.swapaxes(-1, -2) if q == k else array,
        "rows": lambda: np.roll(array, 1, axis=2),
        "rows back": lambda: np.roll(array, -1, axis=2),
        "keys": lambda: np.roll(array, 1, axis=3),
        "keys back": lambda: np.roll(array, -1, axis=3),
        "keys from the left": lambda: np.concatenate([np.full_like(array[..., :1], fill), array[..., :-1]], axis=-1),
        "rows from above": lambda: np.concatenate([np.full_like(array[:, :, :1], fill), array[:, :, :-1]], axis=2),
        "next head": lambda: np.roll(array, 1, axis=1),
        "reversed heads": lambda: array[:, ::-1],
        "first head": lambda: np.broadcast_to(array[:, :1], array.shape),
        "next entry": lambda: np.roll(array, 1, axis=0),
        "first entry": lambda: np.broadcast_to(array[:1], array.shape),
        "entries for heads": lambda: array.swapaxes(0, 1) if b == h else array,
        "last query": lambda: np.broadcast_to(array[:, :, -1:], array.shape),
        "first query": lambda: np.broadcast_to(array[:, :, :1], array.shape),
        "first key": lambda: np.broadcast_to(array[..., :1], array.shape),
    }
    found = np.asarray(moved[which]())
    return None if np.array_equal(found, array) else found


VIEWS: Final = (
    *("transposed", "rows", "rows back", "keys", "keys back", "keys from the left", "rows from above"),
    *("next head", "reversed heads", "first head", "next entry", "first entry", "entries for heads"),
    *("last query", "first query", "first key"),
)


def any_view(array: np.ndarray, random: Random, fill: float) -> np.ndarray | None:
    """Some other view of an array (b, h, q, k)."""
    order = [str(one) for one in random.permutation(VIEWS)]
    return next((found for one in order if (found := view(array, one, fill)) is not None), None)


@mistake("grad.mask_view", "mask")
def mask_of_another_view(p: Pass, random: Random) -> Arrays | None:
    other = any_view(p.masks["mask"], random, fill=int(random.integers(2)))
    # Where it hides nothing, the mask is absent.
    return None if other is None or other.all() else hidden_differently(p, "mask", other)


@mistake("grad.mask_view", "mask")
def mask_inverted(p: Pass, random: Random) -> Arrays | None:
    return hidden_differently(p, "mask", ~p.masks["mask"])


@mistake("grad.mask_view", "key_mask")
def key_mask_of_another_view(p: Pass, random: Random) -> Arrays | None:
    order = random.permutation(["keys", "keys back", "next entry", "first entry"])
    for which in order:
        if (other := view(p.masks["key_mask"], str(which), 0)) is not None:
            return hidden_differently(p, "key_mask", other)
    return None


@mistake("grad.mask_view", "bias")
def bias_of_another_view(p: Pass, random: Random) -> Arrays | None:
    other = any_view(np.broadcast_to(p.added, p.shape), random, fill=0.0)
    return None if other is None else replace(p, added=other).gradients()


@mistake("grad.no_delta")
def delta_left_out(p: Pass, random: Random) -> Arrays | None:
    return replace(p, delta=np.zeros(())).gradients()


@mistake("", facts=("terms",))
def delta_times_a_number(p: Pass, random: Random) -> Arrays | None:
    return replace(p, delta=p.delta * random.choice([2.0, -1.0, 0.5])).gradients()


@mistake("", facts=("terms",))
def delta_alone(p: Pass, random: Random) -> Arrays | None:
    """P ⊙ dP is left out."""
    weights = p.weights()
    return p.gradients(of_scores=-weights * p.delta)


@mistake("grad.delta_layout", facts=())
def delta_of_other_memory(p: Pass, random: Random) -> Arrays | None:
    b, h, q, _ = p.shape
    return replace(p, delta=p.delta.swapaxes(1, 2).reshape(b, h, q, 1)).gradients()


@mistake("grad.lse_cotangent_ignored", "grad_logsumexp", facts=("terms",))
def of_lse_left_out(p: Pass, random: Random) -> Arrays | None:
    return replace(p, of_lse=np.zeros(())).gradients()


@mistake("grad.lse_cotangent_sign", "grad_logsumexp", facts=("terms",))
def of_lse_subtracted(p: Pass, random: Random) -> Arrays | None:
    return replace(p, of_lse=-p.of_lse).gradients()


@mistake("grad.scale_absent", facts=("factor",), kernels=((QUERY,), (KEY,)))
def scale_left_out(p: Pass, random: Random) -> Arrays | None:
    found = p.gradients()
    return {**found, QUERY: found[QUERY] / p.scale, KEY: found[KEY] / p.scale}


@mistake("grad.scale_twice", facts=("factor",), kernels=((QUERY,), (KEY,)))
def scale_once_more(p: Pass, random: Random) -> Arrays | None:
    found = p.gradients()
    return {**found, QUERY: found[QUERY] * p.scale, KEY: found[KEY] * p.scale}


@mistake("grad.softcap_absent", "softcap", kernels=((QUERY,), (KEY,)))
def slope_left_out(p: Pass, random: Random) -> Arrays | None:
    return replace(p, slope=np.ones(())).gradients()


@mistake("grad.sink_absent", "sinks")
def sinks_left_out(p: Pass, random: Random) -> Arrays | None:
    assert p.sinks is not None
    without = np.log(np.maximum(np.exp(p.logsumexp) - np.exp(p.sinks)[None, :, None, None], 1e-300))
    return replace(p, logsumexp=without).gradients()


@mistake("grad.sink_sign", "sinks", facts=("factor",), kernels=((SINKS,),))
def sinks_negated(p: Pass, random: Random) -> Arrays | None:
    found = p.gradients()
    return {**found, SINKS: -found[SINKS]}


@mistake("grad.not_grouped", "groups", facts=TERMS, kernels=((KEY,), (VALUE,)))
def one_head_of_the_group(p: Pass, random: Random) -> Arrays | None:
    heads = np.arange(p.shape[1])[:, None, None] % p.group
    return p.gradients(of_keys=heads == random.integers(p.group))


@mistake("", "groups", facts=TERMS, kernels=((KEY,), (VALUE,)))
def a_head_of_the_group_left_out(p: Pass, random: Random) -> Arrays | None:
    heads = np.arange(p.shape[1])[:, None, None] % p.group
    return None if p.group < 3 else p.gradients(of_keys=heads != random.integers(p.group))


@mistake("grad.group_mean", "groups", facts=TERMS, kernels=((KEY,), (VALUE,)))
def mean_of_the_group(p: Pass, random: Random) -> Arrays | None:
    return p.gradients(of_keys=1 / p.group)


@mistake("", "groups", facts=("places", "terms"), kernels=((KEY,), (VALUE,)))
def groups_of_every_nth_head(p: Pass, random: Random) -> Arrays | None:
    """Key/value head j gets the terms of query heads j, j + g, ..."""
    b, h, _, k = p.shape
    g = h // p.group
    if g == 1:
        return None
    single = replace(p, group=1).gradients()
    found = {name: single[name].reshape(b, p.group, g, k, -1).sum(axis=1) for name in (KEY, VALUE)}
    return {**p.gradients(), **found}


@mistake("grad.query_head", "groups", facts=("terms",), kernels=((KEY,), (VALUE,)))
def at_the_place_of_the_query_head(p: Pass, random: Random) -> Arrays | None:
    single = replace(p, group=1).gradients()
    g = p.shape[1] // p.group
    return None if g == 1 else {**p.gradients(), KEY: single[KEY][:, :g], VALUE: single[VALUE][:, :g]}


def tiles_of(length: int, random: Random) -> tuple[int, int] | None:
    """The size of tiles, and how many a length has, at least two."""
    sizes = [tile for tile in TILES if length > tile]
    return None if not sizes else (size := int(random.choice(sizes)), -(-length // size))


def tiles_that_count(length: int, random: Random) -> np.ndarray | None:
    """How often the terms of each of so many tokens count, by tiles: some 0 times, or twice."""
    chosen = tiles_of(length, random)
    if chosen is None:
        return None
    size, count = chosen
    counts = np.ones(count)
    which = random.integers(5)
    if which == 0:
        counts[-1] = 0
    elif which == 1:
        counts[0] = 0
    elif which == 2:
        counts[:-1] = 0
    elif which == 3:
        counts[1:] = 0
    else:
        counts[random.integers(count)] = 2
    return np.repeat(counts, size)[:length]


@mistake("grad.tail_dropped grad.not_accumulated", facts=TERMS, kernels=((KEY,), (VALUE,)))
def tiles_of_queries(p: Pass, random: Random) -> Arrays | None:
    counts = tiles_that_count(p.shape[2], random)
    return None if counts is None else p.gradients(of_keys=counts[:, None])


@mistake("grad.query_not_accumulated", facts=TERMS, kernels=((QUERY,),))
def tiles_of_keys(p: Pass, random: Random) -> Arrays | None:
    counts = tiles_that_count(p.shape[3], random)
    return None if counts is None else p.gradients(of_query=counts)


@mistake("", facts=TERMS, kernels=((QUERY,), (KEY, VALUE)))
def tiles_on_the_diagonal(p: Pass, random: Random) -> Arrays | None:
    """Left out, or counted twice."""
    if (chosen := tiles_of(min(p.shape[2:]), random)) is None:
        return None
    rows, keys = (np.arange(length) // chosen[0] for length in p.shape[2:])
    counts = np.where(rows[:, None] == keys, random.choice([0.0, 2.0]), 1.0)
    return p.gradients(of_keys=counts, of_query=counts)


@mistake("grad.last_tile", facts=TERMS, kernels=((KEY,), (VALUE,)))
def last_row_again(p: Pass, random: Random) -> Arrays | None:
    counts = np.ones(p.shape[2])
    counts[-1] += -p.shape[2] % int(random.choice(TILES))
    return p.gradients(of_keys=counts[:, None])


@mistake("grad.bias_not_summed", "bias", facts=TERMS, kernels=((BIAS,),))
def bias_of_one_entry(p: Pass, random: Random) -> Arrays | None:
    shape = (1,) * (4 - p.fields["bias"].ndim) + p.fields["bias"].shape
    axes = [axis for axis in range(4) if shape[axis] == 1 < p.shape[axis]]
    if not axes:
        return None
    dz, place = p.of_scores(p.weights()), int(random.choice([0, -1]))
    for axis in axes:
        dz = np.take(dz, [place], axis=axis)
    return {**p.gradients(), BIAS: dz.reshape(p.fields["bias"].shape)}


@mistake("grad.empty_nan", "empty", facts=("constant",))
def nan_in_empty_rows(p: Pass, random: Random) -> Arrays | None:
    empty = ~p.seen.any(axis=-1, keepdims=True)
    return p.gradients(weights=np.where(empty, np.nan, p.weights()))


@mistake("grad.empty_uniform", "empty")
def empty_rows_weigh_all_keys(p: Pass, random: Random) -> Arrays | None:
    """A finite number stands for hidden scores: the same for all, or added to the scores; masked again, or not."""
    empty, k = ~p.seen.any(axis=-1, keepdims=True), p.shape[3]
    exact = np.exp(p.scores + p.added - (p.scores + p.added).max(axis=-1, keepdims=True))
    uniform = np.full(p.shape, 1 / k) if random.random() < 0.6 else exact / exact.sum(axis=-1, keepdims=True)
    if p.sinks is not None:
        return None  # the sink has all weight
    weights = np.where(empty, uniform, p.weights())
    delta = ((weights @ p.v) * p.do).sum(axis=-1, keepdims=True)
    of_scores = replace(p, delta=delta).of_scores(weights)
    if random.random() < 0.5:
        of_scores = np.where(p.seen, of_scores, 0.0)
    return p.gradients(weights=weights, of_scores=of_scores)


def place_of(array: np.ndarray, random: Random) -> np.ndarray | None:
    """Right numbers (b, h, l, d) in other places."""
    b, h, length, d = array.shape
    by = int(random.choice([1, -1, 2, 16]))
    zeros = np.zeros_like(array)
    shifted = zeros.copy()
    shifted[:, :, 1:] = array[:, :, :-1]
    makes: list[Callable[[], np.ndarray]] = [
        lambda: array[:, random.permutation(h)],
        lambda: array[:, ::-1],
        lambda: array[::-1],
        lambda: np.roll(array, by, axis=2),
        lambda: shifted,
        lambda: array[:, :, ::-1],
        lambda: array[:, :, random.permutation(length)],
        lambda: array + np.roll(array, 1, axis=1),
        lambda: array + np.roll(array, 1, axis=0),
        lambda: array + np.roll(array, by, axis=2),
        lambda: array + shifted,
        lambda: np.concatenate([array[:, :1] * 0, array[:, :1] + array[:, 1:2], array[:, 2:]], axis=1),
        lambda: array.swapaxes(1, 2).reshape(array.shape),
        lambda: array.reshape(b, length, h, d).swapaxes(1, 2),
        lambda: np.concatenate([array[..., d // 2 :], array[..., : d // 2]], axis=-1),
        lambda: np.broadcast_to(array[:, :1], array.shape),
        lambda: np.broadcast_to(array[:1], array.shape),
    ]
    for n in random.permutation(len(makes)):
        found = makes[int(n)]()
        if found.shape == array.shape and not np.array_equal(found, array) and found.any():
            return np.array(found)
    return None


@mistake("", facts=(*PLACES, "factor"), kernels=((QUERY,), (KEY,), (VALUE,)))
def numbers_in_other_places(p: Pass, random: Random) -> Arrays | None:
    found = p.gradients()
    seed = int(random.integers(2**31))
    made = {name: place_of(found[name], np.random.default_rng(seed)) for name in (QUERY, KEY, VALUE)}
    return {**found, **{name: array for name, array in made.items() if array is not None}}


@mistake("grad.transposed", "square", kernels=((KEY,),))
def scores_not_transposed(p: Pass, random: Random) -> Arrays | None:
    ds = p.of_scores(p.weights()) * p.slope * p.scale
    return {**p.gradients(), KEY: p.grouped(ds @ p.q)}


@mistake("grad.zero", facts=("constant",), kernels=((QUERY,), (KEY,), (VALUE,)))
def nothing_written(p: Pass, random: Random) -> Arrays | None:
    return {name: array * 0 for name, array in p.gradients().items()}


@mistake("grad.negated", facts=("factor",), kernels=((QUERY,), (KEY,), (VALUE,)))
def wrong_sign(p: Pass, random: Random) -> Arrays | None:
    return {name: -array for name, array in p.gradients().items()}


@mistake("grad.scale_absent", facts=("factor",), kernels=((QUERY,), (KEY,), (VALUE,)))
def twice_as_large(p: Pass, random: Random) -> Arrays | None:
    return {name: 2 * array for name, array in p.gradients().items()}


@mistake("grad.lse_base2")
def logsumexp_of_base_2(p: Pass, random: Random) -> Arrays | None:
    return replace(p, logsumexp=p.logsumexp / math.log(2)).gradients()


@mistake("grad.not_normalized")
def weights_without_sum(p: Pass, random: Random) -> Arrays | None:
    most = np.where(p.seen, p.scores + p.added, -np.inf).max(axis=-1, keepdims=True)
    return replace(p, logsumexp=most).gradients()


def causal(shape: tuple[int, ...], offset: int) -> np.ndarray:
    """A causal mask (1, 1, q, k)."""
    rows, keys = (np.arange(length) for length in shape[2:])
    found: np.ndarray = (keys <= rows[:, None] + offset)[None, None]
    return found


def offset_of(p: Pass) -> int:
    """The position of the first query among the keys."""
    return int(p.fields.get("query_offset", 0))


@dataclass(frozen=True)
class Planted:
    """A request, what a kernel with a mistake returns for it, and the mistake. wrong: the gradients that have it"""

    fields: dict[str, Any]
    actual: Arrays
    name: str
    wrong: tuple[str, ...]

    @property
    def mistake(self) -> Mistake:
        """The row of the table."""
        return MISTAKES[self.name]


def plant(seed: int, name: str) -> Planted | None:
    """A random request with a mistake in one kernel of the backward pass, or in all; None if it does not apply."""
    random, row = np.random.default_rng(seed), MISTAKES[name]
    right, dtype = random_pass(random, row.needs)
    with np.errstate(all="ignore"):
        made, exact = row.make(right, random), right.gradients()
    if made is None:
        return None
    kernels = [kernel for kernel in row.kernels if set(kernel) & made.keys()]
    chosen = [*kernels, tuple(one for kernel in kernels for one in kernel)][random.integers(len(kernels) + 1)]
    wide = np.float64 if dtype == np.float64 else np.float32
    types = {BIAS: wide, SINKS: wide}
    with np.errstate(all="ignore"):
        actual = {
            one: np.asarray((made if one in chosen else exact)[one]).astype(types.get(one, dtype)) for one in exact
        }
    if random.random() < 0.2:  # nothing but the wrong ones is sent
        actual = {one: array for one, array in actual.items() if one in chosen}
    elif random.random() < 0.2:
        with np.errstate(all="ignore"):
            actual["output"] = (right.weights() @ right.v).astype(dtype)
    wrong = tuple(one for one in chosen if one in actual)
    return Planted(right.fields, actual, name, wrong)


def random_pass(random: Random, needs: tuple[str, ...]) -> tuple[Pass, np.dtype]:
    """A right pass of a random request that has these options, and the type of the request."""
    types = [np.dtype(np.float32)] * 3 + [BFLOAT16, np.dtype(np.float16), np.dtype(np.float64)]
    dtype = types[random.integers(len(types))]
    group = int(random.integers(2, 4)) if "groups" in needs else int(random.integers(1, 4))
    g, b, d = int(random.integers(1, 4)), int(random.integers(1, 4)), int(random.choice([4, 8, 16]))
    e, h = d if random.random() < 0.6 else int(random.choice([3, 5, 8, 24])), g * group
    queries = int(random.choice([13, 23, 37, 67, 90]))
    keys = queries if random.random() < 0.5 or "square" in needs else int(random.choice([19, 37, 67, 131]))
    shapes = {"query": (b, h, queries, d), "key": (b, g, keys, d), "value": (b, g, keys, e)}
    shapes["grad_output"] = (b, h, queries, e)
    fields: dict[str, Any] = {one: random.normal(size=shape).astype(dtype) for one, shape in shapes.items()}
    fields["layout"] = "bhld"
    has = {one: one in needs or random.random() < 0.15 for one in OPTIONS}
    broadcast = [(queries, keys), (1, 1, queries, keys), (b, 1, queries, keys), (1, h, queries, keys)]
    broadcast.append((b, h, queries, keys))
    if has["is_causal"] or "causal_too_much" in needs:
        fields["is_causal"] = True
    fields["query_offset"] = np.asarray(int(random.choice([0, max(0, keys - queries)])))
    if has["mask"] or "empty" in needs:
        shape = broadcast[random.integers(len(broadcast))]
        mask = random.random(shape) < 0.7
        mask[..., 0] = True
        if "empty" in needs:
            mask[..., random.permutation(queries)[:3], :] = False
        fields["mask"] = mask
    if has["key_mask"]:
        fields["key_mask"] = random.random((b, keys)) < 0.7
        fields["key_mask"][:, 0] = True
    if has["bias"]:
        fields["bias"] = random.normal(size=broadcast[random.integers(len(broadcast))]).astype(np.float32)
    if has["softcap"]:
        fields["softcap"] = float(random.choice([1.0, 3.0]))
    if has["sinks"]:
        fields["sinks"] = random.normal(size=h).astype(np.float32)
    if has["grad_logsumexp"]:
        fields["grad_logsumexp"] = random.normal(size=(b, h, queries)).astype(np.float32)
    if random.random() < 0.2:
        fields["scale"] = float(random.choice([0.2, 0.5]))
    rounds = dtype.itemsize == 2 and random.random() < 0.5
    return pass_of(fields, group, lambda array: array.astype(dtype).astype(np.float64) if rounds else array), dtype


OPTIONS: Final = ("is_causal", "mask", "key_mask", "bias", "softcap", "sinks", "grad_logsumexp")


def pass_of(fields: dict[str, Any], group: int, rounded: Callable[[np.ndarray], np.ndarray]) -> Pass:
    """The right pass of a request in layout bhld."""
    q, k, v, do = (fields[name].astype(np.float64) for name in ("query", "key", "value", "grad_output"))
    k, v = (np.repeat(array, group, axis=1) for array in (k, v))
    shape = (*q.shape[:3], k.shape[2])
    scale = fields.get("scale", 1 / math.sqrt(q.shape[-1]))
    scores, slope = (q @ k.swapaxes(-1, -2)) * scale, np.ones(())
    if "softcap" in fields:
        ratio = np.tanh(scores / fields["softcap"])
        scores, slope = ratio * fields["softcap"], 1 - ratio**2
    masks = {}
    if "is_causal" in fields:
        masks["is_causal"] = causal(shape, int(fields["query_offset"]))
    if "mask" in fields:
        masks["mask"] = np.broadcast_to(fields["mask"], shape)
    if "key_mask" in fields:
        masks["key_mask"] = np.broadcast_to(fields["key_mask"][:, None, None], shape)
    added = np.broadcast_to(fields["bias"].astype(np.float64), shape) if "bias" in fields else np.zeros(())
    sinks = fields["sinks"].astype(np.float64) if "sinks" in fields else None
    of_lse = fields["grad_logsumexp"].astype(np.float64)[..., None] if "grad_logsumexp" in fields else np.zeros(())
    with np.errstate(all="ignore"):
        return Pass(fields, q, k, v, do, scale, group, scores, slope, masks, added, sinks, of_lse, rounded).forward()
