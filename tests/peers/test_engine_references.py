"""Exact answers of calls of engines agree with torch itself, and with references that engines publish, written anew.

FlashInfer 0.6.18 (flashinfer/trace/templates/attention.py and cascade.py), vLLM (ref_paged_attn of
tests/kernels/attention/test_flash_attn.py), FlashAttention (attention_ref of flash_attn's tests). Calls have what these
references compute: those of FlashInfer count each page as full, mask causally if they mask at all, and know no window
or softcap; that of single_prefill aligns the first query with the first key where there are more queries than keys.
torch's own causal mask gives NaN with a negative scale, by which it multiplies its -inf.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from attention_service import call
from attention_service.errors import InvalidRequest

Array = np.ndarray
DRAWS = 60


def normal(random: np.random.Generator, *shape: int) -> Array:
    return random.normal(size=shape)


def heads(random: np.random.Generator) -> tuple[int, int]:
    """Query heads, and heads of keys and values."""
    kv_heads = int(random.integers(1, 4))
    return kv_heads * int(random.integers(1, 4)), kv_heads


def agree(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-11, atol=1e-11)


def grouped(array: torch.Tensor, count: int) -> torch.Tensor:
    """Keys or values (k, hk, d) for all query heads."""
    return array.repeat_interleave(count // array.shape[1], dim=1)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_torch_scaled_dot_product_attention(seed: int) -> None:
    random = np.random.default_rng(seed)
    (h, hk), (b, q, k, d, e) = heads(random), (int(n) for n in random.integers(1, (4, 20, 20, 9, 9)))
    query, key, value = normal(random, b, h, q, d), normal(random, b, hk, k, d), normal(random, b, hk, k, e)
    options: dict[str, Any] = {"enable_gqa": h != hk}
    if random.random() < 0.3:
        options["is_causal"] = True
    elif random.random() < 0.6:
        options["attn_mask"] = random.random((q, k)) < 0.7 if random.random() < 0.5 else normal(random, b, 1, q, k)
    if random.random() < 0.4:
        options["scale"] = float(random.uniform(0.05, 1))
    theirs = {name: torch.from_numpy(x) if isinstance(x, Array) else x for name, x in options.items()}
    tensors = (torch.from_numpy(array) for array in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **theirs)
    found = call("torch.scaled_dot_product_attention", query=query, key=key, value=value, **options)
    agree(found.output, expected)


def broadcast_from(random: np.random.Generator, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes that broadcast to others: some are 1, the first may be absent."""
    axes = tuple(1 if random.random() < 0.4 else n for n in lead)
    return axes[int(random.integers(0, len(axes) + 1)) :] if random.random() < 0.3 else axes


@pytest.mark.parametrize("seed", range(DRAWS))
def test_torch_broadcasts_leading_axes(seed: int) -> None:
    """What torch refuses is refused, too: a mask of more axes than the scores of query and key, for example."""
    random = np.random.default_rng(seed)
    lead = tuple(int(n) for n in random.integers(2, 5, random.integers(1, 4)))
    (q, k, d, e), names = (int(n) for n in random.integers(2, 7, 4)), ("query", "key", "value")
    ends = ((q, d), (k, d), (k, e))
    given: dict[str, Any] = {
        name: normal(random, *broadcast_from(random, lead), *end) for name, end in zip(names, ends, strict=True)
    }
    if random.random() < 0.2:  # groups of heads, whose number divides that of the query
        counts = (int(n) for n in random.choice([1, 2, 4], 3))
        shapes = zip(names, counts, ends, strict=True)
        given = {name: normal(random, *lead[:-1], count, *end) for name, count, end in shapes} | {"enable_gqa": True}
    if random.random() < 0.5:
        given["attn_mask"] = normal(random, *broadcast_from(random, lead), int(random.choice([1, q])), k)
    theirs = {name: torch.from_numpy(x) if isinstance(x, Array) else x for name, x in given.items()}
    try:
        expected = torch.nn.functional.scaled_dot_product_attention(**theirs)
    except (RuntimeError, IndexError):
        with pytest.raises(InvalidRequest):
            call("torch.scaled_dot_product_attention", **given)
        return
    found = call("torch.scaled_dot_product_attention", **given).output
    assert found.shape == expected.shape
    agree(found, expected)


def softmaxed(logits: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of logits (keys) and the logsumexp of base 2."""
    return torch.softmax(logits, dim=-1) @ value, torch.logsumexp(logits, dim=-1) / math.log(2)


def flashinfer_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query by query and head by head, as FlashInfer's references: output (q, h, e) and logsumexp (q, h)."""
    (q, h, _), e, delta = query.shape, value.shape[-1], len(key) - len(query)
    output, sums = torch.zeros(q, h, e, dtype=torch.float64), torch.full((q, h), -math.inf, dtype=torch.float64)
    for i in range(q):
        most = min(i + 1 + delta, len(key)) if causal else len(key)
        for head in range(h) if most > 0 else ():
            shared = head // (h // key.shape[1])
            logits = key[:most, shared] @ query[i, head] * scale
            output[i, head], sums[i, head] = softmaxed(logits, value[:most, shared])
    return output, sums


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
@pytest.mark.parametrize("seed", range(DRAWS))
def test_flashinfer_batches(kind: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    (h, hk), (b, d) = heads(random), (int(n) for n in random.integers(1, (5, 9)))
    page = int(random.choice([1, 2, 5, 16]))
    counts = random.integers(0, 4, b)
    indptr = np.cumsum([0, *counts])
    indices = random.permutation(int(indptr[-1]) + 2)[: indptr[-1]]
    lengths = np.ones(b, int) if kind == "decode" else random.integers(0, 9, b)
    ends, scale = np.cumsum([0, *lengths]), float(random.uniform(0.1, 1))
    query = normal(random, ends[-1], h, d)
    cache = normal(random, int(indptr[-1]) + 2, 2, page, hk, d)
    keys = np.cumsum([0, *random.integers(0, 12, b)])
    flat = normal(random, 2, keys[-1], hk, d)
    output, sums = [], []
    for n in range(b):
        if kind == "ragged":
            key, value = (torch.from_numpy(x[keys[n] : keys[n + 1]]) for x in flat)
        else:
            pages = torch.from_numpy(cache[indices[indptr[n] : indptr[n + 1]]])
            key, value = (pages[:, i].reshape(-1, hk, d) for i in (0, 1))
        rows = torch.from_numpy(query[ends[n] : ends[n + 1]])
        one = flashinfer_rows(rows, key, value, scale, causal=kind != "decode")
        output.append(one[0])
        sums.append(one[1])
    full = np.full(b, page)
    if kind == "decode":
        arguments = {"paged_kv_cache": cache, "indptr": indptr, "indices": indices, "last_page_len": full}
        function = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
    elif kind == "prefill":
        arguments = {f"paged_kv_{name}": x for name, x in (("indptr", indptr), ("indices", indices))}
        arguments |= {"paged_kv_cache": cache, "paged_kv_last_page_len": full, "qo_indptr": ends, "causal": True}
        function = "flashinfer.BatchPrefillWithPagedKVCacheWrapper.run"
    else:
        arguments = {"k": flat[0], "v": flat[1], "qo_indptr": ends, "kv_indptr": keys, "causal": True}
        function = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper.run"
    found = call(function, q=query, sm_scale=scale, **arguments)
    agree(found.output, torch.cat(output))
    agree(found.logsumexp, torch.cat(sums))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_flashinfer_merge_state(seed: int) -> None:
    random = np.random.default_rng(seed)
    n, h, e = (int(x) for x in random.integers(1, 9, 3))
    v_a, v_b, s_a, s_b = (torch.from_numpy(normal(random, *shape)) for shape in ((n, h, e),) * 2 + ((n, h),) * 2)
    natural = [s * math.log(2) for s in (s_a, s_b)]
    most = torch.maximum(*natural)
    exponentials = [torch.exp(s - most) for s in natural]
    total = exponentials[0] + exponentials[1]
    merged = (v_a * exponentials[0][..., None] + v_b * exponentials[1][..., None]) / total[..., None]
    states = {"v_a": v_a, "s_a": s_a, "v_b": v_b, "s_b": s_b}
    found = call("flashinfer.merge_state", **{name: state.numpy() for name, state in states.items()})
    agree(found.output, merged)
    agree(found.logsumexp, (most + torch.log(total)) / math.log(2))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_vllm_paged_attention(seed: int) -> None:
    random = np.random.default_rng(seed)
    (h, hk), (b, d) = heads(random), (int(n) for n in random.integers(1, (5, 9)))
    page, scale = int(random.choice([1, 3, 16])), float(random.uniform(0.1, 1))
    keys = random.integers(1, 40, b)
    lengths = np.array([int(random.integers(1, k + 1)) for k in keys])
    window = int(random.integers(1, 20)) if random.random() < 0.5 else None
    cap = float(random.uniform(0.5, 5)) if random.random() < 0.5 else None
    columns = int(-(-keys.max() // page))
    table = random.permutation(b * columns).reshape(b, columns)
    key_cache, value_cache = (normal(random, b * columns, page, hk, d) for _ in range(2))
    ends = np.cumsum([0, *lengths])
    query = normal(random, ends[-1], h, d)
    outputs = []
    for n, (q, k) in enumerate(zip(lengths.tolist(), keys.tolist(), strict=True)):
        blocks = table[n, : -(-k // page)]
        key, value = (
            grouped(torch.from_numpy(cache[blocks].reshape(-1, hk, d)[:k]), h) for cache in (key_cache, value_cache)
        )
        scores = torch.einsum("qhd,khd->hqk", torch.from_numpy(query[ends[n] : ends[n + 1]]) * scale, key)
        ones = torch.ones(q, k)
        mask = torch.triu(ones, diagonal=k - q + 1).bool()
        if window is not None:
            mask |= torch.triu(ones, diagonal=k - (q + window) + 1).bool().logical_not()
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        weights = torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value))
    options = {} if window is None else {"sliding_window": window}
    options |= {} if cap is None else {"logits_soft_cap": cap}
    arguments = {"key_cache": key_cache, "value_cache": value_cache, "block_table": table, "seq_lens": keys}
    found = call("vllm.attention", query=query, query_start_loc=ends, scale=scale, **arguments, **options)
    agree(found.output, torch.cat(outputs))


@pytest.mark.parametrize("seed", range(DRAWS))
def test_flash_attention(seed: int) -> None:
    """Dense batches with windows, causal masks, softcap and ALiBi; rows without a key are 0."""
    random = np.random.default_rng(seed)
    (h, hk), (b, q, k, d) = heads(random), (int(n) for n in random.integers(1, (4, 20, 20, 9)))
    query, key, value = normal(random, b, q, h, d), normal(random, b, k, hk, d), normal(random, b, k, hk, d)
    left, right = (int(n) if random.random() < 0.5 else -1 for n in random.integers(0, 9, 2))
    causal, cap = bool(random.random() < 0.5), float(random.choice([0.0, 2.0]))
    slopes = random.random((b, h)) if random.random() < 0.5 else None
    tensors = (torch.from_numpy(x) for x in (query, key, value))
    queries, *others = tensors
    keys, values = (x.repeat_interleave(h // hk, dim=2) for x in others)
    scores = torch.einsum("bthd,bshd->bhts", queries / math.sqrt(d), keys)
    scores = torch.tanh(scores / cap) * cap if cap > 0 else scores
    row, column = torch.arange(q)[:, None], torch.arange(k)[None]
    last = 0 if causal else right
    hidden = torch.zeros(q, k, dtype=torch.bool)
    hidden |= column > row + k - q + last if last >= 0 else hidden
    hidden |= column < row + k - q - left if left >= 0 else hidden
    scores = scores.masked_fill(hidden, -math.inf)
    if slopes is not None:
        scores = scores - torch.from_numpy(slopes)[:, :, None, None] * (row + k - q - column).abs()
    weights = torch.softmax(scores, dim=-1).masked_fill(hidden.all(-1, keepdim=True), 0.0)
    expected = torch.einsum("bhts,bshd->bthd", weights, values)
    options: dict[str, Any] = {} if slopes is None else {"alibi_slopes": slopes}
    arguments = {"q": query, "k": key, "v": value, "causal": causal, "window_size": (left, right), "softcap": cap}
    found = call("flash_attn.flash_attn_func", version=2, **arguments, **options)
    agree(found.output, expected)
