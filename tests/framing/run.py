"""Send sequences of requests over one connection, cut into pieces; each response must equal that to the request alone.

`python -m tests.framing.run NAME --cuts 10,20` repeats one case.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import h11

from tests.attack.server import live
from tests.framing.answers import Answer, Mismatch, parse, violation
from tests.framing.client import Barrier, Connection, Server
from tests.framing.sequences import MAX_BODY, Request, sequence

CERTIFICATE: Final = Path(__file__).parents[1] / "tls" / "localhost.pem"
PARSERS: Final = ("h11", "httptools")
WIDTH: Final = 16  # connections at a time
FAILURES: Final = (Mismatch, h11.ProtocolError, OSError)


class Case(NamedTuple):
    """Where the bytes of a sequence are cut, and whether the client receives only after it has sent."""

    cuts: tuple[int, ...]
    late: bool = False


class Outcome(NamedTuple):
    """How many cases were tried, and a description of each that failed."""

    tried: int
    failures: list[str]


@contextmanager
def serving(parser: str, tls: bool) -> Iterator[Server]:
    """A server in a separate process."""
    settings: dict[str, Any] = {"tls_certificate": CERTIFICATE, "tls_key": CERTIFICATE} if tls else {}
    with live(http_parser=parser, max_body_bytes=MAX_BODY, **settings) as server:
        yield Server(server.port, parser, tls)


def every_byte(server: Server, name: str) -> list[Case]:
    """One case for each offset within a sequence, and one whose pieces are single bytes."""
    length = sum(len(request.data) for request in sequence(name, server.parser))
    return [*(Case((offset,)) for offset in range(1, length)), Case(tuple(range(1, length)))]


def random_cases(server: Server, name: str, rng: Random, count: int) -> list[Case]:
    """Cases with random cuts: between requests, near the ends of heads and bodies, and anywhere."""
    between, ends, length = [0], [0], 0
    for request in sequence(name, server.parser):
        ends.append(length + request.data.find(b"\r\n\r\n") + 2)
        length += len(request.data)
        between.append(length)
    cases = []
    for _ in range(count):
        offsets = rng.sample(between, rng.randint(0, len(between)))
        offsets += [rng.choice(between + ends) + rng.randint(-60, 60) for _ in range(rng.randint(0, 4))]
        offsets += [rng.randrange(length) for _ in range(rng.randint(0, 2))]
        cases.append(
            Case(tuple(sorted({offset for offset in offsets if 0 < offset < length})), late=rng.random() < 0.5)
        )
    return cases


def check(server: Server, name: str, cases: Iterable[Case]) -> Outcome:
    """Send a sequence once for each case, and compare the responses."""
    return asyncio.run(_check(server, name, cases))


async def _check(server: Server, name: str, cases: Iterable[Case]) -> Outcome:
    requests = sequence(name, server.parser)
    label = f"{name} ({' '.join(request.kind for request in requests)})"
    data = b"".join(request.data for request in requests)
    last = next(index for index, request in enumerate(requests) if request.closes)
    outcomes: list[str] = []
    remaining = iter(cases)

    async def send_cases(barrier: Barrier, expected: list[Answer]) -> None:
        for case in remaining:
            connection = Connection(server, barrier)
            pieces = [data[start:end] for start, end in pairwise((0, *case.cuts, len(data)))]
            failure = ""
            try:
                await connection.exchange(pieces, lambda _: False, case.late)
                _compare(requests, parse(connection.received, requests, ended=True), expected)
            except FAILURES as error:
                failure = f"{label}: {error!r}\n  {_command(server, name, case)}"
            outcomes.append(failure)

    async with Barrier(server) as barrier:
        try:
            expected = [await _response_alone(server, barrier, request) for request in requests[: last + 1]]
        except FAILURES as error:
            return Outcome(1, [f"{label}: {error!r}\n  {_command(server, name, Case(()))}"])
        await asyncio.gather(*(send_cases(barrier, expected) for _ in range(WIDTH)))
    return Outcome(len(outcomes), [failure for failure in outcomes if failure])


async def _response_alone(server: Server, barrier: Barrier, request: Request) -> Answer:
    """The response to a request that is sent whole on a new connection. Errors: Mismatch, if it violates HTTP."""
    connection = Connection(server, barrier)
    await connection.exchange([request.data], lambda received: bool(parse(received, [request], ended=False)))
    answers = parse(connection.received, [request], ended=request.closes)
    if not answers or violation(request, answers[0]):
        raise Mismatch(f"{request.kind} alone is answered by {answers}: {answers and violation(request, answers[0])}")
    return answers[0]


def _compare(requests: list[Request], answers: list[Answer], expected: list[Answer]) -> None:
    for index, (request, answer, alone) in enumerate(zip(requests, answers, expected, strict=False)):
        if answer != alone and (not request.other_status or violation(request, answer)):
            raise Mismatch(f"answer {index} is {answer}, not {alone}")
    if len(answers) != len(expected):
        raise Mismatch(f"{len(answers)} answers, not {len(expected)}: {answers}")


def _command(server: Server, name: str, case: Case) -> str:
    flags = " --tls" * server.tls + " --late" * case.late
    cuts = f" --cuts {','.join(map(str, case.cuts))}" if case.cuts else ""
    return f"python -m tests.framing.run {name} --parser {server.parser}{flags}{cuts}"


def main() -> int:
    """Send one sequence."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", help="short-SEED, long-SEED, or kinds joined by +")
    parser.add_argument("--cuts", default="", help="offsets, comma-separated; every: each offset, one after the other")
    parser.add_argument("--late", action="store_true", help="receive only after all is sent")
    parser.add_argument("--parser", default=PARSERS[0], choices=PARSERS)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--port", type=int, help="of a server that runs already")
    options = parser.parse_args()

    def run(server: Server) -> Outcome:
        if options.cuts == "every":
            return check(server, options.name, every_byte(server, options.name))
        cuts = tuple(int(cut) for cut in options.cuts.split(",") if cut)
        return check(server, options.name, [Case(cuts, options.late)])

    if options.port:
        outcome = run(Server(options.port, options.parser, options.tls))
    else:
        with serving(options.parser, options.tls) as server:
            outcome = run(server)
    print(*outcome.failures, f"{len(outcome.failures)} of {outcome.tried} cases fail", sep="\n")
    return bool(outcome.failures)


if __name__ == "__main__":
    sys.exit(main())
