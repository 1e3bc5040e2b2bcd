"""Comparisons: planted mistakes are named, right outputs are not accused, bad input is refused, in every format."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import ml_dtypes
import numpy as np
import pytest

from attention_service import attend
from attention_service.attention.arrays import BFLOAT16
from attention_service.attention.terms import FIELDS
from attention_service.cli import main
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.candidates import MESSAGES
from attention_service.comparison.errors import epsilon, largest_number, measure, ulp
from attention_service.comparison.inputs import OPTIONS, make_input
from attention_service.comparison.memory import comparison_bytes
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.question import make_question
from attention_service.comparison.recipes import NEEDS, recipe_for
from attention_service.comparison.sample import everything
from attention_service.comparison.solve import solve
from attention_service.errors import InvalidRequest
from attention_service.library import WeakInputs, assert_attention, compare
from attention_service.schemas.compare import CompareReport
from tests.helpers.planted import COMMON_PAIRS, Draw, draw, named_first, returned, tells_apart
from tests.helpers.wire import MEDIA_TYPES, write

Run = Callable[..., tuple[int, str, str]]

# The names of the contract: clients may rely on them.
NAMES: Final = """
scale.absent scale.twice scale.inverse_dim scale.value_dim scale.log2e scale.other causal.absent causal.added
causal.strict causal.top_left causal.bottom_right causal.offset_plus_one causal.first_offset chunk.absent
chunk.no_offset window.absent window.left_plus_one window.left_minus_one window.right_plus_one
window.right_minus_one window.one_sided window.offset_ignored mask.absent mask.inverted mask.added mask.transposed
mask.first_batch mask.first_head mask.finite padding.ignored segments.ignored bias.absent bias.before_scale
alibi.absent alibi.sign alibi.first_head alibi.offset_ignored softmax.over_queries softmax.no_max softmax.no_rescale
softmax.accumulator_no_rescale softmax.last_tile softmax.denominator_last_tile softmax.unnormalized softmax.base2
softcap.absent softcap.after_bias softcap.before_scale sinks.absent sinks.shifted sinks.repeated_per_tile
sinks.scaled heads.tiled heads.first heads.keys_only heads.reversed heads.layout heads.permuted value.transposed
value.is_key output.packed output.unmoved rotary.absent rotary.interleaving rotary.sign rotary.base rotary.no_offset
rotary.twice rotary.cache_again rotary.query_only norm.absent norm.after_rotary logsumexp.base2 logsumexp.unscaled
logsumexp.no_sink logsumexp.empty_positive logsumexp.empty_finite empty.uniform empty.nan empty.last_key
precision.scores precision.accumulate precision.inputs precision.float32 output.zeros output.mean_value
keys.last_dropped keys.tail_dropped keys.half keys.second_half cache.ignored scale.first_head scale.shifted
sigmoid.softmax sigmoid.biased selected.absent selected.none_is_last selected.past_ignored
norm.before_rotary norm.no_mean norm.per_head gate.absent gate.activated_again
sinks.first_query clip.absent relative.absent relative.no_bias relative.reversed relative.shifted
relative.unshifted output.scaled softmax.padded_lanes keys.as_queries keys.last_split keys.share_read
softcap.not_divided softcap.times_score merge.base2 merge.unweighted merge.empty_part causal.other_offset
causal.by_tile causal.packed_group query.layout keys.layout values.layout kv.layout heads.kv_reversed
bias.log2e sinks.base2 alibi.factor alibi.log2e rotary.other_dim rotary.positions_shifted window.missing_rows
scale.by_tile precision.overflow16 heads.regrouped heads.as_tokens features.first_part
features.read_again causal.last_row empty.hidden_keys heads.values_only mask.in_max padding.in_sum
scale.zero_is_default query_lengths.absent
""".split()  # noqa: SIM905  # a hundred strings would be harder to read

# Two queries, keys and values: the scores are 1/√2 on the diagonal and 0 beside it.
SMALL: Final[dict[str, Any]] = {
    "query": [[1.0, 0.0], [0.0, 1.0]],
    "key": [[1.0, 0.0], [0.0, 1.0]],
    "value": [[1.0, 2.0], [3.0, 4.0]],
}
# 1 / (1 + e): what the other key weighs without a scale.
OTHER: Final = 1 / (1 + np.e)
UNSCALED: Final = [[1 + 2 * OTHER, 2 + 2 * OTHER], [3 - 2 * OTHER, 4 - 2 * OTHER]]


def float32(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value, np.float32) for name, value in fields.items()}


def test_all_names_of_the_contract_are_known() -> None:
    """But those of terms that are ignored, which have names from the day that they exist."""
    assert set(NAMES) <= set(MESSAGES)
    assert set(MESSAGES) - set(NAMES) <= {f"{field}.absent" for field in FIELDS}
    assert set(NEEDS) <= {name.partition(".")[0] for name in NAMES}


@pytest.mark.parametrize("sent", ["output", "grad_query"])
def test_a_made_input_that_is_not_valid_is_no_error_of_the_caller(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of options that cannot stand together in the sizes of the made input: there is no next input then."""
    monkeypatch.setitem(OPTIONS, "key_mask", lambda random, recipe: np.ones((1, 1), bool))
    fields: dict[str, Any] = {**SMALL, "key_mask": [True, True]}
    asked: dict[str, Any] = {} if sent == "output" else {"grad_output": [[1.0, 1.0]] * 2}
    right = attend(**fields, **asked, include=[] if sent == "output" else [sent])[sent]
    report = compare({sent: right}, **fields, **asked)
    assert report.verdict.ratio is not None
    assert report.verdict.ratio < 2
    assert report.power.survivors
    assert report.next_input is None


def test_a_mistake_is_named() -> None:
    """By hand: without its scale, the softmax of (1, 0) is (e, 1) / (1 + e)."""
    report = compare(UNSCALED, **SMALL)
    assert report.verdict.status == "wrong"
    best = report.hypotheses[0]
    assert (best.name, best.certainty, best.change) == ("scale.absent", "proof", {"scale": 1.0})
    assert best.explained == pytest.approx(1)
    right = 1 / (1 + np.exp(1 / np.sqrt(2)))
    assert report.errors["output"].max_abs == pytest.approx(2 * (right - OTHER), rel=1e-12)


@pytest.mark.parametrize("name", ["keys.half", "keys.second_half"])
@pytest.mark.parametrize(("keys", "read"), [(33, 16), (33, 17), (3, 1), (3, 2), (32, 16)])
def test_half_of_an_odd_number_of_keys_is_rounded_either_way(name: str, keys: int, read: int) -> None:
    """The answer is attention over a slice of the keys, by NumPy."""
    draws = np.random.default_rng(0)
    query, key, value = (draws.standard_normal((2, length, 8)) for length in (keys, keys, keys))
    part = slice(read) if name == "keys.half" else slice(keys - read, None)
    weights = np.exp(query @ key[:, part].swapaxes(1, 2) / np.sqrt(8))
    output = weights / weights.sum(-1, keepdims=True) @ value[:, part]
    report = compare(output, query=query, key=key, value=value, layout="hld")
    best = report.hypotheses[0]
    assert best.certainty == "proof"
    assert name in {best.name, *(other.partition(" ")[0] for other in best.also)}
    if keys % 2 and best.name == name:
        assert f"{read} of {keys} keys" in str(best)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTANTS if not name.startswith("precision.")])
def test_each_planted_mistake_is_named_first(name: str) -> None:
    check_named_first(name)


def check_named_first(name: str) -> None:
    """Plant a mistake into random requests to which it applies: it is named for the first that can show it.

    For some of them the service computes what the mutant does, where a field of the request can say the mistake.
    """
    is_named = False
    for seed in range(40):
        drawn = draw(seed, (name,)) if seed < 6 or not is_named else None
        if drawn is None:
            continue
        if seed < 6:
            check_change(drawn)
        if is_named:
            continue
        arrays = returned(drawn, ("output", "logsumexp") if MUTANTS[name].needs else ("output",))
        report = compare(arrays, **drawn.fields)
        if name not in report.power.survivors:
            assert named_first(report, (name,)), report.hypotheses[:2]
            assert report.verdict.status == "wrong"
            is_named = True
    assert is_named, "no request shows it"


def check_change(drawn: Draw) -> None:
    if drawn.wrong.change is None or drawn.wrong.rounding != drawn.case.rounding:
        return
    change = dict(drawn.wrong.change)
    if any(isinstance(value, str) for value in change.values()):
        return  # in words
    nested = [name for name, value in change.items() if isinstance(value, dict) and name != "window"]
    change |= {name: {**drawn.fields[name], **change[name]} for name in nested}
    fields = {**drawn.fields, **change, "dtype": "float64"}
    result = attend(**{key: value for key, value in fields.items() if value is not None})
    expected = solve(drawn.wrong, everything(drawn.case)).output
    np.testing.assert_allclose(result.output, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("pair", COMMON_PAIRS[::5], ids=" and ".join)
def test_two_planted_mistakes_are_both_named(pair: tuple[str, str]) -> None:
    for seed in range(40):
        drawn = draw(seed, pair)
        if drawn is None or not tells_apart(drawn):
            continue
        report = compare(returned(drawn), **drawn.fields)
        assert named_first(report, pair), report.hypotheses[:2]
        return
    pytest.fail("no request shows both")


def test_a_pair_is_named_beside_one_with_the_same_output() -> None:
    """All visible keys are in the last tile, so that its sum lacks the sink only: alone, sinks.absent explains less."""
    drawn = draw(5_000_018, ("heads.tiled", "sinks.absent"))
    assert drawn is not None
    assert tells_apart(drawn)
    report = compare(returned(drawn), **drawn.fields)
    assert report.hypotheses[0].certainty == "proof"
    assert named_first(report, drawn.names)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_right_outputs_are_not_accused(dtype: str) -> None:
    """What the service itself computes in a type, in other layouts and with all options."""
    for seed, group in enumerate(NEEDS):
        fields = make_input(recipe_for([f"{group}.absent"]), seed) | {"dtype": dtype}
        report = compare(attend(**fields).output, **fields, time_limit=0)
        assert report.verdict.status in ("correct", "inconclusive"), (group, report.verdict)


def test_a_mistake_that_is_not_in_the_table_is_no_proof() -> None:
    fields = make_input(recipe_for(["causal.absent"]), 5)
    output = attend(**fields).output
    report = compare(output + np.sin(np.arange(output.shape[-1])).astype(np.float32), **fields)
    assert report.verdict.status == "wrong"
    assert all(one.certainty == "resembles" for one in report.hypotheses)
    assert "no known mistake" in report.verdict.message


@pytest.mark.parametrize("name", ["window.left_plus_one", "heads.tiled", "softcap.after_bias", "softmax.no_rescale"])
def test_a_planted_mistake_is_named(name: str) -> None:
    check_named_first(name)


def test_infinities_and_nan_are_reported() -> None:
    """They are wrong where the reference is a number, and right where it is the same infinity."""
    fields = float32(SMALL) | {"key_mask": np.array([False, False])}
    report = compare({"output": np.zeros((2, 2)), "logsumexp": [-np.inf, -np.inf]}, **fields, time_limit=0)
    assert report.verdict.ratio == 0
    assert report.errors["logsumexp"].non_finite == 0
    assert report.errors["logsumexp"].max_abs is None
    report = compare(np.full((2, 2), np.nan), **fields)
    assert report.verdict.status == "wrong"
    assert report.errors["output"].non_finite == 4
    assert report.hypotheses[0].name == "empty.nan"


def test_poison_behind_a_mask_is_no_fault_of_the_request() -> None:
    fields = float32(SMALL) | {"key_mask": np.array([True, False])}
    fields["value"][1] = np.nan
    assert compare([[1, 2], [1, 2]], **fields, time_limit=0).verdict.ratio == 0
    leaked = compare([[np.nan, np.nan], [np.nan, np.nan]], **fields, time_limit=0)
    assert leaked.verdict.status == "wrong"


def test_a_logsumexp_may_have_base_2() -> None:
    fields = make_input(recipe_for(["causal.absent"]), 1)
    natural = attend(**fields, include=["logsumexp"])["logsumexp"]
    base2 = {"logsumexp": natural / np.log(2)}
    assert compare(base2, **fields, logsumexp_base="2", time_limit=0).verdict.status in ("correct", "inconclusive")
    report = compare(base2, **fields)
    assert report.hypotheses[0].name == "logsumexp.base2"


def test_other_arrays_are_compared() -> None:
    fields = make_input(recipe_for(["rotary.absent"]), 1)
    names = ["attention_weights", "scores", "key", "present_value", "entropy", "received"]
    result = attend(**fields, include=names)
    arrays = {name: result[name] for name in names}
    assert compare(arrays, **fields).verdict.status == "correct"
    report = compare({**arrays, "key": arrays["key"] * 1.01}, **fields, time_limit=0)
    assert report.verdict.status == "wrong"
    assert set(report.errors) == set(names)


def test_the_callers_own_test_is_told() -> None:
    report = compare(UNSCALED, **SMALL, tolerance={"atol": 10.0})
    [own] = [test for test in report.tests if test.name == "yours"]
    assert own.passes
    assert "scale.absent" in own.misses
    assert {test.name for test in report.tests} == {"torch.testing", "KernelBench", "FlashInfer-Bench", "yours"}


def test_a_weak_request_is_inconclusive_and_says_what_would_not_be() -> None:
    """Of one key, any weights make the same output."""
    fields: dict[str, Any] = {name: np.ones((1, 1, 1, 4), np.float32) for name in ("query", "key", "value")}
    report = compare(np.ones((1, 1, 1, 4), np.float32), **fields)
    assert report.verdict.status == "inconclusive"
    assert report.next_input is not None
    assert report.next_input.request is not None
    again = compare(**report.next_input.request)
    assert set(report.next_input.kills).isdisjoint(again.power.survivors)


@pytest.mark.slow
def test_power_is_honest() -> None:
    """A mistake that is said to be invisible really is, by the same measure, on all rows."""
    for seed in range(30):
        name = NAMES[seed % len(NAMES)]
        drawn = draw(seed, (name,)) if name in MUTANTS else None
        if drawn is None:
            continue
        power = compare(**drawn.fields).power
        report = compare(returned(drawn), **drawn.fields, time_limit=0)
        if name not in power.survivors and not MUTANTS[name].needs:
            assert report.verdict.status in ("wrong", "imprecise"), name


def test_places_are_named() -> None:
    fields = make_input(recipe_for(["heads.tiled"]), 2)
    output = attend(**fields).output.copy()
    output[:, 1:, 10:] += 1
    messages = [place.message for place in compare(output, **fields, time_limit=0).where]
    assert messages[1:] == ["heads 1 to 3 only", "rows 10 to 12 only"]


@pytest.mark.parametrize("media_type", MEDIA_TYPES)
def test_every_wire_format(client: httpx.Client, media_type: str) -> None:
    fields = {**float32(SMALL), "dtype": "float32", "actual": {"output": np.array(UNSCALED, np.float32)}}
    response = client.post(
        "/attention/compare", content=write(fields, media_type), headers={"Content-Type": media_type}
    )
    assert response.status_code == 200
    report = CompareReport.model_validate(response.json())
    assert report.hypotheses[0].name == "scale.absent"
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"actual": {"output": [[1.0, 2.0]]}}, "/actual/output"),
        ({"actual": {"output": [["x"]]}}, "/actual/output/0/0"),
        ({"actual": {}}, "/actual"),
        ({"actual": 3}, "/actual"),
        ({"actual": {"outputs": UNSCALED}}, "/actual/outputs"),
        ({"logsumexp_base": 10}, "/logsumexp_base"),
        ({"tolerance": {"rtol": -1}}, "/tolerance/rtol"),
        ({"tolerance": {"rtol": 1, "x": 2}}, "/tolerance/x"),
        ({"top_k": 1}, "/top_k"),
        ({"query": [[1.0]]}, "/key"),
        ({"normalization": "sum", "actual": {"logsumexp": [1.0, 2.0]}}, "/include"),
    ],
)
def test_bad_input_is_refused(client: httpx.Client, change: dict[str, Any], pointer: str) -> None:
    response = client.post("/attention/compare", json={**SMALL, "actual": {"output": UNSCALED}, **change})
    assert response.status_code == 422, response.text
    assert response.json()["errors"][0]["pointer"] == pointer


def test_null_is_nan(client: httpx.Client) -> None:
    output = [[None, 2.0], [3.0, 4.0]]
    response = client.post("/attention/compare", json={**SMALL, "actual": {"output": output}})
    assert response.json()["errors"]["output"]["non_finite"] == 1
    assert response.json()["verdict"]["ratio"] is None


def test_assert_attention() -> None:
    fields = make_input(recipe_for(["causal.absent"]), 3)
    assert_attention(attend(**fields).output, **fields)
    with pytest.raises(AssertionError, match=r"causal\.absent"):
        assert_attention(attend(**{**fields, "is_causal": False}).output, **fields)
    with pytest.raises(InvalidRequest):
        assert_attention(np.zeros(3), **fields)


def test_assert_attention_tells_of_options_that_its_inputs_cannot_show() -> None:
    """tanh(x) is x for small x: scores of about 1 below a cap of 50 change by less than bfloat16 tells."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 2, 67, 16)).astype(ml_dtypes.bfloat16)
    request = {"query": query, "key": key, "value": value, "layout": "hld", "softcap": 50.0}
    plain = attend(query, key, value, layout="hld").output
    with pytest.raises(WeakInputs) as error:
        assert_attention(plain, **request)
    said, then = str(error.value).splitlines()
    assert said == "Nothing wrong was seen; these inputs cannot show: softcap"
    assert '"softcap": 50.0}' in then  # with the options of the request
    assert "' --kills softcap.absent --output made.safetensors" in then
    assert error.value.report.power.options == ["softcap"]
    report = assert_attention(plain, **request, must_show=None)
    assert report.power.options == ["softcap"]
    assert "a kernel that ignores softcap" in report.verdict.message
    with pytest.raises(InvalidRequest, match="/must_show"):
        assert_attention(plain, **request, must_show="everything")  # type: ignore[arg-type]
    spiky = {**request, "query": query * 30}
    assert assert_attention(attend(**spiky).output, **spiky).power.options == []


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, run: Run) -> None:
    """Exit status 0 for a right output, 1 for a wrong one, 2 for none, 3 for a file that is not there."""
    fields = make_input(recipe_for(["causal.absent"]), 3)
    request, right, wrong = tmp_path / "request.safetensors", tmp_path / "right.npy", tmp_path / "wrong.json"
    made = run("inputs", "--seed", "3", "--kills", "causal.absent", "--output", str(request))
    assert (made[0], made[2]) == (0, "")
    np.save(right, attend(**fields).output)
    wrong.write_text(json.dumps(attend(**{**fields, "is_causal": False}).output.tolist()))
    assert run("compare", str(request), str(right))[0] == 0
    status, printed, _ = run("compare", str(request), str(wrong), "--format", "json")
    assert status == 1
    assert CompareReport.model_validate_json(printed).hypotheses[0].name == "causal.absent"
    assert "proof: causal.absent" in run("compare", str(request), str(wrong))[1]
    assert run("compare", str(request))[0] == 2
    status, _, said = run("compare", str(request), str(tmp_path / "nothing.npy"))
    assert (status, "No such file" in said) == (3, True)
    for name, words in (("scale.other", "found by an estimate"), ("nothing.known", "nothing.known")):
        status, _, said = run("inputs", "--kills", name)
        assert (status, words in said) == (2, True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command in this process: exit status, standard output and standard error. The docs' blocks start processes."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    "suffix",
    [".json", pytest.param(".npz", marks=pytest.mark.slow), pytest.param(".safetensors", marks=pytest.mark.slow)],
)
def test_made_inputs_are_read_again(tmp_path: Path, suffix: str, run: Run) -> None:
    path = tmp_path / f"request{suffix}"
    assert run("inputs", "--kills", "norm.absent", "--output", str(path))[0] == 0
    assert run("compare", str(path))[1].count("not shown: ") == 1
    like = tmp_path / f"like{suffix}"
    assert run("inputs", "--like", str(path), "--seed", "4", "--output", str(like))[0] == 0
    assert "norm.absent" not in run("compare", str(like))[1]


@pytest.mark.parametrize(("size", "kept"), [(9, 9), (10_000, 512)])
def test_made_inputs_keep_the_numbers_of_masks(size: int, kept: int, tmp_path: Path, run: Run) -> None:
    """Up to what small inputs can show."""
    case = tmp_path / "case.json"
    case.write_text(json.dumps({"input": np.eye(3).tolist(), "chunk_size": size}), encoding="utf-8")
    recipe = json.dumps({"options": ["chunk_size"], "numbers": {"chunk_size": kept}})
    for source in (["--like", str(case)], ["--recipe", recipe]):
        status, printed, _ = run("inputs", *source)
        assert (status, json.loads(printed)["chunk_size"]) == (0, kept)


def test_units_in_the_last_place() -> None:
    """NumPy's spacing, for the types that it knows."""
    for dtype in (np.float64, np.float32, np.float16):
        numbers = np.array([1, 1.5, 2, 3.1e-5, 1e4, 0.1], dtype)
        np.testing.assert_array_equal(ulp(numbers.astype(np.float64), np.dtype(dtype)), np.spacing(numbers))
        assert epsilon(np.dtype(dtype)) == np.finfo(dtype).eps
        assert largest_number(np.dtype(dtype)) == np.finfo(dtype).max
    # 8 bits of significand and the exponents of float32 (Wang and Kanwar, "BFloat16", 2019).
    assert (epsilon(BFLOAT16), largest_number(BFLOAT16)) == (2.0**-7, 3.3895313892515355e38)


def test_errors_by_hand() -> None:
    found = measure(np.array([1.0, 2.5, np.nan, np.inf]), np.array([1.0, 2.0, 1.0, np.inf]), np.dtype(np.float32))
    assert (found.max_abs, found.max_rel, found.non_finite) == (0.5, 0.25, 1)
    assert found.rmse == pytest.approx(0.5 / np.sqrt(2))
    assert found.cosine == pytest.approx(6 / np.sqrt(7.25 * 5))
    assert found.ulp is not None
    assert found.ulp.max == 0.5 / 2.0**-22


@pytest.mark.parametrize("factor", [1e-310, 1e-300, 0.0])
def test_tiny_values_have_a_baseline(factor: float) -> None:
    """Smaller than any unit in the last place of float64."""
    query, key, value = np.random.default_rng(0).standard_normal((3, 4, 3))
    output = attend(query, key, value * factor).output
    assert compare(output, query=query, key=key, value=value * factor).verdict.status in ("correct", "inconclusive")
    assert compare(output + 1, query=query, key=key, value=value * factor, time_limit=0).verdict.status == "wrong"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_one_after_the_other_are_right(dtype: type) -> None:
    """As a simple loop makes them, beside longdouble: no order of summation is accused."""
    random = np.random.default_rng(0)
    query: np.ndarray = random.standard_normal((2, 8)).astype(dtype)
    key: np.ndarray = random.standard_normal((4000, 8)).astype(dtype)
    values: list[np.ndarray] = [
        np.full((4000, 8), 7.3, dtype),
        random.standard_normal((4000, 8)).astype(dtype) + dtype(5),
    ]
    for value in values:
        scores = query @ key.T * dtype(8**-0.5)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        sums = [
            np.cumsum(row[:, None] * value, axis=0, dtype=dtype)[-1] / np.cumsum(row, dtype=dtype)[-1]
            for row in weights
        ]
        exact = weights.astype(np.longdouble)
        exact = exact @ value.astype(np.longdouble) / exact.sum(axis=1, keepdims=True)
        for output in (np.stack(sums), exact.astype(dtype)):
            report = compare(output, query=query, key=key, value=value, query_offset=0, time_limit=0)
            assert report.verdict.status in ("correct", "inconclusive"), report.verdict


def test_what_shows_no_mistake_is_inconclusive() -> None:
    fields = make_input(recipe_for(["rotary.absent"]), 1)
    report = compare({"value": fields["value"]}, **fields)
    assert (report.verdict.status, report.verdict.ratio) == ("inconclusive", 0)


def test_a_tuple_is_output_and_logsumexp() -> None:
    fields = make_input(recipe_for(["causal.absent"]), 1)
    result = attend(**fields, include=["logsumexp"])
    assert set(compare((result.output, result["logsumexp"]), **fields).errors) == {"output", "logsumexp"}


def test_many_heads_are_compared_in_time() -> None:
    """The order of heads is looked for among few only: all would be compared with all."""
    arrays = np.random.default_rng(0).standard_normal((4, 20_000, 2, 4)).astype(np.float32)
    report = compare(arrays[0], query=arrays[1], key=arrays[2], value=arrays[3], layout="hld")
    assert report.verdict.status == "wrong"


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_norm_of_each_head_in_the_place_of_one_over_all_is_named(kv_heads: int) -> None:
    random = np.random.default_rng(1)
    query, key, value = (random.normal(size=(h, 9, 4)) * h for h in (4, kv_heads, kv_heads))
    key *= np.arange(1, kv_heads + 1)[:, None, None]  # so that heads are of other sizes
    weight = random.normal(size=(kv_heads, 1, 4))
    normed = key / np.sqrt(np.square(key).mean(axis=-1, keepdims=True)) * weight
    scores = query @ np.repeat(normed, 4 // kv_heads, axis=0).swapaxes(-1, -2) / 2
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(value, 4 // kv_heads, axis=0)
    norm = {"over": "all", "weight": weight.ravel(), "eps": 0.0}
    report = compare(output, query=query, key=key, value=value, key_norm=norm, layout="hld")
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == ("norm.per_head", "proof")


@pytest.mark.parametrize(("padding", "first"), [((1, 0), 1), ((0, 1), 0)], ids=["one too far", "padded behind"])
def test_a_relative_shift_that_is_off_by_one_is_named(padding: tuple[int, int], first: int) -> None:
    """Products for distances -6 to 6 are padded and reshaped: right is padding in front, read from column 0."""
    random = np.random.default_rng(1)
    query, key, value = random.normal(size=(3, 2, 7, 4))
    keys, bias = random.normal(size=(2, 13, 4)), random.normal(size=(2, 4))
    products = np.pad((query + bias[:, None]) @ keys.swapaxes(1, 2), [(0, 0), (0, 0), padding])
    shifted = products.reshape(2, 14, 7)[:, 1:].reshape(2, 7, 13)[..., first : first + 7]
    weights = np.exp((query @ key.swapaxes(1, 2) + shifted) / 2)
    output = weights / weights.sum(axis=-1, keepdims=True) @ value
    relative = {"key": keys, "query_bias": bias}
    report = compare(output, query=query, key=key, value=value, relative_keys=relative, layout="hld")
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == ("relative.shifted", "proof")


def test_a_missing_relative_shift_is_named() -> None:
    random = np.random.default_rng(1)
    query, key, value = random.normal(size=(3, 2, 7, 4))
    keys = random.normal(size=(13, 4))
    weights = np.exp((query @ key.swapaxes(1, 2) + (query @ keys.T)[..., :7]) / 2)
    output = weights / weights.sum(axis=-1, keepdims=True) @ value
    report = compare(output, query=query, key=key, value=value, relative_keys={"key": keys}, layout="hld")
    assert (report.hypotheses[0].name, report.hypotheses[0].certainty) == ("relative.unshifted", "proof")


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tokens", "dim"), [(1, 256, 64), (1, 256, 1024), (8, 300, 32)])
def test_memory_is_estimated(heads: int, tokens: int, dim: int) -> None:
    """Enough, and not many times too much."""
    arrays = np.random.default_rng(0).standard_normal((4, heads, tokens, dim)).astype(np.float32)
    fields = {"query": arrays[0], "key": arrays[1], "value": arrays[2], "layout": "hld"}
    question = make_question(Decoded({**fields, "actual": {"output": arrays[3]}}, frozenset()))
    tracemalloc.start()
    compare(arrays[3], **fields)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= comparison_bytes(question) <= 8 * peak


def test_broken_files_are_refused(tmp_path: Path, run: Run) -> None:
    request, empty = tmp_path / "request.json", tmp_path / "empty.npy"
    request.write_text(json.dumps(SMALL))
    empty.write_bytes(b"")
    status, _, said = run("compare", str(request), str(empty))
    assert (status, said.count("\n")) == (3, 1)
    with pytest.raises(SystemExit, match=r"^2$"):
        run("inputs", "--seed", "-1")


@pytest.mark.parametrize(
    "option",
    [
        {"relative_keys": {"key": np.random.default_rng(0).normal(size=(19, 4))}},
        {"alibi_slopes": [0.5]},
        {"window": {"left": 9}},
        {"chunk_size": 5},
    ],
)
def test_an_offset_that_other_options_read_too_is_no_change_of_the_request(option: dict[str, Any]) -> None:
    """The kernel takes it for 0 in its causal mask alone, which no query_offset says."""
    query, key, value = np.random.default_rng(1).normal(size=(3, 10, 4))
    request = {"query": query[:6], "key": key, "value": value, "query_offset": 4, "is_causal": True, **option}
    own = {"is_causal": False, "mask": np.tril(np.ones((6, 10), bool))}
    report = compare(attend(**{**request, **own}, include=[]).output, **request)
    (found,) = [one for one in report.hypotheses if one.name.startswith("causal.")]
    assert (found.certainty, found.change) == ("proof", None)
