"""compare_call() and assert_call(): functions that are run, named, and judged by what they return."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import assert_call, call, compare_call
from attention_service.errors import InvalidRequest
from tests.test_compare_calls import DECODE, PAGES, RAGGED, VARLEN, Paged, bottom_right, decoded, last_full, varlen

pytestmark = pytest.mark.usefixtures("without_suggestions")
Array = np.ndarray


def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool = False
) -> Any:
    """A right kernel for the numbers of RAGGED."""
    assert causal
    return varlen(bottom_right)[0]


def top_left(**arguments: Any) -> Any:
    """A wrong one that returns output, logsumexp, and None in the place of what it does not make."""
    return (*varlen(lambda n: 0), None)


def test_a_function_is_found_by_its_name() -> None:
    flash_attn_varlen_func.__module__ = "flash_attn.flash_attn_interface"
    report = assert_call(flash_attn_varlen_func, **RAGGED)
    assert (report.verdict.status, report.metadata["call"]) == ("correct", VARLEN)
    q, k, v, *bounds = (RAGGED[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    assert assert_call(flash_attn_varlen_func, q, k, v, *bounds, causal=True, rows=2).verdict.status == "correct"


@pytest.mark.parametrize(
    ("module", "version"), [("flash_attn_interface", 3), ("flash_attn.cute.interface", 4), ("flash_attn.x", 2)]
)
def test_the_version_is_that_of_the_package(module: str, version: int) -> None:
    """(1, -1) has no right bound in versions 2 and 3, and one in 4: without a version it would be refused."""

    def flash_attn_func(q: Array, k: Array, v: Array, window_size: Any) -> Array:
        found = call("flash_attn.flash_attn_func", version=version, q=q, k=k, v=v, window_size=window_size)
        return found.output

    flash_attn_func.__module__, flash_attn_func.__qualname__ = module, "flash_attn_func"
    random = np.random.default_rng(0)
    arguments: dict[str, Any] = {name: random.normal(size=(1, 4, 2, 8)) for name in "qkv"}
    assert assert_call(flash_attn_func, **arguments, window_size=(1, -1)).verdict.status == "correct"
    other = 4 if version < 4 else 2
    with pytest.raises(AssertionError, match="wrong"):
        assert_call(flash_attn_func, **arguments, window_size=(1, -1), version=other)


def test_a_wrong_function_raises_the_report() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_call(top_left, call=VARLEN, **RAGGED)
    assert "proof: ragged.top_left" in str(caught.value)
    assert "in sequence" in str(caught.value)


def test_a_wrapper_is_called_with_the_arguments_of_run() -> None:
    """Those of `plan` say what it computes; `run` has no parameters for them."""

    class Wrapper:
        def run(self, q: Array, paged_kv_cache: Array) -> tuple[Array, Array]:
            return decoded(PAGES, lambda n: PAGES.keys(n, PAGES.tables[n], PAGES.lengths[n]))

    assert assert_call(Wrapper().run, call=DECODE, **PAGES.arguments).verdict.status == "correct"


def test_arguments_are_refused_before_the_function_runs() -> None:
    def never(**arguments: Any) -> None:
        raise AssertionError("it ran")

    with pytest.raises(InvalidRequest, match="/cu_seqlens_k/4"):
        assert_call(never, call=VARLEN, **{**RAGGED, "cu_seqlens_k": [0, 9, 14, 26, 99]})
    with pytest.raises(InvalidRequest, match="/call"):
        assert_call(never, **RAGGED)
    with pytest.raises(InvalidRequest, match="/rows"):
        assert_call(never, call=VARLEN, rows=0, **RAGGED)
    with pytest.raises(InvalidRequest, match="by their names"):
        assert_call(never, RAGGED["q"], call=VARLEN)
    with pytest.raises(InvalidRequest, match="/function"):
        assert_call(VARLEN, **RAGGED)  # type: ignore[arg-type]


@pytest.mark.parametrize("actual", [(None,), 3, "x", object(), {"outputs": np.ones(3)}, [], ()])
def test_what_no_function_returns_is_refused(actual: Any) -> None:
    with pytest.raises(InvalidRequest, match="/actual"):
        compare_call(VARLEN, actual=actual, **RAGGED)
    with pytest.raises(InvalidRequest, match="/actual"):
        assert_call(lambda **_: None, call=VARLEN, **RAGGED)


def test_reports_of_calls_are_shown() -> None:
    report = compare_call(DECODE, actual=decoded(PAGES, last_full), **PAGES.arguments)
    assert repr(report).startswith("CompareReport(wrong in output")
    assert "proof: pages.last_full" in repr(report)
    assert "pages.last_full" in report._repr_html_()  # type: ignore[attr-defined]
    right = call(DECODE, **PAGES.arguments)
    assert compare_call(DECODE, actual=right, **PAGES.arguments).verdict.status == "correct"
    with pytest.raises(InvalidRequest, match="/tolerance"):
        compare_call(DECODE, actual=right, tolerance={"rtol": "x"}, **PAGES.arguments)
    with pytest.raises(InvalidRequest, match="/dtype"):
        compare_call(DECODE, actual=right, dtype="float8", **PAGES.arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "output", "logsumexp"),
    [
        (VARLEN, {"q": (0, 2, 4), "k": (5, 2, 4), "v": (5, 2, 4), "cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 2, 5]},
         (0, 2, 4), (2, 0)),
        (VARLEN, {"q": (0, 2, 4), "k": (0, 2, 4), "v": (0, 2, 4), "cu_seqlens_q": [0], "cu_seqlens_k": [0]},
         (0, 2, 4), (2, 0)),
        ("flash_attn.flash_attn_func", dict.fromkeys("qkv", (0, 3, 2, 4)), (0, 3, 2, 4), (0, 2, 3)),
        ("flashinfer.merge_states", {"v": (0, 2, 3, 4), "s": (0, 2, 3)}, (0, 3, 4), (0, 3)),
    ],
)  # fmt: skip
def test_an_empty_answer_is_right(
    name: str, arguments: dict[str, Any], output: tuple[int, ...], logsumexp: tuple[int, ...]
) -> None:
    """Of a batch without queries, or without sequences; another shape is as wrong as in any batch."""
    given: dict[str, Any] = {
        one: np.zeros(value) if isinstance(value, tuple) else value for one, value in arguments.items()
    }
    right = np.zeros(output), np.zeros(logsumexp)
    assert assert_call(lambda **_: right[0], call=name, **given).verdict.status == "correct"
    report = compare_call(name, actual=right, **given)
    assert (report.verdict.status, report.verdict.ratio, report.metadata["ignored_rows"]) == ("correct", 0, 0)
    for actual in (np.zeros((1, *output[1:])), (right[0], np.zeros((*logsumexp, 1)))):
        with pytest.raises(InvalidRequest, match="/actual/"):
            compare_call(name, actual=actual, **given)
    assert compare_call(name, **given).verdict.status == "inconclusive"
    empty = compare_call(name, actual=right[0], reference=True, **given).reference or {}
    assert empty["output"].shape == output


@pytest.mark.parametrize(("rounds", "said"), [(False, "all 2 wrong"), (True, "some")])
def test_a_finite_logsumexp_of_no_keys_is_shown_in_its_own_base(rounds: bool, said: str) -> None:
    """Row 0 merges two parts alike, to their mean and one more in base 2; row 1 has two parts without keys."""
    values = np.array([[[[2.0]] * 2, [[4.0]] * 2], [[[1.0]] * 2] * 2]).reshape(2, 2, 2, 1)
    sums = np.array([[[3.0] * 2] * 2, [[-np.inf] * 2] * 2])
    output, merged = np.array([[[3.0]] * 2, [[0.0]] * 2]), np.array([[4.0, 4.0], [-5e4, -5e4]])
    if rounds:
        merged[0, 0] = 4.5
    report = compare_call("flashinfer.merge_states", actual=(output, merged), v=values, s=sums, reference=True)
    np.testing.assert_array_equal((report.reference or {})["output"], output)
    np.testing.assert_array_equal((report.reference or {})["logsumexp"], [[4.0, 4.0], [-np.inf, -np.inf]])
    assert f"the logsumexp is wrong: {said} " in report.verdict.message
    assert "finite, where minus infinity is right" in report.verdict.message
    assert report.verdict.message.endswith("worst in sequence 1 of 2, head 0, query 0: -50000 where -inf is right.")
    assert (report.where[0].worst or [])[0].actual == -5e4


def test_full_pages_cannot_show_what_a_kernel_does_with_others() -> None:
    full = Paged.drawn([4, 8, 12])
    power = compare_call(DECODE, **full.arguments).power
    assert {"pages.last_full", "pages.stale_slot"} <= {*power.survivors}
    assert "these lengths fill every page: pages.last_full cannot be seen" in power.weak
    shown = compare_call(DECODE, **PAGES.arguments).power
    assert not {one for one in shown.survivors if one.startswith("pages.")} - {"pages.stale_slot"}
    assert not shown.weak


@pytest.mark.torch
def test_a_function_of_torch_itself() -> None:
    torch: ModuleType = pytest.importorskip("torch")
    torch.manual_seed(0)
    attention = torch.nn.functional.scaled_dot_product_attention
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (torch.randn(2, 4, n, 16, dtype=dtype) for n in (5, 7, 7))
        report = assert_call(attention, query=query, key=key, value=value, is_causal=True)
        assert report.verdict.status == "correct"
        mask = torch.rand(2, 1, 5, 7) > 0.3
        assert assert_call(attention, query=query, key=key, value=value, attn_mask=mask).verdict.status == "correct"
    wrong = attention(query, key, value)
    with pytest.raises(AssertionError, match=r"causal.absent"):
        assert_call(
            lambda **_: wrong,
            call="torch.scaled_dot_product_attention",
            query=query,
            key=key,
            value=value,
            is_causal=True,
        )


def test_weights_of_float8_are_rounded_where_queries_and_values_are() -> None:
    """FlashAttention 3 rounds weights times 256 to float8 before the product, which no half type explains."""
    random, code = np.random.default_rng(0), np.dtype(ml_dtypes.float8_e4m3fn)
    q, k, v = (random.normal(size=(1, n, 2, 64)).astype(code) for n in (16, 200, 200))
    scores = np.einsum("bqhd,bkhd->bhqk", *(x.astype(np.float32) for x in (q, k))) / 8
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    rounded = (weights * 256).astype(code).astype(np.float32) / 256
    output = np.einsum("bhqk,bkhd->bqhd", rounded / weights.sum(axis=-1, keepdims=True), v.astype(np.float32))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
    for legal, status in ((None, "correct"), (["rounded_weights"], "correct")):
        actual = output.astype(ml_dtypes.bfloat16)
        assert (
            compare_call("flash_attn.flash_attn_func", actual=actual, legal=legal, **arguments).verdict.status == status
        )
    report = compare_call("flash_attn.flash_attn_func", actual=actual, legal=["exact"], **arguments)
    assert report.verdict.status in ("imprecise", "wrong")
