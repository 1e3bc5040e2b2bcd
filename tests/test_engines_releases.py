"""Each argument of the functions that calls understand is known, in the newest releases that were read.

Their names are those of flash-attn 2.8.3.post2 (version 3 by its folder hopper), flash-attn-4 4.0.0b36,
flashinfer-python 0.7.2.post1 (arguments of the constructor, of plan and of run), and torch 2.14.1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from attention_service import call
from attention_service.engines.table import FUNCTIONS
from tests.test_engines_call import ONES, fault

RELEASED: Final = {
    ("flash_attn.flash_attn_func", "2"): """
        q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs
    """,
    ("flash_attn.flash_attn_varlen_func", "2"): """
        q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size
        softcap alibi_slopes deterministic return_attn_probs block_table
    """,
    ("flash_attn.flash_attn_with_kvcache", "2"): """
        q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table
        softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse
    """,
    ("flash_attn.flash_attn_func", "3"): """
        q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap
        num_splits pack_gqa deterministic sm_margin
    """,
    ("flash_attn.flash_attn_varlen_func", "3"): """
        q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv
        q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic
        sm_margin
    """,
    ("flash_attn.flash_attn_with_kvcache", "3"): """
        q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table
        cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale
        causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa
        sm_margin return_softmax_lse
    """,
    ("flash_attn.flash_attn_func", "4"): """
        q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa
        deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars block_sparse_tensors
        block_sparse_tensors_bwd return_lse gather_bwd_recompute_p gather_bwd_token_chunk
    """,
    ("flash_attn.flash_attn_varlen_func", "4"): """
        q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k
        gather_kv_indices page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa
        deterministic score_mod score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse
        scheduler_metadata seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p
        gather_bwd_token_chunk
    """,
    ("flashinfer.single_prefill_with_kv_cache", ""): """
        q k v scale_q scale_k scale_v o_dtype custom_mask packed_custom_mask causal kv_layout pos_encoding_mode
        use_fp16_qk_reduction sm_scale window_left logits_soft_cap rope_scale rope_theta backend return_lse
        kv_cache_sf k_scale v_scale
    """,
    ("flashinfer.single_decode_with_kv_cache", ""): """
        q k v kv_layout pos_encoding_mode use_tensor_cores q_scale k_scale v_scale window_left logits_soft_cap
        sm_scale rope_scale rope_theta return_lse
    """,
    ("flashinfer.BatchDecodeWithPagedKVCacheWrapper.run", ""): """
        float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer
        paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args indptr indices last_page_len
        num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode window_left window_right logits_soft_cap
        q_data_type kv_data_type o_data_type data_type sm_scale rope_scale rope_theta non_blocking block_tables
        seq_lens fixed_split_size disable_split_kv q_len_per_req is_causal q paged_kv_cache q_scale k_scale
        v_scale out lse return_lse enable_pdl sinks skip_softmax_threshold_scale_factor kv_cache_sf
    """,
    ("flashinfer.BatchPrefillWithPagedKVCacheWrapper.run", ""): """
        float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf
        paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask
        qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk
        page_size head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction
        sm_scale window_left logits_soft_cap rope_scale rope_theta q_data_type kv_data_type o_data_type
        non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens
        seq_lens_q block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv
        uniform_q_len q paged_kv_cache q_scale k_scale v_scale out lse return_lse lse_base lse_layout enable_pdl
        sinks kv_cache_sf skip_softmax_threshold_scale_factor use_fp16_softmax uses_spcompress
    """,
    ("flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run", ""): """
        float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf kv_indptr_buf custom_mask_buf
        mask_indptr_buf backend jit_args jit_kwargs variant_owns_mask qo_indptr kv_indptr num_qo_heads
        num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask causal pos_encoding_mode
        use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta q_data_type
        kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len
        max_item_len_ptr fixed_split_size disable_split_kv seq_lens seq_lens_q max_token_per_sequence
        max_sequence_kv v_indptr o_indptr uniform_q_len q k v out lse return_lse lse_base lse_layout enable_pdl
        kv_cache_sf q_scale k_scale v_scale o_scale
    """,
    ("flashinfer.BatchMLAPagedAttentionWrapper.run", ""): """
        float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend metadata
        num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale q_data_type kv_data_type use_profiler
        query_layout kv_cache_layout lse_mode output_dtype output_scale scale_mode skip_softmax enable_pdl
        use_sinks cum_seq_lens_q block_tables seq_lens max_q_len query kv_cache out lse return_lse
        profiler_buffer kv_len page_table return_lse_base_on_e o_scale ckv_scale ckv_scale_arr kpe_scale sinks
        skip_softmax_threshold_scale_factor bmm1_scale bmm2_scale q_nope q_pe ckv_cache kpe_cache
    """,
    ("flashinfer.trtllm_batch_decode_with_kv_cache", ""): """
        query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out
        out_dtype o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask
        max_q_len cum_seq_lens_q skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse
        return_lse bmm1_scale_log2 multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank
        causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order request_order_plan
    """,
    ("flashinfer.trtllm_batch_context_with_kv_cache", ""): """
        query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale
        batch_size cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale o_sf_vec_size kv_layout
        enable_pdl sinks kv_cache_sf skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx causal lse
        return_lse multi_ctas_kv_counter_buffer use_fp16_softmax uses_spcompress backend
    """,
    ("flashinfer.merge_state", ""): """
        v_a s_a v_b s_b
    """,
    ("flashinfer.merge_states", ""): """
        v s
    """,
    ("torch.varlen_attn", ""): """
        query key value cu_seq_q cu_seq_k max_q max_k return_aux scale window_size enable_gqa seqused_k
        block_table num_splits
    """,
    ("torch.scaled_dot_product_attention", ""): """
        query key value attn_mask dropout_p is_causal scale enable_gqa
    """,
}
PREFILL, MLA = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run", "flashinfer.BatchMLAPagedAttentionWrapper.run"


@pytest.mark.parametrize(("function", "version"), RELEASED)
def test_every_argument_of_a_release_is_known(function: str, version: str) -> None:
    rows = FUNCTIONS[function].rows
    for name in RELEASED[function, version].split():
        assert name in rows, name
        assert not version or not rows[name].versions or version in rows[name].versions, name


def test_no_function_is_left_out() -> None:
    assert {function for function, _ in RELEASED} == FUNCTIONS.keys() - {"vllm.attention"}


@pytest.mark.parametrize(
    ("function", "name", "value", "neutral"),
    [
        (PREFILL, "variant_owns_mask", True, False),
        (PREFILL, "jit_args", ["a"], None),
        (MLA, "metadata", "MLAPlanMetadata(…)", None),
        (MLA, "skip_softmax", True, False),
        (MLA, "skip_softmax_threshold_scale_factor", 1.0, None),
        (MLA, "output_scale", "per-tensor", "none"),
        ("flashinfer.trtllm_batch_decode_with_kv_cache", "cp_world", 2, 1),
        ("flashinfer.trtllm_batch_decode_with_kv_cache", "cp_rank", 1, 0),
        ("flashinfer.trtllm_batch_decode_with_kv_cache", "causal_seqlens_kv_global", np.ones(1, np.int32), None),
        ("vllm.attention", "mm_prefix_query_range_tensor", np.ones((1, 2), np.int32), None),
        ("vllm.attention", "rswa_prefix_lens", np.ones(1, np.int32), None),
    ],
)
def test_what_is_not_computed_is_refused_by_name(function: str, name: str, value: Any, neutral: Any) -> None:
    pointer, text = fault(function, **{name: value})
    assert (pointer, f"no {name}" in text) == (f"/{name}", True)
    assert fault(function, **{name: neutral})[0] != f"/{name}"  # another argument is missing


def ragged(**more: Any) -> dict[str, Any]:
    """One sequence of two queries with three equal keys each."""
    arrays = {"q": ONES((2, 1, 4)), "k": np.zeros((3, 1, 4)), "v": ONES((3, 1, 4))}
    return arrays | {"qo_indptr": [0, 2], "kv_indptr": [0, 3]} | more


def test_the_logsumexp_of_prefill_has_the_base_and_the_axes_that_it_is_asked_for() -> None:
    for base, logarithm in {None: np.log2(3), "log2": np.log2(3), "ln": np.log(3)}.items():
        for layout, shape in {None: (2, 1), "NH": (2, 1), "HN": (1, 2)}.items():
            found = call(PREFILL, **ragged(lse_base=base, lse_layout=layout)).logsumexp
            np.testing.assert_allclose(found, np.full(shape, logarithm), rtol=1e-15)
    assert fault(PREFILL, **ragged(lse_base="log10"))[0] == "/lse_base"
    assert fault(PREFILL, **ragged(lse_layout="NHD"))[0] == "/lse_layout"
    assert np.array_equal(call(PREFILL, **ragged(uniform_q_len=2)).output, ONES((2, 1, 4)))


def latent(**more: Any) -> dict[str, Any]:
    """Two sequences of one query, with three and two keys of 512 + 64 features in pages of two tokens."""
    random = np.random.default_rng(0)
    query, cache = random.normal(size=(2, 3, 576)), random.normal(size=(3, 2, 576))
    table = {"cum_seq_lens_q": [0, 1, 2], "block_tables": [[2, 0], [1, 9]], "seq_lens": [3, 2]}
    return {"query": query, "kv_cache": cache, "sm_scale": 0.1} | table | more


def test_the_plan_of_mla_may_be_dense_and_its_arrays_packed() -> None:
    """The same by a softmax here."""
    given = latent()
    keys = given["kv_cache"][[2, 0]].reshape(4, 576)[:3]
    scores = given["query"][0] @ keys.T * 0.1
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    found = call(MLA, **given)
    np.testing.assert_allclose(found.output[0], weights @ keys[:, :512], rtol=1e-10)
    np.testing.assert_allclose(found.logsumexp[0], np.log2(np.exp(scores).sum(axis=1)), rtol=1e-10)
    natural = call(MLA, **latent(lse_mode="basee")).logsumexp
    np.testing.assert_allclose(natural[0], np.log(np.exp(scores).sum(axis=1)), rtol=1e-10)
    scaled = call(MLA, **latent(bmm1_scale=0.1, bmm2_scale=2.0, sm_scale=None))
    np.testing.assert_allclose(scaled.output, 2 * found.output, rtol=1e-10)
    sunk = call(MLA, **latent(sinks=np.zeros(3)))
    np.testing.assert_allclose(
        sunk.output[0], np.exp(scores) @ keys[:, :512] / (1 + np.exp(scores).sum(axis=1))[:, None]
    )


def test_arrays_of_mla_come_in_one_form() -> None:
    split = {"q_nope": ONES((2, 3, 512)), "q_pe": ONES((2, 3, 64))}
    assert fault(MLA, **latent(**split)) == (
        "/query",
        "/query: expected query, or q_nope and q_pe, got both",
    )
    assert fault(MLA, **latent(query=1.0))[0] == "/query"
    assert fault(MLA, **latent(head_dim_ckv=500, head_dim_kpe=64))[0] == "/head_dim_kpe"
    assert fault(MLA, **latent(head_dim_ckv=-4))[0] == "/head_dim_ckv"
    assert fault(MLA, **latent(head_dim_ckv=576))[0] == "/query"


def test_a_cache_of_vllm_may_hold_keys_and_values_beside_each_other() -> None:
    """(pages, hk, page, 2d) of 0.33; an odd number of features is none of them."""
    cache = np.zeros((1, 1, 2, 2))
    cache[0, 0, :, 1] = 1.0, 3.0
    where: dict[str, Any] = {"query_start_loc": [0, 1], "seq_lens": [2], "block_table": [[0]]}
    assert call("vllm.attention", query=ONES((1, 1, 1)), kv_cache=cache, **where).output.tolist() == [[[2.0]]]
    odd = np.zeros((1, 1, 2, 3))
    assert fault("vllm.attention", query=ONES((1, 1, 1)), kv_cache=odd, **where)[0] == "/kv_cache"
