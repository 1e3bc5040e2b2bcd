"""The memory estimate of a prepared request."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from service.attention import cost
from service.attention.cost import Memory
from service.attention.plan import Plan
from service.attention.spec import AttentionSpec
from service.backends.base import Backend
from service.codecs.decoded import Decoded


def estimate(
    plan: Plan,
    spec: AttentionSpec,
    sources: Mapping[str, np.ndarray],
    executor: Backend,
    decoded: Decoded | int,
    *,
    decode: int,
    encode: int,
) -> Memory:
    """Upper bounds of the memory of a prepared request in each phase.

    sources: the fields that query, key and value come from
    decoded: the decoded body, or the memory that it keeps
    decode: the estimate of `Codec.decode_bytes`; encode: `chunks.ENCODE_BYTES`, or more where a format is encoded whole
    """
    copied = cost.copied_bytes(plan, spec, sources)
    return Memory(
        decode=decode,
        decoded=decoded if isinstance(decoded, int) else decoded.nbytes,
        compute=executor.peak_bytes(plan, spec.device, copied),
        results=plan.returned_bytes,
        encode=encode,
    )
