"""Measures the memory of each case in a separate process: `python -m tests.memory.measure BACKEND [NAME...]`.

The parent imports all modules, warms up, and forks a child for each request. Resident memory of a child includes the
parent's pages from the start, and copying a page on write does not enlarge it. The parent has returned freed memory to
the system before, so that a child finds no resident memory to reuse. The peak of the child, reset just
before the request, is therefore what the request adds. The parent makes the body: its size is subtracted from where
the child starts, as it belongs to the request and is released after decoding.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attention_service.attention.cost import Memory, copied_bytes
from attention_service.backends.base import Backend
from attention_service.backends.registry import Backends
from attention_service.codecs.base import Codec
from attention_service.codecs.chunks import ENCODE_BYTES
from attention_service.codecs.oip import http as oip
from attention_service.codecs.table import CODECS
from attention_service.pipeline.prepare import make_spec_and_plan
from attention_service.runtime.memory import reuse_memory
from attention_service.schemas.response import answer
from tests.memory.cases import CASES, INFERENCE, Case, write_case

THREADS = 2
LIMIT = 2**30


def main(backend: Any, names: list[str]) -> None:
    """Print a line of JSON for each case."""
    reuse_memory()
    executor = Backends().choose(backend, "cpu")
    warm_up(backend, executor)
    for case in CASES:
        if not names or case.name in names:
            body, head = write_case(case)
            bodies = [body]
            del body
            compute = partial(request, case, bodies, head, executor)
            print(json.dumps({"name": case.name} | measure_in_child(compute, bodies[0].nbytes)), flush=True)


def warm_up(backend: Any, executor: Backend) -> None:
    """Compute a small request in each format on one thread, as a process with several threads cannot be forked."""
    fields = {"input": np.ones((20, 2)), "is_causal": True}
    for media_type, answer_type, form in sorted({(case.media_type, case.answer, case.form) for case in CASES}):
        body, head = write_case(Case("", media_type, answer_type, lambda: fields, form))
        request(Case("", media_type, answer_type, dict, form), [body], head, executor)


def request(case: Case, bodies: list[np.ndarray], head: int | None, executor: Backend) -> Memory:
    """Compute a request as the service does, discard the response, and return the memory estimate."""
    body = bodies.pop().data
    size = len(body)
    if case.media_type == INFERENCE:
        decoder: Codec = oip.HTTPCodec(head)
        encoder = decoder
    else:
        decoder, encoder = CODECS[case.media_type], CODECS[case.answer]
    decode = decoder.decode_bytes(body, LIMIT)
    decoded = decoder.decode(body, LIMIT)
    del body
    if size > 2**16:  # no warm-up
        executor = Backends(threads=THREADS).choose(executor.name, "cpu")  # type: ignore[arg-type]
    kept = decoded.nbytes
    spec, plan = make_spec_and_plan(decoded)
    computing = executor.peak_bytes(plan, spec.device, copied_bytes(plan, spec))
    expected = Memory(decode, kept, computing, plan.returned_bytes, ENCODE_BYTES)
    result = executor.run(plan, spec, spec.sources)
    fields = answer(spec, result, "id")
    del result
    chunks = encoder.encode(fields, decoded).chunks
    del fields
    with open(os.devnull, "wb") as null:
        for chunk in chunks:
            null.write(chunk)
    return expected


def measure_in_child(compute: Callable[[], Memory], size: int) -> dict[str, Any]:
    """Peak and estimate of a request, in bytes, measured in a forked child. size: of its body in bytes"""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, json.dumps(in_child(compute, size)).encode())
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(found))


def in_child(compute: Callable[[], Memory], size: int) -> dict[str, Any]:
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status("VmRSS") - size, time.monotonic()
    expected = compute()
    found = {"estimate": expected.peak, "peak": status("VmHWM") - before, "phases": expected._asdict()}
    return found | {"seconds": time.monotonic() - start}


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
