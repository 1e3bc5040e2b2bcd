"""`call`: names, versions, forms and errors; what random calls (test_engines_random.py) leave out, by hand."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from attention_service import call
from attention_service.engines.call import Call
from attention_service.engines.table import FUNCTIONS, decode
from attention_service.errors import InvalidRequest
from tests.helpers.engine_calls import Draw, Options, Sequence, attention
from tests.helpers.engine_draws import DRAWS

ONES: Any = np.ones
RANDOM = np.random.default_rng(0)
Q, K, V = RANDOM.normal(size=(2, 3, 4, 8)), RANDOM.normal(size=(2, 5, 2, 8)), RANDOM.normal(size=(2, 5, 2, 6))


def fault(function: str, version: int | None = None, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        call(function, version=version, **arguments)
    return caught.value.faults[0].pointer, caught.value.faults[0].sentence()


def by_loops(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Output (b, q, h, e) and logsumexp (b, h, q)."""
    ones = (ONES(q.shape[1:3]), ONES(k.shape[1:3]), ONES(k.shape[1:3]))
    found = [
        attention(Sequence(*arrays, ones), n, options, math.e) for n, arrays in enumerate(zip(q, k, v, strict=True))
    ]
    return np.stack([x for x, _, _ in found]), np.stack([x.T for _, x, _ in found])


def test_three_keys_by_hand() -> None:
    """Query 1 sees keys 0 to 2 of scores 0, ln 2, ln 3 and values 6, 12, 24; query 0 the first two of them."""
    key = np.log([[[1.0]], [[2.0]], [[3.0]]])
    value = np.array([[[6.0]], [[12.0]], [[24.0]]])
    bounds: dict[str, Any] = {"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, 3]}
    name = "flash_attn.flash_attn_varlen_func"
    found = call(name, q=ONES((2, 1, 1)), k=key, v=value, **bounds, causal=True, include=["attention_weights"])
    assert found.output.ravel().tolist() == pytest.approx([30 / 3, 102 / 6])
    assert found.logsumexp.tolist() == [pytest.approx([math.log(3), math.log(6)])]
    assert found.attention_weights is not None
    np.testing.assert_allclose(found.attention_weights[0], [[[1 / 3, 2 / 3, 0], [1 / 6, 1 / 3, 1 / 2]]])


def test_more_queries_than_keys_leave_the_first_rows_without_a_key() -> None:
    found = call(
        "flash_attn.flash_attn_func", q=ONES((1, 3, 1, 1)), k=ONES((1, 1, 1, 1)), v=ONES((1, 1, 1, 1)), causal=True
    )
    assert found.output.ravel().tolist() == [0, 0, 1]
    assert found.logsumexp.ravel().tolist() == [-np.inf, -np.inf, 1]


def test_a_sequence_without_keys_has_the_logsumexp_of_its_sink() -> None:
    arguments = {"query": ONES((1, 2, 4)), "query_start_loc": [0, 1], "seq_lens": [0], "block_table": [[7]]}
    caches = {"key_cache": ONES((1, 2, 1, 4)), "value_cache": ONES((1, 2, 1, 4))}
    found = call("vllm.attention", **arguments, **caches, sinks=[0.5, -2.0])
    assert (found.output == 0).all()
    assert found.logsumexp.tolist() == [[0.5], [-2.0]]
    assert call("vllm.attention", **arguments, **caches).logsumexp.tolist() == [[-np.inf], [-np.inf]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
def test_new_tokens_are_rotated_where_they_are_appended(causal: bool, interleaved: bool) -> None:
    """Without causal and window, all queries are at the first new position."""
    angles = np.arange(12)[:, None] * np.array([1.0, 0.1])  # the first four features of eight turn
    lengths, new, pad = [4, 2], 2, [1, 0]

    def rotated(x: np.ndarray, position: int) -> np.ndarray:
        pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
        found = x.copy()
        for n, (one, other) in enumerate(pairs):
            cos, sin = math.cos(angles[position, n]), math.sin(angles[position, n])
            found[..., one], found[..., other] = (
                x[..., one] * cos - x[..., other] * sin,
                x[..., one] * sin + x[..., other] * cos,
            )
        return found

    k_new, v_new = RANDOM.normal(size=(2, new, 2, 8)), RANDOM.normal(size=(2, new, 2, 6))
    arguments: dict[str, Any] = {
        "rotary_cos": np.cos(angles),
        "rotary_sin": np.sin(angles),
        "rotary_interleaved": interleaved,
    }
    caches: dict[str, Any] = {
        "k_cache": np.pad(K, [(0, 0), (0, 3), (0, 0), (0, 0)]),
        "v_cache": np.pad(V, [(0, 0), (0, 3), (0, 0), (0, 0)]),
    }
    where: dict[str, Any] = {
        "cache_seqlens": np.array(lengths, np.int32),
        "cache_leftpad": np.array(pad, np.int32),
        "causal": causal,
    }
    found = call("flash_attn.flash_attn_with_kvcache", q=Q, k=k_new, v=v_new, **caches, **arguments, **where)
    for n in range(2):
        q = np.stack([rotated(Q[n, i], lengths[n] + i * causal) for i in range(3)])
        k = np.concatenate(
            [K[n, pad[n] : lengths[n]], np.stack([rotated(k_new[n, i], lengths[n] + i) for i in range(new)])]
        )
        v = np.concatenate([V[n, pad[n] : lengths[n]], v_new[n]])
        options = Options(visible=lambda i, j, q, k: not causal or j <= i + k - q)
        output, sums = by_loops(q[None], k[None], v[None], options)
        np.testing.assert_allclose(found.output[n], output[0], rtol=1e-12)
        np.testing.assert_allclose(found.logsumexp[n], sums[0], rtol=1e-12)


def test_slopes_of_each_sequence_go_with_a_rotation() -> None:
    given: dict[str, Any] = {"q": Q, "k": K[:, :1], "v": V[:, :1], "k_cache": K, "v_cache": V, "cache_seqlens": 4}
    given |= {"rotary_cos": np.full((9, 2), 0.6), "rotary_sin": np.full((9, 2), 0.8), "version": 2}
    slopes = np.array([0.1, 0.2, 0.3, 0.4])
    of_all, none = (call("flash_attn.flash_attn_with_kvcache", **given, alibi_slopes=x) for x in (slopes, None))
    of_each = call("flash_attn.flash_attn_with_kvcache", **given, alibi_slopes=np.stack([slopes, slopes]))
    assert np.array_equal(of_all.output, of_each.output)
    assert not np.array_equal(of_all.output, none.output)


def test_queries_of_values_are_added_to_the_scores() -> None:
    """The default scale is 1/√(d + e)."""
    qv = RANDOM.normal(size=(2, 3, 4, 6))
    found = call("flash_attn.flash_attn_func", version=3, q=Q, k=K, v=V, qv=qv)
    output, sums = by_loops(np.concatenate([Q, qv], -1), np.concatenate([K, V], -1), V, Options())
    np.testing.assert_allclose(found.output, output, rtol=1e-12)
    np.testing.assert_allclose(found.logsumexp, sums, rtol=1e-12)
    later = call("flash_attn.flash_attn_func", version=4, q=Q, k=K, v=V, qv=qv)  # whose logsumexp has other axes then
    assert np.array_equal(later.logsumexp, found.logsumexp.swapaxes(1, 2))
    bounds: dict[str, Any] = {"cu_seqlens_q": [0, 3, 6], "cu_seqlens_k": [0, 5, 10]}
    beside: dict[str, Any] = {n: x.reshape(-1, *x.shape[2:]) for n, x in (("q", Q), ("k", K), ("v", V), ("qv", qv))}
    ragged = call("flash_attn.flash_attn_varlen_func", version=4, **beside, **bounds)
    assert np.array_equal(ragged.logsumexp, later.logsumexp.reshape(6, 4))
    assert fault("flash_attn.flash_attn_func", q=Q, k=K, v=V, qv=qv)[0] == "/qv"


@pytest.mark.parametrize("shape", [(3, 8), (4, 3, 8), (2, 4, 3, 8), (3, 1, 2, 4, 3, 8)])
def test_torch_has_any_number_of_leading_axes(shape: tuple[int, ...]) -> None:
    query, key = RANDOM.normal(size=shape), RANDOM.normal(size=(*shape[:-2], 5, 8))
    bias = RANDOM.normal(size=(*shape[:-2], 3, 5))
    found = call("torch.scaled_dot_product_attention", query=query, key=key, value=key, attn_mask=bias)
    weights = np.exp(query @ key.swapaxes(-1, -2) / math.sqrt(8) + bias)
    np.testing.assert_allclose(found.output, weights / weights.sum(-1, keepdims=True) @ key, rtol=1e-12)
    np.testing.assert_allclose(found.logsumexp, np.log(weights.sum(-1)), rtol=1e-12)


@pytest.mark.parametrize("leading", [(4,), (2, 2), (2, 1)])
@pytest.mark.parametrize("of_heads", [2, 1])
def test_masks_of_torch_go_with_their_entries(
    monkeypatch: pytest.MonkeyPatch, leading: tuple[int, ...], of_heads: int
) -> None:
    """Each entry is computed alone, as entries of many tokens are; no mask is copied before."""
    monkeypatch.setattr("attention_service.engines.call.TOGETHER", 1)
    query, key = RANDOM.normal(size=(4, 2, 3, 8)), RANDOM.normal(size=(4, 2, 5, 8))
    masks: list[np.ndarray] = [RANDOM.normal(size=(*leading, of_heads, 3, 5)), ONES((*leading, of_heads, 3, 5), bool)]
    masks[1][..., 1:] = RANDOM.random((*leading, of_heads, 3, 4)) < 0.5
    arrays: dict[str, Any] = {"query": query.reshape(*leading[:1], -1, 2, 3, 8)}
    arrays |= dict.fromkeys(("key", "value"), key.reshape(*leading[:1], -1, 2, 5, 8))
    if leading == (4,):
        arrays = {name: array[:, 0] for name, array in arrays.items()}
    for mask in masks:
        found = call("torch.scaled_dot_product_attention", **arrays, attn_mask=mask)
        bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask
        bias = np.broadcast_to(bias, (*arrays["query"].shape[:-1], 5)).reshape(4, 2, 3, 5)
        weights = np.exp(query @ key.swapaxes(-1, -2) / math.sqrt(8) + bias)
        np.testing.assert_allclose(
            found.output.reshape(4, 2, 3, 8), weights / weights.sum(-1, keepdims=True) @ key, rtol=1e-12
        )
        decoded = decode("torch.scaled_dot_product_attention", arrays | {"attn_mask": mask})
        assert isinstance(decoded, Call)
        fields = decoded.request([3], shapes_only=True)
        assert np.shares_memory(fields.get("mask", fields.get("bias")), mask)


def test_a_number_of_a_mask_is_named_with_its_entry() -> None:
    mask = np.zeros((2, 1, 4, 4))
    mask[1, 0, 2, 3] = np.nan
    arrays: dict[str, Any] = dict.fromkeys(("query", "key", "value"), ONES((2, 3, 4, 8)))
    assert fault("torch.scaled_dot_product_attention", **arrays, attn_mask=mask)[0] == "/attn_mask/1/0/2/3"


def test_flashinfer_merges_states_of_base_2() -> None:
    """One part is of the scores 1 and 3 of base 2, the other of 2: weights 1/7, 4/7 and 2/7 after all."""
    one, other = np.array([[[0.2, 1.0]]]), np.array([[[7.0, 7.0]]])
    s_one, s_other = np.log2([[10.0]]), np.log2([[4.0]])
    found = call("flashinfer.merge_state", v_a=one, s_a=s_one, v_b=other, s_b=s_other)
    np.testing.assert_allclose(found.output, [[[30 / 14, 38 / 14]]])
    np.testing.assert_allclose(found.logsumexp, np.log2([[14.0]]))
    again = call("flashinfer.merge_states", v=np.stack([one, other], 1), s=np.stack([s_one, s_other], 1))
    assert np.array_equal(again.output, found.output)
    assert fault("flashinfer.merge_state", v_a=one, s_a=s_one, v_b=other, s_b=ONES(2))[0] == "/s_b"
    assert fault("flashinfer.merge_states", v=one, s=s_one)[0] == "/s"
    assert fault("flashinfer.merge_state", v_a=1, s_a=0, v_b=1, s_b=0)[0] == "/v_a"
    assert fault("flashinfer.merge_state", v_a=one, s_a=s_one, v_b=one[0], s_b=s_one)[0] == "/v_b"
    assert fault("flashinfer.merge_state", v_a=one, s_a=0, v_b=one, s_b=s_one)[0] == "/s_a"


@pytest.mark.parametrize(
    ("version", "window", "causal", "expected"),
    [
        (2, (-1, 0), False, [2, 3]),
        (4, (-1, -1), False, [3, 3]),
        (4, (-1, -1), True, [2, 3]),
        (4, (-2, -3), False, [3, 3]),
        (4, (None, -1), False, [1, 2]),
        (4, (-1, 1), False, [1, 0]),
        (4, (-1, None), False, [1, 0]),
        (4, (1, -1), False, [1, 1]),
        (3, (1, -1), False, [3, 2]),
        (None, (1, 0), False, [2, 2]),
        (None, (1, -1), True, [2, 2]),
        (None, (-1, -1), False, [3, 3]),
        (None, None, True, [2, 3]),
    ],
)
def test_versions_of_flash_attention_read_windows_in_their_own_way(
    version: int | None, window: Any, causal: bool, expected: list[int]
) -> None:
    """How many of three equal keys each of two queries sees, by its logsumexp."""
    arrays = {"q": ONES((1, 2, 1, 1)), "k": np.zeros((1, 3, 1, 1)), "v": ONES((1, 3, 1, 1))}
    found = call("flash_attn.flash_attn_func", version=version, **arrays, window_size=window, causal=causal)
    assert np.exp(found.logsumexp).round(12).ravel().tolist() == expected


def test_a_window_that_versions_read_differently_needs_the_version() -> None:
    arrays: dict[str, Any] = {"q": Q, "k": K, "v": V}
    for window in [(-1, 0), (1, -1), (-1, 2)]:
        pointer, text = fault("flash_attn.flash_attn_func", **arrays, window_size=window)
        assert pointer == "/window_size"
        assert "`version`" in text
    assert fault("flash_attn.flash_attn_func", 2, **arrays, window_size=(-2, 0))[0] == "/window_size"
    for window, causal in (((-1, 0), False), ((-1, 0), True), ((1, -2), False)):  # no key, before 4.0.0b36 all of them
        pointer, text = fault("flash_attn.flash_attn_func", 4, **arrays, window_size=window, causal=causal)
        assert (pointer, "sides whose sum is at least 0" in text) == ("/window_size", True)
    assert fault("flash_attn.flash_attn_func", 2, **arrays, window_size=(1, 2, 3))[0] == "/window_size"
    assert fault("flash_attn.flash_attn_func", 2, **arrays, window_size=(1, 2.5))[0] == "/window_size/1"


@pytest.mark.parametrize(("right", "expected"), [(None, [2, 3]), (0, [2, 3]), (1, [3, 3]), (-1, [3, 3])])
def test_decode_of_several_queries_is_causal_unless_the_window_is_wider(right: int | None, expected: list[int]) -> None:
    """How many of three equal keys each of two queries sees, by its logsumexp of base 2."""
    where: dict[str, Any] = {"indptr": [0, 2], "indices": [1, 0], "last_page_len": [1], "q_len_per_req": 2}
    function = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
    caches = np.zeros((2, 2, 2, 1, 1))
    found = call(function, q=ONES((2, 1, 1)), paged_kv_cache=caches, window_right=right, **where)
    assert np.exp2(found.logsumexp).round(12).ravel().tolist() == expected


def test_windows_of_torch_have_no_other_negative_side() -> None:
    bounds: dict[str, Any] = {"cu_seq_q": [0, 2], "cu_seq_k": [0, 2], "max_q": 2, "max_k": 2}
    tokens: dict[str, Any] = {name: ONES((2, 1, 1)) for name in ("query", "key", "value")}
    for window in [(-2, 0), (0, -2)]:
        pointer, text = fault("torch.varlen_attn", **tokens, **bounds, window_size=window)
        assert (pointer, "-1 for no bound" in text) == ("/window_size", True)


def test_flags_may_be_numbers_of_numpy() -> None:
    arrays: dict[str, Any] = {"q": Q, "k": K, "v": V}
    plain = call("flash_attn.flash_attn_func", **arrays, causal=True)
    for flag in (np.True_, np.array([True])):
        assert np.array_equal(plain.output, call("flash_attn.flash_attn_func", **arrays, causal=flag).output)
    for wrong in (np.array([True, False]), np.array([1])):
        assert fault("flash_attn.flash_attn_func", **arrays, causal=wrong)[0] == "/causal"


def test_names_that_are_not_known_are_refused_with_the_nearest() -> None:
    arrays: dict[str, Any] = {"q": Q, "k": K, "v": V}
    assert fault("flash_attn.flash_attn_fun")[1].endswith("(did you mean flash_attn.flash_attn_func?)")
    assert fault("flash_attn.flash_attn_func", **arrays, softmax_scal=1)[1].endswith("(did you mean softmax_scale?)")
    pointer, text = fault("flash_attn.flash_attn_func", 2, **arrays, learnable_sink=ONES(4))
    assert (pointer, "an argument of flash_attn.flash_attn_func" in text) == ("/learnable_sink", True)
    assert fault("flash_attn.flash_attn_with_kvcache", 4, **arrays)[0] == "/version"
    assert fault("vllm.attention", 2)[0] == "/version"


def test_arguments_of_performance_change_nothing_and_others_are_refused() -> None:
    arrays: dict[str, Any] = {"q": Q, "k": K, "v": V}
    plain = call("flash_attn.flash_attn_func", **arrays)
    same = call("flash_attn.flash_attn_func", **arrays, deterministic=True, num_splits=3, dropout_p=0.0, softcap=None)
    assert np.array_equal(plain.output, same.output)
    assert "attention here is exact" in fault("flash_attn.flash_attn_func", **arrays, dropout_p=0.1)[1]
    assert fault("flash_attn.flash_attn_func", **arrays, score_mod=lambda x: x)[0] == "/score_mod"


def test_every_function_says_which_argument_is_missing() -> None:
    for name in FUNCTIONS:
        pointer, text = fault(name)
        assert pointer.removeprefix("/") in FUNCTIONS[name].rows, name
        assert text.endswith("got none"), name


def test_errors_of_requests_have_the_names_of_the_library() -> None:
    arrays: dict[str, Any] = {"q": Q, "k": K, "v": V}
    assert fault("flash_attn.flash_attn_func", **arrays, softmax_scale=np.nan)[0] == "/softmax_scale"
    assert fault("flash_attn.flash_attn_func", **arrays | {"q": Q * np.inf})[0] == "/q"
    mask: dict[str, Any] = {"attn_mask": np.full((4, 4), np.nan)}
    assert fault("torch.scaled_dot_product_attention", query=Q, key=Q, value=Q, **mask)[0].startswith("/attn_mask")


def test_a_factor_that_makes_numbers_infinite_is_refused() -> None:
    pointer, text = fault("flash_attn.flash_attn_func", 3, q=Q, k=K * 1e10, v=V, k_descale=np.array(1e308))
    assert (pointer, "inf" in text) == ("/k", True)


def test_parts_of_keys_may_have_types_that_no_other_holds() -> None:
    """bfloat16 beside float16: with equal scores the answer is the mean of the values 1 and 3."""
    where: dict[str, Any] = {
        "qo_indptr": [0, 1],
        "kv_indptr": [0, 1],
        "kv_indices": [0],
        "kv_len_arr": [2],
        "sm_scale": 1,
    }
    ckv, kpe = np.array([[[1.0], [3.0]]], ml_dtypes.bfloat16), np.zeros((1, 2, 1), np.float16)
    queries: dict[str, Any] = {"q_nope": np.zeros((1, 1, 1)), "q_pe": ONES((1, 1, 1))}
    found = call("flashinfer.BatchMLAPagedAttentionWrapper.run", ckv_cache=ckv, kpe_cache=kpe, **queries, **where)
    assert found.output.ravel().tolist() == [2.0]
    assert found.logsumexp.ravel().tolist() == [1.0]


def test_results_are_computed_in_float64_and_rounded_once() -> None:
    exact = call("flash_attn.flash_attn_func", q=Q, k=K, v=V, include=["attention_weights"])
    rounded = call("flash_attn.flash_attn_func", q=Q, k=K, v=V, include=["attention_weights"], dtype="bfloat16")
    assert exact.output.dtype == np.float64
    assert np.array_equal(rounded.logsumexp, exact.logsumexp.astype(np.float32))
    assert np.array_equal(rounded.output, exact.output.astype(ml_dtypes.bfloat16))
    assert rounded.attention_weights is not None
    assert rounded.attention_weights[1].dtype == ml_dtypes.bfloat16
    assert fault("flash_attn.flash_attn_func", q=Q, k=K, v=V, dtype="float8")[0] == "/dtype"
    assert "float16" in fault("flash_attn.flash_attn_func", q=Q, k=K, v=V * 1e6, dtype="float16")[1]
    pointer, text = fault("flash_attn.flash_attn_func", q=Q * 1e30, k=K * 1e30, v=V, dtype="float16")
    assert (pointer, "hold the logsumexp" in text, "ask for dtype float64" in text) == ("/dtype", True, True)
    assert fault("flash_attn.flash_attn_func", q=Q, k=K, v=V, include=["weights"])[0] == "/include/0"


def test_keys_in_the_cache_and_new_ones_must_fit() -> None:
    good: dict[str, Any] = {"q": Q, "k_cache": K, "v_cache": V, "k": K[:, :2], "v": V[:, :2], "cache_seqlens": 3}
    name = "flash_attn.flash_attn_with_kvcache"
    call(name, **good)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"cache_seqlens": 4}, "/cache_seqlens/0"),
        ({"cache_seqlens": None}, "/k"),
        ({"v": None}, "/k"),
        ({"k": ONES((2, 6, 2, 8)), "v": ONES((2, 6, 2, 6))}, "/k"),
        ({"k": K[:1, :2], "v": V[:1, :2]}, "/k"),
        ({"v": V[:, :2, :, :5]}, "/v_cache"),
        ({"k": K[:, :2, :1], "v": V[:, :2, :1]}, "/k_cache"),
        ({"k_cache": K[:1]}, "/k_cache"),
        ({"v_cache": V[:, :4]}, "/v_cache"),
        ({"cache_batch_idx": np.array([0, 2])}, "/cache_batch_idx/1"),
        ({"cache_leftpad": np.array([4, 0])}, "/cache_leftpad/0"),
        ({"block_table": np.array([[0]])}, "/block_table"),
        ({"block_table": np.array([[0], [1]]), "cache_leftpad": np.array([0, 0])}, "/cache_leftpad"),
        ({"block_table": np.array([[0], [1]]), "page_table": np.array([[0], [1]])}, "/page_table"),
        ({"rotary_cos": ONES((3, 2)), "rotary_sin": ONES((3, 2))}, "/cache_seqlens/0"),
        ({"rotary_cos": ONES((9, 2)), "rotary_sin": ONES((9, 3))}, "/rotary_sin"),
        ({"rotary_cos": ONES((9, 2)), "rotary_sin": ONES((9, 2)), "k": None, "v": None}, "/rotary_cos"),
        ({"k_descale": ONES((2, 2, 5))}, "/k_descale"),
    ]
    for wrong, pointer in faults:
        assert fault(name, **good | wrong)[0] == pointer, (wrong.keys(), pointer)


@pytest.mark.torch
def test_torch_computes_the_same_and_its_tensors_are_read() -> None:
    import torch

    query, key = torch.randn(2, 4, 3, 8, dtype=torch.float64), torch.randn(2, 4, 5, 8, dtype=torch.float64)
    for arguments in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.rand(3, 5) < 0.8}):
        given = {"query": query, "key": key, "value": key, **arguments}
        expected = torch.nn.functional.scaled_dot_product_attention(**given)
        found = call("torch.scaled_dot_product_attention", **given)
        np.testing.assert_allclose(found.output, expected.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["flashinfer decode", "flash_attn_varlen_func", "vllm"])
def test_tensors_of_torch_are_read_as_arrays_are(name: str) -> None:
    """bfloat16 and float8 included, and a pair of caches."""
    import torch

    from attention_service.torch_arrays import as_tensor

    def tensor(value: Any) -> Any:
        if isinstance(value, tuple) and isinstance(value[0], np.ndarray):
            return tuple(map(tensor, value))
        return as_tensor(value.copy()) if isinstance(value, np.ndarray) else value

    for seed in range(20):
        drawn = DRAWS[name](Draw(seed))
        given = {argument: tensor(value) for argument, value in drawn.arguments.items()}
        assert any(isinstance(value, torch.Tensor) for value in given.values())
        found, wanted = (call(drawn.function, version=drawn.version, **one) for one in (given, drawn.arguments))
        assert np.array_equal(found.output, wanted.output, equal_nan=True)


def test_a_mask_of_another_size_is_refused() -> None:
    tokens: dict[str, Any] = {"q": ONES((3, 1, 4)), "k": ONES((5, 1, 4)), "v": ONES((5, 1, 4))}
    call("flashinfer.single_prefill_with_kv_cache", **tokens, custom_mask=ONES((3, 5), bool))
    for shape in [(5, 3), (16,), (3, 5, 1), ()]:
        name = "flashinfer.single_prefill_with_kv_cache"
        assert fault(name, **tokens, custom_mask=ONES(shape, bool))[0] == "/custom_mask"
