"""Ratios of measured values within one run, with the bounds that they have to meet."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from benchmarks.bare import PARTS
from benchmarks.table import BY_HAND, MLSERVER, OURS_BY_PARSER, PARSERS, PEERS, TRITON, Server

BARE = "bare calls"
# The most that a request takes, as a multiple of FastAPI by hand on the same HTTP parser.
BY_HAND_BOUNDS = {"W1": 1.2, "W2": 0.74, "W3": 0.78, "W4": 0.6}


@dataclass
class Results:
    """Measured values per server and column, and the size of a W3 request with its answer in MB."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    megabytes: float = math.nan

    def add(self, server: str, column: str, value: float) -> None:
        """Add one value."""
        self.values.setdefault((server, column), []).append(value)

    def median(self, server: str, column: str) -> float:
        """Return the median of the values, NaN if there are none."""
        return statistics.median(self.values.get((server, column), [math.nan]))

    def columns(self) -> list[str]:
        """Return the columns that any server has a value in."""
        return list(dict.fromkeys(column for server, column in self.values if server != BARE))

    def best_peer(self, column: str) -> tuple[float, str]:
        """Return the least median of all peers, and the name of that peer; NaN without peers."""
        found = [(self.median(peer.name, column), peer.name) for peer in PEERS]
        return min((item for item in found if not math.isnan(item[0])), default=(math.nan, "none"))

    def bare(self) -> dict[str, float]:
        """Return the milliseconds of each bare call of W3."""
        return {part: self.median(BARE, part) for part in PARTS}


@dataclass(frozen=True)
class Ratio:
    """A ratio and its bound: an upper bound, unless at_least.

    missing: why there is no value, when it is NaN
    """

    name: str
    value: float
    bound: float
    at_least: bool = False
    missing: str = "absent"

    @property
    def met(self) -> bool:
        """True if the value is within the bound."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> str:
        """Return the row of a Markdown table."""
        target = f"{'≥' if self.at_least else '≤'} {self.bound:g}"
        if math.isnan(self.value):
            return f"| {self.name} | {self.missing} | {target} | |"
        return f"| {self.name} | {self.value:.2f} | {target} | {'met' if self.met else 'missed'} |"


def rows(ratios: list[Ratio]) -> str:
    """Return a Markdown table of ratios."""
    return "\n".join(["| ratio | value | target | |", "|---|---|---|---|", *(ratio.row() for ratio in ratios)])


def _over(results: Results, column: str, parser: str, other: Server) -> float:
    """Return the median of the service on a parser, divided by that of another server."""
    return results.median(OURS_BY_PARSER[parser].name, column) / results.median(other.name, column)


def _over_best(results: Results, column: str, parser: str, bound: float) -> Ratio:
    """Return the ratio of the service on a parser to the fastest peer."""
    best, name = results.best_peer(column)
    value = results.median(OURS_BY_PARSER[parser].name, column) / best
    return Ratio(f"{parser}: {column.removesuffix(' ms')} / best peer ({name})", value, bound)


def to_by_hand(results: Results, missing: str) -> list[Ratio]:
    """Return the ratios of the service to FastAPI by hand, each on the same HTTP parser.

    missing: why there are no measurements by wrk, if there are none
    """
    found = []
    for parser, other in BY_HAND.items():
        for column, bound in BY_HAND_BOUNDS.items():
            value = _over(results, f"{column} p50 ms", parser, other)
            found.append(Ratio(f"{parser}: {column} p50 / FastAPI by hand", value, bound))
        binary = results.median(OURS_BY_PARSER[parser].name, "W3 binary p50 ms")
        lists = results.median(other.name, "W3 p50 ms")
        found.append(Ratio(f"{parser}: W3 binary p50 / W3 p50 of FastAPI by hand", binary / lists, 0.21))
        rps = _over(results, "W1 wrk rps", parser, other)
        found.append(Ratio(f"{parser}: W1 wrk rps / FastAPI by hand", rps, 0.8, at_least=True, missing=missing))
    return found


def to_peers(results: Results) -> list[Ratio]:
    """Return the ratios of the service on each HTTP parser to the peers."""
    found = []
    for parser in PARSERS:
        rps = _over(results, "W1 rps", parser, MLSERVER)
        found += [
            Ratio(f"{parser}: W1 rps / MLServer", rps, 3, at_least=True),
            Ratio(f"{parser}: W2 p50 / MLServer", _over(results, "W2 p50 ms", parser, MLSERVER), 0.45),
            _over_best(results, "W3 p50 ms", parser, 0.4),
            _over_best(results, "W4 p50 ms", parser, 0.5),
            Ratio(f"{parser}: W3 binary p50 / Triton", _over(results, "W3 binary p50 ms", parser, TRITON), 0.6),
        ]
    return found
