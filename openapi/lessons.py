"""The examples of the page: lessons, then the golden cases, which the notebooks are the source of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CASES: Final = Path(__file__).resolve().parent.parent / "tests" / "cases"


def page_examples() -> str:
    """The examples as JSON by name, in the order in which the page lists them; lessons have a text."""
    cases = {path.stem: read(path) for path in sorted(CASES.glob("*.json"))}
    lessons = {path.stem.partition("-")[2]: lesson(read(path), cases) for path in sorted(CASES.glob("lessons/*.json"))}
    golden = {name: {field: case[field] for field in ("title", "source", "request")} for name, case in cases.items()}
    return json.dumps(lessons | golden, ensure_ascii=False, separators=(",", ":")) + "\n"


def lesson(own: dict[str, Any], cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A lesson with its whole request: that of a golden case with some options, or its own."""
    case = cases.get(own.get("case", ""), {"request": {}})
    whole = {**case, **own, "request": {**case["request"], **own.get("request", {})}}
    return {field: whole[field] for field in ("title", "text", "source", "choice", "request") if field in whole}


def read(path: Path) -> dict[str, Any]:
    """The content of a file of JSON."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
