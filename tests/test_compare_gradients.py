"""Gradients of a kernel, judged: verdicts, baselines, names of mistakes, power, errors by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from attention_service.attention.arrays import BFLOAT16
from attention_service.cli import main
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.errors import InvalidRequest
from attention_service.library import assert_attention, attend, compare
from attention_service.library.assertion import WeakInputs
from attention_service.schemas.compare import CompareReport
from tests.helpers.planted import named_first
from tests.helpers.planted_gradients import draw_gradients
from tests.helpers.right_backward import BackwardKernel, backward

# One query, two keys; scale 1. By hand: P = 1/2, O = 3, D = 3; dZ = P (v - D) = (-1, 1); dK = dZ q; dQ = Σ dZ k.
BY_HAND: Final[dict[str, Any]] = {
    "query": [[1.0]],
    "key": [[1.0], [1.0]],
    "value": [[1.0], [5.0]],
    "scale": 1.0,
    "grad_output": [[1.0]],
}
RIGHT: Final = {"grad_query": [[0.0]], "grad_key": [[-1.0], [1.0]], "grad_value": [[0.5], [0.5]]}
# Those that power counts; test_compare_backward.py has the others.
IN_POWER: Final = [name for name, row in GRADIENT_MUTANTS.items() if row.in_power]
TYPES: Final = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}


def request(seed: int, dtype: np.dtype, *, heads: int = 4, length: int = 67, **options: Any) -> dict[str, Any]:
    """A random request with a cotangent, in layout bhld, two key/value heads."""
    random = np.random.default_rng(seed)
    shapes = {"query": heads, "key": 2, "value": 2, "grad_output": heads}
    arrays = {name: random.normal(size=(2, count, length, 16)).astype(dtype) for name, count in shapes.items()}
    return {**arrays, "layout": "bhld", **options}


def returned(fields: dict[str, Any], kernel: BackwardKernel | None = None, **other: Any) -> dict[str, np.ndarray]:
    """The gradients of a kernel that nobody here calls a mistake. other: options that it has in their place"""
    arrays = {name: fields[name] for name in ("query", "key", "value", "grad_output")}
    options = {name: value for name, value in fields.items() if name not in (*arrays, "layout")} | other
    with np.errstate(all="ignore"):
        return backward(**arrays, kernel=kernel or BackwardKernel(), **options)


def ratio_of(report: CompareReport) -> float:
    """The ratio of the verdict, which is a number."""
    assert report.verdict.ratio is not None
    return report.verdict.ratio


def test_gradients_by_hand_are_right() -> None:
    report = compare(RIGHT, **BY_HAND)
    assert report.verdict.ratio == 0
    assert {name: one.max_abs for name, one in report.errors.items()} == dict.fromkeys(RIGHT, 0.0)


def test_a_wrong_gradient_by_hand_is_named() -> None:
    """Without D, dZ = P v = (1/2, 5/2)."""
    report = compare({**RIGHT, "grad_key": [[0.5], [2.5]], "grad_query": [[3.0]]}, **BY_HAND)
    assert report.verdict.status == "wrong"
    assert report.errors["grad_query"].max_abs == 3
    assert report.hypotheses[0].name == "grad.no_delta"
    assert report.hypotheses[0].certainty == "proof"
    assert report.hypotheses[0].change is None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, name in enumerate(IN_POWER)]
)
def test_each_planted_mistake_is_named_first(name: str) -> None:
    for seed in range(40):
        drawn = draw_gradients(seed, name)
        if drawn is None:
            continue
        report = compare(drawn.gradients, **drawn.fields)
        if name not in report.power.survivors:
            assert named_first(report, (name,)), (seed, report)
            return
    pytest.fail("no request shows it")


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 5.0}, {"scale": 1.0, "is_causal": True}])
@pytest.mark.parametrize("dtype", TYPES)
def test_right_kernels_are_right(dtype: str, options: dict[str, Any]) -> None:
    half = dtype != "float32"
    for seed, kernel in enumerate(
        (BackwardKernel(), BackwardKernel(16, 32, half, half), BackwardKernel(32, 16, half, splits=4))
    ):
        fields = request(seed, TYPES[dtype], **options)
        report = compare(returned(fields, kernel), **fields, time_limit=0)
        assert report.verdict.ratio is not None
        assert report.verdict.ratio < 2, (kernel, report)


# What a kernel of the tests does in the place of a request: the request, what the kernel has, and the name.
OTHERS: Final[list[tuple[dict[str, Any], dict[str, Any], str]]] = [
    ({"softcap": 1.0}, {"softcap": 1e9}, "softcap.absent"),
    ({"is_causal": True}, {"is_causal": False}, "causal.absent"),
    ({}, {"scale": 1.0}, "scale.absent"),
    ({"scale": 0.5}, {"scale": 0.25}, "scale.twice"),
]


@pytest.mark.parametrize(("seed", "name"), [(19, "grad.causal_absent"), (17, "grad.chunk_absent")])
def test_mistakes_beyond_float16_are_named(seed: int, name: str) -> None:
    """Weights of hidden keys may be far larger than 1: some gradients are infinite in the type of the request."""
    drawn = draw_gradients(seed, name)
    assert drawn is not None
    assert np.isinf(drawn.gradients["grad_key"]).any()
    assert named_first(compare(drawn.gradients, **drawn.fields), (name,))


@pytest.mark.parametrize(("options", "other", "name"), OTHERS, ids=[name for *_, name in OTHERS])
def test_mistakes_of_the_forward_pass_are_named_with_the_request_that_says_them(
    options: dict[str, Any], other: dict[str, Any], name: str
) -> None:
    fields = request(0, TYPES["float32"], **options)
    report = compare(returned(fields, **other), **fields)
    best = report.hypotheses[0]
    assert name in (best.name, *best.also), report
    assert best.certainty == "proof"
    assert best.change


@pytest.mark.parametrize("names", [("grad_key", "grad_value"), ("grad_key",), ("grad_value",)])
def test_an_ungrouped_kernel_is_named(names: tuple[str, ...]) -> None:
    """dK, dV or both of one head of the group, in the place of the sum over it, as in public threads."""
    fields = request(0, TYPES["float32"])
    repeated = {name: np.repeat(fields[name], 2, axis=1) for name in ("key", "value")}
    every = returned(fields | repeated)
    one = {name: every[name][:, ::2] for name in names}
    report = compare({**returned(fields), **one}, **fields)
    wrong = " and ".join(names) + (" are" if len(names) > 1 else " is")
    assert f"{wrong} wrong: " in report.verdict.message
    assert report.hypotheses[0].name == "grad.not_grouped"
    assert report.hypotheses[0].certainty == "proof"


@pytest.mark.parametrize(("name", "shape"), [("grad_bias", (67, 67)), ("grad_alibi_slopes", (4,))])
def test_the_gradient_of_an_option_is_judged_alone(name: str, shape: tuple[int, ...]) -> None:
    fields = request(0, TYPES["float32"])
    fields[name.removeprefix("grad_")] = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = getattr(attend(**fields, gradients="all", include=[]), name)
    assert ratio_of(compare({name: found}, **fields, time_limit=0)) < 2
    assert compare({name: found * np.float32(1.5)}, **fields, time_limit=0).verdict.status == "wrong"


def test_an_unknown_mistake_is_told_by_facts() -> None:
    fields = request(0, TYPES["float32"])
    found = returned(fields)
    report = compare({**found, "grad_value": found["grad_value"] * np.float32(1.7)}, **fields)
    assert report.verdict.status == "wrong"
    assert not any(one.certainty == "proof" for one in report.hypotheses)
    assert [fact.name for fact in report.facts] == ["factor"]
    assert "1.7" in report.facts[0].message


def test_places_say_the_axes_of_the_field() -> None:
    fields = request(0, TYPES["float32"])
    found = returned(fields)
    found["grad_key"][1, :, 64:] += 1
    report = compare(found, **fields, time_limit=0)
    assert [place.message for place in report.where[1:]] == [
        "batch entry 1 only",
        "keys 64 to 66 only: the tail of a tile of 64",
    ]
    assert report.where[0].axes == ["batch entry", "key/value head", "key", "feature"]


def test_errors_far_below_the_largest_gradient_are_seen() -> None:
    """Each number has a limit of its own: the last key of a causal mask is seen by one query alone."""
    fields = request(0, TYPES["float32"], length=256, is_causal=True, query_offset=np.asarray(0))
    found = returned(fields)
    found["grad_value"][:, :, -1] *= np.float32(1.01)
    report = compare(found, **fields, time_limit=0)
    assert report.verdict.status == "wrong"
    assert report.where[1].message == "key 255 only"


@pytest.mark.parametrize("seed", [1, 8])
def test_rows_that_few_keys_dominate_are_right(seed: int) -> None:
    """Their errors are those of few numbers, in the direction of few keys: too few to be drawn twice only."""
    random = np.random.default_rng(seed)
    shapes = {"query": (2, 3, 129, 128), "key": (2, 3, 385, 128), "value": (2, 3, 385, 128)}
    arrays = {name: random.normal(size=shape) for name, shape in shapes.items()}
    arrays |= {"query": arrays["query"] * 2.5, "value": arrays["value"] + random.normal(size=(1, 3, 1, 1)) * 2}
    arrays["grad_output"] = random.normal(size=shapes["query"])
    fields: dict[str, Any] = {name: array.astype(BFLOAT16) for name, array in arrays.items()} | {"layout": "bhld"}
    report = compare(returned(fields, BackwardKernel(16, 16, rounds=True)), **fields, time_limit=0)
    assert ratio_of(report) < 1


def test_heads_of_a_group_may_each_be_rounded_to_the_smallest_numbers() -> None:
    """Gradients of keys around 1e-6, where neighbouring numbers of float16 are 6e-8 apart."""
    for seed in range(12):
        fields = request(seed, TYPES["float16"], heads=4, length=64)
        small: dict[str, Any] = {
            name: (fields[name] * TYPES["float16"].type(factor)).astype(np.float16)
            for name, factor in {"query": 0.01, "grad_output": 0.001}.items()
        }
        fields = {
            name: array[..., :2] if isinstance(array, np.ndarray) else array for name, array in (fields | small).items()
        }
        report = compare(returned(fields, BackwardKernel(rounds=True, expands=True)), **fields, time_limit=0)
        assert ratio_of(report) <= 2, (seed, report)


@pytest.mark.parametrize("factor", [1, 4, 8])
def test_roundings_of_equal_rows_add_up(factor: int) -> None:
    """Small weights are subnormal in float16, and those of equal queries are rounded alike."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        query, key, value, cotangent = random.normal(size=(4, 1, 1, 64, 8))
        query, cotangent = (np.broadcast_to(array[..., :1, :], array.shape) for array in (factor * query, cotangent))
        made = {"query": query, "key": key, "value": value, "grad_output": cotangent}
        fields: dict[str, Any] = {name: array.astype(np.float16) for name, array in made.items()} | {"layout": "bhld"}
        report = compare(returned(fields, BackwardKernel(rounds=True)), **fields, time_limit=0)
        assert ratio_of(report) <= 2, (seed, report)


def test_what_is_exactly_0_has_no_rounding() -> None:
    """Also in half types: no number of this type is between."""
    fields = request(0, TYPES["bfloat16"], length=16, key_mask=np.tile(np.arange(16) < 12, (2, 1)))
    right = returned(fields, BackwardKernel(rounds=True))
    assert not right["grad_key"][:, :, 12:].any()
    right["grad_key"][:, :, 13] = 1e-6
    report = compare(right, **fields, time_limit=0)
    assert (report.verdict.status, report.where[1].message) == ("wrong", "key 13 only")


def test_rows_without_a_key_have_gradients_of_0() -> None:
    fields = request(0, TYPES["float32"])
    fields["mask"] = np.ones((67, 67), bool)
    fields["mask"][3] = False
    found = attend(**fields, gradients="all")
    names = ("grad_query", "grad_key", "grad_value")
    right = {name: np.array(found[name]) for name in names}
    assert ratio_of(compare(right, **fields, time_limit=0)) < 2
    right["grad_query"][:, :, 3] = np.nan
    report = compare(right, **fields, time_limit=0)
    assert report.verdict.status == "wrong"
    assert report.errors["grad_query"].non_finite == 2 * 4 * 16


def test_gradients_of_parameters_are_judged() -> None:
    """Of sinks and slopes, and of arrays in objects."""
    fields = request(0, TYPES["float32"], sinks=np.linspace(-1, 1, 4).astype(np.float32))
    fields["query_norm"] = {"weight": np.linspace(0.5, 1.5, 16).astype(np.float32)}
    found = attend(**fields, gradients="all")
    sent = {"grad_sinks": found.grad_sinks, "grad_query_norm": {"weight": found["grad_query_norm"]["weight"]}}
    assert ratio_of(compare(sent, **fields, time_limit=0)) < 2
    sent["grad_query_norm"] = {"weight": found["grad_query_norm"]["weight"] * 1.01}
    report = compare(sent, **fields, time_limit=0)
    assert report.verdict.status in ("imprecise", "wrong")
    assert report.where[0].array == "grad_query_norm.weight"


def test_outputs_and_gradients_are_judged_together() -> None:
    fields = request(0, TYPES["float32"])
    output = attend(**fields, gradients="all").output
    report = compare({"output": output, **returned(fields)}, **fields)
    assert report.verdict.status == "correct"
    assert set(report.errors) == {"output", "grad_query", "grad_key", "grad_value"}
    assert {name.partition(".")[0] for name in report.power.survivors} != {"grad"}
    every = compare({"output": output, **returned(fields, scale=1.0)}, **fields)
    assert every.verdict.message.startswith("Wrong: the output is right; ")
    # The backward pass is that of another request; as the output is right, no request asks for both.
    [best] = every.hypotheses
    assert (best.name, best.certainty, best.change) == ("scale.absent", "proof", None)
    assert best.message.endswith("(dq, dk and dv only)")


def test_cotangents_that_hide_mistakes_are_called_weak() -> None:
    fields = request(0, TYPES["float32"])
    assert compare(returned(fields), **fields).power.weak == []
    ones = fields | {"grad_output": np.ones_like(fields["grad_output"])}
    assert compare(returned(ones), **ones).power.weak == ["grad_output is 1 everywhere"]
    rows: dict[str, Any] = fields | {
        "grad_output": np.broadcast_to(fields["grad_output"][..., :1], fields["grad_output"].shape).copy()
    }
    assert compare(returned(rows), **rows).power.weak == ["grad_output is one number along each row"]


def test_the_next_input_shows_what_this_one_cannot() -> None:
    """One key: D cancels all, so that no gradient of a score shows anything."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=(1, 2, 1, 8)).astype(np.float32) for name in ("query", "key", "value")}
    fields: dict[str, Any] = {
        **arrays,
        "grad_output": random.normal(size=(1, 2, 1, 8)).astype(np.float32),
        "layout": "bhld",
    }
    report = compare(returned(fields), **fields)
    assert report.verdict.status == "inconclusive"
    assert "grad.scale_absent" in report.power.survivors
    assert report.next_input is not None
    assert report.next_input.request is not None
    again = compare(**report.next_input.request)
    assert not set(report.next_input.kills) & set(again.power.survivors)


def test_assertions_take_gradients() -> None:
    fields = request(0, TYPES["float32"])
    found = returned(fields)
    assert assert_attention(found, **fields, must_show=None).verdict.status == "correct"
    assert assert_attention(found, **fields, must_show=None, rows=8).verdict.status == "correct"
    with pytest.raises(AssertionError, match=r"grad\.negated"):
        assert_attention({name: -array for name, array in found.items()}, **fields)
    assert issubclass(WeakInputs, AssertionError)


def test_errors_name_the_field() -> None:
    without = {name: value for name, value in BY_HAND.items() if name != "grad_output"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (RIGHT, without, "/grad_output: expected the gradient of output"),
        ({"grad_key": [[1.0]]}, BY_HAND, r"/actual/grad_key: expected \(2, 1\)"),
        ({"grad_bias": [[1.0]]}, BY_HAND, "bias"),
        ({"grad_mask": [[1.0]]}, BY_HAND, "grad_mask"),
        ({"grad_query": [["x"]]}, BY_HAND, "grad_query"),
    ]
    for actual, fields, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            compare(actual, **fields)


def test_a_time_limit_leaves_the_verdict(client: httpx.Client) -> None:
    body = {**BY_HAND, "actual": {**RIGHT, "grad_key": [[0.5], [2.5]]}, "time_limit": 0}
    report = client.post("/attention/compare", json=body).json()
    assert report["ended_early"]
    assert report["verdict"]["status"] == "wrong"


def test_gradients_are_judged_over_http(client: httpx.Client) -> None:
    response = client.post("/attention/compare", json={**BY_HAND, "actual": RIGHT, "reference": True})
    assert response.status_code == 200
    assert response.json()["reference"] == RIGHT
    refused = client.post("/attention/compare", json={**BY_HAND, "actual": {"grad_key": [[1.0]]}})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/actual/grad_key"


def test_inputs_for_a_request_with_a_cotangent_have_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = tmp_path / "case.json"
    case.write_text(json.dumps(BY_HAND), encoding="utf-8")
    assert main(["inputs", "--like", str(case)]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert np.shape(fields["grad_output"]) == (*np.shape(fields["query"])[:3], np.shape(fields["value"])[3])
    assert fields["gradients"] == "all"
    assert compare(**fields).power.weak == []


def test_inputs_are_made_that_show_mistakes_of_both_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which of them a request like this one shows; a request without a cotangent shows none of a backward pass."""
    case = tmp_path / "case.json"
    case.write_text(json.dumps(BY_HAND), encoding="utf-8")
    like = ["inputs", "--like", str(case), "--kills"]
    assert main([*like, "grad.causal_added", "causal.added"]) == 0
    fields = json.loads(capsys.readouterr().out)
    query, key, value, grad = (np.array(fields[name]) for name in ("query", "key", "value", "grad_output"))
    weights = np.exp(query @ key.swapaxes(-1, -2))
    weights /= weights.sum(-1, keepdims=True)
    delta = (weights @ value * grad).sum(-1, keepdims=True)
    of_scores = np.tril(weights) * (grad @ value.swapaxes(-1, -2) - delta)
    assert compare({"grad_query": of_scores @ key}, **fields, time_limit=0).verdict.status == "wrong"
    assert main([*like, "grad.causal_absent", "grad.causal_added"]) == 1
    assert capsys.readouterr().err == "not shown by this request: grad.causal_absent\n"
    case.write_text(json.dumps({**BY_HAND, "grad_output": None}), encoding="utf-8")
    for command in (["inputs", "--kills"], like):
        assert main([*command, "grad.causal_added"]) == 2
        assert "for grad.causal_added, a request with grad_output and without actual" in capsys.readouterr().err


@pytest.mark.parametrize("garbage", [1e5, np.nan])
def test_hidden_keys_change_no_verdict(garbage: float) -> None:
    """A cache has anything behind its last key: it is read by nobody, and no baseline grows by it."""
    fields = request(0, TYPES["float32"], key_lengths=np.array([60, 60]))
    found = attend(**fields, gradients="all")
    right = {name: np.array(found[name]) for name in ("grad_query", "grad_key", "grad_value")}
    hidden = fields | {name: fields[name].copy() for name in ("key", "value")}
    for name in ("key", "value"):
        hidden[name][:, :, 60:] = garbage
    ratio = compare(right, **fields, time_limit=0).verdict.ratio
    assert compare(right, **hidden, time_limit=0).verdict.ratio == pytest.approx(ratio, rel=0.5)
    wrong = {**right, "grad_query": right["grad_query"] * np.float32(1.01)}
    assert compare(wrong, **hidden, time_limit=0).verdict.status == "wrong"
    zeros = [compare(np.zeros_like(found.output), **one, time_limit=0).verdict for one in (fields, hidden)]
    assert zeros[1].ratio == pytest.approx(zeros[0].ratio, rel=0.5)


def test_what_is_not_0_is_never_proved_to_be_0() -> None:
    """Gradients of sinks in bfloat16 of one tile of queries alone: far smaller than the right ones, but no zeros."""
    fields = request(0, TYPES["bfloat16"], length=200, sinks=np.linspace(-1, 1, 4).astype(np.float32))
    found = attend(**fields, gradients="all")
    report = compare({"grad_sinks": found.grad_sinks * np.float32(0.02)}, **fields)
    assert not any(one.name == "grad.zero" and one.certainty == "proof" for one in report.hypotheses)


@pytest.mark.parametrize("size", [1e-320, 1e-310])
def test_subnormal_gradients_are_judged(size: float) -> None:
    fields = BY_HAND | {"grad_output": [[size]]}
    report = compare({"grad_value": [[1.0], [1.0]]}, **fields, time_limit=0)
    assert report.verdict.status == "wrong"
    assert ratio_of(compare({"grad_value": [[size / 2], [size / 2]]}, **fields, time_limit=0)) < 2


def test_a_sum_near_0_leaves_gradients_of_values_room() -> None:
    """Scores are divided by their sum, which loses digits where they cancel: torch in float32 does as well."""
    random = np.random.default_rng(0)
    fields: dict[str, Any] = {
        name: random.normal(size=(2, 60, 16)).astype(np.float32) for name in ("query", "key", "value")
    }
    fields |= {"grad_output": random.normal(size=(2, 60, 16)).astype(np.float32), "layout": "hld"}
    scores = np.einsum("hqd,hkd->hqk", fields["query"], fields["key"]) / np.float32(4)
    weights = scores / scores.sum(axis=-1, keepdims=True)
    actual = {"grad_value": np.einsum("hqk,hqe->hke", weights, fields["grad_output"])}
    verdict = compare(actual, **fields, normalization="sum", time_limit=0).verdict
    assert verdict.ratio is not None
    assert verdict.ratio < 2


def test_the_worst_elements_are_those_with_the_largest_ratios() -> None:
    fields = request(0, TYPES["float32"], length=256, is_causal=True, query_offset=np.asarray(0))
    found = returned(fields)
    found["grad_value"][0, 0, -1, 3] *= np.float32(1.1)
    report = compare(found, **fields, time_limit=0)
    assert report.where[0].worst is not None
    assert report.where[0].worst[0].index == [0, 0, 255, 3]
    assert report.where[0].worst[0].actual == pytest.approx(float(found["grad_value"][0, 0, -1, 3]))


@pytest.mark.parametrize("scale", [0.5, np.linspace(0.2, 0.8, 4)])
def test_heads_may_have_scales_of_their_own(scale: Any) -> None:
    fields = request(0, TYPES["float32"], scale=scale)
    found = attend(**fields, gradients="all")
    sent = {name: np.asarray(found[name]) for name in ("grad_query", "grad_key", "grad_scale")}
    assert ratio_of(compare(sent, **fields, time_limit=0)) < 2
    sent["grad_scale"] = sent["grad_scale"] * np.float32(2)
    assert compare(sent, **fields, time_limit=0).where[0].array == "grad_scale"
