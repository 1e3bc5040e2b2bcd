"""For `make docs`: what is no page of the site, but a file of the project, is named there in place of a link to it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What mkdocs calls with the text of each page."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
