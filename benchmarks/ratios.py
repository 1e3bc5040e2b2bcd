"""Ratios of measured values within one run, with the bounds that they have to meet."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from benchmarks.bare import PARTS
from benchmarks.table import MLSERVER, OURS_BASE64, OURS_BY_PARSER, PAIRS, PARSERS, PEERS, TRITON, Server
from benchmarks.workloads import BEHIND_NGINX
from benchmarks.wrk import MISSING, WRK

BARE = "bare calls"
# The most that a small request takes, as a multiple of FastAPI by hand on the same HTTP parser with as many workers,
# and the least throughput.
SMALL = {"httptools": 1.05, "h11": 1.15}
LEAST_RATE = 0.85
# The same of others: with one BLAS thread for each server, and where each has its own threads.
LARGE = {
    "W2 p50": (0.75, 0.8),
    "W2 CPU": (1.0, 0.5),
    "W3 p50": (0.75, 0.8),
    "W3 CPU": (1.0, 0.5),
    "W3 binary p50": (1.2, 1.2),
    "W4 p50": (0.6, 0.6),
}


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

    def paired(self, column: str, server: Server, other: Server) -> float:
        """Return the median of the ratios of two servers, each of two measurements that followed each other."""
        values, beside = (self.values.get((one.name, column), [math.nan]) for one in (server, other))
        return statistics.median(value / other_value for value, other_value in zip(values, beside, strict=False))

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

    bound: None if there is none; missing: why there is no value, when it is NaN
    """

    name: str
    value: float
    bound: float | None = None
    at_least: bool = False
    missing: str = "absent"

    @property
    def met(self) -> bool:
        """True if the value is within the bound, or there is none."""
        if self.bound is None:
            return True
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def row(self) -> str:
        """Return the row of a Markdown table."""
        target = "" if self.bound is None else f"{'≥' if self.at_least else '≤'} {self.bound:g}"
        if math.isnan(self.value):
            return f"| {self.name} | {self.missing} | {target} | |"
        verdict = "" if self.bound is None else "met" if self.met else "missed"
        return f"| {self.name} | {self.value:.2f} | {target} | {verdict} |"


def rows(ratios: list[Ratio], title: str = "ratio") -> str:
    """Return a Markdown table of ratios."""
    return "\n".join([f"| {title} | value | target | |", "|---|---|---|---|", *(ratio.row() for ratio in ratios)])


def to_by_hand(results: Results, *, own_threads: bool) -> list[Ratio]:
    """Return the ratios of the service to FastAPI by hand, on the same HTTP parser with as many workers.

    own_threads: True if BLAS had its own threads, False for one
    """
    found = []
    for (parser, workers), (by_hand, ours) in PAIRS.items():
        prefix = f"{parser}, {workers} workers" if workers > 1 else parser
        for load in ("W1 httpx", BEHIND_NGINX):
            value = results.paired(f"{load} p50 ms", ours, by_hand)
            found.append(Ratio(f"{prefix}: {load} p50", value, SMALL[parser]))
            found.append(Ratio(f"{prefix}: {load} CPU", results.paired(f"{load} CPU ms", ours, by_hand)))
            rate = results.paired(f"{load} wrk rps", ours, by_hand)
            if not math.isnan(rate) or WRK is None:
                found.append(Ratio(f"{prefix}: {load} wrk rps", rate, LEAST_RATE, at_least=True, missing=MISSING))
        if workers == 1:
            for column, bounds in LARGE.items():
                value = results.paired(f"{column} ms", ours, by_hand)
                found.append(Ratio(f"{prefix}: {column}", value, bounds[own_threads]))
    return found


def of_base64(results: Results) -> list[Ratio]:
    """Return the ratios of the service with arrays in base64, and with lists, to FastAPI by hand with lists."""
    by_hand, ours = PAIRS["httptools", 1]
    return [
        Ratio(f"{server.name}: {column}", results.paired(f"{column} ms", server, by_hand))
        for column in ("W2 p50", "W2 CPU", "W3 p50", "W3 CPU")
        for server in (ours, *OURS_BASE64)
    ]


def to_peers(results: Results) -> list[Ratio]:
    """Return the ratios of the service on each HTTP parser to the peers."""
    found = []
    for parser in PARSERS:
        ours = OURS_BY_PARSER[parser]
        for column, peer in {"W1 rps": MLSERVER, "W2 p50 ms": MLSERVER, "W3 binary p50 ms": TRITON}.items():
            found.append(Ratio(f"{parser}: {column} / {peer.name}", results.paired(column, ours, peer)))
        for column in ("W3 p50 ms", "W4 p50 ms"):
            best, name = results.best_peer(column)
            value = results.median(ours.name, column) / best
            found.append(Ratio(f"{parser}: {column} / best peer ({name})", value))
    return found
