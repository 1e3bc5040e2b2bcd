"""`make test-deep`: how good comparisons are, by thousands of random requests with planted mistakes.

    python -m tests.deep_compare [PART …] [--draws N] [--seed N]

Parts are mistakes, pairs, power, apart, right, kernels, formulas, gradients, backward_formulas, backwards, rounding,
places, corrupted, hidden, few and fitted.

Each part prints its figures, and what it got wrong. The exit status is 1 if a figure is below what it should be.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from attention_service.attention.arrays import BFLOAT16
from attention_service.attention.terms import POSITIONAL
from attention_service.comparison.errors import distance
from attention_service.comparison.gradients.mutants import GRADIENT_MUTANTS
from attention_service.comparison.inputs import make_input
from attention_service.comparison.mutants import MUTANTS
from attention_service.comparison.sample import everything
from attention_service.comparison.solve import solve
from attention_service.library import attend, compare
from tests import test_compare_hidden as by_hand
from tests.helpers import planted_numbers
from tests.helpers.backward_mistakes import MISTAKES as BACKWARD_MISTAKES
from tests.helpers.backward_mistakes import plant as plant_backward
from tests.helpers.coarse_kernels import COARSE, exact, random_formula, random_kernel, random_place, size, wrong
from tests.helpers.coarse_kernels import random_request as random_request_of_halves
from tests.helpers.coarse_kernels import right as right_of_halves
from tests.helpers.corrupted import draw_corrupted
from tests.helpers.formulas import is_of, plant, table
from tests.helpers.planted import (
    COMMON_PAIRS,
    EVERY,
    Draw,
    draw,
    named_first,
    random_recipe,
    returned,
    shown,
    tells_apart,
)
from tests.helpers.planted_gradients import draw_gradients
from tests.helpers.right_backward import backward, random_request
from tests.helpers.right_kernels import FOLDS, Kernel, flash
from tests.peers.conformance.adapters import ADAPTERS
from tests.test_compare_few_numbers import folded_backward, split_decode

# What the mistakes of each part must reach: the share of those that can be told which are named first.
MISTAKES: Final = 0.95
PAIRS: Final = 0.80
GRADIENTS: Final = 0.98
PLACED: Final = 0.95
LIBERAL: Final = Kernel(folds="scale and log2(e)", rounds_weights=True, cubic=True, fast_tanh=True)
# Errors of a part of the rows that are so many times those of right kernels are no rounding; those of so few rows.
TOLD: Final = 3.0
TOLD_OF_FEW: Final = 10.0
FEW: Final = 4
FORMULAS: Final = 0.98
# The share of facts whose numbers are the planted ones: errors that are printed are not those of the worst rounding.
FITTED: Final = 0.99
# Options that other libraries have.
OPTIONS_OF_OTHERS: Final = {"is_causal", "mask", "key_mask", "bias", "softcap", "sinks", "alibi_slopes", "window"}
# Mistakes that can be planted: an output may resemble those of rounding, but never prove them.
PLANTED: Final = [name for name in MUTANTS if not name.startswith("precision.")]


def draws(count: int, seed: int, planted: Sequence[tuple[str, ...]]) -> Iterator[Draw]:
    """About so many draws, as many of each of the mistakes; those left out to which the mistakes do not apply."""
    for names in planted:
        found = (drawn for n in range(50 * count) if (drawn := draw(seed + n, names, EVERY)))
        yield from islice(found, -(-count // len(planted)))


def mistakes(count: int, seed: int) -> bool:
    """Plant each mistake, and count how often it is named first where the request can tell it."""
    counts: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    for drawn in draws(count, seed, [(name,) for name in PLANTED]):
        [name] = drawn.names
        planted[name] += 1
        report = compare(returned(drawn, arrays_that_show(name)), **drawn.fields)
        if name in report.power.survivors:
            counts["untellable"] += 1
        elif named_first(report, (name,)):
            counts["first"] += 1
            counts["proved"] += report.hypotheses[0].certainty == "proof"
        else:
            counts["not first"] += 1
            counts["false proof"] += bool(report.hypotheses) and report.hypotheses[0].certainty == "proof"
            print(f"  {name} in {drawn.case.dtype.name}: {[one.name for one in report.hypotheses[:2]]}", flush=True)
    tellable = counts["first"] + counts["not first"]
    share = counts["first"] / tellable
    print(f"mistakes: {share:.2%} of {tellable} tellable ones named first, of {planted.total()} draws; {dict(counts)}")
    print(f"  each mistake at least {min(planted.values())} times")
    return share >= MISTAKES


def pairs(count: int, seed: int) -> bool:
    """Plant two mistakes at once, and count how often both are named; neither may be proved alone."""
    counts: Counter[str] = Counter()
    for drawn in draws(count, seed, COMMON_PAIRS):
        if not tells_apart(drawn):
            counts["untellable"] += 1
            continue
        report = compare(returned(drawn), **drawn.fields)
        if named_first(report, drawn.names):
            counts["both"] += 1
            continue
        counts["not both"] += 1
        counts["false proof"] += bool(report.hypotheses) and report.hypotheses[0].certainty == "proof"
        print(f"  {drawn.names} in {drawn.case.dtype.name}: {[one.name for one in report.hypotheses[:2]]}", flush=True)
    tellable = counts["both"] + counts["not both"]
    share = counts["both"] / tellable
    print(f"pairs: {share:.2%} of {tellable} tellable ones both named, of {count} draws; {dict(counts)}")
    return share >= PAIRS and not counts["false proof"]


def power(count: int, seed: int) -> bool:
    """Ask for the power of requests, and hold it against the mistakes themselves, on all rows."""
    counts: Counter[str] = Counter()
    for drawn in draws(count, seed, [(name,) for name in PLANTED]):
        [name] = drawn.names
        if MUTANTS[name].needs:
            counts["not of the output"] += 1
            continue
        found = compare(**drawn.fields)
        whole = everything(drawn.case)
        exact = solve(drawn.case, whole).output
        report = compare(exact.astype(drawn.case.dtype), **drawn.fields)
        limit = 2 * report.baseline["output"].limit
        apart = [distance(solve(wrong, whole).output, exact) for wrong in shown(drawn.case, name)]
        is_alive = min(apart) <= limit
        counts["right" if (name in found.power.survivors) == is_alive else "wrong"] += 1
        if (name in found.power.survivors) != is_alive:
            print(f"  {name}: {[one / limit for one in apart]}", flush=True)
    print(f"power: {counts['wrong']} of {counts['wrong'] + counts['right']} not as it says; {dict(counts)}")
    return not counts["wrong"]


def apart(count: int, seed: int) -> bool:
    """Plant mistakes until so many next inputs were made to tell one from others, and see whether each does."""
    counts: Counter[str] = Counter()
    for drawn in draws(50 * count, seed, [(name,) for name in PLANTED]):
        report = compare(returned(drawn, arrays_that_show(drawn.names[0])), **drawn.fields)
        best = report.hypotheses[0] if report.hypotheses else None
        if best is None or best.certainty != "proof" or not best.also:
            continue
        if report.next_input is None or report.next_input.request is None:
            counts["no input tells them apart"] += 1
            continue
        named = set(report.next_input.kills)
        found = compare(**report.next_input.request).power
        is_right = not named & set(found.survivors) and all(
            len(named & set(one)) < 2 for one in found.indistinguishable
        )
        counts["apart" if is_right else "not apart"] += 1
        if counts["apart"] + counts["not apart"] == count:
            break
    print(f"apart: {dict(counts)}")
    return not counts["not apart"]


def right(count: int, seed: int) -> bool:
    """Compare what other libraries return, where they are installed: none is wrong.

    torch SDPA gets so many requests, the others a tenth. Imprecise is right only for half types, whose scores some
    libraries round; float64 that is computed in float32 is counted apart.
    """
    is_good = True
    for name, adapter in ADAPTERS.items():
        if not adapter.is_installed:
            continue
        target, counts = adapter.load(), Counter[str]()
        wanted = count if name == "torch-sdpa" else count // 10
        for n in range(30 * wanted):
            if counts["compared"] == wanted:
                break
            fields = request_of_few_options(seed + n)
            if attend(**fields, include=[]).metadata.fully_masked_rows:
                continue  # libraries differ where a query sees no key
            try:
                output = target(**fields)
            except Exception:  # Unsupported, or what the library says of the request
                counts["refused"] += 1
                continue
            report = compare(output, **fields, time_limit=0)
            dtype = fields["query"].dtype.name
            status: str = report.verdict.status
            if dtype == "float64" and status == "wrong":
                again = compare(output, **fields, dtype="float32", time_limit=0)
                status = status if again.verdict.status in ("wrong", "imprecise") else "float64 in float32"
            counts["compared"] += 1
            counts[f"{status} {dtype}" if status in ("wrong", "imprecise") else "right"] += 1
            if status == "wrong" or (status == "imprecise" and dtype in ("float32", "float64")):
                is_good = False
                options = sorted(fields.keys() - {"query", "key", "value"})
                print(f"  {name}, {dtype}, {options}: {report.verdict.message} ({report.verdict.ratio})", flush=True)
        print(f"right: {adapter.title} {adapter.version}: {dict(counts)}", flush=True)
    return is_good


def kernels(count: int, seed: int) -> bool:
    """Judge right kernels as production writes them, output and logsumexp, by their verdicts alone: none is wrong."""
    counts = Counter[str]()
    for n in range(count):
        request, kernel = kernel_and_request(np.random.default_rng(seed + n))
        options = {name: request[name] for name in ("softcap", "is_causal") if name in request}
        answer = flash(request["query"], request["key"], request["value"], kernel, **options)
        report = compare(answer, **request, time_limit=1e-3)
        dtype, status = request["query"].dtype.name, report.verdict.status
        counts[f"{status if status in ('wrong', 'imprecise') else 'right'} {dtype}"] += 1
        if status in ("wrong", "imprecise"):
            print(f"  {dtype}, {request['query'].shape}, {kernel}, {options}: {report.verdict.message}", flush=True)
    print(f"kernels: {dict(counts)}", flush=True)
    return not any(name.startswith(("wrong", "imprecise")) for name in counts)


def kernel_and_request(random: np.random.Generator) -> tuple[dict[str, Any], Kernel]:
    """A random request, and a kernel that does what its type allows: float32 is rounded nowhere on the way."""
    dtype = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16)][random.integers(3)]
    is_half, queries = dtype.itemsize == 2, int(random.integers(1, 200))
    d, keys, heads = int(random.integers(16, 257)), queries + int(random.integers(0, 300)), int(random.integers(1, 4))
    shapes = {"query": (1, heads, queries, d), "key": (1, 1, keys, d), "value": (1, 1, keys, d)}
    fields: dict[str, Any] = {name: random.normal(size=shape) for name, shape in shapes.items()}
    fields["query"] *= random.choice([0.01, 0.3, 1.0, 4.0])
    request = {name: array.astype(dtype) for name, array in fields.items()} | {"layout": "bhld"}
    if random.random() < 0.5:
        request |= {"is_causal": True, "query_offset": keys - queries}
    if random.random() < 0.3:
        request["softcap"] = float(random.choice([1.0, 5.0, 20.0, 50.0]))
    flags = {name: is_half and bool(random.random() < 0.5) for name in ("rounds_weights", "cubic", "fast_tanh")}
    kernel = Kernel(
        tile=int(random.choice([16, 32, 64, 128])),
        folds=str(random.choice(FOLDS)) if is_half else "nothing",
        rounds_sum=flags["rounds_weights"] and bool(random.random() < 0.5),
        **flags,
    )
    return request, kernel


def request_of_few_options(seed: int) -> dict[str, Any]:
    """A random request with at most two options that other libraries have."""
    random = np.random.default_rng(seed)
    recipe = random_recipe(random, ())
    chosen = random.permutation(sorted(OPTIONS_OF_OTHERS))[: random.integers(0, 3)]
    recipe = replace(recipe, options=frozenset(map(str, chosen)))
    # Without an offset, masks by position need as many queries as keys.
    if POSITIONAL & set(recipe.options) or random.random() < 0.5:
        recipe = replace(recipe, queries=min(recipe.keys, 37), keys=min(recipe.keys, 37))
    fields = make_input(recipe, seed)
    fields.pop("query_offset", None)
    for name in ("mask", "key_mask"):
        if name in fields:
            fields[name][..., 0] = True
    return fields


def arrays_that_show(name: str) -> tuple[str, ...]:
    """The arrays that a kernel must return for a mistake to show."""
    return ("output", "logsumexp") if MUTANTS[name].needs else ("output",)


def gradients(count: int, seed: int) -> bool:
    """Plant each mistake of backward passes, and count how often it is named first where the request can tell it."""
    counts, names = Counter[str](), [name for name, row in GRADIENT_MUTANTS.items() if row.in_power]
    for name in names:
        found = (drawn for n in range(50 * count) if (drawn := draw_gradients(seed + n, name, EVERY)))
        for drawn in islice(found, -(-count // len(names))):
            report = compare(drawn.gradients, **drawn.fields)
            best = report.hypotheses[0] if report.hypotheses else None
            if name in report.power.survivors:
                counts["untellable"] += 1
            elif named_first(report, (name,)):
                counts["first"] += 1
                counts["proved"] += best is not None and best.certainty == "proof"
            else:
                counts["not first"] += 1
                counts["false proof"] += best is not None and best.certainty == "proof"
                dtype = drawn.fields["query"].dtype.name
                print(f"  {name} in {dtype}: {[one.name for one in report.hypotheses[:2]]}", flush=True)
    tellable = counts["first"] + counts["not first"]
    print(f"gradients: {counts['first'] / tellable:.2%} of {tellable} tellable ones named first; {dict(counts)}")
    return counts["first"] / tellable >= GRADIENTS and not counts["false proof"]


def backwards(count: int, seed: int) -> bool:
    """Judge right backward passes as production writes them, by their verdicts alone: none is wrong or imprecise."""
    counts = Counter[str]()
    for n in range(seed, seed + count):
        fields, kernel, options = random_request(np.random.default_rng(n))
        arrays = {name: fields[name] for name in ("query", "key", "value", "grad_output")}
        with np.errstate(all="ignore"):
            answer = backward(**arrays, kernel=kernel, **options)
        verdict = compare(answer, **fields, **options, time_limit=1e-3).verdict
        is_wrong = verdict.status in ("wrong", "imprecise")
        counts[f"{verdict.status if is_wrong else 'right'} {fields['query'].dtype.name}"] += 1
        if is_wrong:
            print(f"  {n}: {arrays['query'].shape}, {kernel}, {sorted(options)}: {verdict.message}", flush=True)
    print(f"backwards: {dict(counts)}", flush=True)
    return not any(name.startswith(("wrong", "imprecise")) for name in counts)


def backward_formulas(count: int, seed: int) -> bool:
    """Plant mistakes of one backward kernel, or of all, by formulas of their own, and count how often each is named
    first, or explained by a fact, where the gradients are wrong."""
    counts = Counter[str]()
    for name, row in BACKWARD_MISTAKES.items():
        found = (drawn for n in range(10 * count) if (drawn := plant_backward(seed + n, name)))
        for drawn in islice(found, -(-count // len(BACKWARD_MISTAKES))):
            report = compare(drawn.actual, **drawn.fields)
            best = report.hypotheses[0] if report.hypotheses else None
            is_named = best is not None and not {best.name, *best.also}.isdisjoint(row.names)
            is_proved = best is not None and best.certainty == "proof"
            if report.verdict.status != "wrong":
                counts["untellable"] += 1
            elif is_named or ({fact.name for fact in report.facts} & {*row.facts} and not is_proved):
                counts["named" if is_named else "fact"] += 1
                counts["proved"] += is_proved
            else:
                counts["false proof" if is_proved else "neither"] += 1
                said = [(one.name, *one.also) for one in report.hypotheses[:1]], [fact.message for fact in report.facts]
                proof = " PROVED" if is_proved else ""
                print(f"  {name} {drawn.wrong} in {drawn.fields['query'].dtype.name}{proof}: {said}", flush=True)
    tellable = counts["named"] + counts["fact"] + counts["neither"] + counts["false proof"]
    share = (counts["named"] + counts["fact"]) / tellable
    print(f"backward_formulas: {share:.2%} of {tellable} tellable ones named first or explained; {dict(counts)}")
    return share >= GRADIENTS and not counts["false proof"]


def rounding(count: int, seed: int) -> bool:
    """Round scores or sums to a half type: never correct without the mistake among the survivors, never wrong for it.

    As many right kernels for the same requests are never accused.
    """
    counts, is_good = Counter[str](), True
    for n in range(seed, seed + count):
        random = np.random.default_rng(n)
        request, kernel, how = random_request_of_halves(random), random_kernel(random), COARSE[n % len(COARSE)]
        name = "precision.accumulate" if how == "sums" else "precision.scores"
        sent = wrong(request, coarse=how, tile=kernel.tile, weights=kernel.rounds_weights)
        report = compare(sent, **request)
        status = report.verdict.status
        is_bad = status in ("correct", "inconclusive") and name not in report.power.survivors
        is_bad |= status == "wrong" and (report.errors["output"].max_abs or 0) <= 10 * report.baseline["output"].limit
        right_status = compare(right_of_halves(request, kernel), **request, time_limit=1e-3).verdict.status
        is_bad |= right_status in ("imprecise", "wrong")
        counts[status] += 1
        counts["survives"] += name in report.power.survivors
        if is_bad:
            is_good = False
            shapes = request["query"].dtype.name, request["query"].shape, request["key"].shape[2]
            print(f"  {n}: {how}, {shapes}: {status}; right: {right_status}: {report.verdict.message}", flush=True)
    print(f"rounding: {dict(counts)}")
    return is_good


def places(count: int, seed: int) -> bool:
    """Plant a wrong formula in a part of the rows: never correct or imprecise where it is more than rounding.

    It is more if the errors there are TOLD times those of the worst of three right kernels, in the mean.
    """
    counts = Counter[str]()
    for n in range(seed, seed + count):
        random = np.random.default_rng(n)
        request, kernel = random_request_of_halves(random), random_kernel(random)
        where, formula = random_place(random, request["query"].shape[:3]), random_formula(random, request)
        if where.all() or not where.any():
            continue
        truth, kernels = exact(request), [random_kernel(random), random_kernel(random), LIBERAL]
        others = [right_of_halves(request, one) for one in kernels]
        sent = wrong(request, tile=kernel.tile, weights=kernel.rounds_weights, formula=formula)
        sent = np.where(where[..., None], sent, right_of_halves(request, kernel))
        legal = max(size(one, truth, where) for one in others)
        is_told = size(sent, truth, where) > (TOLD if where.sum() > FEW else TOLD_OF_FEW) * legal
        report = compare(sent, **request, time_limit=1e-3)
        status = report.verdict.status
        counts[f"{status} {'told' if is_told else 'within rounding'}"] += 1
        if is_told and status != "wrong":
            shapes = request["query"].dtype.name, request["query"].shape, request["key"].shape[2]
            ratio = size(sent, truth, where) / legal
            print(f"  {n}: {formula}, {int(where.sum())} rows of {shapes}: {ratio:.2g}, {status}", flush=True)
    print(f"places: {dict(counts)}")
    told = {name: number for name, number in counts.items() if name.endswith(" told")}
    return told.get("wrong told", 0) >= PLACED * sum(told.values()) and not {"correct told"} & told.keys()


def formulas(count: int, seed: int) -> bool:
    """Plant mistakes by formulas that share no line with the product, and count those named first, or told by a fact.

    What has no name must have a true fact. A proof of another mistake is false unless its formula agrees within legal
    rounding. The right answers of the same formulas must not be wrong.
    """
    counts = Counter[str]()
    names = [*table.MISTAKES, *table.FACTS]
    for number, name in itertools.product(range(-(-count // len(names))), names):
        planted = plant(name, seed + number)
        if planted is None:
            continue
        if compare(planted.right, **planted.fields, time_limit=1e-3).verdict.status in ("wrong", "imprecise"):
            counts["right ones accused"] += 1
            print(f"  right: {name}, seed {seed + number}", flush=True)
        report = compare(planted.sent, **planted.fields)
        best = report.hypotheses[0] if report.hypotheses else None
        told = {fact.name for fact in report.facts} & {*planted.facts}
        names_of_best = () if best is None else (best.name, *best.also)
        is_proof = best is not None and best.certainty == "proof"
        is_false = is_proof and planted.name not in names_of_best
        apart = 2 * (report.baseline["output"].limit or 0.0)
        is_false = is_false and not any(
            one in planted.facts or is_of(one, name, seed + number, apart) for one in names_of_best
        )
        if planted.name in report.power.survivors or report.verdict.status not in ("wrong", "imprecise"):
            counts["untellable"] += 1
        elif planted.name in names_of_best:
            counts["first"] += 1
        elif told or (is_proof and not is_false):
            counts["explained"] += 1
        else:
            counts["not explained"] += 1
            facts = [fact.message for fact in report.facts[:1]]
            print(f"  {name}, seed {seed + number}: {[one.name for one in report.hypotheses[:2]]} {facts}", flush=True)
        counts["false proof"] += is_false
        if is_false:
            print(f"  false proof: {name}, seed {seed + number}: {names_of_best[:1]}", flush=True)
    told_of = counts["first"] + counts["explained"]
    share = told_of / (told_of + counts["not explained"])
    print(
        f"formulas: {share:.2%} of {told_of + counts['not explained']} tellable ones named or explained; {dict(counts)}"
    )
    return share >= FORMULAS and not counts["false proof"] and not counts["right ones accused"]


def corrupted(count: int, seed: int) -> bool:
    """Damage answers in any way: a comparison ends, and says so."""
    counts = Counter[str]()
    for n in range(seed, seed + count):
        sent, fields = draw_corrupted(n)
        try:
            counts[compare(sent, **fields).verdict.status] += 1
        except Exception as error:
            counts["failed"] += 1
            print(f"  {n}: {type(error).__name__}: {error}", flush=True)
    print(f"corrupted: {dict(counts)}")
    return not counts["failed"]


def hidden(count: int, seed: int) -> bool:
    """Send zeros, means, one element moved, and the same of gradients, beside keys that a finite number hides."""
    counts = Counter[str]()
    hows = (*by_hand.WAYS, "alibi")
    for n in range(seed, seed + count):
        random = np.random.default_rng(n)
        dtype, how = by_hand.TYPES[str(random.choice([*by_hand.TYPES]))], str(random.choice(hows))
        query, key, value = by_hand.drawn(dtype, n)
        query = (query * dtype.type(random.choice([0.1, 1]))).astype(dtype)
        fields, added = by_hand.hidden(how, dtype)
        fields |= {"query": query, "key": key, "value": value, "layout": "hld"}
        right = by_hand.attention(query, key, value, added)
        sent = {"right": right.astype(dtype)} | {name: by_hand.bad(name, right, value, dtype) for name in by_hand.BAD}
        cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            (name, {"output": array}, {}) for name, array in sent.items()
        ]
        cotangent = random.normal(size=query.shape).astype(dtype)
        gradients = by_hand.gradients(query, key, value, added, cotangent)
        for name, array in () if how == "alibi" else gradients.items():  # which leaves one key, and gradients next to 0
            factor = 1 + max(1e-3, 32 * by_hand.epsilon(dtype))
            made = {"right": array, "zeros": np.zeros_like(array), "one factor": array * factor}
            cases += [(what, {name: one.astype(dtype)}, {"grad_output": cotangent}) for what, one in made.items()]
        for name, actual, more in cases:
            status = compare(actual, **fields, **more).verdict.status
            good = ("correct", "inconclusive") if name == "right" else ("wrong", "imprecise")
            counts["as it is" if status in good else "another verdict"] += 1
            if status not in good:
                print(f"  {how}, {dtype}, seed {n}: {name} of {next(iter(actual))} is {status}", flush=True)
    print(f"hidden: {dict(counts)}")
    return not counts["another verdict"]


def few(count: int, seed: int) -> bool:
    """Judge right kernels and backward passes of few rows and features, some of them much larger: none is wrong."""
    counts = Counter[str]()
    for n in range(seed, seed + count):
        random = np.random.default_rng(n)
        dtype = BFLOAT16 if n % 2 else np.dtype(np.float16)
        rows, keys, (dim, features) = random.integers(1, 4), random.choice([64, 200]), random.choice([1, 4, 8, 64], 2)
        lengths = {"query": (rows, dim), "key": (keys, dim), "value": (keys, features), "grad_output": (rows, features)}
        made = {name: random.normal(size=(1, 1, *shape)) for name, shape in lengths.items()}
        made["query"] *= random.choice([1, 4])
        made["key"][..., 3, :] *= random.choice([1, 20])
        made["value"][..., :1] *= random.choice([1, 30])
        fields: dict[str, Any] = {name: array.astype(dtype) for name, array in made.items()}
        query, key, value = (fields[name] for name in ("query", "key", "value"))
        answers: dict[str, Any] = {
            f"{parts} parts{', folded' * folds}": {"output": split_decode(query, key, value, parts, folds=folds)}
            for parts, folds in itertools.product((1, 4), (False, True))
        }
        answers["backward"] = folded_backward(fields, dtype)
        for what, answer in answers.items():
            asked = fields if what == "backward" else {"query": query, "key": key, "value": value}
            verdict = compare(answer, **asked, query_offset=0, time_limit=1e-3).verdict
            is_wrong = verdict.status in ("wrong", "imprecise")
            counts["accused" if is_wrong else "right"] += 1
            if is_wrong:
                print(f"  {n}: {what}, {dtype}, {rows} × {keys}, {dim} and {features}: {verdict.message}", flush=True)
    print(f"few: {dict(counts)}", flush=True)
    return not counts["accused"]


def fitted(count: int, seed: int) -> bool:
    """Plant known numbers, and hold what facts say of them against these, up to the error that is printed."""
    counts = Counter[str]()
    for n, planted in planted_numbers.draws(count, seed):
        facts, limit = planted_numbers.facts_about(planted)
        counts["nothing told"] += not facts
        for fact in facts:
            wrong = planted_numbers.misses(planted, fact.name, fact.message, limit)
            counts["another fact" if wrong is None else "false" if wrong else "true"] += 1
            if wrong:
                dtype = planted.fields["query"].dtype.name
                print(f"  {n}: {planted.kind} in {dtype}: {'; '.join(wrong)}: {fact.message}", flush=True)
    share = counts["true"] / (counts["true"] + counts["false"])
    print(
        f"fitted: {share:.2%} of {counts['true'] + counts['false']} facts are true of a planted number; {dict(counts)}"
    )
    return share >= FITTED


PARTS: Final = {
    "mistakes": (mistakes, 10_000),
    "pairs": (pairs, 900),
    "power": (power, 1_000),
    "apart": (apart, 100),
    "right": (right, 10_000),
    "kernels": (kernels, 2_000),
    "formulas": (formulas, 3_000),
    "gradients": (gradients, 4_000),
    "backward_formulas": (backward_formulas, 3_000),
    "backwards": (backwards, 1_000),
    "rounding": (rounding, 200),
    "places": (places, 1_000),
    "corrupted": (corrupted, 1_000),
    "hidden": (hidden, 2_000),
    "few": (few, 1_000),
    "fitted": (fitted, 4_000),
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--draws", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = [PARTS[part][0](options.draws or PARTS[part][1], options.seed) for part in options.parts or PARTS]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
