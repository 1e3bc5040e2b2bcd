"""What a saved page holds, read by other means than its own."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np


def parts_of(text: str) -> dict[str, str]:
    """The deflated parts of a page: its style, its saved numbers and its script."""
    (packed,) = re.findall(r'id="deflated">([^<]*)<', text)
    parts = json.loads(zlib.decompress(base64.b64decode(packed)))
    return {attributes.get("id", tag): content for tag, attributes, content in parts}


def array_of(saved: Any) -> np.ndarray:
    """An array of a page: a typed one, or nested lists."""
    if isinstance(saved, list):
        return np.array(saved, np.float64)
    return np.frombuffer(base64.b64decode(saved["data"]), saved["dtype"]).reshape(saved["shape"])


def addresses(text: str) -> list[str]:
    """What a page refers to outside of itself."""
    linked = re.findall(r'(?:src|href|action|srcset|data)="([^"]*)"', text)
    style = re.findall(r"url\(([^)]*)\)|@import", parts_of(text)["style"])
    return [address for address in [*linked, *style] if not address.startswith(("data:", "#"))]
