"""Fuzz one codec in this process, as tests/attack/fuzz.py says: its name and options of libFuzzer."""

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

with atheris.instrument_imports(include=["service.codecs", "zipfile", "numpy.lib.format"]):
    import service.codecs.oip.grpc  # noqa: F401  # and with it all others

from tests.attack.bounds import address_space, memory_bound, parse
from tests.attack.corpus import OIP, TARGETS, nasty, seeds
from tests.helpers.wire import NPZ, SAFETENSORS

LONGEST = 4096
# To how much a body may unpack.
UNPACKED = 2**20
# Executions after which their number is told.
TELL = 1000
Mutate = Callable[[bytes], bytes]


def with_checksums(body: bytes, mutate: Mutate) -> bytes:
    """An archive with one member changed, and whole again: else hardly anything gets past the checksums."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as old, zipfile.ZipFile(stream, "w") as new:
        names = old.namelist()
        chosen = names[sum(body) % len(names)]
        for name in names:
            content = old.read(name)
            new.writestr(zipfile.ZipInfo(name), mutate(content) if name == chosen else content)
    return stream.getvalue()


def with_length(body: bytes, mutate: Mutate) -> bytes:
    """A changed header, whose length is said right."""
    length = int.from_bytes(body[:8], "little")
    header = mutate(body[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + body[8 + length :]


# What a blind mutation would hardly ever get right.
REPAIRS = {NPZ: with_checksums, SAFETENSORS: with_length, OIP: with_length}


def run_one(media_type: str, options: list[str]) -> None:
    """Fuzz one codec until libFuzzer ends the process."""
    codec = TARGETS[media_type]
    executions = itertools.count(1)

    def execute(body: bytes) -> None:
        if (number := next(executions)) % TELL == 0:
            print(f"executed {number}", file=sys.stderr, flush=True)
        with address_space(memory_bound(codec, len(body), UNPACKED)):
            parse(codec, body, UNPACKED)

    def mutate(body: bytes, longest: int, seed: int) -> bytes:
        def blindly(part: bytes) -> bytes:
            return bytes(atheris.Mutate(part, max(len(part), 64)))

        if media_type in REPAIRS and seed % 4:
            try:
                return REPAIRS[media_type](body, blindly)[:longest]
            except Exception:  # whatever is wrong with it already
                return bytes(atheris.Mutate(body, longest))
        return bytes(atheris.Mutate(body, longest))

    with tempfile.TemporaryDirectory() as folder:
        bodies = seeds(media_type) + [make() for make in nasty(media_type).values()]
        for number, body in enumerate(body for body in bodies if len(body) <= LONGEST):
            (Path(folder) / str(number)).write_bytes(body)
        del bodies
        # libFuzzer's alarm may ring when its handler is gone already, and would kill what has ended well.
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
        atheris.Setup([sys.argv[0], f"-max_len={LONGEST}", *options, folder], execute, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    run_one(sys.argv[1], sys.argv[2:])
