"""The matrix of docs/conformance.md: what each installed library does in each corner.

`python -m tests.peers.conformance.matrix` writes the page's generated part anew. It takes minutes, and needs all
libraries of `make install-torch`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attention_service.conformance.corners import CORNERS
from attention_service.conformance.judge import judge_arrays
from attention_service.conformance.runner import SuiteResult, run_cases
from attention_service.conformance.suite import SuiteCase, finished
from attention_service.conformance.target import Target, Unsupported, call
from tests.helpers.corners import BY_NAME, make_corner_cases
from tests.peers.conformance.adapters import ADAPTERS, Adapter
from tests.peers.conformance.deviations import BY_CELL, DEVIATIONS, Deviation

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "conformance.md"
BEGIN, END = "<!-- matrix: measured -->\n", "<!-- end -->"
# Cases of each corner, all in float32 where the corner does not say another type.
CASES: Final = 3
SEED: Final = 0
MARKS: Final = {"correct": "✓", "unsupported": "·"}
BREAKS, OTHERWISE, UNEXPLAINED = "✗", "≠", "?"
ALIGNED: Final = {0: "first with first", 1: "last with last"}


def main(names: Iterable[str] = tuple(ADAPTERS)) -> int:
    """Write the generated part of the page, and return the exit status: 1 if a library is not installed."""
    chosen = {name: ADAPTERS[name] for name in names}
    missing = [adapter.title for adapter in chosen.values() if not adapter.is_installed]
    if missing:
        sys.stderr.write(f"not installed: {', '.join(missing)}\n")
        return 1
    warnings.simplefilter("ignore")
    cases = [case for corner in CORNERS for case in make_corner_cases(corner.name, CASES, SEED, ("float32",))]
    results: dict[str, SuiteResult] = {}
    alignments: dict[str, str] = {}
    for name, adapter in chosen.items():
        target = adapter.load()
        results[name] = run_cases(cases, target)
        alignments[name] = alignment(target)
        sys.stderr.write(f"{adapter.title}: done\n")
    text = "\n".join([*tables(chosen, results, alignments), *programs()])
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


def replaced(page: str, text: str) -> str:
    """A page with another generated part."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def alignment(target: Target) -> str:
    """How an implementation aligns a causal mask, if q < k and it is not told."""
    first, last = aligned_cases()
    fields = {name: value for name, value in first.fields.items() if name != "query_offset"}
    try:
        actual = call(target, fields)
    except Unsupported:
        return MARKS["unsupported"]
    right = [place for place, case in enumerate((first, last)) if judge_arrays(case, actual).status == "correct"]
    return ALIGNED[right[0]] if right else "neither"


def aligned_cases() -> tuple[SuiteCase, SuiteCase]:
    """The same causal request with offset 0, and with offset k − q."""
    first = next(make_corner_cases("causal.first", 1, SEED, ("float32",)))
    q, k = (first.fields[name].shape[2] for name in ("query", "key"))
    return first, finished(first.name, first.corner, {**first.fields, "query_offset": k - q})


def tables(
    chosen: Mapping[str, Adapter], results: Mapping[str, SuiteResult], alignments: Mapping[str, str]
) -> Iterator[str]:
    """The versions, the matrix, and the first differences, as lines of Markdown."""
    yield "| implementation | version |"
    yield "|---|---|"
    yield from (f"| {adapter.title} | {adapter.package} {adapter.version} |" for adapter in chosen.values())
    yield ""
    yield f"| corner | right is | {' | '.join(adapter.title for adapter in chosen.values())} |"
    yield f"|---|---|{'---|' * len(chosen)}"
    for corner in CORNERS:
        cells = (_cell(name, corner.name, results[name]) for name in chosen)
        yield f"| `{corner.name}` | {corner.text} | {' | '.join(cells)} |"
    yield f"| causal, q < k, no offset | must be said | {' | '.join(alignments[name] for name in chosen)} |"
    yield ""
    yield from _differences(chosen, results)


def _cell(name: str, corner: str, result: SuiteResult) -> str:
    status = next(found.status for found in result.corners if found.name == corner)
    if status in MARKS:
        return MARKS[status]
    deviation = BY_CELL.get((name, corner))
    return UNEXPLAINED if deviation is None else f"[{BREAKS if deviation.breaks else OTHERWISE}](#{deviation.anchor})"


def _differences(chosen: Mapping[str, Adapter], results: Mapping[str, SuiteResult]) -> Iterator[str]:
    """The first difference of each cell, with the known mistake that resembles it most."""
    yield "| implementation | corner | first difference | what `compare` would call it |"
    yield "|---|---|---|---|"
    for name, adapter in chosen.items():
        for corner in results[name].corners:
            if (failure := corner.first_failure) is None:
                continue
            found = corner.diagnosis
            said = "" if found is None else found.message
            if found is not None and found.hypothesis is not None:
                said = f"{found.certainty}: `{found.hypothesis}`"
            yield f"| {adapter.title} | `{corner.name}` | {failure.message} | {said} |"


def programs() -> Iterator[str]:
    """Each deviation with its program, as lines of Markdown."""
    for deviation in DEVIATIONS:
        yield f"\n### {deviation.title}\n\n{verdict(deviation)}{deviation.text}"
        if deviation.code is not None:
            yield f"\n```python\n{deviation.code}```"


def verdict(deviation: Deviation) -> str:
    """What a deviation is by the library's own documentation, as a sentence."""
    said = "Its documentation promises nothing here."
    if deviation.quote is not None:
        said = f"The documentation of {deviation.source} says: `` {deviation.quote} ``"
    return f"**{'Breaks its documentation' if deviation.breaks else 'Another definition'}.** {said}\n\n"


assert all(corner in BY_NAME for _, corner in BY_CELL)
if __name__ == "__main__":
    sys.exit(main())
