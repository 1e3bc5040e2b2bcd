"""From a request to its plan."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from attention_service.attention.arrays import FLOATS, MAX_COUNT, cast, compute_dtype, per_head, wider, widest
from attention_service.attention.gradients import make_gradients
from attention_service.attention.outputs import make_selection
from attention_service.attention.plan import Notice, Plan
from attention_service.attention.roles import resolve_layout, resolve_roles, sources
from attention_service.attention.score_term import Frame
from attention_service.attention.shapes import Sizes, score_axes
from attention_service.attention.spec import AttentionSpec, Given, Layout
from attention_service.attention.steps import make_steps
from attention_service.attention.terms import make_terms
from attention_service.errors import InvalidArray, InvalidValue, Overflow, ShapeMismatch, shape

# Heads that may have a scale each: all are listed in the metadata of an answer.
MAX_SCALES: Final = 2**14


def make_plan(spec: AttentionSpec) -> Plan:
    """The plan of a request. Errors: InvalidRequest of every kind, with the pointer of the field at fault.

    It depends on the shapes and types of the sources, not on their numbers, so that a request without other arrays has
    the same plan as any other of the same shapes and options.
    """
    given = sources(spec)
    layout = resolve_layout(spec.layout, given)
    dtype = _dtype(spec, given)
    roles = resolve_roles(spec, given, layout, dtype)
    computing, sizes, past = compute_dtype(dtype), roles.sizes, roles.past_length
    _check_counts(sizes, f"/{roles.query.field}")
    single_query = given["query"][1].ndim == 1
    axes = score_axes(layout, sizes.num_heads, single_query=single_query)
    frame = Frame(axes, sizes, past, computing)
    steps = make_steps(spec, frame)
    scale, head_scales = _scales(spec.scale, sizes, computing)
    sinks, row_sinks = _sinks(spec.sinks, layout, sizes, computing)
    _check_tokens(spec, sizes)
    return Plan(
        roles=roles,
        dtype=dtype,
        scale=scale,
        layout=layout,
        query_steps=steps["query"],
        key_steps=steps["key"],
        value_steps=steps["value"],
        head_scales=head_scales,
        softcap=_softcap(spec.softcap, computing),
        terms=make_terms(spec, frame),
        sinks=sinks,
        row_sinks=row_sinks,
        normalization=spec.normalization,
        output_steps=steps["output"],
        gate=_gate(spec.gate, layout, sizes, computing),
        gradients=make_gradients(spec, roles, layout, frame, dtype, single_query=single_query),
        selection=make_selection(spec, sizes),
        single_query=single_query,
        notices=_notices(spec),
    )


def _check_counts(sizes: Sizes, pointer: str) -> None:
    """Refuse more batch entries or heads than anybody sends: there are loops over them. Errors: ShapeMismatch."""
    for name, count in (("batch entries", sizes.batch_size), ("heads", max(sizes.num_heads, sizes.num_kv_heads))):
        if count > MAX_COUNT:
            raise ShapeMismatch.at(pointer, f"at most {MAX_COUNT} {name}", str(count))


def dtype_of(spec: AttentionSpec) -> np.dtype:
    """The type of the operands of a request. Errors: MissingField, FieldConflict for what is no source."""
    return _dtype(spec, sources(spec))


def _dtype(spec: AttentionSpec, given: Given) -> np.dtype:
    """The type asked for, else the widest type of the arrays that came with one."""
    if spec.dtype is not None:
        return FLOATS[spec.dtype]
    arrays = dict(given.values()) | {"past_key": spec.past_key, "past_value": spec.past_value}
    return widest([x.dtype for name, x in arrays.items() if x is not None and name not in spec.untyped])


def _finite(number: float, pointer: str, dtype: np.dtype) -> float:
    """The number of a field. Errors: InvalidValue, Overflow for one that the type that is computed in cannot hold."""
    if not math.isfinite(number):
        raise InvalidValue.of(pointer, "a finite number", number)
    if abs(number) > float(np.finfo(dtype).max):
        raise Overflow.of(pointer, f"a number that {dtype.name} can hold", number, wider(dtype))
    return float(number)


def _scales(scale: float | np.ndarray | None, sizes: Sizes, dtype: np.dtype) -> tuple[float, np.ndarray | None]:
    """The fields `scale` and `head_scales` of a plan. Errors: InvalidValue, InvalidArray, ShapeMismatch, Overflow."""
    if isinstance(scale, np.ndarray) and scale.shape == (1,) != (sizes.num_heads,):
        scale = float(scale[0])  # R writes each number as a list
    if isinstance(scale, np.ndarray):
        if sizes.num_heads > MAX_SCALES:
            raise InvalidArray.of("/scale", f"one number for more than {MAX_SCALES} heads", scale)
        per_head(scale, "/scale", sizes.num_heads, dtype)
        return 1.0, scale.astype(np.float64)
    return 1 / math.sqrt(sizes.head_dim) if scale is None else _finite(scale, "/scale", dtype), None


def _sinks(
    sinks: np.ndarray | None, layout: Layout, sizes: Sizes, dtype: np.dtype
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The fields `sinks` and `row_sinks` of a plan. Errors: ShapeMismatch, InvalidArray, Overflow."""
    if sinks is None or sinks.ndim == 1:
        return None if sinks is None else per_head(sinks, "/sinks", sizes.num_heads, dtype), None
    h, _, b, q, *_ = sizes
    wanted = (b, h, q) if "b" in layout else (h, q)
    if sinks.shape != wanted:
        raise ShapeMismatch.of("/sinks", f"{shape((h,))}, one number a head, or {shape(wanted)}", sinks)
    return None, cast(sinks, dtype, "/sinks").reshape(b, h, q)


def _gate(gate: np.ndarray | None, layout: Layout, sizes: Sizes, dtype: np.dtype) -> np.ndarray | None:
    """The gates of a request as (b, h, q, e or 1). Errors: ShapeMismatch, InvalidArray, Overflow."""
    if gate is None:
        return None
    h, _, b, q, _, _, e = sizes
    leading = (b, h, q) if "b" in layout else (h, q)
    if gate.shape not in ((*leading, e), (*leading, 1)):
        axes = "b, h, q, value_dim" if "b" in layout else "h, q, value_dim"
        expected = " or ".join(dict.fromkeys((shape((*leading, e)), shape((*leading, 1)))))
        raise ShapeMismatch.of("/gate", expected, gate, f"axes {axes} in every layout")
    return cast(gate, dtype, "/gate").reshape(b, h, q, -1)


def _softcap(softcap: float | None, dtype: np.dtype) -> float | None:
    if softcap is None:
        return None
    if softcap <= 0:
        raise InvalidValue.of("/softcap", "a number above 0", softcap, "leave it out for no cap")
    return _finite(softcap, "/softcap", dtype)


def _check_tokens(spec: AttentionSpec, sizes: Sizes) -> None:
    """Check that labels are (l,) or (b, l), as many as the tokens that they name. Errors: ShapeMismatch."""
    for field, length in (("query_tokens", sizes.query_length), ("key_tokens", sizes.key_length)):
        labels = getattr(spec, field)
        if labels is None:
            continue
        rows = labels if labels and not isinstance(labels[0], str) else [labels]
        if rows is labels and len(rows) != sizes.batch_size:
            raise ShapeMismatch.at(f"/{field}", f"{sizes.batch_size} lists, one per batch entry", f"{len(rows)}")
        for i, row in enumerate(rows):
            if len(row) != length:
                pointer = f"/{field}/{i}" if rows is labels else f"/{field}"
                raise ShapeMismatch.at(pointer, f"{length} labels", str(len(row)))


def _notices(spec: AttentionSpec) -> tuple[Notice, ...]:
    bias = spec.bias
    if bias is not None and (bias == 1).any() and ((bias == 0) | (bias == 1)).all():
        text = "bias holds only 0 and 1, and was added to the scores; to hide keys send booleans as mask"
        return (Notice("bias_looks_like_mask", text),)
    return ()
