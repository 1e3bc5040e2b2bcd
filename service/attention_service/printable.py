"""Text of strangers, such as names of files and of tensors, shown in a terminal or a log."""

from __future__ import annotations

import re
from typing import Final

# Control characters, separators of lines, marks that turn the direction of text, and halves of surrogate pairs.
CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text on one line: characters that would control a terminal, or the direction of text, are escaped."""
    return CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
