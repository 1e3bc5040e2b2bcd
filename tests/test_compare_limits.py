"""Comparisons are inside every limit, leave nothing behind, and claim no more than the inputs can show."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.shapes import Sizes
from attention_service.backends.base import no_check
from attention_service.codecs.decoded import Decoded
from attention_service.comparison import inputs
from attention_service.comparison.case import make_case
from attention_service.comparison.engine.suggestion import best_of
from attention_service.comparison.inputs import (
    COTANGENTS,
    MADE_OUTPUTS,
    MADE_ROOM,
    OPTIONS,
    made_scores,
    make_input,
    suggestions,
)
from attention_service.comparison.memory import (
    ARRAY_BYTES,
    HEAD_BYTES,
    OBJECTS,
    Work,
    comparison_bytes,
    parts_of,
    recipes,
    suggestion_bytes,
)
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.question import make_question
from attention_service.comparison.recipes import MADE, MAX_DIM, Recipe, recipe_for, recipe_of
from attention_service.comparison.sample import MAX_THREADS
from attention_service.library import compare
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.runtime.machine import cpu_count
from attention_service.settings.model import LEAST_MEMORY
from tests.conftest import app, serving

RIGHT: Final = ("correct", "inconclusive")
RANDOM: Final = np.random.default_rng(0)
TILED: Final = [
    name
    for name, row in MUTANTS.items()
    if row.by_tile and name.startswith("softmax.") and name != "softmax.padded_lanes"
]


def heads(b: int, h: int, g: int, q: int, k: int, d: int, e: int, **options: Any) -> dict[str, Any]:
    """A request in float16 with random operands, layout bhld."""
    shapes = {"query": (b, h, q, d), "key": (b, g, k, d), "value": (b, g, k, e)}
    arrays = {name: RANDOM.standard_normal(shape, np.float32).astype(np.float16) for name, shape in shapes.items()}
    return {**arrays, "layout": "bhld", **options}


MANY: Final = "many batch entries"
# Requests whose sizes are unusual in one way each.
SHAPES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "wide": lambda: heads(1, 1, 1, 2, 2, 50_000, 4),
    "wide values": lambda: heads(1, 1, 1, 2, 2, 4, 50_000),
    "many heads on one": lambda: heads(1, 800, 1, 1, 300, 32, 32),
    MANY: lambda: heads(1000, 1, 1, 2, 2, 8, 8),
    "many keys": lambda: heads(1, 4, 1, 1, 20_000, 16, 16),
    "many queries": lambda: heads(1, 1, 1, 20_000, 1, 16, 16),
    "a mask": lambda: heads(1, 2, 2, 300, 300, 8, 8, mask=RANDOM.random((1, 2, 300, 300)) < 0.9),
    "norms and rotation": lambda: heads(1, 4, 2, 200, 200, 64, 64, rotary={}, query_norm={}, key_norm={}),
    "few numbers": lambda: heads(1, 1, 1, 1, 2, 2, 2),
    "usual heads": lambda: heads(1, 4, 2, 33, 65, 64, 64),
    "equal keys": lambda: {**heads(1, 2, 1, 700, 700, 16, 16, is_causal=True, rotary={}, query_norm={}, key_norm={}),
                           "key": np.ones((1, 1, 700, 16), np.float16), "value": np.ones((1, 1, 700, 16), np.float16)},
}  # fmt: skip


# The estimate is at most so many times the peak with a made input, beyond the bytes of objects of both parts.
SLACK: Final = 6
WORKERS: Final = min(cpu_count(), MAX_THREADS)


def peak_of(function: Callable[[], object]) -> int:
    """The peak of traced memory during a call, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
# All arrays of many batch entries would take a minute.
@pytest.mark.parametrize(
    ("name", "is_all"), [(name, sent) for name in SHAPES for sent in (False, True) if (name, sent) != (MANY, True)]
)
def test_memory_is_estimated_for_every_shape(name: str, is_all: bool) -> None:
    """With outputs that are wrong, so that hypotheses are made; and a next input if all arrays were sent."""
    fields = SHAPES[name]()
    shape, keys = fields["query"].shape[:3], fields["key"].shape[2]
    actual = {"output": np.zeros((*shape, fields["value"].shape[3]), np.float16)}
    if is_all:
        actual |= {"logsumexp": np.zeros(shape, np.float32), "attention_weights": np.zeros((*shape, keys), np.float16)}
    question = make_question(Decoded({**fields, "actual": actual}, frozenset()))
    peak, estimate = peak_of(lambda: compare(actual, **fields)), comparison_bytes(question, WORKERS)
    arrays, work = parts_of(question, WORKERS)
    assert peak <= estimate
    if is_all:
        assert estimate - OBJECTS <= SLACK * peak
    else:  # nothing is made, as the mistake is known: the rest alone is enough
        assert peak <= OBJECTS + arrays + work.bytes <= SLACK * peak + 2 * OBJECTS


# Requests of more than 64 MiB, whose estimates are close. A mask is added to the scores by one of the mistakes.
LARGE: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "grouped heads": lambda: heads(1, 16, 4, 2048, 2048, 128, 128, is_causal=True),
    "a large mask": lambda: heads(1, 8, 8, 1400, 1400, 16, 16, mask=RANDOM.random((1, 8, 1400, 1400)) < 0.9),
}

CLOSE: Final = {"grouped heads": 1.6, "a large mask": 4.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_estimate_of_a_large_request_is_close(name: str) -> None:
    """A search of an error that is no known mistake takes most: at most the estimate, and not much less."""
    fields = LARGE[name]()
    output = attend(**fields).output.astype(np.float32)
    actual = (output + RANDOM.normal(size=output.shape)).astype(np.float16)
    question = make_question(Decoded({**fields, "actual": {"output": actual}}, frozenset()))
    estimate = comparison_bytes(question, WORKERS)
    assert estimate > 2**26
    peak = peak_of(lambda: compare(actual, **fields))
    assert peak <= estimate <= CLOSE[name] * peak


RECIPES: Final = {
    "tiny": {"heads": 1, "kv_heads": 1, "head_dim": 2, "value_dim": 2},
    "of usual heads": {"head_dim": 128, "value_dim": 128},
    "of many heads": {"heads": 12, "kv_heads": 4, "head_dim": 16, "value_dim": 16},
    "of many queries": {"heads": 4, "kv_heads": 2, "head_dim": 2, "value_dim": 2, "queries": 257},
}
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    **{name: (name,) for name in (*OPTIONS, "past")},
    "none": (),
    "tables": ("mask", "bias"),
    "all": tuple({*OPTIONS, "past"} - {"is_causal", "chunk_size", "query_lengths", "key_lengths"}),
}


@pytest.mark.slow
# Each option by itself at usual sizes, which take longest to compute; none, tables and all at every size.
@pytest.mark.parametrize(
    ("size", "options"),
    [(size, name) for size in RECIPES for name in CHOICES if size == "of usual heads" or len(CHOICES[name]) != 1],
)
def test_memory_is_estimated_for_every_made_input(size: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed takes the same memory; two are tried, as the first is kept meanwhile."""
    monkeypatch.setattr(inputs, "TRIES", 2)
    sizes: Any = RECIPES[size]
    recipe = Recipe(frozenset(CHOICES[options]), keys=257, **sizes)
    peak = peak_of(lambda: best_of(suggestions(recipe, MUTANTS, ("output",), 0, no_check), MUTANTS))
    assert peak <= suggestion_bytes(recipe, ("output",)) <= SLACK * peak + OBJECTS


@pytest.mark.parametrize("actual", [{}, {"actual": {"output": [[0.5, 0.5]]}}], ids=["power", "wrong"])
def test_a_tiny_comparison_fits_into_the_least_memory(actual: dict[str, Any]) -> None:
    fields = {"query": [[1.0, 0.0]], "key": [[1.0, 0.0], [0.0, 1.0]], "value": [[1.0, 2.0], [3.0, 4.0]]}
    with serving(app(memory_limit=LEAST_MEMORY)) as client:
        response = client.post("/attention/compare", json={**fields, **actual})
    assert response.status_code == 200, response.text


@pytest.mark.slow
@pytest.mark.parametrize("heads_of_keys", [1, 8])
def test_a_made_input_takes_a_bounded_amount_of_memory(heads_of_keys: int) -> None:
    norm = {"weight": np.ones(2 * MAX_DIM)}
    fields = heads(1, 8, heads_of_keys, 3, 3, 2 * MAX_DIM, 2 * MAX_DIM, is_causal=True, rotary={}, query_norm=norm)
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    recipe = recipe_of(make_case(spec, plan.dtype), TILED)
    assert (recipe.head_dim, recipe.value_dim) == (MAX_DIM, MAX_DIM)
    names = ("output", "logsumexp")
    wanted = ("heads.reversed", "mask.finite")
    peak = peak_of(lambda: best_of(suggestions(recipe, wanted, names, 0, no_check), wanted))
    assert peak <= min(64 * 2**20, suggestion_bytes(recipe, names))


@pytest.mark.parametrize(
    ("h", "g", "d", "tiles", "expected"),
    [
        (8, 8, 8, False, (2, 4, 4, 67)),
        (8, 8, 64, True, (2, 4, 4, 515)),  # 527,360 numbers
        (32, 2, 128, True, (2, 32, 2, 515)),  # 1,054,720
        (8, 8, 256, True, (1, 4, 4, 515)),  # two batch entries would have 2,109,440
        (8, 8, 1024, True, (1, 2, 2, 259)),  # 4 heads of 515 keys 4,218,880, 2 heads 2,109,440
        (8, 1, 1024, False, (2, 8, 1, 67)),  # 1,097,728
    ],
)
def test_a_made_input_has_at_most_1_100_000_numbers(
    h: int, g: int, d: int, tiles: bool, expected: tuple[int, int, int, int]
) -> None:
    """Of keys and values of a sample of 4 heads, each query head with its own."""
    spec, plan = make_spec_and_plan(Decoded(heads(1, h, g, 3, 3, d, d), frozenset()))
    recipe = recipe_of(make_case(spec, plan.dtype), TILED if tiles else [])
    assert (recipe.batch, recipe.heads, recipe.kv_heads, recipe.keys) == expected
    assert recipe.batch * min(recipe.heads, 4) * recipe.keys * 2 * d <= 1_100_000


def test_a_made_input_rotates_as_the_request_does() -> None:
    for rotary in ({"dim": 6, "interleaved": True}, {"base": 50.0}):
        fields = heads(1, 1, 1, 3, 3, 8, 8, rotary=rotary)
        spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
        assert recipe_of(make_case(spec, plan.dtype), []).rotary == {"interleaved": False} | rotary


def test_the_operands_of_a_made_input_are_estimated_by_hand() -> None:
    """2 · (4 · 13 · 8 + 2 · 67 · 13) numbers, once in float32 and three times in float64, beside outputs."""
    recipe = Recipe(frozenset(), dtype="float32", heads=4, kv_heads=2, keys=67, head_dim=8, value_dim=5, queries=13)
    sizes = Sizes(4, 2, 2, 13, 67, 8, 5)
    work = Work(sizes, ("output",), 5, scores=made_scores(("output",)), outputs=MADE_OUTPUTS, room=MADE_ROOM)
    rest = OBJECTS + ARRAY_BYTES * 2 * 4 * 13 * 5 + work.bytes
    assert suggestion_bytes(recipe, ("output",)) - rest == (4 + 3 * 8) * 2 * (416 + 1742)


def test_the_operands_of_a_comparison_are_estimated_by_hand() -> None:
    """2 · 3 · 8 + 2 · 4 · (8 + 5) numbers in float64, as given and as if they had other axes; the latter once more."""
    question = make_question(Decoded({**heads(1, 2, 2, 3, 4, 8, 5), "query_offset": 1}, frozenset()))
    arrays, work = parts_of(question, 1)
    assert arrays == 8 * (48 + 104)
    assert work.copied - HEAD_BYTES * 2 * 3 * 5 == 8 * (48 + 2 * 104)
    made = max(suggestion_bytes(one, ("output",)) for one in recipes(question))
    assert comparison_bytes(question) == OBJECTS + arrays + max(made, work.bytes)


def test_the_report_says_that_a_made_input_is_narrower() -> None:
    fields = heads(1, 1, 1, 2, 2, MAX_DIM + 8, 4)
    report = compare(**fields)
    assert report.next_input is not None
    assert report.next_input.note is not None
    assert str(MAX_DIM) in report.next_input.note
    plain = compare(**heads(1, 2, 2, 2, 2, 8, 4))
    assert plain.next_input is not None
    assert plain.next_input.note is None


def folded(dtype: type, d: int, tokens: tuple[int, int], seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A request, and what a kernel returns that multiplies the query by scale · log2(e), in the type of the request."""
    random = np.random.default_rng(seed)
    rows = (tokens[0], tokens[1], tokens[1])
    drawn: list[np.ndarray] = [random.standard_normal((2, count, d)).astype(dtype) for count in rows]
    query, key, value = drawn
    factor = np.float32(np.log2(np.e) / np.sqrt(d))
    scores = (query * factor.astype(np.float32)).astype(dtype).astype(np.float32) @ key.astype(np.float32).swapaxes(
        1, 2
    )
    largest = scores.max(axis=-1, keepdims=True)
    powers = np.exp2(scores - largest)
    total = powers.sum(axis=-1, keepdims=True)
    output = (powers.astype(dtype).astype(np.float32) @ value.astype(np.float32) / total).astype(dtype)
    logsumexp = ((largest + np.log2(total))[..., 0] * np.float32(np.log(2))).astype(np.float32)
    return {"query": query, "key": key, "value": value, "layout": "hld"}, {"output": output, "logsumexp": logsumexp}


@pytest.mark.parametrize("d", [1, 4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("tokens", [(19, 37), (1, 5), (5, 1)], ids=str)
def test_a_query_that_holds_the_scale_is_right(dtype: type, d: int, tokens: tuple[int, int]) -> None:
    """Also where √d is a power of two, so that the scale alone would round nothing."""
    for seed in range(2):
        fields, arrays = folded(dtype, d, tokens, seed)
        report = compare(arrays, **fields, time_limit=0)
        assert report.verdict.status in RIGHT, report.verdict


@pytest.mark.parametrize("d", [16, 64])
def test_a_wrong_logsumexp_of_half_types_is_still_wrong(d: int) -> None:
    fields, arrays = folded(ml_dtypes.bfloat16, d, (19, 37), 0)
    report = compare({**arrays, "logsumexp": arrays["logsumexp"] / np.float32(np.log(2))}, **fields)
    assert (report.verdict.status, report.hypotheses[0].name) == ("wrong", "logsumexp.base2")


@pytest.mark.parametrize(
    ("queries", "keys", "d", "names"),
    [
        (1, 1, 4, ("logsumexp",)),
        (1, 1, 1, ("output", "logsumexp")),
        (1, 5, 4, ("logsumexp",)),
        (5, 1, 4, ("logsumexp",)),
    ],
)
def test_one_number_proves_no_scale(queries: int, keys: int, d: int, names: tuple[str, ...]) -> None:
    """One query and one key, one number to fit the scale to, or a single key, whose weight is 1 at any scale."""
    random = np.random.default_rng(1)
    query, key, value = (random.standard_normal((n, d)) for n in (queries, keys, keys))
    fields: dict[str, Any] = {"query": query, "key": key, "value": value}
    result = attend(**fields, scale=0.3, include=["logsumexp"])
    report = compare(
        {name: getattr(result, name, None) if name == "output" else result[name] for name in names}, **fields
    )
    assert report.verdict.status == "wrong"
    assert [one.certainty for one in report.hypotheses if one.certainty == "proof"] == []


@pytest.mark.parametrize(
    "change", [{"softcap": 0.3}, {"alibi_slopes": [0.5]}, {"bias": [[0.0, 0.7]]}, {"query": 0.3}], ids=str
)
def test_one_free_weight_proves_no_scale(change: dict[str, Any]) -> None:
    """One query and two keys: whatever changes their weights, some scale changes them alike."""
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(1, 8)), random.normal(size=(2, 8)), random.normal(size=(2, 8))
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "query_offset": 1, "dtype": "float32"}
    changed = {**change, "query": query + change["query"]} if "query" in change else change
    report = compare(attend(**{**fields, **changed}).output, **fields)
    assert report.verdict.status == "wrong"
    assert [one.name for one in report.hypotheses if one.certainty == "proof"] == []


@pytest.mark.parametrize(("queries", "keys", "d"), [(1, 5, 4), (5, 5, 1), (2, 2, 1)])
def test_several_numbers_prove_a_scale(queries: int, keys: int, d: int) -> None:
    random = np.random.default_rng(1)
    query, key, value = (random.standard_normal((n, d), np.float32) for n in (queries, keys, keys))
    fields: dict[str, Any] = {"query": query, "key": key, "value": value}
    result = attend(**fields, scale=0.3, include=["logsumexp"])
    best = compare({"output": result.output, "logsumexp": result["logsumexp"]}, **fields).hypotheses[0]
    assert (best.name, best.certainty) == ("scale.other", "proof")


def without_rescale(query: np.ndarray, key: np.ndarray, value: np.ndarray, tile: int) -> np.ndarray:
    """Attention (q, d) in tiles of keys that never rescales what earlier tiles added."""
    scores = query @ key.T / np.sqrt(query.shape[1])
    total, output, largest = (
        np.zeros((len(query), 1)),
        np.zeros((len(query), value.shape[1])),
        np.full((len(query), 1), -np.inf),
    )
    for start in range(0, len(key), tile):
        part = scores[:, start : start + tile]
        largest = np.maximum(largest, part.max(axis=1, keepdims=True))
        powers = np.exp(part - largest)
        total, output = total + powers.sum(axis=1, keepdims=True), output + powers @ value[start : start + tile]
    return output / total


@pytest.mark.parametrize("keys", [5, 16, 67, 128, 255, 300, 513])
def test_a_mistake_of_tiles_is_shown_by_keys_of_two_tiles(keys: int) -> None:
    query, key, value = np.random.default_rng(2).standard_normal((3, keys, 4)) * 2
    found = compare(query=query, key=key, value=value).power
    shown = [tile for tile in (16, 32, 64, 128, 256) if tile < keys]
    assert {name: found.tiles[name] for name in TILED} == dict.fromkeys(TILED, shown)
    assert {name: name in found.survivors for name in TILED} == dict.fromkeys(TILED, keys <= 256)
    wrong = without_rescale(query, key, value, 128)
    report = compare(wrong, query=query, key=key, value=value)
    assert (report.verdict.status == "wrong") == (keys > 128)
    assert keys <= 128 or report.hypotheses[0].name == "softmax.no_rescale"


@pytest.mark.parametrize("tile", [16, 64, 512])
def test_a_kernel_of_any_usual_tile_is_proved_not_to_rescale(tile: int) -> None:
    """The truth of `power.tiles` ends at 256, but kernels with tiles of 512 keys are known, too."""
    query, key, value = np.random.default_rng(2).standard_normal((3, 1100, 4)) * 2
    best = compare(without_rescale(query[:40], key, value, tile), query=query[:40], key=key, value=value).hypotheses[0]
    assert (best.name, best.certainty, f"of {tile} keys" in best.message) == ("softmax.no_rescale", "proof", True)


def test_a_tail_is_not_shown_by_keys_without_one() -> None:
    """96 keys are whole tiles of 16 and 32: a kernel that drops what is left over is right."""
    query, key, value = np.random.default_rng(2).standard_normal((3, 96, 4)) * 2
    assert "keys.tail_dropped" in compare(query=query, key=key, value=value).power.survivors


@pytest.mark.parametrize("name", ["softmax.no_rescale", "softmax.last_tile"])
def test_made_inputs_show_mistakes_of_tiles(name: str) -> None:
    found = best_of(suggestions(recipe_for([name]), [name], ("output",), 0, no_check), [name])
    assert found is not None
    assert found.kills == (name,)
    query, key, value = (found.fields[role][0, 0].astype(np.float64) for role in ("query", "key", "value"))
    for tile in (16, 32, 64, 128):
        wrong = without_rescale(query, key, value, tile)
        assert (
            compare(wrong, query=query, key=key, value=value, dtype="float32", time_limit=0).verdict.status == "wrong"
        )


def test_the_next_input_of_few_keys_shows_mistakes_of_tiles() -> None:
    fields = make_input(recipe_for([]), 0)
    report = compare(**fields)
    assert report.next_input is not None
    assert set(TILED) <= set(report.next_input.kills)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1e200, "float64"), (-1e300, "float64"), (1e-200, "float64"), (1e-200, "float32"), (3e38, "float32")],
)
def test_a_scale_whose_square_overflows_is_no_defect(scale: float, dtype: str) -> None:
    rows = [[1, 2], [3, 4]]
    assert compare(input=rows, scale=scale, dtype=dtype).verdict.status == "inconclusive"
    assert compare([[1.0, 2.0], [3.0, 4.0]], input=rows, scale=scale, dtype=dtype).verdict.message


def test_a_finite_error_that_is_too_large_for_a_ratio_is_not_called_infinite() -> None:
    report = compare([[1e300, -1e300]], query=[[1.0]], key=[[1.0]], value=[[1.0, 2.0]])
    assert report.verdict.status == "wrong"
    assert report.errors["output"].non_finite == 0
    assert "infinite" not in report.verdict.message


def test_recipes_know_the_options_that_inputs_make() -> None:
    assert OPTIONS.keys() | COTANGENTS.keys() == MADE


@pytest.mark.parametrize(("offset", "expected"), [(6, "last"), (0, 0), (2, 3)])
def test_made_inputs_keep_the_alignment_of_one_offset(offset: int, expected: Any) -> None:
    """A kernel that takes one number, or that aligns the last query with the last key, can run them."""
    fields = heads(2, 2, 2, 3, 9, 4, 4, is_causal=True, query_offset=offset)
    spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
    made = make_input(recipe_of(make_case(spec, plan.dtype), []), 0)
    last = made["key"].shape[2] - made["query"].shape[2]
    assert made["query_offset"] == (last if expected == "last" else expected)
    spec = spec._replace(query_offset=np.array([offset, offset]))
    assert make_input(recipe_of(make_case(spec, plan.dtype), []), 0)["query_offset"].shape == (2,)


def test_a_causal_mask_of_one_query_need_not_show() -> None:
    """The last query sees every key: no numbers could show the mask. In another place they could."""
    fields = heads(1, 2, 2, 1, 9, 4, 4, is_causal=True)
    for offset in (8, 7):
        actual = attend(**fields, query_offset=offset, include=[]).output
        assert compare(actual, **fields, query_offset=offset).power.options == []
    key, value = np.ones((2, 1, 2, 9, 4), np.float16)
    report = compare(**fields | {"key": key, "value": value}, query_offset=7)
    assert report.power.options == ["is_causal"]
