"""Data frames as arguments: the names of their rows are the labels of their tokens.

pandas is no dependency: whatever has `__array__`, `index` and `columns` is a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

# The sources whose tokens each field labels; a request has one of them. `input` alone is the keys, too, which then have
# the labels of the queries.
SOURCES: Final = {"query_tokens": ("query", "input"), "key_tokens": ("key", "context")}


def with_labels(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, with labels of queries and keys from frames where the call gives none."""
    layout = arguments["layout"]
    in_columns = isinstance(layout, str) and layout == "dl"
    found = {}
    for field, sources in SOURCES.items():
        has_past = field == "key_tokens" and arguments["past_key"] is not None  # whose tokens no frame names
        for source in sources:
            labels = _labels(arguments[source], in_columns=in_columns)
            if labels is not None and arguments[field] is None and not has_past:
                found[field] = labels
    return {**arguments, **found} if found else arguments


def _labels(value: Any, *, in_columns: bool) -> list[str] | None:
    """The names of the rows, or columns, of a frame as text; None if there are none but 0, 1, 2 …, or for no frame."""
    if (
        value is None
        or type(value) is np.ndarray
        or not all(hasattr(value, name) for name in ("__array__", "index", "columns"))
    ):
        return None
    labels = [str(name) for name in (value.columns if in_columns else value.index)]
    return None if labels == [str(number) for number in range(len(labels))] else labels
