"""The request of a comparison, and its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, create_model

from attention_service.attention import spec
from attention_service.attention.outputs import OUTPUT, OUTPUTS
from attention_service.attention.spec import Included
from attention_service.schemas.arrays import NumbersOrNull, Tensor
from attention_service.schemas.call import OF_NO_CALL, CallRequest
from attention_service.schemas.closed import Closed, shortened
from attention_service.schemas.request import OF_CALLS, AttentionRequest, check_length
from attention_service.schemas.response import AttentionResponse

LogsumexpBase = Literal["e", "2"]
# What right kernels of half types do beside rounding inputs and output; `exact` is none of it.
Liberty = Literal[
    "exact",
    "folded_scale",
    "rounded_weights",
    "rounded_sum",
    "rounded_operands",
    "approximate_exp2",
    "approximate_tanh",
]
Certainty = Literal["proof", "resembles"]
Status = Literal["correct", "imprecise", "wrong", "inconclusive"]


class ArraysByName(Closed):
    """What a kernel returned, by the names of AttentionResponse. null is NaN, or minus infinity as there."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that were sent, by name."""
        return dict(_leaves({name: getattr(self, name) for name in type(self).model_fields}))


def _leaves(arrays: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays and those in objects, by their names with dots."""
    for name, value in arrays.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", np.asarray(value)


def _kind_of(name: str) -> Any:
    """The type of what a kernel returned, by the type in a response."""
    declared, *_ = get_args(AttentionResponse.model_fields[name].annotation) or (None,)
    kinds = {
        dict[str, Tensor]: dict[str, NumbersOrNull],
        dict[str, dict[str, Tensor]]: dict[str, dict[str, NumbersOrNull]],
    }
    return float | NumbersOrNull if name == "grad_scale" else kinds.get(declared, NumbersOrNull)


if TYPE_CHECKING:
    ActualArrays = ArraysByName
else:
    # Every result that a kernel rounds: integers, as the bits of hidden_by, are none. The response describes them.
    ActualArrays = create_model(
        "ActualArrays",
        __base__=ArraysByName,
        __doc__=ArraysByName.__doc__,
        **{
            name: (_kind_of(name) | None, None)
            for name in AttentionResponse.model_fields
            if name == OUTPUT or (name in get_args(Included) and not (name in OUTPUTS and OUTPUTS[name].is_integer))
        },
    )


class OwnTolerance(Closed):
    """The caller's own test: |actual - reference| <= atol + rtol · |reference|."""

    rtol: Annotated[float, Field(ge=0)] = 0.0
    """Relative tolerance."""
    atol: Annotated[float, Field(ge=0)] = 0.0
    """Absolute tolerance."""
    mismatches: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of elements that may fail."""


class Judging(Closed):
    """How an answer is judged: what all comparisons can be asked."""

    tolerance: OwnTolerance | None = None
    """The caller's own test, to be told what it accepts. Default: none."""
    legal: Annotated[list[Liberty], BeforeValidator(check_length)] | None = None
    """What a right kernel may do beside rounding inputs and output. exact is none of the others, which only count in
    float16 and bfloat16, but folded_scale. Default: all."""
    reference: bool | None = False
    """Return what is right, too: each array that was sent, or the output if none was."""
    time_limit: Annotated[float, Field(ge=0)] | None = None
    """Seconds after which the search for mistakes ends. The verdict is given however long it takes; names, power and
    the next input as far as they were found. Default: no limit."""


class CompareRequest(Judging, AttentionRequest):
    """A request of `/attention`, and what a kernel returned for it. `include` and `encoding` have no effect."""

    elsewhere = dict.fromkeys(AttentionRequest.elsewhere, f"{OF_CALLS}/compare")

    actual: ActualArrays | None = None
    """What the kernel returned. Default: nothing; the report then says what the request could show."""
    logsumexp_base: LogsumexpBase | None = "e"
    """The base of the logarithm in `actual.logsumexp`."""
    against: ActualArrays | None = None
    """What another kernel returned for the same request, to be judged beside the first. Default: nothing."""


class ActualOfCall(ArraysByName):
    """What a function of another library returned, in its own axes and its own base of logarithms: one array or both.

    A null is NaN, or in logsumexp minus infinity."""

    output: NumbersOrNull | None = None
    """The output. Default: not judged."""
    logsumexp: NumbersOrNull | None = None
    """The logsumexp. Default: not judged."""


class CompareCallRequest(Judging, CallRequest):
    """A call of `/attention/call`, and what the function returned for it. `include`, `backend`, `device` and `encoding`
    have no effect."""

    elsewhere = dict.fromkeys(CompareRequest.model_fields, f"{OF_NO_CALL}/compare")

    dtype: spec.DType | None = None
    """Type whose rounding is legal. Default: that of the output, else of the queries."""
    actual: ActualOfCall | None = None
    """What the function returned. Default: nothing; the report then says what the call could show."""


def _as_lists(array: Any) -> Any:
    """An array as JSON has it, with null for what is not finite."""
    if not isinstance(array, np.ndarray):
        return array
    is_finite = np.isfinite(array)
    return (array if is_finite.all() else np.where(is_finite, array, np.array(None))).tolist()


# An ndarray in Python, nested lists in JSON.
RightArray = Annotated[Any, PlainSerializer(_as_lists, return_type=list[Any], when_used="json")]


class Reported(BaseModel):
    """A part of a report."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, json_schema_extra=shortened)


class Verdict(Reported):
    """The verdict on an output."""

    status: Status
    """`correct`: within legal rounding; `imprecise`: more than that; `wrong`: far from it; `inconclusive`: not known.
    It is not known if nothing was sent, if the request could not show most mistakes, or if it has an option that the
    comparison does not know."""
    ratio: float | None
    """The largest error in baselines; null: infinite, or nothing was judged. Of rows it is twice their error in legal
    errors. Up to 2 is correct, up to 10 imprecise, unless the error has a place, which is wrong."""
    message: str
    """The verdict in a sentence."""


class UlpErrors(Reported):
    """Errors in units in the last place of the type of the request."""

    max: float
    """The largest."""
    p99: float
    """The 99th percentile."""
    above_one: float
    """The share of elements above one."""


class ArrayErrors(Reported):
    """How far an array is from the reference. Numbers are null where no element can be compared."""

    max_abs: float | None
    """The largest absolute error."""
    max_rel: float | None
    """The largest relative error, over elements of at least a thousandth of the largest."""
    rmse: float | None
    """The root of the mean square of the errors."""
    relative_rmse: float | None
    """rmse over the root of the mean square of the reference."""
    cosine: float | None
    """The cosine of the angle between the arrays, as vectors."""
    ulp: UlpErrors | None
    """Errors in units in the last place."""
    non_finite: int
    """Elements that are infinite or NaN where the reference is another number, or the reverse."""


class Baseline(ArrayErrors):
    """The errors of the worst legal rounding, and the baseline that the ratio of an array divides by."""

    limit: float
    """The baseline: the larger of max_abs and ε/4 · steps, and a fourth of an ulp more. The steps bound how far the
    order of sums moves a right answer."""


class ToleranceResult(Reported):
    """What a test with a tolerance says."""

    name: str
    """torch.testing, KernelBench, FlashInfer-Bench, or yours."""
    passes: bool | None
    """Whether it accepts the arrays that were sent; null: none were."""
    tolerance: dict[str, float]
    """rtol, atol, and the share of mismatches that it accepts."""
    misses: list[str]
    """The mistakes of `power` that it would accept for this request."""


class WorstElement(Reported):
    """One of the elements with the largest errors."""

    index: list[int]
    """Its place in the array as sent."""
    actual: float | None
    """What was sent; null: infinite or NaN."""
    reference: float | None
    """What is right; null: infinite."""


class Place(Reported):
    """Where an array is wrong: by `indices`, from `start` to before `stop` by `stride`, or by `residues`."""

    array: str
    """The name of the array."""
    what: str
    """elements, or the axis that is wrong in parts. It is batch entries, heads, key/value heads, rows, features or
    keys; of a call of an engine sequences, heads or queries."""
    message: str
    """The place in words."""
    indices: list[int] | None = None
    """The first of the indices that are wrong."""
    start: int | None = None
    """The first index of a run."""
    stop: int | None = None
    """The index after the last of a run."""
    stride: int | None = None
    """From one index of a run to the next."""
    share: float | None = None
    """The share of the indices from `start` to before `stop` that is wrong. Default: those that `stride` says."""
    modulus: int | None = None
    """What the indices are divided by for `residues`: a power of two."""
    residues: list[int] | None = None
    """The first of the remainders of all indices that are wrong, and of no others."""
    axes: list[str] | None = None
    """What the indices of `worst` count, in the order of the array as sent."""
    worst: list[WorstElement] | None = None
    """The elements with the largest errors."""


class Fact(Reported):
    """What is true of a wrong array, within legal rounding on all of its rows."""

    name: str
    """The stable name of the kind of fact."""
    array: str
    """The name of the array."""
    message: str
    """The fact in a sentence."""
    numbers: dict[str, list[float]]
    """The few numbers that it has, at most 16 of each name."""


class ReportedHypothesis(Reported):
    """A mistake that may explain the output."""

    name: str
    """The stable name of the mistake; of two, joined by ` and `."""
    also: list[str]
    """Other mistakes that have the same output for this request."""
    message: str
    """What the kernel did."""
    change: dict[str, Any] | None
    """The fields to change in the request to get this output; null: no field can say it."""
    explained: float
    """The share of the squared error that it explains: of each wrong array, the least of them."""
    ratio: float | None
    """The distance of the output to that of the mistake, in baselines; null: infinite."""
    certainty: Certainty
    """`proof`: the distance is within legal rounding on all rows."""


class ReportedPower(Reported):
    """Which mistakes this request can show."""

    mutants: int
    """How many known mistakes would change the meaning of this request."""
    killed: int
    """How many of them change the output by more than legal rounding."""
    survivors: list[str]
    """Those that do not, in one variant at least: this request cannot tell them from the truth."""
    indistinguishable: list[list[str]]
    """Groups of mistakes that this request cannot tell from each other."""
    tiles: dict[str, list[int]]
    """By the name of a mistake of tiles, the sizes of tiles, in keys, for which this request shows it. It is killed if
    it is shown for 16, 32, 64, 128 and 256."""
    weak: list[str] = []
    """Why cotangents of the request hide mistakes of gradients, or lengths of a call mistakes of addressing. Numbers
    that do not differ cancel; of a call, factors count, too."""
    options: list[str]
    """The options of the request that a kernel could ignore: with these inputs, that changes no more than rounding."""


class AgainstReport(Reported):
    """What another kernel returned, judged beside the first."""

    message: str
    """Both answers in a sentence."""
    verdict: Verdict
    """Is the other answer right?"""
    errors: dict[str, ArrayErrors]
    """Its errors."""
    hypotheses: list[ReportedHypothesis]
    """Which mistakes explain it, best first."""
    differences: dict[str, float | None]
    """The largest difference of the two answers, by array, in baselines; null: infinite. Up to 4 is legal, twice that
    of each."""


class NextInput(Reported):
    """A request that tells apart what this one leaves open."""

    kills: list[str]
    """The mistakes that it shows, of those that are still possible."""
    seed: int
    """The seed that it is made from: `attention-service inputs --like REQUEST --seed SEED`."""
    request: dict[str, Any] | None
    """The request; null: too large to be shown."""
    note: str | None = None
    """How it differs from the request of the comparison: it is narrower if that is very wide."""


class CompareReport(Reported):
    """The report of a comparison."""

    verdict: Verdict
    """Is it right?"""
    errors: dict[str, ArrayErrors]
    """The errors of each array that was sent."""
    baseline: dict[str, Baseline]
    """The same numbers for the worst of the legal roundings in the type of the request."""
    tests: list[ToleranceResult]
    """What tests with usual tolerances say, and the caller's own."""
    where: list[Place]
    """Where the first array that is wrong is wrong."""
    hypotheses: list[ReportedHypothesis]
    """Which mistakes explain it, best first."""
    facts: list[Fact]
    """What is true of the wrong arrays where no mistake is proved. At most 16 facts, those first that tell most."""
    power: ReportedPower
    """Which mistakes this request can show."""
    next_input: NextInput | None
    """A request that shows what is left open; null: nothing is left open that could be shown."""
    against: AgainstReport | None = None
    """What there is to say of the answer in `against`; null: there is none."""
    reference: dict[str, RightArray] | None = None
    """What is right, in float64, if `reference` of the request asked for it. It has the axes and the names of what was
    sent; null in it is infinite, or in a row of no sequence of a call."""
    ended_early: bool = False
    """True if `time_limit` ended the search. Hypotheses, facts, power and next_input hold what was found until then."""
    metadata: dict[str, Any]
    """How the reference was computed."""
