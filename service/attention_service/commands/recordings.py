"""One call of a recording, as commands ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from attention_service.backends.base import no_check
from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.codecs.table import CODECS
from attention_service.commands.terminal import CommandError
from attention_service.engines.call import Merge
from attention_service.engines.table import decode
from attention_service.library.recordings import RecordedCall, read_recording
from attention_service.pipeline.calls import JSON, CallOperation


def chosen_call(root: Path, number: int | None, status: int = 2) -> RecordedCall:
    """A call of a recording. number: None for the only one; status: of errors

    Errors: CommandError, InvalidRequest, OSError.
    """
    calls = read_recording(root).calls
    number = 0 if number is None and len(calls) == 1 else number
    if number is None or number >= len(calls):
        numbers = f"a number from 0 to {len(calls) - 1}" if calls else "a recording with calls of attention"
        raise CommandError(f"--call: expected {numbers}, got {number}", status)
    return calls[number]


def read_sequence(root: Path, number: int | None, sequence: int) -> Decoded:
    """The request of one sequence of a recorded call. number: as of chosen_call

    Errors: CommandError, InvalidRequest of every kind, OSError.
    """
    recorded = chosen_call(root, number)
    call = decode(recorded.function, recorded.arguments())
    if isinstance(call, Merge):
        raise CommandError(f"--call: expected a call with queries and keys, got {recorded.function}", 2)
    has_both = np.flatnonzero((call.query.lengths > 0) & (call.keys > 0)).tolist()
    if sequence not in has_both:
        count = len(call.query.lengths)
        expected = f"one of {count} sequences from 0 that has queries and keys"
        raise CommandError(f"--sequence: expected {expected}, got {sequence}", 2)
    return Decoded(call.request([sequence]), frozenset())


def write_computed(root: Path, number: int | None, file: BinaryIO) -> None:
    """Write the exact answer of a recorded call as JSON, with its weights. number: which call; None for the only one

    Errors: CommandError, ServiceError of every kind, OSError.
    """
    call = chosen_call(root, number)
    fields = {"call": call.function, "arguments": call.arguments(), "include": ["attention_weights"]}
    operation = CallOperation(Backends())
    request = operation.prepare(Decoded(fields, frozenset()))
    file.writelines(operation.encode(request, operation.compute(request, no_check), CODECS[JSON], call.name).chunks)
