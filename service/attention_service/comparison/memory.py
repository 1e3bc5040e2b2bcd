"""Upper bounds of the memory of a comparison, and of the input that it may make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Final

import numpy as np

from attention_service.attention.arrays import FLOATS, compute_dtype
from attention_service.attention.cost import arrays_of, copied_bytes, peak_bytes, tile_bytes
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.shapes import Sizes
from attention_service.attention.terms import TERMS
from attention_service.attention.terms.masks import KeyLengths, KeyMask
from attention_service.attention.terms.relative import RelativeKeys
from attention_service.attention.tiles import Tiling
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.gradients.case import MOST_TERMS, TILE
from attention_service.comparison.gradients.subject import SAMPLED
from attention_service.comparison.inputs import MADE_OUTPUTS, MADE_ROOM, made_scores
from attention_service.comparison.pairs import PAIR_SCORES
from attention_service.comparison.recipes import Recipe, recipe_for_sizes
from attention_service.comparison.sample import block_counts
from attention_service.comparison.samples import MAX_OUTPUTS, most_scores, sample_counts
from attention_service.comparison.truth import Question

# Copies of the scores of a block or sample that a thread has at the same time, and of its keys and values: if no step
# changes these, and if some does.
COPIES: Final = 8
VALUE_COPIES: Final = (1, 2)
# Scores of a sample that are kept for mutants with other operands, without options and with them; those of a block, of
# which fewer mutants are computed; values.
KEPT_SCORES: Final = (24, 48)
KEPT_BLOCKS: Final = 8
KEPT_VALUES: Final = 8
# Scores that pairs of mistakes keep, for each score of their sample, likewise.
PAIRS: Final = (300, 2000)
# Copies of query, key and value of a made input in float64: as given, and what mistakes copy whole.
OPERAND_COPIES: Final = 3
# Copies of an array that was sent, in bytes for each element: as sent and as reference; those beside them while it is
# judged, once for each legal rounding and as differences; and while facts are told of one.
SENT_BYTES: Final = 16
JUDGED_BYTES: Final = 32
# The same for each number of query, key and value whose errors go through their steps.
STEPPED_BYTES: Final = 24
TOLD_BYTES: Final = 56
# All of them together, of an output of a made input.
ARRAY_BYTES: Final = 64
# The same for the outputs of heads, of which there is the reference, a copy in other axes and one of an edge.
HEAD_BYTES: Final = 24
# The same for a reference in the report: a list of numbers and its text, which is held twice.
REFERENCE_BYTES: Final = 128
# Answers of mutants that are kept for a sample: of a request without options, for each of them, and for all.
ANSWERS: Final = 96
OPTION_ANSWERS: Final = 24
MAX_ANSWERS: Final = 240
# The same for biases and selected keys, and for masks of booleans, which mistakes change as a whole.
TABLE_BYTES: Final = 24
MASK_BYTES: Final = 14
# Copies of gradients that a comparison has throughout: right, served, rounded, limits and what they are made of; of the
# mistake of each worker; of outputs and their cotangents; and answers of mistakes that are kept for a sample.
GRADIENT_COPIES: Final = 10
WORKER_COPIES: Final = 5
OUTPUT_COPIES: Final = 6
GRADIENT_ANSWERS: Final = 240
# Terms of the sums of a gradient, of which facts tell, and copies of them.
TERM_COPIES: Final = 3
# The objects of a comparison: cases, candidates, hypotheses and the report.
OBJECTS: Final = 2**22
SMALL: Final = Sizes(num_heads=2, num_kv_heads=2, batch_size=2, query_length=7, key_length=11, head_dim=1, value_dim=1)


def _is_table(kind: type[ScoreTerm]) -> bool:
    """True if a made input has as many numbers for a term as a head has scores."""
    value = kind.example(np.random.default_rng(0), SMALL)
    arrays = value.values() if isinstance(value, dict) else [value]
    return sum(np.size(array) for array in arrays) >= SMALL.query_length * SMALL.key_length


@cache
def table_fields() -> frozenset[str]:
    """The fields of made inputs with about a number for each score.

    Not made at the start: the random numbers of NumPy take an idle service 2 MB.
    """
    return frozenset(kind.field for kind in TERMS if _is_table(kind))


def comparison_bytes(question: Question, workers: int = 1) -> int:
    """Upper bound of the memory of a comparison, beyond the arrays of the request, in bytes. workers: see Work"""
    arrays, work = parts_of(question.forward, workers)
    inputs = recipes(question) if question.suggests else ()
    made = max((suggestion_bytes(recipe, work.names, workers) for recipe in inputs), default=0)
    return OBJECTS + arrays + max(work.bytes, made) + _gradient_bytes(question, workers)


def _gradient_bytes(question: Question, workers: int) -> int:
    """Upper bound of the memory that gradients take in a comparison, in bytes."""
    if question.gradients is None:
        return 0
    spec, plan, names = question.gradients.spec, question.gradients.plan, question.gradients.names
    exact = make_plan(spec._replace(dtype="float64", backend="numpy", device="cpu", allow_non_finite=True))
    sizes = [prod(exact.output_shape(name)) for name in names]
    running = peak_bytes(exact, tile_bytes(exact, Tiling(scores=TILE)), copied_bytes(exact, spec))
    sampled = sum(min(size, SAMPLED) for size in sizes)
    kept = GRADIENT_COPIES * sum(sizes) + GRADIENT_ANSWERS * sampled
    outputs = prod((plan.sizes.batch_size, plan.sizes.num_heads, plan.sizes.query_length, plan.sizes.value_dim))
    h, _, b, q, k, d, e = plan.sizes
    kept += TERM_COPIES * min(MOST_TERMS, b * h * max(q, k) * max(d, e))
    return (1 + workers) * running + 8 * (kept + workers * WORKER_COPIES * sum(sizes) + OUTPUT_COPIES * outputs)


def parts_of(question: Question, workers: int) -> tuple[int, Work]:
    """The bytes of the arrays that a comparison has throughout, and what its mutants are computed from."""
    plan, names = question.plan, tuple({*(question.actual or ("output",)), *(question.against or ())})
    sizes, linear = plan.sizes, plan.roles.output_map
    features = sizes.value_dim if linear is None else max(sizes.value_dim, -(-len(linear.weight) // sizes.num_heads))
    answers = [answer for answer in (question.actual, question.against) if answer is not None]
    sent = sum(array.size for answer in answers for array in answer.values())
    others = sizes.batch_size * sizes.num_heads * sizes.query_length * features
    needs_all_heads = linear is not None or any(step.needs_all_heads for step in plan.output_steps)
    work = Work(sizes, names, features, needs_all_heads=needs_all_heads, scores=most_scores(names))
    work = replace(work, options=len(recipes(question)[0].options), workers=workers, has_pairs=True)
    width, numbers, steps = compute_dtype(plan.dtype).itemsize, work.operands, any(plan.steps)
    work = replace(
        work,
        has_steps=steps,
        judged=(width + STEPPED_BYTES * steps) * numbers + JUDGED_BYTES * sent,
        copied=_copied(plan) + HEAD_BYTES * others,
        told=TOLD_BYTES * max((array.size for answer in answers for array in answer.values()), default=0),
    )
    arrays = 8 * numbers + SENT_BYTES * sent + _table_bytes(plan)
    arrays += copied_bytes(plan, question.spec) + question.reference * REFERENCE_BYTES * (sent or others)
    return arrays, work


def _copied(plan: Plan) -> int:
    """The bytes of what mistakes copy whole: operands as if their memory had other axes, values without padding, keys
    after their steps; and of keys and values while they are copied."""
    h, g, b, q, k, d, e = plan.sizes
    axes = b * (h * q * d + g * k * (d + e)) if h > 1 and max(q, k) > 1 else 0
    values = b * g * k * e * any(isinstance(term, KeyMask | KeyLengths) for term in plan.terms)
    return 8 * (axes + values + b * g * k * (d + e) + b * g * k * d * bool(plan.steps[1]))


def _table_bytes(plan: Plan) -> int:
    """The bytes of the copies of masks, biases and other arrays of a plan."""
    sizes = [(MASK_BYTES if array.dtype == bool else TABLE_BYTES) * array.size for array in arrays_of(plan)]
    relative = sum(term.keys.size for term in plan.terms if isinstance(term, RelativeKeys))  # with padding, too
    return sum(sizes) + 2 * TABLE_BYTES * relative


def recipes(question: Question) -> tuple[Recipe, Recipe]:
    """The recipes of the inputs that a comparison may make: without and with the keys of several tiles."""
    spec, plan = question.spec, question.plan
    without, tiled = (recipe_for_sizes(spec, plan.sizes, plan.dtype, tiles) for tiles in ((), TILES))
    return without, tiled


def suggestion_bytes(recipe: Recipe, names: tuple[str, ...], workers: int = 1) -> int:
    """Upper bound of the memory of `suggestions`, in bytes. names, workers: see Work"""
    work = Work(recipe.sizes, names, recipe.value_dim, scores=made_scores(names), outputs=MADE_OUTPUTS, room=MADE_ROOM)
    work = replace(work, options=len(recipe.options), workers=workers)
    width = compute_dtype(FLOATS[recipe.dtype]).itemsize
    tables = len(table_fields() & recipe.options) * prod((recipe.batch, recipe.heads, recipe.queries, recipe.keys))
    if "relative_keys" in recipe.options:
        tables += 2 * recipe.heads * (recipe.queries + recipe.keys) * recipe.head_dim  # with padding, too
    others = prod((recipe.batch, recipe.heads, recipe.queries, recipe.value_dim))
    arrays = work.operand_bytes(width) + ARRAY_BYTES * others + TABLE_BYTES * tables
    return OBJECTS + arrays + work.bytes


@dataclass(frozen=True)
class Work:
    """What the mutants of a case are computed from.

    names: of the arrays that are compared; features: of an output of a head; options: how many; scores, outputs: about
    how many of them a sample has; has_pairs: True if pairs of mistakes are tried; has_steps: if something is done
    to query, key or value; room: see Case; workers: threads that compute them
    judged: bytes beside blocks while arrays are judged; copied: of what mistakes copy whole; told: while facts are told
    """

    sizes: Sizes
    names: tuple[str, ...]
    features: int
    needs_all_heads: bool = False
    options: int = 0
    scores: int = 0
    outputs: int = MAX_OUTPUTS
    room: int = Case.room
    has_pairs: bool = False
    has_steps: bool = True
    workers: int = 1
    judged: int = 0
    copied: int = 0
    told: int = 0

    @property
    def operands(self) -> int:
        """The numbers of query, key and value."""
        h, g, b, q, k, d, e = self.sizes
        return b * (h * q * d + g * k * (d + e))

    def operand_bytes(self, width: int) -> int:
        """The bytes of the copies of query, key and value. width: bytes of a number in the type of the request"""
        return (width + 8 * OPERAND_COPIES) * self.operands

    @property
    def bytes(self) -> int:
        """The bytes of the scores, keys and values of a block and a sample, and of the answers that are kept."""
        keys, width = self.sizes.key_length, self.sizes.head_dim + self.sizes.value_dim
        heads, rows = block_counts(self.sizes, needs_all_heads=self.needs_all_heads)
        counts = sample_counts(self.sizes, self.scores, self.outputs, needs_all_heads=self.needs_all_heads)
        sampled = counts[0] * counts[1]
        block, sample = heads * rows * keys, sampled * counts[2] * keys
        answer = self.features + 1 + (keys if "attention_weights" in self.names else 0)
        answers = min(ANSWERS + OPTION_ANSWERS * self.options, MAX_ANSWERS) * sampled * counts[2] * answer
        in_sample = self._working(sample, sampled * keys * width)
        if self.has_pairs:
            pairs = PAIRS[self.options > 0] * min(sample, PAIR_SCORES)
            in_sample += self._kept(pairs)
        operands = heads * keys * width
        in_blocks = self._working(block, operands)
        in_blocks += self.workers * self._kept(KEPT_BLOCKS * block + operands, largest=max(block, operands))
        operands = sampled * keys * width
        scores = KEPT_SCORES[self.options > 0] * sample
        kept = self._kept(scores + KEPT_VALUES * operands, largest=max(sample, operands))
        searching = 8 * answers + kept + self.copied + max(in_sample, in_blocks, self.told)
        return max(searching, self.judged + in_blocks)

    def _working(self, scores: int, values: int) -> int:
        """The bytes that all threads compute with at a time."""
        return 8 * self.workers * (COPIES * scores + VALUE_COPIES[self.has_steps] * values)

    def _kept(self, numbers: int, largest: int = 0) -> int:
        """The bytes of so many numbers, as far as `Sample.once` keeps them. largest: numbers of the largest entry"""
        return min(max(self.room, 8 * largest), 8 * numbers)
