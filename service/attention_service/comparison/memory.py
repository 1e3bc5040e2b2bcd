"""Upper bounds of the memory of a comparison, and of the input that it may make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

from attention_service.attention.arrays import FLOATS, compute_dtype
from attention_service.attention.cost import arrays_of, copied_bytes
from attention_service.attention.shapes import Sizes
from attention_service.attention.terms.relative import RelativeKeys
from attention_service.comparison.case import TILES, Case
from attention_service.comparison.compare import Question
from attention_service.comparison.inputs import MADE_OUTPUTS, MADE_ROOM, made_scores
from attention_service.comparison.recipes import Recipe, recipe_for_sizes
from attention_service.comparison.sample import block_counts
from attention_service.comparison.samples import MAX_OUTPUTS, most_scores, sample_counts

# Copies of the scores of a block or sample that live at the same time, of 8 bytes each.
COPIES: Final = 12
# Scores of a block or sample that are kept for mutants with other operands, without options and with them; values.
KEPT_SCORES: Final = (24, 48)
KEPT_VALUES: Final = 8
# Copies of an array that was sent, in bytes for each element: as sent, as reference, and once for each legal rounding.
ARRAY_BYTES: Final = 64
# The same for the outputs of heads, of which there is the reference, a copy in other axes and one of an edge.
HEAD_BYTES: Final = 24
# The same for a reference in the report: a list of numbers and its text, which is held twice.
REFERENCE_BYTES: Final = 128
# Answers of mutants that are kept for a sample, likewise.
ANSWERS: Final = (112, 240)
# The objects of a comparison: cases, candidates, hypotheses and the report.
OBJECTS: Final = 2**21 + 2**19
# The arrays of a made input with a number for each score.
TABLES: Final = frozenset({"mask", "bias", "selected_keys"})


def comparison_bytes(question: Question, workers: int = 1) -> int:
    """Upper bound of the memory of a comparison, beyond the arrays of the request, in bytes. workers: see Case"""
    plan, names = question.plan, tuple({*(question.actual or ("output",)), *(question.against or ())})
    sizes, linear = plan.sizes, plan.roles.output_map
    features = sizes.value_dim if linear is None else max(sizes.value_dim, -(-len(linear.weight) // sizes.num_heads))
    answers = [answer for answer in (question.actual, question.against) if answer is not None]
    sent = sum(array.size for answer in answers for array in answer.values())
    others = sizes.batch_size * sizes.num_heads * sizes.query_length * features
    needs_all_heads = linear is not None or any(step.needs_all_heads for step in plan.output_steps)
    work = Work(sizes, names, features, needs_all_heads=needs_all_heads, scores=most_scores(names))
    made = recipes(question)
    work = replace(work, has_options=bool(made[0].options), workers=workers)
    width = compute_dtype(plan.dtype).itemsize + 8
    tables = sum(array.size for array in arrays_of(plan))
    tables += 2 * sum(term.keys.size for term in plan.terms if isinstance(term, RelativeKeys))  # with padding, too
    arrays = work.operand_bytes(width) + ARRAY_BYTES * sent + HEAD_BYTES * others + 16 * tables
    arrays += copied_bytes(plan, question.spec) + question.reference * REFERENCE_BYTES * (sent or others)
    return OBJECTS + arrays + work.bytes + max(suggestion_bytes(one, names, workers) for one in made)


def recipes(question: Question) -> tuple[Recipe, Recipe]:
    """The recipes of the inputs that a comparison may make: without and with the keys of several tiles."""
    spec, plan = question.spec, question.plan
    without, tiled = (recipe_for_sizes(spec, plan.sizes, plan.dtype, tiles) for tiles in ((), TILES))
    return without, tiled


def suggestion_bytes(recipe: Recipe, names: tuple[str, ...], workers: int = 1) -> int:
    """Upper bound of the memory of `suggest`, in bytes. names: of the arrays that are compared; workers: see Case"""
    sizes = Sizes(
        num_heads=recipe.heads,
        num_kv_heads=recipe.kv_heads,
        batch_size=recipe.batch,
        query_length=recipe.queries,
        key_length=recipe.keys,
        head_dim=recipe.head_dim,
        value_dim=recipe.value_dim,
    )
    work = Work(sizes, names, recipe.value_dim, scores=made_scores(names), outputs=MADE_OUTPUTS, room=MADE_ROOM)
    work = replace(work, has_options=bool(recipe.options), workers=workers)
    width = compute_dtype(FLOATS[recipe.dtype]).itemsize + 8
    tables = len(TABLES & recipe.options) * prod((recipe.batch, recipe.heads, recipe.queries, recipe.keys))
    if "relative_keys" in recipe.options:
        tables += 2 * recipe.heads * (recipe.queries + recipe.keys) * recipe.head_dim  # with padding, too
    others = prod((recipe.batch, recipe.heads, recipe.queries, recipe.value_dim))
    arrays = work.operand_bytes(width) + ARRAY_BYTES * others + 16 * tables
    return OBJECTS + arrays + work.bytes


@dataclass(frozen=True)
class Work:
    """What the mutants of a case are computed from.

    names: of the arrays that are compared; features: of an output of a head; scores, outputs: about how many of them
    a sample has; room, workers: see Case
    """

    sizes: Sizes
    names: tuple[str, ...]
    features: int
    needs_all_heads: bool = False
    has_options: bool = False
    scores: int = 0
    outputs: int = MAX_OUTPUTS
    room: int = Case.room
    workers: int = 1

    def operand_bytes(self, width: int) -> int:
        """The bytes of the copies of query, key and value. width: bytes of a number in both of its types"""
        h, g, b, q, k, d, e = self.sizes
        return 5 * width * b * (h * q * d + g * k * (d + e))

    @property
    def bytes(self) -> int:
        """The bytes of the scores, keys and values of a block and a sample, and of the answers that are kept."""
        keys, head_dim, value_dim = self.sizes.key_length, self.sizes.head_dim, self.sizes.value_dim
        heads, rows = block_counts(self.sizes, self.workers, needs_all_heads=self.needs_all_heads)
        counts = sample_counts(self.sizes, self.scores, self.outputs, needs_all_heads=self.needs_all_heads)
        sampled = counts[0] * counts[1]
        block, sample = heads * rows * keys, sampled * counts[2] * keys
        answer = self.features + 1 + (keys if "attention_weights" in self.names else 0)
        working = COPIES * max(block, sample) + 4 * max(heads, sampled) * keys * (head_dim + value_dim)
        working *= self.workers
        kept = self._kept(sample, sampled * keys * value_dim)
        if counts != (self.sizes.batch_size, self.sizes.num_heads, self.sizes.query_length):
            # What the sample does not show is looked for in blocks.
            kept += self.workers * self._kept(block, heads * keys * value_dim)
        return kept + 8 * (working + ANSWERS[self.has_options] * sampled * counts[2] * answer)

    def _kept(self, scores: int, values: int) -> int:
        """The bytes that are kept beside so many scores and values, see `Sample.once`: one entry may be larger."""
        most = 8 * (KEPT_SCORES[self.has_options] * scores + KEPT_VALUES * values)
        return min(max(self.room, 8 * max(scores, values)), most)
