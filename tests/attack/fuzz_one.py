"""Fuzz one codec in this process. Arguments: its name, and options of libFuzzer. tests/attack/fuzz.py starts it."""

from __future__ import annotations

import atexit
import io
import itertools
import signal
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["attention_service.codecs", "zipfile", "numpy.lib.format"]):
    import attention_service.codecs.oip.grpc  # noqa: F401  # and with it all others

from tests.attack.bounds import address_space, memory_bound, parse
from tests.attack.corpus import OIP, TARGETS, hostile_bodies, seeds
from tests.helpers.wire import NPZ, SAFETENSORS

LONGEST = 4096
# The limit for the decompressed size of a body, in bytes.
UNPACKED = 2**20
# Executions between two reports of their number.
REPORT_EVERY = 1000
Mutate = Callable[[bytes], bytes]


def with_checksums(body: bytes, mutate: Mutate) -> bytes:
    """A zip archive with one mutated member and correct checksums, without which hardly any body would be decoded."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as old, zipfile.ZipFile(stream, "w") as new:
        names = old.namelist()
        chosen = names[sum(body) % len(names)]
        for name in names:
            content = old.read(name)
            new.writestr(zipfile.ZipInfo(name), mutate(content) if name == chosen else content)
    return stream.getvalue()


def with_length(body: bytes, mutate: Mutate) -> bytes:
    """A body with a mutated header and the correct length of the header."""
    length = int.from_bytes(body[:8], "little")
    header = mutate(body[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + body[8 + length :]


# Restores what random mutations nearly always break: checksums and lengths.
REPAIRS = {NPZ: with_checksums, SAFETENSORS: with_length, OIP: with_length}


def run_one(media_type: str, options: list[str]) -> None:
    """Fuzz one codec until libFuzzer ends the process."""
    codec = TARGETS[media_type]
    executions = itertools.count(1)

    def execute(body: bytes) -> None:
        if (number := next(executions)) % REPORT_EVERY == 0:
            print(f"executed {number}", file=sys.stderr, flush=True)
        with address_space(memory_bound(codec, len(body), UNPACKED)):
            parse(codec, body, UNPACKED)

    def mutate(body: bytes, longest: int, seed: int) -> bytes:
        def mutate_bytes(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(len(part), 64)))

        if media_type in REPAIRS and seed % 4:
            try:
                return REPAIRS[media_type](body, mutate_bytes)[:longest]
            except Exception:  # the body is too broken to repair
                return bytes(atheris.Mutate(body, longest))
        return bytes(atheris.Mutate(body, longest))

    with tempfile.TemporaryDirectory() as folder:
        bodies = seeds(media_type) + [make() for make in hostile_bodies(media_type).values()]
        for number, body in enumerate(body for body in bodies if len(body) <= LONGEST):
            (Path(folder) / str(number)).write_bytes(body)
        del bodies
        # libFuzzer's alarm may ring after its handler is removed, and would kill a process that ended well.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
        atheris.Setup([sys.argv[0], f"-max_len={LONGEST}", *options, folder], execute, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    run_one(sys.argv[1], sys.argv[2:])
