"""The sequences of a call as questions: those of like lengths in a padded batch, whose shapes are bounded before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np

from attention_service.backends.base import Check, no_check
from attention_service.comparison.calls.mistakes import MISTAKES
from attention_service.comparison.calls.moves import suspects
from attention_service.comparison.calls.question import CallQuestion
from attention_service.comparison.memory import REFERENCE_BYTES, comparison_bytes
from attention_service.comparison.truth import Question
from attention_service.engines.call import Call, Fields
from attention_service.engines.partial import BASES
from attention_service.engines.tokens import Tokens
from attention_service.errors import InvalidRequest, ShapeMismatch, shape
from attention_service.pipeline.calls import BYTES_PER_SEQUENCE
from attention_service.pipeline.prepare import plan_of_fields

# Numbers of tokens and scores of sequences that are padded to one length: always, and at most.
FEW: Final = 2**18
MOST: Final = 2**22
# Sequences of a part, at most: the deadline is checked before each part.
SEQUENCES: Final = 4096
# With padding, a batch has at most so many times the numbers of its sequences.
PADDED: Final = 2
# Copies of the tokens of a part in float64 beside those that a comparison counts, while they are padded: as stored, and
# with factors.
COPIES: Final = 2
# Options of a sequence that stand beside those of others in one batch.
STACKED: Final = ("mask", "bias")


def parts(call: Call, check: Check = no_check) -> Iterator[np.ndarray]:
    """The sequences that have queries, (n,) of each part: of like lengths, at most MOST numbers unless it is one.

    Errors: what `check` raises.
    """
    index = np.flatnonzero(call.query.lengths > 0)
    if call.own is not None and len(index) and not _is_stacked(call, int(index[0])):
        yield from index[:, None]
        return
    if not len(index):
        return
    index = index[np.lexsort((call.keys[index], call.query.lengths[index]))]
    sizes = np.stack([call.query.lengths[index], call.keys[index]])
    cuts = [0, *(np.flatnonzero(np.diff(sizes).any(axis=0)) + 1).tolist(), len(index)]
    start, alone, longest = 0, 0, 0  # of the part: its first sequence, the numbers of all, and the most keys
    for at, stop in pairwise(cuts):
        check()
        q, k = sizes[:, at].tolist()
        while at < stop:
            each, count = _numbers(call, q, max(longest, k)), at - start
            added = min(stop - at, max(min(MOST // each, SEQUENCES) - count, count == 0))
            padded = (count + added) * each
            if not added or (count and padded > max(FEW, PADDED * (alone + added * _numbers(call, q, k)))):
                yield index[start:at]
                start, alone, longest = at, 0, 0
                continue
            at, alone, longest = at + added, alone + added * _numbers(call, q, k), max(longest, k)
    yield index[start:]


def _numbers(call: Call, q: int, k: int) -> int:
    """The numbers of a sequence of q queries and k keys: those of its tokens, and its scores."""
    query, features = call.query, call.query.features + call.value.features
    return q * query.heads * (features + k) + max(k, 1) * call.key.heads * features


def _is_stacked(call: Call, sequence: int) -> bool:
    """True if the options that a sequence has of its own may stand beside those of others in one batch."""
    return call.own is not None and call.own(sequence).keys() <= {*STACKED}


def question_of(asked: CallQuestion, part: np.ndarray, *, shapes_only: bool = False) -> Question:
    """The question about the sequences of a part, a padded batch in layout blhd.

    shapes_only: True for zeros that take no memory in the place of tokens. Errors: InvalidRequest of every kind.
    """
    call = asked.addressed
    fields = _fields(call, part, shapes_only=shapes_only) | {"dtype": asked.dtype.name, "include": ["logsumexp"]}
    try:
        spec, plan = plan_of_fields(fields)
    except InvalidRequest as error:
        raise call.renamed(error) from None
    return Question(
        spec,
        plan,
        call.form.base == "2",
        asked.tolerance,
        asked.liberties,
        actual=_actual(asked, part, shapes_only=shapes_only),
        time_limit=asked.time_limit,
        is_decoded=True,
        suggests=False,
    )


def _fields(call: Call, part: np.ndarray, *, shapes_only: bool) -> Fields:
    """The fields of the request for the sequences of a part."""
    first = int(part[0])
    if call.own is not None and not _is_stacked(call, first) and call.keys[first]:
        return call.request([first], shapes_only=shapes_only)
    queries, keys = call.query.lengths[part], call.keys[part]
    k = max(int(keys.max()), 1)
    made = _zeros if shapes_only else _padded
    fields: Fields = {
        "query": made([call.query], part, int(queries.max())),
        "key": made([call.key] if call.past is None else [call.past[0], call.key], part, k),
        "value": made([call.value] if call.past is None else [call.past[1], call.value], part, k),
        "layout": "blhd",
        "query_offset": call.offsets[part],
        **call.options,
    }
    if (queries < queries.max()).any():
        fields["query_lengths"] = queries
    if (keys < k).any():
        fields["key_lengths"] = keys
    if call.own is not None and keys.any():
        fields |= _options(call, part, (int(queries.max()), k))
    return fields


def _zeros(tokens: list[Tokens], part: np.ndarray, length: int) -> np.ndarray:
    """Zeros of the shape of padded tokens."""
    return np.broadcast_to(np.zeros(()), (len(part), length, tokens[0].heads, tokens[0].features))


def _padded(tokens: list[Tokens], part: np.ndarray, length: int) -> np.ndarray:
    """Tokens of sequences, those of several kinds behind each other, then zeros: (n, length, heads, d) in float64."""
    found = np.zeros((len(part), length, tokens[0].heads, tokens[0].features))
    for row, n in zip(found, part.tolist(), strict=True):
        at = 0
        for kind in tokens:
            array = kind.of(n)
            row[at : at + len(array)] = array
            at += len(array)
    return found


def _options(call: Call, part: np.ndarray, sizes: tuple[int, int]) -> Fields:
    """Masks and biases of the sequences of a part, (n, h or 1, q, k).

    Errors: ShapeMismatch for those of other lengths, which a mistake of addressing makes of a sequence.
    """
    assert call.own is not None
    owned = [call.own(n) for n in part.tolist()]
    found: Fields = {}
    for name in owned[0]:
        arrays = [np.asarray(own[name]) for own in owned]
        arrays = [array.reshape((1,) * (3 - array.ndim) + array.shape[-3:]) for array in arrays]
        heads = max(len(array) for array in arrays)
        stacked = np.zeros((len(part), heads, *sizes), arrays[0].dtype)
        for row, array, n in zip(stacked, arrays, part.tolist(), strict=True):
            own = row[:, : call.query.lengths[n], : call.keys[n]]
            if any(given not in (1, wanted) for given, wanted in zip(array.shape[1:], own.shape[1:], strict=True)):
                raise ShapeMismatch.of(f"/{name}", shape(own.shape), array)
            own[...] = array
        found[name] = stacked
    return found


def _actual(asked: CallQuestion, part: np.ndarray, *, shapes_only: bool) -> Mapping[str, np.ndarray] | None:
    """What was returned for the sequences of a part, in the axes of its request; padding as a right answer has it."""
    if asked.actual is None:
        return None
    call, rows = asked.addressed, asked.addressed.query.rows
    assert rows is not None
    n, q, h = len(part), int(call.query.lengths[part].max()), call.query.heads
    found: dict[str, np.ndarray] = {}
    for name, array in asked.actual.items():
        axes = (n, q, h) if name == "logsumexp" else (n, q, h, call.value.features)
        if shapes_only:
            found[name] = np.broadcast_to(np.zeros(()), axes)
        else:
            padding: Any = 0.0 if name == "output" else _empty_sum(call)
            found[name] = np.broadcast_to(padding, axes).copy()
            for to, sequence in zip(found[name], part.tolist(), strict=True):
                to[: call.query.lengths[sequence]] = array[rows.of(sequence)]
        if name == "logsumexp":
            found[name] = found[name].transpose(0, 2, 1)
    return found


def _empty_sum(call: Call) -> Any:
    """The logsumexp of a query that sees no key, of each head: that of its sink."""
    sinks = call.options.get("sinks")
    return -np.inf if sinks is None else np.asarray(sinks, np.float64) * BASES[call.form.base]


@np.errstate(all="ignore")
def call_bytes(asked: CallQuestion, workers: int, check: Check = no_check) -> int:
    """Upper bound of the memory of a comparison of a call, beyond its arguments and what was returned, in bytes.

    workers: threads of a comparison. Errors: InvalidRequest of every kind, for the options of the call, and what
    `check` raises.
    """
    call = asked.addressed
    most = _part_bytes(asked, workers, check)
    for mistake in MISTAKES.values() if isinstance(asked.call, Call) else ():
        check()
        for suspect in suspects(mistake.edit, call) if mistake.applies(call) else ():
            if isinstance(suspect.call, Call) and (suspect.call.keys > call.keys).any():
                most = max(most, _part_bytes(replace(asked, call=suspect.call), workers, check))
    rows = call.query.rows
    assert rows is not None
    answers = rows.slots * max(rows.length, 1) * call.query.heads * (call.value.features + 1)  # empty lists, too
    return (
        most
        + (8 * COPIES + asked.reference * REFERENCE_BYTES) * answers
        + 2 * BYTES_PER_SEQUENCE * len(call.query.lengths)
    )


def _part_bytes(asked: CallQuestion, workers: int, check: Check) -> int:
    """The bytes for comparing the largest part of a call. Errors: as of `call_bytes`."""
    most = 0
    for part in _largest(asked.addressed, list(parts(asked.addressed, check))):
        question = question_of(asked, part, shapes_only=True)
        arrays = sum(array.nbytes for array in question.spec.sources.values())
        arrays += sum(array.nbytes for array in (question.actual or {}).values())
        most = max(most, comparison_bytes(question, workers) + COPIES * arrays)
    return most


def _largest(call: Call, found: list[np.ndarray]) -> list[np.ndarray]:
    """The parts of the most queries, keys and scores, with their padding."""
    if not found:
        return []
    counts, together = np.array([len(part) for part in found]), np.concatenate(found)
    start = np.cumsum(counts) - counts
    queries = counts * np.maximum.reduceat(call.query.lengths[together], start)
    keys = np.maximum.reduceat(np.maximum(call.keys[together], 1), start)
    return [found[n] for n in {int(np.argmax(sizes)) for sizes in (queries, counts * keys, queries * keys)}]
