"""Keeps simdjson from being imported: a plug-in of pytest, and a command that runs a module.

`pytest -p tests.helpers.without_simdjson`, `python -m tests.helpers.without_simdjson MODULE`
"""

from __future__ import annotations

import runpy
import sys

sys.modules["simdjson"] = None  # type: ignore[assignment]  # so that its import fails

if __name__ == "__main__":
    runpy.run_module(sys.argv[1], run_name="__main__")
