"""The liberties that right kernels take in half types, and how an answer is computed with them.

- folded_scale: the scale times log2(e) is multiplied into the query, which is rounded then (FlashInfer's
  q_smem_inplace_multiply_sm_scale; the Triton kernels of vLLM for ROCm)
- rounded_weights: weights are rounded before the product with the values, as tensor cores take them (FlashAttention)
- rounded_sum: weights are rounded before they are summed up, too (FlashInfer's m16k16_rowsum_f16f16f32)
- rounded_operands: query, key and value are rounded again after norms, clipping and rotation
- approximate_exp2: exp2 is a polynomial of degree 3 (FlashAttention-4's POLY_EX2, flash_attn/cute/utils.py)
- approximate_tanh: the tanh of the softcap is tanh.approx.f32 (PTX ISA), as in FlashInfer and FlashAttention
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import cache, partial
from typing import Final, get_args

import ml_dtypes
import numpy as np

from attention_service.attention.arrays import compute_dtype
from attention_service.comparison.problem import Rounding, rounded
from attention_service.schemas.compare import Liberty

LIBERTIES: Final = frozenset(get_args(Liberty)) - {"exact"}
LOG2E: Final = math.log2(math.e)
# Not asked for by name: kernels of float8 queries and values round weights to float8, too, as part of rounded_weights.
CODED_WEIGHTS: Final = "coded_weights"
CODES: Final = np.dtype(ml_dtypes.float8_e4m3fn)
# The polynomial of FlashAttention-4 for 2^x, 0 <= x < 1, from its constant on, and its relative error.
CUBIC: Final = (1.0, 0.695146143436431884765625, 0.227564394474029541015625, 0.077119089663028717041015625)
EXP2_ERROR: Final = 8.8e-5
# The relative error of tanh.approx.f32.
TANH_ERROR: Final = 2.0**-11


@cache
def legal_roundings(
    dtype: np.dtype, liberties: frozenset[str] = LIBERTIES, *, changes: bool = False
) -> tuple[Rounding, ...]:
    """What right kernels of a type round; the plain one, which only rounds inputs and output, is the first.

    Kernels take several liberties at once: so do two of the roundings in half types.
    liberties: those that are legal; changes: True if steps change query, key or value, which may be rounded afterwards
    """
    inputs = None if dtype == np.float64 else partial(rounded, dtype=dtype)
    plain = Rounding(computes=compute_dtype(dtype), inputs=inputs, output=dtype)
    found = [plain]
    if "folded_scale" in liberties:
        found.append(replace(plain, scaled_query=dtype))
    if dtype.itemsize < 4:
        # With log2(e) for exp2, so that a scale that is a power of two is rounded, too.
        is_folded = "folded_scale" in liberties
        first = replace(
            plain,
            scaled_query=dtype if is_folded else None,
            folded=LOG2E if is_folded else 1.0,
            weights=dtype if "rounded_weights" in liberties else None,
            operands=dtype if changes and "rounded_operands" in liberties else None,
        )
        second = replace(plain, exponentials=dtype if "rounded_sum" in liberties else None)
        if "approximate_exp2" in liberties:
            first = replace(first, exp=cubic_exp)
        if "approximate_tanh" in liberties:
            first, second = replace(first, tanh=uneven_tanh), replace(second, tanh=large_tanh)
        found += [first, second]
        if CODED_WEIGHTS in liberties:
            found.append(replace(first, weights=CODES))
    return tuple(dict.fromkeys(found))


def chosen(legal: Collection[str] | None) -> frozenset[str]:
    """The liberties that a request allows. legal: as in the request; None or empty for all"""
    return LIBERTIES & frozenset(legal) if legal else LIBERTIES


def cubic_exp(numbers: np.ndarray) -> np.ndarray:
    """exp of numbers of at most 0, by the polynomial of FlashAttention-4."""
    powers = np.maximum(numbers * numbers.dtype.type(LOG2E), numbers.dtype.type(-127))
    whole = np.floor(powers)
    part = powers - whole
    found = np.full_like(part, CUBIC[3])
    for coefficient in CUBIC[2::-1]:
        found *= part
        found += part.dtype.type(coefficient)
    return np.where(np.isneginf(numbers), numbers.dtype.type(0), np.ldexp(found, whole.astype(np.int32)))


def uneven_tanh(numbers: np.ndarray) -> np.ndarray:
    """tanh with an error that is another one for each number."""
    return np.asarray(
        np.tanh(numbers) * (1 + numbers.dtype.type(TANH_ERROR) * np.sin(numbers * numbers.dtype.type(1e4)))
    )


def large_tanh(numbers: np.ndarray) -> np.ndarray:
    """tanh that is too large everywhere."""
    return np.asarray(np.tanh(numbers) * numbers.dtype.type(1 + TANH_ERROR))
