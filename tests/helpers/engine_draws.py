"""A random call of each function of docs/coming-from.md, written from the functions' own documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tests.helpers.engine_calls import Array, Draw, Drawn, Options, Sequence

Visible = Callable[[int, int, int, int], bool]


def empty() -> tuple[Options, dict[str, Any]]:
    return Options(), {}


def of_window(left: int | None, right: int | None) -> Visible:
    """Keys from i + k - q - left to i + k - q + right; None is unbounded."""

    def visible(i: int, j: int, q: int, k: int) -> bool:
        at = i + k - q
        return (left is None or j >= at - left) and (right is None or j <= at + right)

    return visible


def flash_options(draw: Draw, version: int, options: Options, arguments: dict[str, Any]) -> None:
    """Options that all functions of FlashAttention have, in a version."""
    causal = draw.maybe()
    if causal or draw.maybe():
        arguments["causal"] = causal
    left: int | None = None
    right: int | None = 0 if causal else None
    if draw.maybe():
        if version == 4:
            sides = tuple(None if draw.maybe(0.4) else draw.number(-3, 9) for _ in range(2))
            left, right = (None, None) if all(side is not None and side < 0 for side in sides) else sides
            right = 0 if causal else right
            if left is None or right is None or left + right >= 0:
                arguments["window_size"] = sides
            else:  # refused
                left, right = None, 0 if causal else None
        else:
            left, right = (-1 if draw.maybe(0.4) else draw.number(0, 9) for _ in range(2))
            arguments["window_size"] = (left, right)
            left, right = None if left < 0 else left, 0 if causal else None if right < 0 else right
    seen = of_window(left, right)
    options.visible = seen
    if version == 3 and draw.maybe(0.3):
        size = arguments["attention_chunk"] = draw.number(1, 9)
        options.visible = lambda i, j, q, k: seen(i, j, q, k) and (i + k - q) // size == j // size
    if draw.maybe():
        options.scale = arguments["softmax_scale"] = float(draw.random.uniform(-0.5, 1.5))
    if draw.maybe():
        options.softcap = arguments["softcap"] = float(draw.random.choice([0.0, 0.7, 5.0]))
    if version == 4 and draw.maybe():
        options.sinks = arguments["learnable_sink"] = draw.random.normal(size=draw.h)
    if version == 2 and draw.maybe(0.4):
        slopes = draw.random.uniform(0, 1, size=(draw.h,) if draw.maybe() else (draw.b, draw.h))
        arguments["alibi_slopes"], options.slopes = slopes, np.broadcast_to(slopes, (draw.b, draw.h))


def flash_descales(draw: Draw, sequences: list[Sequence], arguments: dict[str, Any]) -> None:
    for which, name in enumerate("qkv"):
        if draw.maybe(0.8):
            arguments[f"{name}_descale"] = draw.factors(sequences, which, draw.hk)


def flash_func(draw: Draw) -> Drawn:
    version, (options, arguments) = draw.number(2, 4), empty()
    draw.e = draw.number(1, 8)
    q, k = draw.number(1, 12), draw.number(1, 20)
    codes = version == 3 and draw.maybe()
    sequences = draw.sequences([q] * draw.b, [k] * draw.b, codes=codes)
    flash_options(draw, version, options, arguments)
    if codes:
        flash_descales(draw, sequences, arguments)
    arguments |= {
        name: np.stack([getattr(one, array) for one in sequences])
        for name, array in (("q", "query"), ("k", "key"), ("v", "value"))
    }
    return Drawn("flash_attn.flash_attn_func", arguments, version, sequences, options, form="dense")


def flash_varlen(draw: Draw) -> Drawn:
    version, options = draw.number(2, 4), Options()
    draw.e = draw.number(1, 8)
    queries, keys = draw.lengths(0, 9), draw.lengths(0, 40)
    codes = version == 3 and draw.maybe()
    sequences = draw.sequences(queries, keys, codes=codes)
    arguments: dict[str, Any] = {"max_seqlen_q": 9, "max_seqlen_k": 40}
    about: dict[str, Any] = {}
    flash_options(draw, version, options, arguments)
    if codes:
        flash_descales(draw, sequences, arguments)
    stored = [one.query for one in sequences]
    if version > 2 and draw.maybe():  # slots that are longer than what is used of them
        more = [draw.number(0, 3) for _ in sequences]
        stored = [draw.beside([x], spare=n) for x, n in zip(stored, more, strict=True)]
        arguments["seqused_q"] = draw.whole(queries)
    form = "dense" if version == 4 and draw.maybe(0.3) else "ragged"
    if form == "dense":
        most = max(max(map(len, stored)), 1)
        arguments["q"], arguments["seqused_q"] = draw.slots([one.query for one in sequences], most), draw.whole(queries)
        about["starts"] = [0] * draw.b
    else:
        bounds = draw.bounds([len(x) for x in stored])
        arguments["q"], arguments["cu_seqlens_q"] = draw.beside(stored, spare=draw.number(0, 2)), bounds
        about["starts"] = bounds[:-1].tolist()
    if version != 3 and draw.maybe():
        k, v, rows, _ = draw.pages(sequences)
        arguments |= {"k": k, "v": v, "block_table" if version == 2 else "page_table": draw.table(rows)}
        arguments |= {"cu_seqlens_k": draw.bounds(keys)} if version == 2 else {"seqused_k": draw.whole(keys)}
    else:
        spare = [draw.number(0, 3) if version > 2 else 0 for _ in sequences]
        for name, array in (("k", "key"), ("v", "value")):
            beside = [draw.beside([getattr(x, array)], spare=n) for x, n in zip(sequences, spare, strict=True)]
            arguments[name] = draw.beside(beside, spare=draw.number(0, 2))
        arguments["cu_seqlens_k"] = draw.bounds([k + n for k, n in zip(keys, spare, strict=True)])
        if version > 2:
            arguments["seqused_k"] = draw.whole(keys)
    return Drawn("flash_attn.flash_attn_varlen_func", arguments, version, sequences, options, form=form, about=about)


def flash_kvcache(draw: Draw) -> Drawn:
    """In version 3, queries and new keys may lie beside each other."""
    version, options = draw.number(2, 3), Options()
    draw.e = draw.number(1, 8)
    new, q = draw.number(1, 4) if draw.maybe() else 0, draw.number(1, 5)
    is_ragged = version == 3 and draw.maybe()
    news = [draw.number(0, new) for _ in range(draw.b)] if is_ragged else [new] * draw.b
    queries = draw.lengths(0, 5) if is_ragged else [q] * draw.b
    sequences = draw.sequences(queries, [max(k, n) for k, n in zip(draw.lengths(0, 40), news, strict=True)])
    arguments: dict[str, Any] = {}
    flash_options(draw, version, options, arguments)
    ends = [len(x.key) - n for x, n in zip(sequences, news, strict=True)]
    cached = [Sequence(x.query, x.key[:n], x.value[:n], x.factors) for x, n in zip(sequences, ends, strict=True)]
    put = draw.beside if is_ragged else np.stack
    arguments["q"] = put([one.query for one in sequences])
    if new:
        arguments["k"] = put([x.key[n:] for x, n in zip(sequences, ends, strict=True)])
        arguments["v"] = put([x.value[n:] for x, n in zip(sequences, ends, strict=True)])
    if is_ragged:
        arguments["cu_seqlens_q"] = draw.bounds(queries)
        arguments |= {"cu_seqlens_k_new": draw.bounds(news)} if new else {}
    lengths = [len(x.key) for x in cached]
    paged = draw.maybe()
    pads = [0] * draw.b
    if draw.maybe() and not (paged and version == 2):
        pads = [draw.number(0, 5) for _ in cached]
        arguments["cache_leftpad"] = draw.whole(pads)
    arguments["cache_seqlens"] = draw.whole([n + pad for n, pad in zip(lengths, pads, strict=True)])
    order = [int(n) for n in draw.random.permutation(draw.b + 1)[: draw.b]] if draw.maybe() else None
    if paged:
        padded = []
        for one, pad in zip(cached, pads, strict=True):
            key, value = (np.concatenate([np.zeros((pad, *x.shape[1:]), x.dtype), x]) for x in (one.key, one.value))
            padded.append(Sequence(one.query, key, value, one.factors))
        k, v, rows, _ = draw.pages(padded)
        table = draw.table([row + [0] * (-(-new // draw.page) + 1) for row in rows])
        if order is not None:
            table = np.stack(
                [table[order.index(n)] if n in order else np.full_like(table[0], -7) for n in range(draw.b + 1)]
            )
        arguments |= {"k_cache": k, "v_cache": v, "block_table" if version == 2 else "page_table": table}
    else:
        most = max(n + pad for n, pad in zip(lengths, pads, strict=True)) + new + draw.number(0, 2) or 1
        arguments |= {
            name: draw.slots([getattr(x, array) for x in cached], most, order, pads)
            for name, array in (("k_cache", "key"), ("v_cache", "value"))
        }
    if order is not None:
        arguments["cache_batch_idx"] = draw.whole(order)
    form, about = "dense", {}
    if is_ragged:
        form, about = "ragged", {"starts": arguments["cu_seqlens_q"][:-1].tolist()}
    return Drawn("flash_attn.flash_attn_with_kvcache", arguments, version, sequences, options, form=form, about=about)


def infer_options(draw: Draw, arguments: dict[str, Any], options: Options, *, causal: bool) -> None:
    left = draw.number(-1, 9)
    if draw.maybe():
        arguments["window_left"] = left
    seen = of_window(left if left >= 0 and "window_left" in arguments else None, 0 if causal else None)
    options.visible = seen
    if draw.maybe():
        options.softcap = arguments["logits_soft_cap"] = float(draw.random.choice([0.0, 0.7, 5.0]))


def infer_scales(draw: Draw, sequences: list[Sequence], arguments: dict[str, Any], names: tuple[str, ...]) -> None:
    for which, name in enumerate(names):
        if name and draw.maybe(0.4):
            factor = arguments[name] = float(draw.random.uniform(0.1, 2.0))
            for one in sequences:
                one.factors = tuple(x * factor if n == which else x for n, x in enumerate(one.factors))  # type: ignore[assignment]


SCALES: Final = ("q_scale", "k_scale", "v_scale")


def infer_cache(draw: Draw, arguments: dict[str, Any], name: str, k: Array, v: Array, default: str) -> None:
    """The cache as one tensor or as a pair, NHD or HND."""
    layout = str(draw.random.choice(["NHD", "HND"]))
    if layout != default or draw.maybe():
        arguments["kv_layout"] = layout
    if layout == "HND":
        k, v = np.ascontiguousarray(k.swapaxes(1, 2)), np.ascontiguousarray(v.swapaxes(1, 2))
    arguments[name] = np.stack([k, v], axis=1) if k.shape == v.shape and draw.maybe() else (k, v)


def infer_pages(draw: Draw, arguments: dict[str, Any], sequences: list[Sequence], names: tuple[str, str, str]) -> None:
    k, v, rows, _ = draw.pages(sequences)
    infer_cache(draw, arguments, "paged_kv_cache", k, v, "NHD")
    listed = [page for row in rows for page in row] + [-5] * draw.number(0, 2)
    last = [(len(one.key) - 1) % draw.page + 1 if len(one.key) else draw.number(0, 9) for one in sequences]
    arguments |= {
        names[0]: draw.bounds([len(row) for row in rows]),
        names[1]: draw.whole(listed),
        names[2]: draw.whole(last),
    }
    arguments["page_size"] = draw.page


def infer_decode(draw: Draw) -> Drawn:
    options, arguments = empty()
    each = draw.number(2, 4) if draw.maybe(0.3) else 1
    sequences = draw.sequences([each] * draw.b, draw.lengths(0, 40), codes=draw.maybe(0.3))
    infer_pages(draw, arguments, sequences, ("indptr", "indices", "last_page_len"))
    infer_options(draw, arguments, options, causal=True)
    infer_scales(draw, sequences, arguments, SCALES)
    arguments["q"] = draw.beside([one.query for one in sequences])
    if draw.maybe():
        arguments["q_len_per_req"] = each
    if draw.maybe():
        options.sinks = arguments["sinks"] = draw.random.normal(size=draw.h)
    function = "flashinfer.BatchDecodeWithPagedKVCacheWrapper.run"
    return Drawn(
        function, arguments, None, sequences, options, 2.0, "tokens", {"starts": [n * each for n in range(draw.b)]}
    )


def infer_masks(draw: Draw, arguments: dict[str, Any], sequences: list[Sequence], options: Options) -> bool:
    """Draws causal or masks; True if causal."""
    causal = arguments["causal"] = draw.maybe()
    if draw.maybe(0.6):
        return causal
    masks = options.masks = [draw.random.random((len(x.query), len(x.key))) < 0.6 for x in sequences]
    if draw.maybe():
        arguments["custom_mask"] = np.concatenate([mask.reshape(-1) for mask in masks])
    else:
        packed: list[int] = []
        for mask in masks:
            bits = mask.reshape(-1).tolist()
            packed += [sum(bit << n for n, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
        arguments["packed_custom_mask"] = np.array(packed, np.uint8)
    return False


def infer_prefill(draw: Draw) -> Drawn:
    """Paged or ragged."""
    (options, arguments), is_paged = empty(), draw.maybe()
    draw.e = draw.number(1, 8)
    queries, keys = draw.lengths(0, 9), draw.lengths(0, 40)
    sequences = draw.sequences(queries, keys, codes=draw.maybe(0.3))
    if is_paged:
        infer_pages(draw, arguments, sequences, ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"))
    else:
        arguments |= {"k": draw.beside([x.key for x in sequences]), "v": draw.beside([x.value for x in sequences])}
        arguments["kv_indptr"] = draw.bounds(keys)
    infer_options(draw, arguments, options, causal=infer_masks(draw, arguments, sequences, options))
    infer_scales(draw, sequences, arguments, SCALES)
    if draw.maybe():
        options.scale = arguments["sm_scale"] = float(draw.random.uniform(0.1, 1.5))
    if is_paged and draw.maybe():
        options.sinks = arguments["sinks"] = draw.random.normal(size=draw.h)
    bounds = arguments["qo_indptr"] = draw.bounds(queries)
    arguments["q"] = draw.beside([one.query for one in sequences], spare=draw.number(0, 2))
    kind = "Paged" if is_paged else "Ragged"
    function = f"flashinfer.BatchPrefillWith{kind}KVCacheWrapper.run"
    base, form = 2.0, "tokens"
    if draw.maybe():
        base = {"ln": math.e, "log2": 2.0}[arguments.setdefault("lse_base", str(draw.random.choice(["ln", "log2"])))]
    if draw.maybe():
        form = {"HN": "ragged", "NH": "tokens"}[
            arguments.setdefault("lse_layout", str(draw.random.choice(["HN", "NH"])))
        ]
    return Drawn(function, arguments, None, sequences, options, base, form, {"starts": bounds[:-1].tolist()})


def infer_single(draw: Draw) -> Drawn:
    (options, arguments), is_decode = empty(), draw.maybe()
    draw.b, draw.e = 1, draw.number(1, 8)
    q = 1 if is_decode else draw.number(1, 9)
    sequences = draw.sequences([q], [draw.number(1, 40)], codes=draw.maybe(0.3))
    causal = is_decode or infer_masks(draw, arguments, sequences, options)
    infer_options(draw, arguments, options, causal=causal)
    infer_scales(draw, sequences, arguments, SCALES if is_decode else ("", *SCALES[1:]))
    one = sequences[0]
    if not is_decode and draw.maybe():
        found = []
        for which, name in enumerate(("scale_q", "scale_k", "scale_v")):
            arguments[name] = draw.random.uniform(0.5, 2, size=one.factors[which].shape[1])
            found.append(one.factors[which] * arguments[name])
        one.factors = found[0], found[1], found[2]
    hnd = draw.maybe()
    arguments |= {"kv_layout": "HND" if hnd else "NHD"}
    arguments |= {"k": one.key.swapaxes(0, 1) if hnd else one.key, "v": one.value.swapaxes(0, 1) if hnd else one.value}
    arguments["q"] = one.query[0] if is_decode else one.query
    function = f"flashinfer.single_{'decode' if is_decode else 'prefill'}_with_kv_cache"
    return Drawn(function, arguments, None, sequences, options, 2.0, "one" if is_decode else "tokens", {"starts": [0]})


def trtllm(draw: Draw) -> Drawn:
    (options, arguments), is_decode = empty(), draw.maybe()
    each = draw.number(1, 3)
    queries = [each] * draw.b if is_decode and draw.maybe() else draw.lengths(0, 9)
    sequences = draw.sequences(queries, draw.lengths(0, 40), codes=draw.maybe(0.3))
    apart = draw.maybe()
    k, v, rows, others = draw.pages(sequences, apart=apart)
    infer_cache(draw, arguments, "kv_cache", k, v, "HND")
    tables = [draw.table(rows), draw.table(others)]
    if apart:
        width = min(table.shape[1] for table in tables)
        arguments["block_tables"] = np.stack([table[:, :width] for table in tables], axis=1)
        arguments["uses_shared_paged_kv_idx"] = False
    else:
        arguments["block_tables"] = tables[0]
    arguments["seq_lens"] = draw.whole([len(one.key) for one in sequences])
    bounds = draw.bounds(queries)
    if is_decode and queries == [each] * draw.b:
        arguments["q_len_per_req"] = each
    else:
        arguments["cum_seq_lens_q"] = bounds
    causal = is_decode or draw.maybe()
    if not is_decode and not (causal and draw.maybe()):
        arguments["causal"] = causal
    infer_options(draw, arguments, options, causal=causal)
    arguments.pop("logits_soft_cap", None)
    options.softcap, options.scale = 0.0, 1.0
    if not is_decode or draw.maybe():
        options.scale = arguments["bmm1_scale"] = float(draw.random.uniform(0.1, 1.5))
    arguments["bmm2_scale"] = 1.0
    infer_scales(draw, sequences, arguments, ("", "", "bmm2_scale"))
    if draw.maybe():
        options.sinks = arguments["sinks"] = draw.random.normal(size=draw.h)
    arguments["query"] = draw.beside([one.query for one in sequences])
    function = f"flashinfer.trtllm_batch_{'decode' if is_decode else 'context'}_with_kv_cache"
    return Drawn(function, arguments, None, sequences, options, 2.0, "tokens", {"starts": bounds[:-1].tolist()})


def mla(draw: Draw) -> Drawn:
    """One head of keys in two parts; the first is the value, too."""
    options, arguments = empty()
    draw.hk, draw.h = 1, draw.number(1, 4)
    ckv = draw.d
    draw.d, draw.e = ckv + draw.number(1, 4), ckv
    queries, keys = draw.lengths(0, 4), draw.lengths(0, 40)
    sequences = draw.sequences(queries, keys)
    for one in sequences:
        one.value = one.key[..., :ckv]
    draw.e = ckv
    k, _, rows, _ = draw.pages(sequences)
    bounds = draw.bounds(queries)
    if is_dense := draw.maybe():
        arguments |= {"block_tables": draw.table(rows), "seq_lens": draw.whole(keys), "cum_seq_lens_q": bounds}
    else:
        arguments |= {"kv_indptr": draw.bounds([len(row) for row in rows]), "kv_len_arr": draw.whole(keys)}
        arguments |= {"kv_indices": draw.whole([page for row in rows for page in row]), "qo_indptr": bounds}
    query = draw.beside([one.query for one in sequences])
    for whole, array, names in (
        ("query", query, ("q_nope", "q_pe")),
        ("kv_cache", k[:, :, 0], ("ckv_cache", "kpe_cache")),
    ):
        parts = array[..., :ckv].copy(), array[..., ckv:].copy()
        kind = draw.number(0, 2)
        arguments |= ({whole: array.copy()}, {whole: parts}, dict(zip(names, parts, strict=True)))[kind]
    arguments |= {"page_size": draw.page, "head_dim_ckv": ckv, "num_heads": draw.h}
    options.scale = arguments["sm_scale"] = float(draw.random.uniform(0.1, 1.0))
    if draw.maybe(0.3):
        options.scale = arguments["bmm1_scale"] = float(draw.random.uniform(0.1, 1.0))
        infer_scales(draw, sequences, arguments, ("", "", "bmm2_scale"))
    arguments["causal"] = draw.maybe()
    options.visible = of_window(None, 0 if arguments["causal"] else None)
    if draw.maybe(0.3):
        options.sinks = arguments["sinks"] = draw.random.normal(size=draw.h)
    natural = arguments["return_lse_base_on_e"] = draw.maybe()
    if is_dense:
        arguments["lse_mode"] = "basee" if natural else "base2"
    function, base = "flashinfer.BatchMLAPagedAttentionWrapper.run", math.e if natural else 2.0
    return Drawn(function, arguments, None, sequences, options, base, "tokens", {"starts": bounds[:-1].tolist()})


def torch_sdpa(draw: Draw) -> Drawn:
    options, arguments = empty()
    draw.e = draw.number(1, 8)
    q, k = draw.number(1, 9), draw.number(1, 12)
    sequences = draw.sequences([q] * draw.b, [k] * draw.b)
    arguments |= {
        name: np.stack([getattr(one, name).swapaxes(0, 1) for one in sequences]) for name in ("query", "key", "value")
    }
    arguments["enable_gqa"] = True
    kind = draw.number(0, 3)
    shape = tuple(1 if draw.maybe(0.3) else n for n in (draw.b, draw.h, q, k))[draw.number(0, 2) :]
    if kind == 1:
        arguments["is_causal"] = True
        options.visible = lambda i, j, q, k: j <= i
    elif kind == 2:
        bias = arguments["attn_mask"] = draw.random.normal(size=shape)
        options.biases = list(np.broadcast_to(bias, (draw.b, draw.h, q, k)))
    elif kind == 3:
        mask = arguments["attn_mask"] = draw.random.random(shape) < 0.7
        options.biases = list(np.where(np.broadcast_to(mask, (draw.b, draw.h, q, k)), 0.0, -np.inf))
    if draw.maybe():
        options.scale = arguments["scale"] = float(draw.random.uniform(-0.5, 1.5))
    return Drawn("torch.scaled_dot_product_attention", arguments, None, sequences, options, form="heads")


def torch_varlen(draw: Draw) -> Drawn:
    options = Options()
    draw.e = draw.number(1, 8)
    queries, keys = draw.lengths(0, 9), draw.lengths(0, 40)
    sequences = draw.sequences(queries, keys)
    left, right = draw.number(-1, 9), draw.number(-1, 9)
    arguments: dict[str, Any] = {"window_size": (left, right), "enable_gqa": True, "max_q": 9, "max_k": 40}
    options.visible = of_window(None if left < 0 else left, None if right < 0 else right)
    bounds = arguments["cu_seq_q"] = draw.bounds(queries)
    arguments["query"] = draw.beside([one.query for one in sequences])
    if draw.maybe():
        arguments["key"], arguments["value"], rows, _ = draw.pages(sequences)
        arguments |= {"cu_seq_k": None, "block_table": draw.table(rows), "seqused_k": draw.whole(keys)}
    else:
        arguments |= {
            "key": draw.beside([x.key for x in sequences]),
            "value": draw.beside([x.value for x in sequences]),
        }
        arguments["cu_seq_k"] = draw.bounds(keys)
    return Drawn("torch.varlen_attn", arguments, None, sequences, options, about={"starts": bounds[:-1].tolist()})


def vllm(draw: Draw) -> Drawn:
    options = Options()
    queries, keys = draw.lengths(0, 9), draw.lengths(0, 40)
    sequences = draw.sequences(queries, keys, codes=draw.maybe(0.3))
    k, v, rows, _ = draw.pages(sequences)
    kind = draw.number(0, 4)
    arguments: dict[str, Any] = {"block_table": draw.table(rows), "seq_lens": draw.whole(keys)}
    if kind == 0 and len(k) != 2:
        arguments["kv_cache"] = np.stack([k, v])
    elif kind == 1 and len(k) != 2:
        arguments["kv_cache"] = np.stack([k, v], axis=1)
    elif kind == 4:
        arguments["kv_cache"] = np.concatenate([k, v], axis=-1).swapaxes(1, 2).copy()
    elif kind == 2:
        x = 2 if draw.d % 2 == 0 else 1
        parts = k.reshape(len(k), draw.page, draw.hk, draw.d // x, x)
        arguments |= {"key_cache": parts.transpose(0, 2, 3, 1, 4).copy(), "value_cache": v.transpose(0, 2, 3, 1).copy()}
    else:
        arguments |= {"key_cache": k, "value_cache": v}
    causal = draw.maybe()
    if not causal or draw.maybe():
        arguments["causal"] = causal
    left = None
    if draw.maybe():
        arguments["sliding_window"] = draw.number(1, 9)
        left = arguments["sliding_window"] - 1
    options.visible = of_window(left, 0 if causal else left)
    if draw.maybe():
        options.softcap = arguments["logits_soft_cap"] = float(draw.random.choice([0.0, 0.7, 5.0]))
    if draw.maybe(0.3):
        slopes = arguments["alibi_slopes"] = draw.random.uniform(0, 1, size=draw.h)
        options.slopes = np.broadcast_to(slopes, (draw.b, draw.h))
    if draw.maybe():
        options.sinks = arguments["sinks"] = draw.random.normal(size=draw.h)
    infer_scales(draw, sequences, arguments, SCALES)
    bounds = arguments["query_start_loc"] = draw.bounds(queries)
    arguments["query"] = draw.beside([one.query for one in sequences], spare=draw.number(0, 2))
    arguments["num_actual_tokens"] = sum(queries)
    return Drawn("vllm.attention", arguments, None, sequences, options, about={"starts": bounds[:-1].tolist()})


DRAWS: Final[dict[str, Callable[[Draw], Drawn]]] = {
    "flash_attn_func": flash_func,
    "flash_attn_varlen_func": flash_varlen,
    "flash_attn_with_kvcache": flash_kvcache,
    "flashinfer single": infer_single,
    "flashinfer decode": infer_decode,
    "flashinfer prefill": infer_prefill,
    "flashinfer MLA": mla,
    "flashinfer trtllm": trtllm,
    "torch SDPA": torch_sdpa,
    "torch varlen_attn": torch_varlen,
    "vllm": vllm,
}
