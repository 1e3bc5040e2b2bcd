"""What the measurements should come to, as ratios within one run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from benchmarks.bare import PARTS
from benchmarks.table import BY_HAND, FLOOR, MLSERVER, OURS, OURS_OIP, PEERS, TRITON, Server

BARE = "bare calls"


@dataclass
class Results:
    """Values of each server and column, one a round; and the bytes of request and answer that the peak belongs to."""

    values: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    megabytes: float = math.nan

    def add(self, server: str, column: str, value: float) -> None:
        self.values.setdefault((server, column), []).append(value)

    def median(self, server: str, column: str) -> float:
        """NaN where nothing was measured."""
        return statistics.median(self.values.get((server, column), [math.nan]))

    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for server, column in self.values if server != BARE))

    def best_peer(self, column: str) -> tuple[float, str]:
        """The least of the peers, and whose it is."""
        found = [(self.median(peer.name, column), peer.name) for peer in PEERS]
        return min((item for item in found if not math.isnan(item[0])), default=(math.nan, "none"))

    def bare(self) -> float:
        """Milliseconds of the bare calls of W3."""
        return sum(self.median(BARE, part) for part in PARTS)


@dataclass(frozen=True)
class Ratio:
    """A ratio and its bound: at most, unless at_least."""

    name: str
    value: float
    bound: float
    at_least: bool = False

    def row(self) -> str:
        sign = "≥" if self.at_least else "≤"
        if math.isnan(self.value):
            return f"| {self.name} | absent | {sign} {self.bound:g} | |"
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return f"| {self.name} | {self.value:.2f} | {sign} {self.bound:g} | {'met' if met else 'missed'} |"


def rows(ratios: list[Ratio]) -> str:
    """A Markdown table."""
    return "\n".join(["| ratio | value | target | |", "|---|---|---|---|", *(ratio.row() for ratio in ratios)])


def ratios(results: Results) -> list[Ratio]:
    """Every ratio that has a target."""

    def over(column: str, server: Server, ours: Server = OURS) -> float:
        return results.median(ours.name, column) / results.median(server.name, column)

    def over_best(column: str) -> tuple[float, str]:
        best, name = results.best_peer(column)
        return results.median(OURS.name, column) / best, name

    third, fourth = over_best("W3 p50 ms"), over_best("W4 p50 ms")
    least = results.median(FLOOR.name, "W3 p50 ms") + results.bare()
    return [
        Ratio("W1 p50 / floor", over("W1 p50 ms", FLOOR), 2.5),
        Ratio("W1 rps / MLServer", over("W1 rps", MLSERVER), 3, at_least=True),
        Ratio("W1 rps / FastAPI by hand", over("W1 rps", BY_HAND), 0.95, at_least=True),
        Ratio("W2 p50 / MLServer", over("W2 p50 ms", MLSERVER), 0.45),
        Ratio(f"W3 p50 / best peer ({third[1]})", third[0], 0.33),
        Ratio("W3 p50 / (floor + bare codec + bare kernel)", results.median(OURS.name, "W3 p50 ms") / least, 1.3),
        Ratio("W3 binary p50 / Triton", over("W3 binary p50 ms", TRITON), 0.6),
        Ratio("W3 OIP binary p50 / Triton", over("W3 binary p50 ms", TRITON, OURS_OIP), 0.6),
        Ratio("W4 OIP binary p50 / Triton", over("W4 p50 ms", TRITON, OURS_OIP), 0.6),
        Ratio(f"W4 p50 / best peer ({fourth[1]})", fourth[0], 0.5),
        Ratio("W3 peak / (request + answer)", results.median(OURS.name, "W3 peak MB") / results.megabytes, 4),
    ]
