"""Which wrong kernels do public judges of attention kernels accept?

    python -m benchmarks.judges             # all judges, as a Markdown table, in a few minutes
    python -m benchmarks.judges FlashInfer  # those whose names contain a word

Each judge is restated from its source: how it makes its inputs, and what it accepts. Every known mistake that applies
to these inputs is a kernel, whose exact answer is rounded to the type that the judge compares in. A kernel passes if
the judge accepts it for each of `TRIALS` seeds. Beside it stands what `compare` says for the same inputs: by how much
the mistake exceeds legal rounding, or that these inputs cannot show it. The kernels that are right (each legal rounding
of the type) are judged, too.

No batch entry and no head affects another, so that fewer of them leave each number what it is; all other sizes are the
judge's own.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16
from attention_service.backends.base import no_check
from attention_service.codecs.decoded import Decoded
from attention_service.comparison.baseline import arrays_of, baselines, rounded_cases, stored_dtype
from attention_service.comparison.candidates import candidates
from attention_service.comparison.case import Case, make_case
from attention_service.comparison.engine.candidate import Candidate, ratio
from attention_service.comparison.mutants.masks import LeftOut
from attention_service.comparison.problem import Answer, Problem, rounded
from attention_service.comparison.rules import CORRECT
from attention_service.comparison.sample import everything
from attention_service.comparison.solve import solve
from attention_service.pipeline.prepare import make_spec_and_plan

Arrays = Mapping[str, np.ndarray]
Fields = dict[str, Any]
# Seeds for each judge. KernelBench's default is 1, its scripts use 5, FlashInfer-Bench uses 3.
TRIALS: Final = 2
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
# When the sources were read.
READ: Final = "2026-11-23"
GITHUB: Final = "https://github.com"


@dataclass(frozen=True)
class Trial:
    """What a judge compares with: the arrays of its own reference, and the request."""

    case: Case
    fields: Fields
    expected: Arrays


@dataclass(frozen=True)
class Judge:
    """A public test of attention kernels.

    sources: URLs of inputs and tolerance, with the commit; inputs, rule: in words; reduced: what differs from the
    original; make: the fields of a request; accepts: its verdict on the arrays of a kernel
    """

    name: str
    sources: tuple[str, ...]
    inputs: str
    rule: str
    make: Callable[[np.random.Generator], Fields]
    accepts: Callable[[Arrays, Trial], bool]
    reduced: str = ""
    names: tuple[str, ...] = ("output",)


# Judges


def close(rtol: float, atol: float, mismatches: float = 0.0) -> Callable[[Arrays, Trial], bool]:
    """|actual - expected| <= atol + rtol · |expected| for all elements but a share, as in allclose."""

    def accepts(actual: Arrays, trial: Trial) -> bool:
        for name, expected in trial.expected.items():
            with np.errstate(invalid="ignore"):
                good = np.abs(actual[name] - expected) <= atol + rtol * np.abs(expected)
            good |= actual[name] == expected
            if np.count_nonzero(~good) > mismatches * good.size:
                return False
        return True

    return accepts


def flashinfer(actual: Arrays, trial: Trial) -> bool:
    """An element is wrong if absolute and relative error exceed 1e-2; an infinity or NaN of the kernel always is.

    The comparisons are those of the source: beside an infinite reference the relative error is NaN, which exceeds
    nothing. The logsumexp has base 2 there.
    """
    for name, expected in trial.expected.items():
        if not np.isfinite(actual[name]).all():
            return False
        with np.errstate(invalid="ignore"):
            size = np.abs(expected) / (math.log(2) if name == "logsumexp" else 1)
            absolute = np.abs(actual[name] - expected) / (math.log(2) if name == "logsumexp" else 1)
            relative = absolute / (size + 1e-8)
        if ((absolute > 1e-2) & (relative > 1e-2)).any():
            return False
    return True


def flash_attention(actual: Arrays, trial: Trial) -> bool:
    """The largest error is at most twice that of a computation in the half type, and twice the rounding of adding 0.3.

    The reference computes in float32 and is rounded; the other one rounds after each operation, the scale being folded
    into the key.
    """
    expected, case = trial.expected["output"], trial.case
    kind = case.dtype
    query, key, value = (trial.fields[name].astype(F32) for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(array, group, axis=1) for array in (key, value))
    scores = rounded(query @ rounded(key * F32.type(case.scale), kind).swapaxes(-1, -2), kind)
    places = np.arange(scores.shape[-1])
    offset = trial.fields["query_offset"]
    scores[..., places > np.arange(scores.shape[-2])[:, None] + offset] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = rounded(weights / weights.sum(axis=-1, keepdims=True), kind)
    low = rounded(weights @ value, kind)
    moved = rounded(rounded(expected.astype(F32) + F32.type(0.3), kind) - F32.type(0.3), kind)
    allowed = 2 * np.abs(low - expected).max() + 2 * np.abs(moved - expected).max()
    return bool(np.abs(actual["output"] - expected).max() <= allowed)  # NaN is not


def uniform(dtype: np.dtype) -> Callable[[np.random.Generator], Fields]:
    """The inputs of KernelBench's problem: uniform between 0 and 1, with 512 tokens of 1024 features."""

    def make(random: np.random.Generator) -> Fields:
        query, key, value = (random.random((1, 2, 512, 1024), F32).astype(dtype) for _ in range(3))
        return {"query": query, "key": key, "value": value, "layout": "bhld"}

    return make


def latent(spread: float) -> Callable[[np.random.Generator], Fields]:
    """The inputs of the latent-attention contest: one query of 16 heads, and 1024 keys whose first 512 features are
    the values."""

    def make(random: np.random.Generator) -> Fields:
        query = (random.standard_normal((4, 16, 1, 576), F32).astype(BFLOAT16) * BFLOAT16.type(spread)).astype(BFLOAT16)
        cache = (random.standard_normal((4, 1, 1024, 576), F32).astype(BFLOAT16) * BFLOAT16.type(spread)).astype(
            BFLOAT16
        )
        return {"query": query, "key": cache, "value": cache[..., :512], "layout": "bhld"}

    return make


def normal(
    shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: np.dtype, **options: Any
) -> Callable[[np.random.Generator], Fields]:
    """Normal inputs of these shapes, in layout bhld."""

    def make(random: np.random.Generator) -> Fields:
        shapes = {"query": shape, "key": kv_shape, "value": kv_shape}
        arrays = {name: random.standard_normal(one, F32).astype(dtype) for name, one in shapes.items()}
        return {**arrays, "layout": "bhld", **options}

    return make


KERNEL_BENCH: Final = (
    f"{GITHUB}/gimletlabs/KernelBench/blob/8e02d677bc8efa2134bfa14d18bd3581b51590ae/KernelBench/level1/97_ScaledDotProductAttention.py",
    f"{GITHUB}/ScalingIntelligence/KernelBench/blob/0d1222636478e6c238dc9886b6ba4be975b22efe/src/kernelbench/eval.py",
)
LATENT: Final = "problems/amd_202602/mixed-mla/reference.py"
GPU_MODE: Final = f"{GITHUB}/gpu-mode/reference-kernels/blob/302b862fbdce06a9ec4fb85915a912be0b84c082/{LATENT}"
GPU_MODE_SMALL: Final = f"{GITHUB}/gpu-mode/reference-kernels/blob/7df7dcd63725ee1a525a9974c9136df96bdda804/{LATENT}"
AITER: Final = f"{GITHUB}/ROCm/aiter/blob/029455b479a99fd451a29088625cd8ab972f3bef/aiter/test_common.py"
FLASHINFER: Final = f"{GITHUB}/flashinfer-ai/flashinfer-bench/blob"
UNIFORM: Final = "uniform in [0, 1), 512 tokens × 1024 features"
FEWER: Final = "2 heads of 1,024"
NORMAL: Final = "normal, 4 × 16 heads × 1 query, 1024 keys, d = 576, values = the first 512 features of the keys"
DECODE: Final = normal((4, 16, 1, 128), (4, 2, 1024, 128), BFLOAT16)
# Judges of the same inputs are asked about the same kernels.
UNIFORM_F32: Final = uniform(F32)
LATENT_1: Final = latent(1.0)
CAUSAL: Final = normal((2, 6, 113, 64), (2, 2, 203, 64), BFLOAT16, is_causal=True, query_offset=90)


def decode(*lengths: int) -> Callable[[np.random.Generator], Fields]:
    """One query for each sequence of a cache; lengths: of the sequences."""
    return lambda random: DECODE(random) | {"key_lengths": np.array(lengths)}


JUDGES: Final = (
    Judge(
        "KernelBench level 1, problem 97, float16",
        KERNEL_BENCH,
        f"{UNIFORM}, float16",
        "rtol = atol = 1e-2",
        uniform(F16),
        close(1e-2, 1e-2),
        reduced=FEWER,
    ),
    Judge(
        "KernelBench v0 and v0.1, problem 97, float32",
        KERNEL_BENCH,
        f"{UNIFORM}, float32",
        "rtol = atol = 1e-2",
        UNIFORM_F32,
        close(1e-2, 1e-2),
        reduced=FEWER,
    ),
    Judge(
        "KernelBench today, problem 97, float32",
        KERNEL_BENCH,
        f"{UNIFORM}, float32",
        "rtol = atol = 1e-4",
        UNIFORM_F32,
        close(1e-4, 1e-4),
        reduced=FEWER,
    ),
    Judge(
        "GPU MODE latent attention, inputs × 0.02",
        (GPU_MODE_SMALL,),
        f"{NORMAL}, all × 0.02, bfloat16",
        "rtol = atol = 1e-2",
        latent(0.02),
        close(1e-2, 1e-2),
    ),
    Judge(
        "GPU MODE latent attention",
        (GPU_MODE,),
        f"{NORMAL}, bfloat16",
        "rtol = atol = 1e-2",
        LATENT_1,
        close(1e-2, 1e-2),
    ),
    Judge(
        "GPU MODE latent attention, rtol = atol = 0.1",
        (GPU_MODE,),  # 0.1 is quoted in the notes of a participant, 5 % is the share of AITER's test
        f"{NORMAL}, bfloat16",
        "rtol = atol = 0.1, 5 % mismatches (not in the source)",
        LATENT_1,
        close(0.1, 0.1, 0.05),
    ),
    Judge(
        "AITER's `checkAllclose`, on the same inputs",
        (AITER, GPU_MODE),
        f"{NORMAL}, bfloat16",
        "rtol = atol = 1e-2, 5 % mismatches",
        LATENT_1,
        close(1e-2, 1e-2, 0.05),
    ),
    Judge(
        "FlashInfer-Bench, paged decoding",
        (
            f"{FLASHINFER}/9058b9489124afbda090101a2caa6ca2560d4d4b/flashinfer_trace/definitions/gqa_paged/gqa_paged_decode_h16_kv2_d128_ps1.json",
            f"{FLASHINFER}/00a1ec889fdae3b2cf7b08d551a180bb2e480db2/flashinfer_bench/bench/utils.py",
            f"{FLASHINFER}/06323a42cf94756e6dbdaebab35f7839b8d96588/flashinfer_bench/bench/evaluators/default.py",
        ),
        "normal, 16 heads on 2, d = 128, 1024, 517, 64 and 1 keys, bfloat16; output and logsumexp",
        "wrong if abs > 1e-2 and rel > 1e-2, or infinite or NaN",
        decode(1024, 517, 64, 1),
        flashinfer,
        reduced="its lengths come from recorded traffic",
        names=("output", "logsumexp"),
    ),
    Judge(
        "FlashInfer-Bench, with a sequence of no keys",
        (f"{FLASHINFER}/06323a42cf94756e6dbdaebab35f7839b8d96588/flashinfer_bench/bench/evaluators/default.py",),
        "the same with 1024, 517, 64 and 0 keys",
        "wrong if abs > 1e-2 and rel > 1e-2, or infinite or NaN",
        decode(1024, 517, 64, 0),
        flashinfer,
        reduced="its lengths come from recorded traffic",
        names=("output", "logsumexp"),
    ),
    Judge(
        "FlashAttention's own test",
        (
            f"{GITHUB}/Dao-AILab/flash-attention/blob/e7f8a55c9840154965d620c16b3dab1209bbea2b/hopper/test_flash_attn.py",
        ),
        "normal, 6 heads on 2, 113 queries, 203 keys, d = 64, causal, bfloat16",
        "error ≤ 2 × that of bfloat16 throughout + 2 × the rounding of x + 0.3 − 0.3",
        CAUSAL,
        flash_attention,
        reduced="batch 2 of 9",
    ),
    Judge(
        "`torch.testing.assert_close`, on the same inputs",
        (f"{GITHUB}/pytorch/pytorch/blob/539f6ce3075a01a0f4a2d54d2061c3696df9ed69/torch/testing/_comparison.py",),
        "the same",
        "rtol = 1.6e-2, atol = 1e-5 (bfloat16)",
        CAUSAL,
        close(1.6e-2, 1e-5),
        reduced="batch 2 of 9",
    ),
)


# Kernels


def extra_kernels(case: Case, names: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Wrong kernels that are not in the table of mutants."""
    keys, sizes = np.arange(case.plan.sizes.key_length), case.plan.sizes
    yield "(the last 16 keys dropped)", case.with_term(LeftOut((keys < len(keys) - 16)[None, None, None]))
    yield "(every output 0.9 % too large)", case.edited(_larger_output)
    if sizes.query_length == 1 and sizes.head_dim >= sizes.value_dim:
        guess = case.query[..., : sizes.value_dim] * case.scale
        yield "(query × scale, no key or value read)", case.changed(of_whole=lambda _: guess)
    if "logsumexp" in names:
        yield "(every logsumexp 0.9 % too large)", case.edited(_larger_logsumexp)
        yield "(logsumexp 12345 for no keys)", case.edited(_logsumexp_of_nothing)


def _larger_output(_: Problem, answer: Answer) -> Answer:
    return replace(answer, output=answer.output * 1.009)


def _larger_logsumexp(_: Problem, answer: Answer) -> Answer:
    assert answer.logsumexp is not None
    return replace(answer, logsumexp=answer.logsumexp * 1.009)


def _logsumexp_of_nothing(problem: Problem, answer: Answer) -> Answer:
    assert answer.logsumexp is not None
    return replace(answer, logsumexp=np.where(problem.empty, 12345.0, answer.logsumexp))


def _stored(arrays: Arrays, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Arrays in the types in which kernels return them, as float64."""
    with np.errstate(over="ignore"):
        return {name: rounded(array.astype(np.float64), stored_dtype(name, dtype)) for name, array in arrays.items()}


@dataclass
class Findings:
    """What a judge says of all kernels.

    passes, ratios: of wrong kernels by name: whether all trials pass, and the distance from the truth in baselines;
    right: the number of right kernels; refused: which of them fail
    """

    passes: dict[str, bool] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    right: int = 0
    refused: set[int] = field(default_factory=set)

    def add(self, name: str, passes: bool, found: float) -> None:
        """Count a trial of a wrong kernel."""
        self.passes[name] = self.passes.get(name, True) and passes
        self.ratios[name] = max(self.ratios.get(name, 0.0), found)

    @property
    def accepted(self) -> dict[str, float]:
        """The ratios of the wrong kernels that pass although these inputs show the mistake, by short name."""
        return self._shown(name for name, passes in self.passes.items() if passes and self.ratios[name] > CORRECT)

    @property
    def invisible(self) -> dict[str, float]:
        """The same of those whose mistake these inputs cannot show, whatever its detail."""
        return {name: found for name, found in self._shown(self.ratios).items() if found <= CORRECT}

    @property
    def visible(self) -> dict[str, float]:
        """The same of all whose mistake they show."""
        return self._shown(name for name, found in self.ratios.items() if found > CORRECT)

    def _shown(self, names: Iterable[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in names:  # those that differ by a detail only, like the size of a tile, are one
            short = name if name.startswith("(") else f"`{name.split(' ')[0]}`"
            found[short] = max(found.get(short, 0.0), self.ratios[name])
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def judged(judges: Sequence[Judge]) -> list[Findings]:
    """What judges of the same inputs say of all kernels."""
    found = [Findings() for _ in judges]
    for seed in range(TRIALS):
        fields = judges[0].make(np.random.default_rng(seed))
        spec, plan = make_spec_and_plan(Decoded(fields, frozenset()))
        case, dtype, names = make_case(spec, plan.dtype), plan.dtype, judges[0].names
        sample = everything(case)
        right = arrays_of(solve(case, sample), names)
        limits = baselines(case, sample, right, dtype)
        kernels = [_stored(arrays_of(solve(one, sample), right), dtype) for one in rounded_cases(case, dtype)]
        trial = Trial(case, fields, kernels[0])
        for judge, findings in zip(judges, found, strict=True):
            findings.right = len(kernels)
            findings.refused |= {place for place, arrays in enumerate(kernels) if not judge.accepts(arrays, trial)}
        others = (
            Candidate((name,), one, arrays_of(solve(one, sample), right), name)
            for name, one in extra_kernels(case, names)
        )
        for wrong in itertools.chain(candidates(case, sample, right, no_check), others):
            # An array that a mistake does not have (the logsumexp of heads in another order) is right.
            arrays = _stored({**right, **wrong.arrays}, dtype)
            name = f"{wrong.names[0]} {wrong.case.detail}".strip()
            apart = ratio(wrong.arrays, right, limits)
            for judge, findings in zip(judges, found, strict=True):
                findings.add(name, judge.accepts(arrays, trial), apart)
    return found


# Table

HEADER: Final = (
    "| judge | inputs | accepts | wrong kernels that pass | right kernels that fail |\n|---|---|---|---|---|"
)


def row(judge: Judge, found: Findings) -> str:
    """The row of a judge, with how many kernels pass and fail."""
    inputs = f"{judge.inputs} ({judge.reduced})" if judge.reduced else judge.inputs
    accepted = f"{len(found.accepted)} of {len(found.visible)}"
    refused = f"{len(found.refused)} of {found.right}"
    return f"| {judge.name} | {inputs} | {judge.rule} | {accepted} | {refused} |"


def details(judge: Judge, found: Findings) -> str:
    """The wrong kernels that pass, each with its ratio, and the mistakes that nobody can see in the inputs."""
    passing = ", ".join(f"{name} {_number(ratio)}" for name, ratio in found.accepted.items()) or "none"
    return f"- **{judge.name}**: {passing}; not to be seen: {', '.join(found.invisible) or 'none'}."


def _number(number: float) -> str:
    return "∞" if math.isinf(number) else f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def main() -> None:
    options = argparse.ArgumentParser(description="Which wrong kernels do public judges of attention kernels accept?")
    options.add_argument("names", nargs="*", help="words in the names of the judges (default: all)")
    words = options.parse_args().names
    chosen = [judge for judge in JUDGES if not words or any(word in judge.name for word in words)]
    started = time.perf_counter()
    print(HEADER, flush=True)
    lines = []
    for _, group in itertools.groupby(chosen, key=lambda judge: judge.make):
        judges = list(group)
        for judge, found in zip(judges, judged(judges), strict=True):
            print(row(judge, found), flush=True)
            lines.append(details(judge, found))
    print("", *lines, sep="\n")
    print(f"\n{TRIALS} seeds each, {time.perf_counter() - started:.0f} s. Sources, read on {READ}:\n")
    for source in dict.fromkeys(source for judge in chosen for source in judge.sources):
        print(f"- {source}")


if __name__ == "__main__":
    main()
