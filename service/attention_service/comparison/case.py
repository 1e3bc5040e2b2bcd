"""A case: a request in float64, whose operands and options a mutant changes one by one.

Axes: b batch, h query heads, g key/value heads, q queries, k keys (the past included), n new keys, p past keys,
d and e features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

import numpy as np

from attention_service.attention.operands import Operands, make_operands
from attention_service.attention.outputs import FORWARD
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.spec import ROLES, AttentionSpec
from attention_service.attention.steps import STEPPED, Steps
from attention_service.attention.steps.step import OperandStep
from attention_service.attention.tiles import Tiling
from attention_service.backends.base import Check, no_check
from attention_service.backends.dense.operands import DENSE_OPTIONS, load_operands
from attention_service.backends.numpy.backend import NumpyLibrary
from attention_service.backends.threads import TilePool
from attention_service.comparison.legal import LIBERTIES
from attention_service.comparison.problem import Answer, Problem, Rounding, Softmax, attention
from attention_service.errors import FieldConflict

S = TypeVar("S")
T = TypeVar("T")
Term = TypeVar("Term", bound=ScoreTerm)
Step = TypeVar("Step", bound=OperandStep)

# What a mutant changes that no field of a request can say.
INEXPRESSIBLE: Final = None
# The options of plans that a case computes, beside those of score terms, which it takes as they are.
KNOWN: Final = DENSE_OPTIONS | {f"selection.include.{name}" for name in FORWARD}
# Methods of score terms that a case computes, or that change no number.
METHODS_OF_TERMS: Final = frozenset(
    {
        "visible",
        "added",
        "products",
        "arrays",
        "narrows",
        "differs",
        "cause",
        "reads_query",
        "reads_offset",
        "of",
        "example",
        "noun",
        "columns",
        "visible_columns",
    }
    | {"largest_product", "largest_added", "added_size", "visible_bytes"}
    | {"backward", "products_backward", "parameter_shapes"}
)
EXACT: Final = Rounding()
# Tiles of keys that kernels use.
TILES: Final = (16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """All that the answer to a request depends on. A mutant is a function from a case to changed ones.

    plan, spec:       of the request that is asked for, in float64
    dtype:            the caller's type
    offset:           (b or 1,), the position of the first query among the keys; None if the request leaves it open
    query, key, value: (b, h, q, d), (b, g, n, d), (b, g, n, e), projected, before their steps
    past_key, past_value: (b, g, p, d or e)
    bad_values:       (b, g, k), True where a value is not finite; it is 0 in `value` instead
    key_of_head, value_of_head: (h,), the key and value head that each query head reads
    steps:            what is done to query, key and value, by role, and to head outputs, as output; past_steps: to past
                      keys
    head_order:       (h,), the head that is returned in the place of each head
    softcap_at:       the scores that are capped
    scaled_bias:      True to add biases before the scale
    scale:            one number, or (h,)
    sinks:            (h,), or (b, h, q)
    hidden_score:     what takes the place of hidden scores
    softmax:          from scores to weights and outputs
    over_queries:     True to take the softmax over queries
    edits:            changes of the answer, one after the other
    of_whole:         from all head outputs (b, h, q, e) to those that are returned
    gate:             (b, h, q, e or 1), what head outputs are multiplied by; None for none
    head_outputs:     (b, h, q, e), right, for of_whole; None to compute them
    map_steps:        by role (b, l), the size of the products that make a projected number, see `floors`
    rounding:         the types that are computed in
    liberties:        what a right kernel may do beside rounding inputs and output, see `legal`
    change:           the fields to change in the request, to reproduce this case; None if no field can say it
    tiles:            the sizes of tiles, in keys, that mistakes of tiles are tried for; tile: that of a wrong case
    detail:           what tells this case from others of the same mutant, like "of 64 keys"
    check:            raises to end the computation; called in all that can take long
    pool:             threads that compute parts of a comparison; None for the calling thread alone
    room:             bytes that a sample may keep, see `Sample.once`
    memo:             what is computed once for a case, by its name; a changed case has its own
    """

    plan: Plan
    spec: AttentionSpec
    dtype: np.dtype
    offset: np.ndarray | None
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    past_key: np.ndarray
    past_value: np.ndarray
    bad_values: np.ndarray | None
    head_order: np.ndarray
    key_of_head: np.ndarray
    value_of_head: np.ndarray
    steps: Mapping[str, Steps]
    past_steps: Steps = ()
    scale: float | np.ndarray
    softcap: float | None
    softcap_at: str = "scaled"
    scaled_bias: bool = False
    terms: tuple[ScoreTerm, ...]
    hidden_score: float = -np.inf
    sinks: np.ndarray | None
    softmax: Softmax = attention
    over_queries: bool = False
    edits: tuple[Callable[[Problem, Answer], Answer], ...] = ()
    of_whole: Callable[[np.ndarray], np.ndarray] | None = None
    gate: np.ndarray | None = None
    head_outputs: np.ndarray | None = None
    map_steps: Mapping[str, np.ndarray]
    rounding: Rounding = EXACT
    liberties: frozenset[str] = LIBERTIES
    change: Mapping[str, Any] | None = field(default_factory=dict)
    tiles: tuple[int, ...] = TILES
    tile: int | None = None
    detail: str = ""
    check: Check = no_check
    pool: TilePool | None = None
    room: int = 2**25
    memo: dict[str, Any] = field(default_factory=dict, init=False)

    def each(self, function: Callable[[S], T], parts: Iterable[S]) -> Iterator[T]:
        """The results of a function for each part, in order, by the threads of the pool."""
        return map(function, parts) if self.pool is None else self.pool.run(function, parts)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, made once for this case."""
        if name not in self.memo:
            self.memo[name] = make()
        found: T = self.memo[name]
        return found

    def changed(self, change: Mapping[str, Any] | None = INEXPRESSIBLE, *, detail: str = "", **fields: Any) -> Self:
        """This case with other fields. change, detail: how the request would say it, see Case"""
        both = None if change is None or self.change is None else {**self.change, **change}
        joined = ", ".join(part for part in (self.detail, detail) if part)
        return replace(self, change=both, detail=joined, **fields)

    def step(self, role: str, kind: type[Step]) -> Step | None:
        """The step of a class that is done to query, key, value or output; None if there is none."""
        return next((step for step in self.steps[role] if isinstance(step, kind)), None)

    def term(self, kind: type[Term]) -> Term | None:
        """The term of a class; None if the request has none."""
        return next((term for term in self.terms if type(term) is kind), None)

    def without(
        self, *kinds: type[ScoreTerm], change: Mapping[str, Any] | None = INEXPRESSIBLE, detail: str = ""
    ) -> Self:
        """This case without the terms of some classes."""
        return self.changed(change, detail=detail, terms=tuple(term for term in self.terms if type(term) not in kinds))

    def with_term(self, new: ScoreTerm, change: Mapping[str, Any] | None = INEXPRESSIBLE, *, detail: str = "") -> Self:
        """This case with a term in the place of that of the same class, or as the last one."""
        others = tuple(term for term in self.terms if type(term) is not type(new))
        return self.changed(change, detail=detail, terms=(*others, new))

    def edited(self, edit: Callable[[Problem, Answer], Answer]) -> Self:
        """This case with one more change of its answer, which no field can say."""
        return self.changed(edits=(*self.edits, edit))

    @property
    def past_length(self) -> int:
        """The number of keys in the cache."""
        return self.plan.roles.past_length

    @property
    def joins_heads(self) -> bool:
        """True if an output map makes one output of all heads."""
        return self.plan.roles.output_map is not None

    @property
    def needs_all_heads(self) -> bool:
        """True if no output of a head can be computed without the other heads."""
        return self.joins_heads or any(step.needs_all_heads for step in self.steps["output"])


def unknown_options(plan: Plan) -> tuple[str, ...]:
    """The names of options that no case computes: what a kernel does with them cannot be judged."""
    options = {name for name in plan.options if name not in KNOWN and not name.startswith("terms.")}
    return tuple(sorted(options | {f"terms.{type(term).__name__}" for term in plan.terms if not _is_known(term)}))


def _is_known(term: ScoreTerm) -> bool:
    """True if cases compute all that the term does: a method that is new in ScoreTerm may change scores, too."""
    own = {name for kind in type(term).__mro__ if issubclass(kind, ScoreTerm) for name in vars(kind)}
    return {name for name in own if not name.startswith("_") and hasattr(ScoreTerm, name)} <= METHODS_OF_TERMS


def make_case(
    spec: AttentionSpec, dtype: np.dtype, check: Check = no_check, liberties: frozenset[str] = LIBERTIES
) -> Case:
    """The case of a request. spec: may have any dtype; numbers are taken as they are given. dtype: the caller's

    liberties: see Case

    Errors: InvalidRequest of every kind, FieldConflict for options that no case computes.
    """
    spec = spec._replace(dtype="float64", backend="numpy", device="cpu", include=(), top_k=None, select_heads=None)
    spec = spec._replace(select_queries=None, average_heads=False, allow_non_finite=True)
    plan = make_plan(spec)
    if unknown := unknown_options(plan):
        raise FieldConflict.at("", "options that the comparison knows", ", ".join(unknown))
    raw = replace(plan, query_steps=(), key_steps=(), value_steps=(), output_steps=())
    with np.errstate(all="ignore"):
        operands = make_operands(spec, raw, spec.sources)
        loaded = load_operands(raw, operands, NumpyLibrary(raw, Tiling(scores=1), None))
    sizes, past = plan.sizes, plan.roles.past_length
    heads = np.arange(sizes.num_heads)
    kv_heads = heads * sizes.num_kv_heads // sizes.num_heads
    return Case(
        plan=plan,
        spec=spec,
        dtype=dtype,
        offset=_offset(spec, plan),
        query=loaded.query,
        key=loaded.key[:, :, past:],
        value=loaded.value[:, :, past:],
        past_key=loaded.key[:, :, :past],
        past_value=loaded.value[:, :, :past],
        bad_values=None if loaded.bad_values is None else loaded.bad_values[:, :, 0],
        head_order=heads,
        key_of_head=kv_heads,
        value_of_head=kv_heads,
        steps=dict(zip(STEPPED, (*plan.steps, plan.output_steps), strict=True)),
        scale=plan.scale if plan.head_scales is None else plan.head_scales,
        softcap=plan.softcap,
        terms=plan.terms,
        sinks=plan.sinks if plan.row_sinks is None else plan.row_sinks,
        gate=loaded.gate,
        map_steps=_map_steps(plan, operands),
        liberties=liberties,
        check=check,
    )


def _offset(spec: AttentionSpec, plan: Plan) -> np.ndarray | None:
    """The position of the first query among the keys, (b or 1,)."""
    if spec.query_offset is not None:
        return np.atleast_1d(spec.query_offset)
    sizes, past = plan.sizes, plan.roles.past_length
    return np.full(1, past) if past or sizes.query_length == sizes.key_length else None


def _map_steps(plan: Plan, operands: Operands) -> dict[str, np.ndarray]:
    """|x| · |w| + |bias| of the largest number that a map makes of each token, by role (b, l); 0 without a map."""
    found = {}
    for name, role in zip(ROLES, plan.roles.inputs, strict=True):
        array: np.ndarray = getattr(operands, name)
        if role.map is None:
            found[name] = np.zeros((len(array), array.shape[-2]))
            continue
        weights = float(np.linalg.norm(role.map.weight, axis=-1).max())
        bias = 0.0 if role.map.bias is None else float(np.max(np.abs(role.map.bias)))
        found[name] = np.linalg.norm(array, axis=-1) * weights + bias
    return found
