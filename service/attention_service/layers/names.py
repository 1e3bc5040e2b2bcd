"""The names of stored layers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from attention_service.version import MODEL

# No name is a path: there is no slash, and none begins with a dot.
NAME: Final = re.compile(r"(?!\.)[a-zA-Z0-9._-]{1,64}")
RULE: Final = f"1 to 64 of a-z A-Z 0-9 . _ -, no dot at the start, and not {MODEL}"
# Names that an error lists.
MAX_LISTED: Final = 5


def is_name(name: str) -> bool:
    """True if a layer may have this name. That of the model that computes requests without a layer is taken."""
    return NAME.fullmatch(name) is not None and name != MODEL


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are most like a name; the first ones if none is like it."""
    names = sorted(known)
    return get_close_matches(name[:64], names, n=MAX_LISTED, cutoff=0.5) or names[:MAX_LISTED]
