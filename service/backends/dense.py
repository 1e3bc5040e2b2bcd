"""Attention by its definition (Vaswani et al. 2017, section 3.2.1), for any library with the Python array API.

A tile of scores at a time: only what the plan returns ever exists for all queries and keys.

Shapes in comments: b batch, h heads, g key/value heads, r the queries of a tile, k its keys, d and e features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from service.attention.arrays import norm
from service.attention.operands import Operands
from service.attention.plan import Notice, Plan
from service.attention.positions import Rotation
from service.attention.projections import DenseMap
from service.attention.result import Computed, overflow
from service.attention.roles import Role
from service.attention.spec import ROW_STATISTICS, STAGES, Norm
from service.attention.tiles import Cut, Tile, parts, tiles

ZERO_SUM = Notice("zero_sum", "the visible scores of some rows sum to 0: their weights and outputs are 0")

Array = Any  # of the library in use


@dataclass(frozen=True, slots=True)
class Library:
    """An array library and where its arrays live.

    returned: the plan's own type, in this library's terms
    load: from NumPy to the device, in the plan's computing type if it is a float; store: back to NumPy, by names
    waits: whether to look at a number means to wait until all before it is done
    matmul: of the last two axes, into a place if one is given and in_place says that it can be
    scratch: memory for the scores of one tile at a time, of this thread; None to let the product make its own
    hide: put a number wherever a mask is False, in place; exp: in place
    top: where so many largest numbers of the last axis are, in descending order, equal ones by lower index
    run: a function on each tile, results in order, by so many workers; tile_scores: the size of a tile, in elements
    """

    xp: Any
    device: Any
    returned: Any
    load: Callable[[np.ndarray], Array]
    store: Callable[[dict[str, Array]], dict[str, np.ndarray]]
    waits: bool
    matmul: Callable[[Array, Array, Array | None], Array]
    in_place: bool
    scratch: Callable[[tuple[int, ...]], Array | None]
    hide: Callable[[Array, Array, float], None]
    exp: Callable[[Array], Array]
    top: Callable[[Array, int], Array]
    run: Callable[[Callable[[Tile], Any], list[Tile]], Iterable[Any]]
    workers: int
    tile_scores: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Query (b, h, q, d), key (b, g, k, d) and value (b, g, k, e) as attention sees them, the past included."""

    query: Array
    key: Array
    value: Array
    bad_values: Array | None  # (b, g, 1, k) where a value is not finite (and 0 here instead); None where all are
    norms: tuple[float, float, float]  # bounds of them, as in Operands


def compute(
    plan: Plan, lib: Library, loaded: Loaded, backend: str, check: Callable[[], None] | None = None
) -> Computed:
    """Every number on the way. Errors: Overflow where a visible score is not finite, and what `check` raises."""
    head_outputs = empty_outputs(plan, lib, loaded)
    collected = Collected(plan, lib)
    way = choose_way(plan, lib, loaded)
    working = replace(loaded, key=lib.xp.permute_dims(loaded.key, (0, 1, 3, 2)))
    if way.scale_first:
        working = replace(working, query=loaded.query * plan.scale)
    cut = Cut(lib.tile_scores, lib.workers, lib.in_place and way.divide_last and way.unshifted and collected.streams)

    def run(tile: Tile) -> Found:
        if check is not None:
            check()
        if not cut.streams:
            return _TileRun(plan, lib, working, way, tile).run(head_outputs, collected)
        runs = (_TileRun(plan, lib, working, way, part) for part in parts(tile, cut))
        return _stream(plan, lib, tile, runs, head_outputs, collected)

    for found in lib.run(run, list(tiles(plan, cut))):
        collected.add_found(found)
    arrays, masked = stored(plan, lib, loaded, head_outputs, collected.arrays, collected.fully_masked_rows)
    return Computed(
        arrays=arrays,
        fully_masked_rows=masked,
        backend=backend,
        device=str(lib.device),
        kernel="dense",
        notices=(ZERO_SUM,) if collected.zero_sum else (),
    )


@dataclass(frozen=True, slots=True)
class Way:
    """What the size of the numbers allows. All ways mean the same; the cautious ones take longer.

    watched:        scores may overflow, so each is looked at
    scale_first:    the query is scaled instead of all scores
    unshifted:      exp cannot overflow or underflow, so the largest score need not be subtracted
    divide_last:    exponentials may meet the values before they are divided by their sum
    """

    watched: bool
    scale_first: bool
    unshifted: bool
    divide_last: bool


# So many scores are computed in one go; nothing needs to be prepared for them.
SMALL: Final = 2**14
# Of exponents: e^40 times a million keys is far from the largest float32, and e^-80 a normal one.
UNSHIFTED: Final = {np.dtype(np.float32): 40.0, np.dtype(np.float64): 300.0}
# A query times a scale in here keeps all its digits.
MODERATE_SCALE: Final = (1e-6, 1e6)


@dataclass(frozen=True, slots=True)
class Bounds:
    """No score is larger, scaled or not; none that goes into the softmax; no value."""

    scores: float
    exponents: float
    values: float

    def allow(self, plan: Plan) -> bool:
        """Whether no score can overflow; not so where a bound is NaN."""
        limit = largest(plan)
        return self.scores < limit and self.exponents < limit


def choose_way(plan: Plan, lib: Library, loaded: Loaded) -> Way:
    """Decide by bounds: those that come for nothing, and if they do not allow everything, closer ones."""
    way = _allowed(plan, loaded, loose_bounds(plan, loaded))
    if way.unshifted or (lib.waits and not way.watched):
        return way
    return _allowed(plan, loaded, _close_bounds(plan, lib, loaded))


def _allowed(plan: Plan, loaded: Loaded, bounds: Bounds) -> Way:
    """What these bounds allow. No sum is larger than its count times its largest."""
    limit = largest(plan)
    watched = loaded.bad_values is not None or not bounds.allow(plan)
    if plan.normalization == "sum":
        return Way(watched, False, False, False)
    exponent = max(bounds.exponents, 0.0 if plan.sinks is None else float(np.max(np.abs(plan.sinks))))
    unshifted = not watched and exponent <= UNSHIFTED[plan.compute_dtype]
    low, high = MODERATE_SCALE
    sums = bounds.values * plan.sizes.key_length * math.exp(exponent if unshifted else 0.0)
    return Way(
        watched=watched,
        scale_first=not watched and "scores" not in plan.selection.include and low < abs(plan.scale) < high,
        unshifted=unshifted,
        divide_last=plan.score_count > SMALL and sums < limit,
    )


def largest(plan: Plan) -> float:
    """What is computed may be as large as this, and rounded up."""
    return float(np.finfo(plan.compute_dtype).max) / 4


def loose_bounds(plan: Plan, loaded: Loaded) -> Bounds:
    """From what is known before anything is looked at."""
    query, key, value = loaded.norms
    return _bounds(plan, query * key, value)


def _close_bounds(plan: Plan, lib: Library, loaded: Loaded) -> Bounds:
    """|q·k| <= |q| |k| (Cauchy-Schwarz) for the longest query and the longest key."""
    xp = lib.xp
    longest = [math.sqrt(float(xp.max(xp.vecdot(x, x)))) for x in (loaded.query, loaded.key)]
    values = max(float(xp.max(loaded.value)), -float(xp.min(loaded.value)))
    return _bounds(plan, longest[0] * longest[1], values)


def _bounds(plan: Plan, raw: float, values: float) -> Bounds:
    """From a bound of q·k: what comes after it can add."""
    bound = raw * abs(plan.scale)
    if plan.softcap is not None:
        bound = min(bound, plan.softcap)
    if plan.bias is not None:
        bound += _largest_finite(plan.bias)
    if plan.alibi is not None:
        furthest = float(np.max(np.abs(plan.alibi.offset))) + plan.sizes.query_length + plan.sizes.key_length
        bound += float(np.max(np.abs(plan.alibi.slopes))) * furthest
    return Bounds(max(raw, raw * abs(plan.scale)), bound, values)


def _largest_finite(bias: np.ndarray) -> float:
    """The largest magnitude in a bias, -inf aside."""
    low, high = float(bias.min()), float(bias.max())
    if low == -math.inf:
        low = float(np.min(bias, where=np.isfinite(bias), initial=0))
    return max(-low, high if math.isfinite(high) else 0.0, 0.0)


def empty_outputs(plan: Plan, lib: Library, loaded: Loaded) -> Array:
    """Where head outputs (b, h, q, e) go; tokens stand before heads in memory where the output is joined from them."""
    b, h, q, _ = loaded.query.shape
    e, dtype = loaded.value.shape[-1], loaded.query.dtype
    if plan.layout in ("hld", "bhld"):
        return lib.xp.empty((b, h, q, e), dtype=dtype, device=lib.device)
    return lib.xp.permute_dims(lib.xp.empty((b, q, h, e), dtype=dtype, device=lib.device), (0, 2, 1, 3))


# Before the scores: operands.


def load_operands(plan: Plan, operands: Operands, lib: Library) -> Loaded:
    """Project, split heads, normalise, rotate, append to the cache."""
    xp, roles = lib.xp, plan.roles
    query = _heads(operands.query, roles.query, lib)
    key = _heads(operands.key, roles.key, lib)
    value = _heads(operands.value, roles.value, lib)
    query = _rotated(_normalised(query, plan.query_norm, lib), plan.query_rotation, lib)
    key = _rotated(_normalised(key, plan.key_norm, lib), plan.key_rotation, lib)
    if operands.past_key is not None and operands.past_value is not None:
        key = xp.concat([lib.load(operands.past_key), key], axis=2)
        value = xp.concat([lib.load(operands.past_value), value], axis=2)
    norms = _known_norms(plan, operands)
    if operands.finite and (roles.value.map is None or norms[2] < largest(plan)):
        return Loaded(query, key, value, None, norms)
    good = xp.isfinite(value)
    if xp.all(good):
        return Loaded(query, key, value, None, norms)
    zero = xp.zeros_like(value)
    return Loaded(query, key, xp.where(good, value, zero), ~xp.all(good, axis=-1)[:, :, None, :], norms)


def _known_norms(plan: Plan, operands: Operands) -> tuple[float, float, float]:
    """Bounds of the norms of query, key and value after all that is done to them; inf where none is known."""
    roles, sizes = plan.roles, plan.sizes
    query, key, value = operands.norms
    queries, keys = sizes.batch_size * sizes.query_length, sizes.batch_size * sizes.key_length
    bounds = (
        _turned(_normed(_mapped(query, roles.query, queries), plan, plan.query_norm, queries), plan.query_rotation),
        _turned(_normed(_mapped(key, roles.key, keys), plan, plan.key_norm, keys), plan.key_rotation),
        _mapped(value, roles.value, keys),
    )
    if roles.past_length == 0:
        return bounds
    return bounds[0], bounds[1] + key, bounds[2] + value  # the norms of operands count the past


def _mapped(bound: float, role: Role, tokens: int) -> float:
    """|xWᵀ + b| <= |x| |W| + |b|."""
    if role.map is None:
        return bound
    bias = 0.0 if role.map.bias is None else norm(role.map.bias)
    return bound * norm(role.map.weight) + math.sqrt(tokens) * bias


def _normed(bound: float, plan: Plan, rms: Norm | None, tokens: int) -> float:
    """The root of the mean square of each head is 1 then, times the weights, unless nothing keeps a 0 from dividing."""
    if rms is None:
        return bound
    if rms.eps < float(np.finfo(plan.compute_dtype).tiny):
        return math.inf
    weight = 1.0 if rms.weight is None else float(np.max(np.abs(rms.weight)))
    return weight * math.sqrt(tokens * plan.sizes.num_heads * plan.sizes.head_dim)


def _turned(bound: float, rotation: Rotation | None) -> float:
    """Tables may hold more than a cosine and a sine."""
    if rotation is None:
        return bound
    return bound * max(1.0, math.hypot(np.max(np.abs(rotation.cos)), np.max(np.abs(rotation.sin))))


def _heads(tokens: np.ndarray, role: Role, lib: Library) -> Array:
    """An operand as (b, heads, l, d), projected if it has a map."""
    array = lib.load(tokens)
    if role.map is None:
        return array
    mapped = _apply(role.map, array, lib)  # b l heads·d
    b, length, features = mapped.shape
    return lib.xp.permute_dims(lib.xp.reshape(mapped, (b, length, role.heads, features // role.heads)), (0, 2, 1, 3))


def _apply(linear: DenseMap, tokens: Array, lib: Library) -> Array:
    """y = x Wᵀ + bias over the last axis: (b, l, in) -> (b, l, out)."""
    mapped = tokens @ lib.load(linear.weight.T)
    if linear.bias is not None:
        mapped += lib.load(linear.bias)
    return mapped


def _normalised(array: Array, norm: Norm | None, lib: Library) -> Array:
    """RMS normalisation over the last axis."""
    if norm is None:
        return array
    scaled = array / lib.xp.sqrt(lib.xp.mean(array * array, axis=-1, keepdims=True) + norm.eps)
    return scaled if norm.weight is None else scaled * lib.load(norm.weight)


def _rotated(array: Array, rotation: Rotation | None, lib: Library) -> Array:
    """Pairs (x, y) of the first features become (x cos - y sin, x sin + y cos)."""
    if rotation is None:
        return array
    xp = lib.xp
    cos, sin = lib.load(rotation.cos)[:, None], lib.load(rotation.sin)[:, None]  # b 1 l dim/2
    half = cos.shape[-1]
    turned, rest = array[..., : 2 * half], array[..., 2 * half :]
    if rotation.interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
        pairs = xp.stack([x * cos - y * sin, x * sin + y * cos], axis=-1)
        turned = xp.reshape(pairs, turned.shape)
    else:
        x, y = turned[..., :half], turned[..., half:]
        turned = xp.concat([x * cos - y * sin, x * sin + y * cos], axis=-1)
    return xp.concat([turned, rest], axis=-1)


# After the weights: the output.


def stored(
    plan: Plan, lib: Library, loaded: Loaded, head_outputs: Array, scores: dict[str, Array], masked: Array
) -> tuple[dict[str, np.ndarray], int]:
    """All that the plan returns: the output, what it includes of the operands, and what was collected of the scores.

    masked: how many rows see no key, brought back with the rest; 0 where that is known
    """
    past = plan.roles.past_length
    arrays = {
        "query": loaded.query,
        "key": loaded.key[:, :, past:],
        "value": loaded.value[:, :, past:],
        "present_key": loaded.key,
        "present_value": loaded.value,
        "head_outputs": head_outputs,
    }
    wanted = {"output": _output(plan, lib, head_outputs)} | scores
    wanted |= {name: array for name, array in arrays.items() if name in plan.selection.include}
    if not isinstance(masked, int):
        wanted["fully_masked_rows"] = masked
    found = lib.store(wanted)
    return found, int(found.pop("fully_masked_rows", np.zeros(())))


def _output(plan: Plan, lib: Library, head_outputs: Array) -> Array:
    """Join the heads, unless the layout shows them, and apply the output map."""
    if "h" in plan.layout:
        return head_outputs
    b, h, q, e = head_outputs.shape
    joined = lib.xp.reshape(lib.xp.permute_dims(head_outputs, (0, 2, 1, 3)), (b, q, h * e))
    return joined if plan.roles.output_map is None else _apply(plan.roles.output_map, joined, lib)


# What hides scores, and what is added to them, in a tile.


def visible(plan: Plan, lib: Library, tile: Tile, *, band: bool = True) -> Array | None:
    """Which scores of a tile take part, broadcasting to it; None where all do. band: whether its edges count here."""
    parts, seen = [], plan.visibility
    if seen.mask is not None:
        parts.append(lib.load(_part(seen.mask, tile)))
    if plan.bias is not None:
        hidden = np.isneginf(_part(plan.bias, tile))
        if hidden.any():
            parts.append(lib.load(~hidden))
    if seen.keys is not None:
        parts.append(lib.load(_part(seen.keys[:, None, None, :], tile)))
    if seen.queries is not None:
        parts.append(lib.load(_part(seen.queries[:, None, :, None], tile)))
    if seen.segments is not None:
        ids = lib.load(_part(seen.segments.query[:, None, :, None], tile))
        parts.append(ids == lib.load(_part(seen.segments.key[:, None, None, :], tile)))
    if seen.band is not None and band:
        parts += [mask for _, mask in edges(plan, lib, tile, narrow=False)]
    found = None
    for part in parts:
        found = part if found is None else found & part
    return found


def edges(plan: Plan, lib: Library, tile: Tile, *, narrow: bool) -> list[tuple[slice, Array]]:
    """The edges of the band that cut through a tile: which of its columns, and which scores in these take part.

    narrow: only the columns that an edge cuts, else all
    """
    band, columns = plan.visibility.band, tile.columns
    if band is None:
        return []
    found = []
    i = np.arange(tile.rows.start, tile.rows.stop)[:, None]
    if band.low is not None:
        low = _part(band.low[:, None, None, None], tile)
        stop = min(tile.rows.stop - 1 + int(low.max()), columns.stop)  # from there on all rows see all
        if columns.start < stop:
            j = np.arange(columns.start, stop if narrow else columns.stop)
            found.append((slice(0, len(j)), lib.load(j) >= lib.load(i + low)))
    if band.high is not None:
        high = _part(band.high[:, None, None, None], tile)
        start = max(tile.rows.start + int(high.min()) + 1, columns.start)  # up to there all rows see all
        if start < columns.stop:
            j = np.arange(start if narrow else columns.start, columns.stop)
            place = slice(columns.stop - columns.start - len(j), columns.stop - columns.start)
            found.append((place, lib.load(j) <= lib.load(i + high)))
    return found


def fully_masked(plan: Plan, lib: Library, seen: Array | None, tile: Tile) -> Array:
    """How many rows of a tile see no key, those of padding not counted. `seen` is what `visible` gave.

    A number that may be on its way yet.
    """
    if seen is None:
        return 0
    return count_masked(plan, lib, ~lib.xp.any(seen, axis=-1), tile)


def count_masked(plan: Plan, lib: Library, unseen: Array, tile: Tile) -> Array:
    """How many of these rows (b, h, r), each axis full or 1, are not padding."""
    if plan.visibility.queries is not None:
        unseen = unseen & lib.load(_part(plan.visibility.queries[:, None, :, None], tile)[..., 0])
    shape = tuple(part.stop - part.start for part in (tile.batch, tile.heads, tile.rows))
    return lib.xp.sum(lib.xp.broadcast_to(unseen, shape))


def additions(plan: Plan, lib: Library, tile: Tile) -> list[Array]:
    """What is added to the scores of a tile: the bias and ALiBi, each broadcasting to it."""
    found = []
    if plan.bias is not None:
        found.append(lib.load(_part(plan.bias, tile)))
    if plan.alibi is not None:
        i = np.arange(tile.rows.start, tile.rows.stop)[:, None] + _part(plan.alibi.offset[:, None, None, None], tile)
        j = np.arange(tile.columns.start, tile.columns.stop, dtype=plan.compute_dtype)
        distance = lib.xp.abs(lib.load(i) - lib.load(j))
        found.append(distance * lib.load(-plan.alibi.slopes[tile.heads, None, None]))
    return found


def _part(array: np.ndarray, tile: Tile) -> np.ndarray:
    """The part of an array (b, h, q, k), each axis full or 1, that belongs to a tile."""
    cuts = (tile.batch, tile.heads, tile.rows, tile.columns)
    return array[tuple(slice(None) if size == 1 else cut for size, cut in zip(array.shape, cuts, strict=True))]


@dataclass(frozen=True, slots=True)
class Found:
    """What a tile adds to numbers that several tiles make together."""

    tile: Tile
    fully_masked_rows: Array  # a number
    zero_sum: bool
    received: Array | None


class _TileRun:
    """The scores of one tile, from the product to the weights, each step in the place of the one before."""

    def __init__(self, plan: Plan, lib: Library, loaded: Loaded, way: Way, tile: Tile) -> None:
        self._plan = plan
        self._lib = lib
        self._tile = tile
        self._way = way
        self._query = loaded.query[tile.batch, tile.heads, tile.rows]  # b h r d
        self._key = loaded.key[tile.batch, tile.kv_heads, :, tile.columns]  # b g d k
        self._value = loaded.value[tile.batch, tile.kv_heads, tile.columns]  # b g k e
        self._bad = loaded.bad_values
        # Where nothing but exponentials is made of scores, it is enough to hide some; else each step must know which.
        self._edges = edges(plan, lib, tile, narrow=True) if way.unshifted else []
        self._visible = visible(plan, lib, tile, band=not way.unshifted)

    def run(self, head_outputs: Array, collected: Collected) -> Found:
        """Write the head outputs of this tile, and what the plan returns of its scores."""
        tile = self._tile
        weights = self._scores(collected)
        zero_sum = False
        if self._plan.normalization == "sum":
            total, zero_sum = self._sums(weights)
            weights /= total
            outputs = grouped_matmul(weights, self._value, self._lib)
            masked = fully_masked(self._plan, self._lib, self._visible, tile)
        else:
            shift = self._exponentials(weights)
            total = self._sum(weights)
            outputs = grouped_matmul(weights, self._value, self._lib) if self._way.divide_last else None
            masked = self._count_masked(total)
            if self._plan.sinks is not None:
                total = total + self._lib.xp.exp(self._sinks() - shift)
            collected.add("logsumexp", tile, (shift + self._lib.xp.log(total))[..., 0])
            seen_total = _one_for_zero(total, self._lib) if self._hides else total
            if outputs is not None:
                outputs /= seen_total
                if collected.needs_weights:
                    weights /= seen_total
            else:
                weights /= seen_total
                outputs = grouped_matmul(weights, self._value, self._lib)
        received = collected.add_weights(tile, weights) if collected.needs_weights else None
        head_outputs[tile.batch, tile.heads, tile.rows] = outputs
        return Found(tile, masked, zero_sum, received)

    @property
    def _hides(self) -> bool:
        """Whether a score of this tile may be hidden."""
        return self._visible is not None or bool(self._edges)

    def _count_masked(self, total: Array) -> Array:
        """Rows that see no key: where nothing can underflow, those whose exponentials have this sum 0."""
        if self._way.unshifted:
            return count_masked(self._plan, self._lib, total[..., 0] == 0, self._tile) if self._hides else 0
        return fully_masked(self._plan, self._lib, self._visible, self._tile)

    def weighed(self, collected: Collected) -> tuple[Array, Array]:
        """Unshifted exponentials times values (b, h, r, e), and their sum (b, h, r, 1)."""
        exponentials = self._lib.exp(self._scores(collected))
        return grouped_matmul(exponentials, self._value, self._lib), self._sum(exponentials)

    def _scores(self, collected: Collected) -> Array:
        """masked_scores (b, h, r, k), the stages before them collected on the way."""
        plan, xp = self._plan, self._lib.xp
        place = collected.place(self._tile)
        if place is None:
            place = self._lib.scratch((*self._query.shape[:3], self._key.shape[-1]))
        scores = grouped_matmul(self._query, self._key, self._lib, place)
        collected.add("scores", self._tile, scores)
        if not self._way.scale_first:
            scores *= plan.scale
        collected.add("scaled_scores", self._tile, scores)
        if plan.softcap is not None:
            scores /= plan.softcap
            xp.tanh(scores, out=scores)
            scores *= plan.softcap
        collected.add("capped_scores", self._tile, scores)
        for addition in additions(plan, self._lib, self._tile):
            scores += addition
        if self._way.watched:
            self._check(scores)
        if self._visible is not None:
            self._lib.hide(scores, self._visible, -np.inf)
        for columns, seen in self._edges:
            self._lib.hide(scores[..., columns], seen, -np.inf)
        collected.add("masked_scores", self._tile, scores)
        return scores

    def _check(self, scores: Array) -> None:
        """Errors: Overflow for a visible score that is not finite, or a visible value."""
        xp = self._lib.xp
        bad = ~xp.isfinite(scores)
        if self._bad is not None:
            values = self._bad[self._tile.batch, self._tile.kv_heads, :, self._tile.columns]
            bad = bad | xp.repeat(values, scores.shape[1] // values.shape[1], axis=1)
        if self._visible is not None:
            bad = bad & self._visible
        if xp.any(bad):
            raise overflow(self._plan, "scores")

    def _exponentials(self, scores: Array) -> Array:
        """Turn scores into their exponentials, in place; what was subtracted before, (b, h, r, 1)."""
        xp, plan = self._lib.xp, self._plan
        if self._way.unshifted:
            self._lib.exp(scores)
            return xp.zeros((1, 1, 1, 1), dtype=scores.dtype, device=self._lib.device)
        largest = xp.max(scores, axis=-1, keepdims=True)
        if plan.sinks is not None:
            largest = xp.maximum(largest, self._sinks())
        if self._visible is not None:  # nothing to subtract where nothing is seen
            largest = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))
        scores -= largest
        self._lib.exp(scores)
        return largest

    def _sum(self, exponentials: Array) -> Array:
        """Their sum over the keys (b, h, r, 1), by a product: that is the quickest way."""
        ones = self._lib.xp.ones((exponentials.shape[-1], 1), dtype=exponentials.dtype, device=self._lib.device)
        return self._lib.matmul(exponentials, ones, None)

    def _sinks(self) -> Array:
        return _sinks(self._plan, self._lib, self._tile)

    def _sums(self, scores: Array) -> tuple[Array, bool]:
        """Turn scores into those that count; their sum (b, h, r, 1), and whether some sum of visible ones is 0."""
        xp = self._lib.xp
        if self._visible is not None:
            self._lib.hide(scores, self._visible, 0.0)
        total = xp.sum(scores, axis=-1, keepdims=True)
        if not xp.all(xp.isfinite(total)):
            raise overflow(self._plan, "sums of scores")
        zero = total == 0
        if not xp.any(zero):
            return total, False
        sees = True if self._visible is None else xp.any(self._visible, axis=-1, keepdims=True)
        self._lib.hide(scores, xp.broadcast_to(~zero, scores.shape), 0.0)
        return xp.where(zero, xp.ones_like(total), total), bool(xp.any(zero & sees))


def _stream(
    plan: Plan, lib: Library, tile: Tile, runs: Iterable[_TileRun], head_outputs: Array, collected: Collected
) -> Found:
    """A tile whose keys come in parts, where nothing is kept of their scores but sums."""
    outputs = total = None
    for run in runs:
        part = run.weighed(collected)
        if outputs is None:
            outputs, total = part
        else:
            outputs += part[0]
            total += part[1]
    unseen: Array = total == 0
    if plan.sinks is not None:
        total = total + lib.xp.exp(_sinks(plan, lib, tile))
    collected.add("logsumexp", tile, lib.xp.log(total)[..., 0])
    outputs /= _one_for_zero(total, lib)
    head_outputs[tile.batch, tile.heads, tile.rows] = outputs
    return Found(tile, count_masked(plan, lib, unseen[..., 0], tile), zero_sum=False, received=None)


def _sinks(plan: Plan, lib: Library, tile: Tile) -> Array:
    """The sinks of the heads of a tile, (h, 1, 1)."""
    return lib.load(plan.sinks[tile.heads, None, None])  # type: ignore[index]  # asked for only where there are some


def _one_for_zero(total: Array, lib: Library) -> Array:
    """What to divide a row that sees nothing by: 0 divided by anything is 0."""
    return lib.xp.where(total == 0, lib.xp.ones_like(total), total)


def grouped_matmul(left: Array, right: Array, lib: Library, place: Array | None = None) -> Array:
    """(b, h, q, x) @ (b, g, x, y) -> (b, h, q, y), where head n of the left meets head n // (h // g) of the right.

    place: where the result is to be written, if it has a place already
    """
    b, h, q, x = left.shape
    g, y = right.shape[1], right.shape[-1]
    if h == g:
        return lib.matmul(left, right, place)
    grouped = None if place is None else place.reshape((b, g, h // g, q, y))
    product = lib.matmul(lib.xp.reshape(left, (b, g, h // g, q, x)), right[:, :, None], grouped)
    return lib.xp.reshape(product, (b, h, q, y)) if place is None else place


class Collected:
    """What is returned of the score matrices, cut to the heads and queries that were asked for, filled tile by tile.

    Tiles write to places that no other writes to; what they make together is added up in their order.
    """

    def __init__(self, plan: Plan, lib: Library) -> None:
        self.arrays: dict[str, Array] = {}
        self.fully_masked_rows: Array = 0
        self.zero_sum = False
        # Whether nothing is kept of the scores but one number a row.
        self.streams = not plan.selection.include & {*STAGES, "attention_weights", "received", "entropy"}
        self.needs_weights = bool(plan.selection.include & {"attention_weights", "received", "entropy"})
        self._chosen = chosen = plan.selection
        # Whose last axis is k, of which a tile has a part.
        self._by_key = {*STAGES, *(() if chosen.top_k else ("attention_weights",))}
        self._lib = lib
        sizes = plan.sizes
        self._heads = np.arange(sizes.num_heads) if chosen.heads is None else chosen.heads
        self._queries = np.arange(sizes.query_length) if chosen.queries is None else chosen.queries
        b, h, q, k = sizes.batch_size, len(self._heads), len(self._queries), sizes.key_length
        computing = lib.load(np.zeros(0, plan.compute_dtype)).dtype
        shapes = dict.fromkeys(STAGES, (b, h, q, k)) | dict.fromkeys(ROW_STATISTICS, (b, h, q))
        averaged = 1 if chosen.average_heads else h
        shapes["attention_weights"] = (b, averaged, q, k if chosen.top_k is None else chosen.top_k)
        shapes["received"] = (b, averaged, k)
        plain = chosen.heads is None and chosen.queries is None and chosen.top_k is None and not chosen.average_heads
        self._placed = lib.in_place and plain and lib.returned == computing and "attention_weights" in chosen.include
        skips = plan.visibility.band is not None and plan.skips_hidden
        make = lib.xp.zeros if skips or "received" in chosen.include else lib.xp.empty  # what is skipped stays 0
        for name, shape in shapes.items():
            if name in chosen.include:
                dtype = lib.returned if name == "attention_weights" else computing
                self.arrays[name] = make(shape, dtype=dtype, device=lib.device)
        if chosen.top_k is not None:
            integer = lib.load(np.zeros(0, np.int64)).dtype
            self.arrays["top_indices"] = lib.xp.zeros(shapes["attention_weights"], dtype=integer, device=lib.device)

    def place(self, tile: Tile) -> Array | None:
        """Where the weights of a tile go if they go there as they are: its scores may as well be made there."""
        if not self._placed:
            return None
        return self.arrays["attention_weights"][tile.batch, tile.heads, tile.rows, tile.columns]

    def add(self, name: str, tile: Tile, block: Array) -> None:
        """Keep what the plan includes of a block (b, h, r, k), or (b, h, r)."""
        if name in self.arrays:
            places, block = self._cut_heads(tile, block)
            self._write(name, tile, places, block)

    def add_weights(self, tile: Tile, weights: Array) -> Array | None:
        """Keep the weights of a tile, or what is made of them; the result is what its keys receive."""
        xp = self._lib.xp
        if "entropy" in self.arrays:
            self.add("entropy", tile, -xp.sum(_x_log_x(weights, xp), axis=-1))
        if not self.arrays.keys() & {"attention_weights", "received"}:
            return None
        places, kept = self._cut_heads(tile, weights)
        if self._placed:
            return xp.sum(kept, axis=2) if "received" in self.arrays else None
        if self._chosen.average_heads:
            places, kept = np.zeros(1, np.int64), xp.mean(kept, axis=1, keepdims=True)
        received = xp.sum(kept, axis=2) if "received" in self.arrays else None
        if "attention_weights" in self.arrays:
            if self._chosen.top_k is not None:
                order = self._lib.top(kept, self._chosen.top_k)
                self._write("top_indices", tile, places, order)
                kept = xp.take_along_axis(kept, order, axis=-1)
            self._write("attention_weights", tile, places, kept)
        return received

    def add_found(self, found: Found) -> None:
        """Add up what tiles make together."""
        self.fully_masked_rows += found.fully_masked_rows
        self.zero_sum |= found.zero_sum
        if found.received is not None:
            heads: slice | Array = found.tile.heads
            if self._chosen.average_heads:
                heads = slice(1)
            elif self._chosen.heads is not None:
                heads = self._lib.load(self._places(self._heads, found.tile.heads))
            self.arrays["received"][found.tile.batch, heads, found.tile.columns] += found.received

    def _cut_heads(self, tile: Tile, block: Array) -> tuple[np.ndarray, Array]:
        """Where the heads of a tile that were asked for go, and they themselves."""
        places = self._places(self._heads, tile.heads)
        if self._chosen.heads is None:
            return places, block
        return places, block[:, self._lib.load(self._heads[places] - tile.heads.start)]

    @staticmethod
    def _places(chosen: np.ndarray, part: slice) -> np.ndarray:
        return np.nonzero((part.start <= chosen) & (chosen < part.stop))[0]

    def _write(self, name: str, tile: Tile, places: np.ndarray, block: Array) -> None:
        target = self.arrays[name]
        if block.dtype != target.dtype:
            block = self._lib.xp.astype(block, target.dtype)
        columns = (tile.columns,) if name in self._by_key else ()
        if self._chosen.queries is None and len(places):
            whole = self._chosen.heads is None
            heads = slice(int(places[0]), int(places[-1]) + 1) if whole else self._lib.load(places)
            target[(tile.batch, heads, tile.rows, *columns)] = block
            return
        rows = self._places(self._queries, tile.rows)
        if len(rows) and len(places):
            block = block[:, :, self._lib.load(self._queries[rows] - tile.rows.start)]
            target[(tile.batch, self._lib.load(places[:, None]), self._lib.load(rows[None, :]), *columns)] = block


def _x_log_x(weights: Array, xp: Any) -> Array:
    """w ln w, and 0 for 0."""
    return weights * xp.log(xp.where(weights > 0, weights, xp.ones_like(weights)))
