"""Gradients: by hand, by fifty digits, by torch's own differentiation; exact zeros; errors; every format."""

from __future__ import annotations

import io
import itertools
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from decimal import Decimal
from typing import Any, ClassVar, Literal

import httpx
import numpy as np
import pytest
import safetensors.numpy

from attention_service import attend
from attention_service.attention.gradients import FIELDS
from attention_service.attention.plan import Plan
from attention_service.attention.planning import make_plan
from attention_service.attention.score_term import ScoreTerm
from attention_service.attention.spec import AttentionSpec
from attention_service.attention.tiles import Tiling, whole
from attention_service.backends.base import Backend
from attention_service.backends.numpy.backend import NumpyBackend
from attention_service.backends.registry import Backends
from attention_service.errors import FieldConflict, InvalidRequest, MissingField, Overflow, ShapeMismatch
from tests.helpers.by_decimal import MINUS_INFINITY, Exact, canonical
from tests.helpers.corners import BY_NAME, make_corner_cases
from tests.helpers.covering import with_options
from tests.helpers.options import plain, unusual

PLAIN, TABLE = plain(2, 2, 4, 6), unusual(2, 2, 4, 6)
# Options of which no gradient depends: where the request is computed, what it returns, its labels.
OTHER = {"dtype", "device", "backend", "query_tokens", "key_tokens", "untyped"}
OPTIONS = [name for name in TABLE if name not in OTHER and not name.startswith("grad")]
# One part in so many of the largest gradient of a field: rounding in float64, and cancellation.
TOLERANCE = 1e-10
ROWS = 4
# Corners whose numbers may be moved: norms of zeros and of equal features have no slope, or a steep one.
STEEP = {"norm.zero_row", "norm.equal_features"}
SMOOTH = [name for name, corner in BY_NAME.items() if "float64" in corner.types and name not in STEEP]
# A step that is a power of 2, so that numbers moved by it are exact but for their last bits.
STEP = 2.0**-20


def leaves(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(value, Mapping):
        for inner, part in value.items():
            yield from leaves(f"{name}.{inner}", part)
    else:
        yield name, value


def gradients_of(spec: AttentionSpec, backend: Backend | None = None) -> dict[str, np.ndarray]:
    """All gradients of a request by their dotted names, without the prefix."""
    spec = spec._replace(gradients="all")
    arrays = (backend or Backends().choose(spec.backend, spec.device)).run(make_plan(spec), spec, spec.sources).arrays
    found = dict(leaf for name in arrays if name.startswith("grad_") for leaf in leaves(name, arrays[name]))
    return {name.removeprefix("grad_"): array for name, array in found.items()}


class TestByHand:
    """One query, two keys: weights 1/4 and 3/4, values 1 and 5, so that D = 4 and dZ = (-3/4, 3/4)."""

    FIELDS: Mapping[str, Any] = {
        "query": [[1.0]],
        "key": [[0.0], [math.log(3)]],
        "value": [[1.0], [5.0]],
        "scale": 1.0,
        "query_offset": 0,
        "grad_output": [[1.0]],
    }

    def test_softmax(self) -> None:
        result = attend(**self.FIELDS, gradients="all", include=["grad_masked_scores"])
        assert result.grad_masked_scores == pytest.approx(np.array([[-0.75, 0.75]]))
        assert result.grad_value == pytest.approx(np.array([[0.25], [0.75]]))
        assert result.grad_query == pytest.approx(np.array([[0.75 * math.log(3)]]))
        assert result.grad_key == pytest.approx(np.array([[-0.75], [0.75]]))
        assert float(result.grad_scale) == pytest.approx(0.75 * math.log(3))

    def test_the_logsumexp_has_the_weights_as_its_gradient(self) -> None:
        fields = {**self.FIELDS, "grad_output": None, "grad_logsumexp": [2.0]}
        result = attend(**fields, include=["grad_masked_scores", "grad_value"])
        assert result.grad_masked_scores == pytest.approx(np.array([[0.5, 1.5]]))
        assert not result.grad_value.any()

    def test_a_sink_takes_weight(self) -> None:
        # exp(ln 4) beside 1 and 3: the sink has half the weight, the keys 1/8 and 3/8; D = 1/8 + 15/8 = 2.
        result = attend(**self.FIELDS, sinks=[math.log(4)], gradients="all")
        assert result.grad_sinks == pytest.approx(np.array([0.5 * (0 - 2)]))
        assert result.grad_key == pytest.approx(np.array([[1 / 8 * (1 - 2)], [3 / 8 * (5 - 2)]]))

    def test_a_softcap_flattens(self) -> None:
        # Scores 0 and cap · atanh(1/2) are capped to 0 and cap / 2, where the slope is 1 - 1/4.
        cap = 2 * math.log(3)
        fields = {**self.FIELDS, "key": [[0.0], [cap * math.atanh(0.5)]]}
        result = attend(**fields, softcap=cap, gradients="all", include=["grad_scaled_scores"])
        assert result.grad_scaled_scores == pytest.approx(np.array([[-0.75, 0.75 * 0.75]]))

    def test_slopes_keep_their_digits_where_they_are_small(self) -> None:
        """1 - tanh² and σ (1 - σ) are 4 exp(-2x) and exp(-x) far out, where 1 minus almost 1 has no digits."""
        arrays = [np.array(x, np.float32) for x in ([[20]], [[1], [0]], [[1], [0]])]
        fields: dict[str, Any] = {"query_offset": 0, "scale": 1.0, "grad_output": np.ones((1, 1), np.float32)}
        result = attend(*arrays, **fields, normalization="sigmoid", include=["grad_masked_scores"])
        assert result.grad_masked_scores[0, 0] == pytest.approx(math.exp(-20), rel=1e-6)
        result = attend(*arrays, **fields, softcap=2.0, include=["grad_masked_scores", "grad_scaled_scores"])
        slope = result.grad_scaled_scores[0, 0] / result.grad_masked_scores[0, 0]
        assert slope == pytest.approx(4 * math.exp(-20), rel=1e-6)

    def test_the_logsumexp_of_a_vector(self) -> None:
        fields = {**self.FIELDS, "query": [1.0], "grad_output": None, "grad_logsumexp": [2.0]}
        found = attend(**fields, include=["grad_masked_scores"]).grad_masked_scores
        assert found == pytest.approx(np.array([0.5, 1.5]))

    def test_sigmoid_and_sum(self) -> None:
        fields = {**self.FIELDS, "include": ["grad_masked_scores"]}
        sigmoid = attend(**fields, normalization="sigmoid").grad_masked_scores
        assert sigmoid == pytest.approx(np.array([[0.25 * 1, 3 / 16 * 5]]))
        fields["key"] = [[1.0], [3.0]]
        total = attend(**fields, normalization="sum").grad_masked_scores
        assert total == pytest.approx(np.array([[(1 - 4) / 4, (5 - 4) / 4]]))  # the same weights


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_are_slopes_in_fifty_digits(name: str) -> None:
    """The slope of a loss over some rows, in a direction in which every number of every field moves."""
    for number, case in enumerate(make_corner_cases(name, 3 if name == "combined" else 1, 7, ("float64",))):
        check_slope(case.fields, np.random.default_rng(number))


def check_slope(fields: dict[str, Any], random: np.random.Generator) -> None:
    directions = {name: direction(array, random) for name, array in float_fields(fields).items()}
    before, after = (Exact(moved(fields, directions, sign * STEP)) for sign in (-1, 1))
    output = np.asarray(attend(**{**fields, "include": []}).output)
    layout = fields.get("layout", "bhld")
    flat = canonical(np.arange(output.size).reshape(output.shape), layout, fields.get("num_heads", 0))
    b, h, q, e = flat.shape
    has_logsumexp = fields.get("normalization", "softmax") == "softmax"
    cotangent, of_logsumexp, slope = np.zeros(output.size), np.zeros((b, h, q)), Decimal(0)
    for place in {(int(n), int(m), int(i)) for n, m, i in random.integers(0, (b, h, q), (ROWS, 3))}:
        weights = np.asarray(random.integers(-4, 5, e) / 4)
        cotangent[flat[place]] = weights
        low, high = before.row(*place), after.row(*place)
        pairs = list(zip(weights.tolist(), low.output, high.output, strict=True))
        if has_logsumexp and high.logsumexp != MINUS_INFINITY:
            assert low.logsumexp is not None
            assert high.logsumexp is not None
            of_logsumexp[place] = 0.5
            pairs.append((0.5, low.logsumexp, high.logsumexp))
        slope += sum((Decimal(weight) * (y - x) for weight, x, y in pairs), Decimal(0))
    request = {**fields, "grad_output": cotangent.reshape(output.shape), "gradients": "all", "include": []}
    if has_logsumexp:
        axes = [n for n, axis in zip((b, h, q), "bhq", strict=True) if axis in shown_axes(layout, h)]
        request["grad_logsumexp"] = of_logsumexp.reshape(axes)
    result = attend(**request)
    found = dict(leaf for name in result if name.startswith("grad_") for leaf in leaves(name, result[name]))
    assert found.keys() == {f"grad_{name}" for name in directions}
    products = [found[f"grad_{name}"] * direction for name, direction in directions.items()]
    expected, size = (sum(float(f(x).sum()) for x in products) for f in (np.asarray, np.abs))
    assert float(slope / Decimal(2 * STEP)) == pytest.approx(expected, rel=0, abs=1e-8 * max(1.0, size))


def shown_axes(layout: str, heads: int) -> str:
    """The axes of a logsumexp."""
    return ("b" if "b" in layout else "") + ("h" if "h" in layout or heads > 1 else "") + "q"


def float_fields(fields: Mapping[str, Any], outer: str = "") -> dict[str, np.ndarray]:
    """The fields of a request that have gradients, by their dotted names."""
    found: dict[str, np.ndarray] = {}
    for name, value in fields.items():
        place = f"{outer}.{name}" if outer else name
        if place.split(".")[0] not in FIELDS or name == "eps":
            continue
        if isinstance(value, Mapping):
            found |= float_fields(value, place)
        elif np.asarray(value).dtype.kind == "f":
            found[place] = np.asarray(value)
    return found


def direction(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """A step of every finite number: -1, 0 or 1."""
    return np.where(np.isfinite(array), random.integers(-1, 2, array.shape), 0)


def moved(fields: Mapping[str, Any], directions: Mapping[str, np.ndarray], step: float, outer: str = "") -> Any:
    """The request with its numbers moved by so many steps."""
    changed = dict(fields)
    for name, value in fields.items():
        place = f"{outer}.{name}" if outer else name
        if isinstance(value, Mapping):
            changed[name] = moved(value, directions, step, place)
        elif place in directions:
            changed[name] = np.asarray(value) + step * directions[place]
    return changed


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_each_option_are_those_of_torch(name: str, backend: Literal["numpy", "torch"]) -> None:
    spec = with_options(PLAIN, TABLE, (name,))
    assert spec is not None
    check_against_torch(spec, Backends().choose(backend, "cpu"))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("first", OPTIONS)
def test_gradients_of_pairs_of_options_are_those_of_torch(first: str) -> None:
    backend = Backends().choose("numpy", "cpu")
    for second in OPTIONS[: OPTIONS.index(first)]:
        spec = with_options(PLAIN, TABLE, (first, second))
        if spec is not None:
            check_against_torch(spec, backend)


def check_against_torch(spec: AttentionSpec, backend: Backend) -> None:
    """Compare all gradients with torch's own differentiation of a composition in torch."""
    import torch

    from tests.helpers.by_torch import composed

    random = np.random.default_rng(0)
    right = composed(spec)
    output = random.normal(size=tuple(right.output.shape))
    loss = (right.output * torch.tensor(output)).sum()
    logsumexp = None
    if right.logsumexp is not None:
        logsumexp = random.normal(size=tuple(right.logsumexp.shape))
        loss = loss + (right.logsumexp * torch.tensor(logsumexp)).sum()
        logsumexp = logsumexp if logsumexp.shape[1] > 1 else logsumexp[:, 0]
    loss.backward()
    is_whole = spec.select_heads is None and spec.select_queries is None
    stages = tuple(right.stages) if is_whole else ()
    include = (*(name for name in spec.include if spec.top_k or name != "attention_weights"), *stages)
    request = spec._replace(grad_output=output, grad_logsumexp=logsumexp, gradients="all", include=include)  # type: ignore[arg-type]  # names
    arrays = backend.run(make_plan(request), request, request.sources).arrays
    found = dict(leaf for name in arrays if name.startswith("grad_") for leaf in leaves(name, arrays[name]))
    expected = {f"grad_{name}": leaf.grad for name, leaf in right.leaves.items()}
    expected |= {name: right.stages[name].grad for name in stages}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        right_numbers = np.zeros(found[name].shape) if gradient is None else gradient.numpy().reshape(found[name].shape)
        largest = np.abs(right_numbers).max(initial=0)
        np.testing.assert_allclose(found[name], right_numbers, rtol=0, atol=TOLERANCE * (1 + largest), err_msg=name)


class TestExactZeros:
    def test_a_row_without_a_key_and_hidden_nan(self) -> None:
        random = np.random.default_rng(0)
        query, key, value, output = (random.normal(size=(3, 4)) for _ in range(4))
        mask = np.array([[True, True, False], [False, False, False], [True, False, False]])
        clean = attend(query, key, value, mask=mask, grad_output=output, gradients="all", softcap=3.0, scale=0.5)
        key[2], value[2], query[1] = np.nan, np.inf, np.nan
        result = attend(query, key, value, mask=mask, grad_output=output, gradients="all", softcap=3.0, scale=0.5)
        assert not result.grad_query[1].any()
        assert not result.grad_key[2].any()
        assert not result.grad_value[2].any()
        for name in clean:
            if name.startswith("grad_"):
                np.testing.assert_allclose(result[name], clean[name], rtol=0, atol=1e-15, err_msg=name)

    def test_hidden_nan_behind_maps_norms_and_rotation(self) -> None:
        random = np.random.default_rng(0)
        tokens, output = random.normal(size=(4, 8)), random.normal(size=(4, 8))
        maps = {role: {"weight": random.normal(size=(8, 8))} for role in ("query", "key", "value", "output")}
        layer: dict[str, Any] = {"projection": maps, "num_heads": 2, "rotary": {}, "key_lengths": 3, "query_lengths": 3}
        layer |= {"query_norm": {"weight": np.ones(4)}, "key_norm": {"weight": np.ones(4)}}
        layer["projection"]["gate"] = {"weight": random.normal(size=(2, 8))}
        layer |= {"output_norm": {"weight": np.ones(4)}, "grad_output": output, "gradients": "all"}
        clean = attend(input=tokens, **layer)
        tokens[3] = np.nan
        poisoned = attend(input=tokens, **layer)
        assert not poisoned.grad_input[3].any()
        for (name, right), (_, found) in zip(leaves("", dict(clean)), leaves("", dict(poisoned)), strict=True):
            if ".grad_" in name:
                np.testing.assert_allclose(found, right, rtol=0, atol=1e-13, err_msg=name)

    def test_a_hidden_number_may_overflow(self) -> None:
        value = np.array([[1.0], [3e38]], np.float32)
        cotangent = np.array([[1e10]], np.float32)
        result = attend(
            np.ones((1, 1), np.float32), np.ones((2, 1), np.float32), value,
            key_mask=[True, False], query_offset=0, grad_output=cotangent, gradients="all",
        )  # fmt: skip
        assert not result.grad_query.any()
        assert result.grad_value.tolist() == [[np.float32(1e10)], [0.0]]

    def test_a_visible_key_without_weight_may_overflow(self) -> None:
        arrays = [np.array(x, np.float32) for x in ([[1e3]], [[1], [-1]], [[1], [2.5e38]])]
        result = attend(*arrays, scale=1, query_offset=0, grad_output=np.array([[2]], np.float32), gradients="all")
        assert not result.grad_query.any()

    def test_weights_that_underflow_and_a_bias_of_minus_infinity(self) -> None:
        query, key, value = np.ones((1, 1)), np.array([[0.0], [-1e4], [5.0]]), np.array([[1.0], [2.0], [9.0]])
        bias = np.array([[0.0, 0.0, -np.inf]])
        result = attend(query, key, value, scale=1.0, bias=bias, query_offset=0, grad_output=[[1.0]], gradients="all")
        assert result.grad_value.tolist() == [[1.0], [0.0], [0.0]]
        assert not result.grad_key.any()
        assert not result.grad_bias.any()

    def test_scores_that_sum_to_0(self) -> None:
        result = attend(
            [[1.0]], [[1.0], [-1.0]], [[2.0], [3.0]],
            normalization="sum", query_offset=0, grad_output=[[1.0]], gradients="all",
        )  # fmt: skip
        assert not any(np.any(result[name]) for name in result if name.startswith("grad_"))

    def test_the_sink_of_a_row_without_a_key_gets_the_cotangent_of_the_logsumexp(self) -> None:
        result = attend(
            np.ones((2, 1)), np.ones((2, 1)), np.ones((2, 1)),
            mask=[[True, True], [False, False]], sinks=[[0.5, 0.25]], grad_logsumexp=[0.0, 3.0], gradients="all",
        )  # fmt: skip
        assert result.grad_sinks.tolist() == [[0.0, 3.0]]


class TestComputation:
    """However a request is cut, its gradients are the same but for rounding."""

    FIELDS: Mapping[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "is_causal": True, "softcap": 2.0}

    def spec(self, dtype: Any = np.float64) -> AttentionSpec:
        random = np.random.default_rng(0)
        query, output = (random.normal(size=(2, 37, 4 * 8)).astype(dtype) for _ in range(2))
        key, value = (random.normal(size=(2, 37, 2 * 8)).astype(dtype) for _ in range(2))
        arrays: dict[str, Any] = {"query": query, "key": key, "value": value, "grad_output": output, "include": ()}
        return AttentionSpec(**arrays, **self.FIELDS)

    def test_tiles_and_threads_change_nothing_but_rounding(self) -> None:
        whole = gradients_of(self.spec(), NumpyBackend())
        for threads in (None, 3):
            small = NumpyBackend(threads)
            small.tiling = Tiling(scores=64, workers=threads or 1, fast_rows=1, max_scores=64)
            for name, gradient in gradients_of(self.spec(), small).items():
                np.testing.assert_allclose(gradient, whole[name], rtol=0, atol=1e-12)

    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("fast_rows", [0, 1])
    def test_every_option_in_many_tiles(self, name: str, fast_rows: int) -> None:
        """In tiles of whole rows, and in blocks of one key if a softmax returns no matrices."""
        spec = with_options(PLAIN, TABLE, (name,))
        assert spec is not None
        shape = NumpyBackend().run(make_plan(spec), spec, spec.sources).output.shape
        spec = spec._replace(grad_output=np.random.default_rng(0).normal(size=shape), include=(), top_k=None)
        whole = gradients_of(spec, NumpyBackend())
        for threads in (None, 2):
            small = NumpyBackend(threads)
            small.tiling = Tiling(3, workers=threads or 1, fast_rows=fast_rows, fast_columns=1, max_scores=8)
            for field, gradient in gradients_of(spec, small).items():
                np.testing.assert_allclose(gradient, whole[field], rtol=1e-12, atol=1e-12, err_msg=field)

    def test_blocks_of_keys_keep_the_digits_of_large_scores(self) -> None:
        # Scores 2^23 and 2^23 - 1, whose softmax is that of 1 and 0; float32 has no number between them.
        query, key = np.array([[2.0**12, 1.0]], np.float32), np.array([[2.0**11, 0.0], [2.0**11, -1.0]], np.float32)
        value, output = np.zeros((2, 1), np.float32), np.ones((1, 1), np.float32)
        spec = AttentionSpec(query, key, value, scale=1.0, query_offset=np.array(0), grad_output=output, include=())
        backend = NumpyBackend()
        backend.tiling = Tiling(scores=1, fast_rows=1, fast_columns=1)
        found = gradients_of(spec, backend)["value"]
        assert found == pytest.approx(np.array([[math.e], [1.0]]) / (math.e + 1), rel=1e-6)

    @pytest.mark.parametrize("normalization", ["softmax", "sigmoid"])
    def test_threads_hold_the_gradients_of_their_own_tile_only(self, normalization: Any) -> None:
        """Many tiles of whole rows, each of which adds to the gradients of all keys, or blocks of keys."""
        random = np.random.default_rng(0)
        query, output = random.normal(size=(2, 1, 2**11, 16)).astype(np.float32)
        key, value = random.normal(size=(2, 1, 2**14, 16)).astype(np.float32)
        arrays = {"query": query, "key": key, "value": value, "grad_output": output, "query_offset": np.array(0)}
        spec = AttentionSpec(**arrays, include=(), gradients="all", normalization=normalization)
        backend, plan = NumpyBackend(2), make_plan(spec)
        tracemalloc.start()
        try:
            backend.run(plan, spec, spec.sources)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= backend.peak_bytes(plan, "cpu", 0)

    def test_an_error_in_a_tile_ends_all_threads(self) -> None:
        spec, calls = self.spec()._replace(gradients="all"), itertools.count()
        backend = NumpyBackend(3)
        backend.tiling = Tiling(scores=64, workers=3, fast_rows=1, max_scores=64)

        def check() -> None:
            if next(calls) == 5:
                raise TimeoutError

        with pytest.raises(TimeoutError):
            backend.run(make_plan(spec), spec, spec.sources, check)

    def test_halves_are_computed_in_float32_and_returned_as_halves(self) -> None:
        rounded = self.spec(np.float16)
        wide: dict[str, Any] = {name: array.astype(np.float64) for name, array in rounded.sources.items()}
        wide["grad_output"] = np.asarray(rounded.grad_output, np.float64)
        exact = gradients_of(rounded._replace(**wide))
        for name, gradient in gradients_of(rounded).items():
            assert gradient.dtype == np.float16
            largest = np.abs(exact[name]).max()
            np.testing.assert_allclose(gradient, exact[name], rtol=2**-11, atol=1e-5 * largest, err_msg=name)

    def test_a_key_that_is_selected_twice_counts_once(self) -> None:
        selected = np.zeros((37, 2), np.int64)
        found = gradients_of(self.spec()._replace(is_causal=False, selected_keys=selected))
        alone = gradients_of(self.spec()._replace(is_causal=False, selected_keys=selected[:, :1]))
        for name, gradient in found.items():
            assert np.array_equal(gradient, alone[name])

    def test_the_output_stays_as_it_is_without_gradients(self) -> None:
        spec = self.spec()
        plain_spec = spec.forward()
        outputs = [
            NumpyBackend().run(make_plan(s), s, s.sources).output for s in (spec._replace(gradients="all"), plain_spec)
        ]
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=0, atol=1e-15)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanWithAnOption(Plan):
    """A plan with an option whose gradient nobody wrote."""

    future: int = 0


def test_a_plan_with_an_unknown_option_is_refused() -> None:
    spec = TestComputation().spec()._replace(gradients="all")
    plan = make_plan(spec)
    unknown = PlanWithAnOption(**{field.name: getattr(plan, field.name) for field in fields_of(Plan)}, future=1)
    with pytest.raises(FieldConflict, match="future"):
        NumpyBackend().run(unknown, spec, spec.sources)


def test_a_term_that_reads_queries_has_gradients_or_is_refused() -> None:
    class Term(ScoreTerm):
        reads_query: ClassVar[bool] = True

    with pytest.raises(NotImplementedError):
        Term().products_backward(None, None, whole(make_plan(TestComputation().spec().forward())), None)  # type: ignore[arg-type]  # it reads none


QKV: Mapping[str, Any] = {"query": np.ones((2, 3)), "key": np.ones((2, 3)), "value": np.ones((2, 3))}
OUTPUT = np.ones((2, 3))


@pytest.mark.parametrize(
    ("fields", "error", "pointer"),
    [
        ({"gradients": "all"}, MissingField, "/grad_output"),
        ({"include": ["grad_query"]}, MissingField, "/grad_output"),
        ({"grad_output": OUTPUT}, FieldConflict, "/grad_output"),
        ({"grad_logsumexp": np.ones(2)}, FieldConflict, "/grad_logsumexp"),
        ({"grad_output": OUTPUT, "include": ["grad_bias"]}, MissingField, "/bias"),
        ({"grad_output": OUTPUT, "include": ["grad_scale"]}, MissingField, "/scale"),
        ({"grad_output": OUTPUT, "include": ["grad_query_norm"], "query_norm": {}}, MissingField, "/query_norm"),
        ({"grad_output": np.ones((3, 2)), "gradients": "all"}, ShapeMismatch, "/grad_output"),
        ({"grad_logsumexp": np.ones((2, 1)), "gradients": "all"}, ShapeMismatch, "/grad_logsumexp"),
        ({"grad_output": OUTPUT * np.nan, "gradients": "all"}, InvalidRequest, "/grad_output/0/0"),
        (
            {"grad_logsumexp": np.ones(2), "gradients": "all", "normalization": "sigmoid"},
            FieldConflict,
            "/grad_logsumexp",
        ),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], error: type[InvalidRequest], pointer: str) -> None:
    with pytest.raises(error) as raised:
        attend(**QKV, **fields)
    assert [fault.pointer for fault in raised.value.faults] == [pointer]


def test_gradients_that_their_type_cannot_hold() -> None:
    arrays = {name: array.astype(np.float16) for name, array in QKV.items()}
    arrays["value"] = arrays["value"] * np.array([[1], [6e4]], np.float16)
    with pytest.raises(Overflow):
        attend(**arrays, grad_output=np.full((2, 3), 6e4, np.float16), gradients="all")


def layer() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {
        "input": random.normal(size=(3, 4)),
        "projection": {
            "query": {"weight": random.normal(size=(4, 4))},
            "value": {"kernel": random.normal(size=(4, 4))},
        },
        "scale": 0.5,
        "num_heads": 2,
        "grad_output": random.normal(size=(3, 4)),
        "gradients": "all",
    }


def test_json_has_objects_and_numbers_where_the_request_has_them(client: httpx.Client) -> None:
    expected = attend(**layer())
    answer = client.post("/attention", json=as_lists(layer())).json()
    assert answer.keys() == {"metadata", *expected}
    assert answer["grad_scale"] == pytest.approx(float(expected.grad_scale))
    found = dict(leaves("", {name: answer[name] for name in expected}))
    for name, array in leaves("", dict(expected)):
        np.testing.assert_allclose(np.asarray(found[name]), array, rtol=1e-12)


def as_lists(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: as_lists(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("media_type", ["application/vnd.safetensors", "application/x-npz"])
def test_binary_formats_have_dotted_names(client: httpx.Client, media_type: str) -> None:
    headers = {"accept": media_type}
    response = client.post("/attention", json=as_lists(layer()), headers=headers)
    assert response.status_code == httpx.codes.OK, response.text
    if "safetensors" in media_type:
        found = safetensors.numpy.load(response.content)
    else:
        found = dict(np.load(io.BytesIO(response.content)))
    for name, array in leaves("", dict(attend(**layer()))):
        np.testing.assert_allclose(found[name.removeprefix(".")], array, rtol=1e-12, err_msg=name)


def test_the_inference_protocol_returns_the_arrays_that_it_is_asked_for(client: httpx.Client) -> None:
    given = layer()
    tensors = {"input": given["input"], "grad_output": given["grad_output"]}
    tensors |= {"projection.query.weight": given["projection"]["query"]["weight"]}
    inputs = [
        {"name": name, "shape": list(array.shape), "datatype": "FP64", "data": array.ravel().tolist()}
        for name, array in tensors.items()
    ]
    outputs = [{"name": "output"}, {"name": "grad_projection.query.weight"}]
    body = {"inputs": inputs, "outputs": outputs, "parameters": {"num_heads": 2}}
    answer = client.post("/v2/models/attention/infer", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert [tensor["name"] for tensor in answer.json()["outputs"]] == ["output", "grad_projection.query.weight"]
    body["outputs"] = [{"name": "grad_projection.query.kernel"}]
    answer = client.post("/v2/models/attention/infer", json=body)
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert "projection.query.kernel" in answer.text


def test_a_picture_is_that_of_the_request_without_gradients() -> None:
    fields = layer()
    plain_fields = {name: value for name, value in fields.items() if not name.startswith("grad")}
    assert attend(**fields).heatmap().svg == attend(**plain_fields).heatmap().svg
