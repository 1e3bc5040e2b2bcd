"""A hook of mkdocs: replaces links to files outside docs/, which the site does not contain, by their names."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The Markdown of a page with these links replaced. mkdocs calls it for each page."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
