"""Golden cases: requests with the numbers that five notebooks print for them.

Each file holds a request and expected numbers: for a field of the response, or a function of it as in `exp(scores)`,
the values and the format in which they were printed. A response is right if it prints the same digits.

`lessons/` holds the lessons of the page: requests of their own, or those of golden cases with other options.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Expected:
    """One printed array: the field, a function applied to it ("" for none), the print format, the values."""

    name: str
    printed: str
    values: Any

    def compare(self, answer: dict[str, Any]) -> float:
        """The largest deviation from the printed numbers, in units of the last digit printed.

        Asserts that the field of the response, printed in the same format, gives the same digits.
        """
        function, field = re.fullmatch(r"(?:(\w+)\()?(\w+)\)?", self.name).groups()  # type: ignore[union-attr]
        got = as_array(answer[field])
        if function:
            got = np.asarray(np.exp(got) if function == "exp" else np.var(got))
        want = as_array(self.values)
        assert got.shape == want.shape, f"{self.name}: shape {got.shape} instead of {want.shape}"
        shown = np.vectorize(lambda x: float(self.printed % x))(got)
        np.testing.assert_array_equal(shown, want, err_msg=f"{self.name} does not print the same digits")
        finite = np.isfinite(want)
        return float(np.max(np.abs(got[finite] - want[finite]) / self._last_digit(want[finite])))

    def _last_digit(self, values: np.ndarray) -> np.ndarray:
        digits = np.full(values.shape, float(re.search(r"\d+", self.printed)[0]))  # type: ignore[index]
        if self.printed.endswith("e"):
            digits -= np.floor(np.log10(np.abs(values)))
        return np.asarray(10.0**-digits)


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    source: str
    request: dict[str, Any]
    expected: tuple[Expected, ...]


def as_array(value: Any) -> np.ndarray:
    """Nested lists as an array of floats; None (null in JSON) becomes minus infinity."""

    def replace_none(x: Any) -> Any:
        return [replace_none(item) for item in x] if isinstance(x, list) else -math.inf if x is None else x

    return np.asarray(replace_none(value), dtype=float)


def load(path: Path) -> Case:
    content = json.loads(path.read_text(encoding="utf-8"))
    expected = tuple(Expected(name, **one) for name, one in content["expected"].items())
    own = {field: content[field] for field in ("title", "source", "request")}
    return Case(name=path.stem, expected=expected, **own)


CASES = [load(path) for path in sorted(FOLDER.glob("*.json"))]
