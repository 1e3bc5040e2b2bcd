"""What the comparison prints at its end."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the properties `architecture` that tests recorded."""
    reports = terminalreporter.getreports("passed")
    lines = [str(value) for report in reports for name, value in report.user_properties if name == "architecture"]
    if lines:
        terminalreporter.section(f"{len(lines)} architectures of transformers")
        for line in sorted(lines):
            terminalreporter.write_line(line)
