"""Merged parts of the keys as the attention that they are: each part is a key, its logsumexp the score."""

from __future__ import annotations

import numpy as np

from attention_service.engines.call import Call, Fields, Form, Merge
from attention_service.engines.partial import BASES, checked_sums
from attention_service.engines.tokens import dense


def as_call(merge: Merge) -> Call:
    """The call over parts (n, h, e): n sequences of one query. Parts without keys are hidden, whatever they hold.

    Errors: as of engines.partial.merge.
    """
    sums = checked_sums(merge.parts, merge.names)
    logits = np.where(np.isinf(sums), -np.inf, sums / BASES[merge.base])
    hidden = np.isinf(sums)[..., None]
    outputs = [
        np.where(at, part.output.dtype.type(0), part.output) for at, part in zip(hidden, merge.parts, strict=True)
    ]
    if len({array.dtype for array in outputs}) > 1:
        outputs = [array.astype(np.float64) for array in outputs]
    value = np.stack(outputs, axis=1)
    n, count, h, _ = value.shape
    query, key = (np.broadcast_to(np.zeros((), value.dtype), (n, length, h, 1)) for length in (1, count))
    biases = logits.transpose(1, 2, 0)[:, :, None]  # n, h, 1, parts

    def own(sequence: int) -> Fields:
        return {"bias": biases[sequence]}

    form = Form(lambda x: x[:, 0], lambda x: x[:, 0], merge.base)
    name = merge.names[0][0]
    return Call(dense(name, query), dense(name, key), dense(name, value), form, {}, own)
