"""The engine without HTTP: `from attention_service import attend`.

- functions: attend(), compare() and assert_attention() with all their parameters, generated from the schemas
- assertion: what assert_attention() does with a report, WeakInputs, WrongOutput
- calls: what they do with their arguments; frames: labels from data frames
- result: what attend() returns, page: as one HTML file; report: what compare() returns
- engines: call() and merge(), for calls of other libraries; engine_calls: compare_call(), assert_call() and
  judge_recording(); recordings, recording_verdicts: what it reads and says; tensor_files: tensors in files
- types: the types of arguments
"""

from __future__ import annotations

from attention_service.library.assertion import WeakInputs, WrongOutput
from attention_service.library.calls import backends
from attention_service.library.engine_calls import assert_call, compare_call, judge_recording
from attention_service.library.engines import CallResult, call, merge
from attention_service.library.functions import assert_attention, attend, compare
from attention_service.library.result import AttentionResult

__all__ = [
    "AttentionResult",
    "CallResult",
    "WeakInputs",
    "WrongOutput",
    "assert_attention",
    "assert_call",
    "attend",
    "backends",
    "call",
    "compare",
    "compare_call",
    "judge_recording",
    "merge",
]
