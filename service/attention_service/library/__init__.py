"""The engine without HTTP: `from attention_service import attend`.

- functions: attend() and compare() with all their parameters, generated from the schemas
- assertion: assert_attention(), WeakInputs
- calls: what they do with their arguments
- result: what attend() returns; report: what compare() returns
- types: the types of arguments
"""

from __future__ import annotations

from attention_service.library.assertion import WeakInputs, assert_attention
from attention_service.library.calls import backends
from attention_service.library.functions import attend, compare
from attention_service.library.result import AttentionResult

__all__ = ["AttentionResult", "WeakInputs", "assert_attention", "attend", "backends", "compare"]
