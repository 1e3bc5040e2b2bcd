"""The picture in the README: the weights of its request, as the service computes them."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from service import attend

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 96, 56, 96, 44


def picture(request: dict[str, Any]) -> str:
    """A heatmap as SVG, a row for each query, a column for each key; readable on light and on dark pages."""
    weights = attend(**request)["attention_weights"]
    queries, keys = request["query_tokens"], request["key_tokens"]
    width, height = LEFT + CELL_WIDTH * len(keys) + 12, TOP + CELL_HEIGHT * len(queries) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="15">',
        "<title>Attention weights: each row is a query, each column a key</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
    ]
    for j, key in enumerate(keys):
        parts.append(_text(LEFT + CELL_WIDTH * (j + 0.5), TOP - 14, key, "#57606a"))
    for i, query in enumerate(queries):
        parts.append(_text(LEFT - 12, TOP + CELL_HEIGHT * (i + 0.5) + 5, query, "#57606a", "end"))
        for j, weight in enumerate(weights[i]):
            parts += _cell(LEFT + CELL_WIDTH * j, TOP + CELL_HEIGHT * i, float(weight))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _cell(x: int, y: int, weight: float) -> list[str]:
    red, green, blue = (round(255 + (full - 255) * weight**0.5) for full in (9, 105, 218))
    ink = "#ffffff" if weight > 0.3 else "#24292f"
    return [
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL_WIDTH - 4}" height="{CELL_HEIGHT - 4}" rx="4" '
        f'fill="rgb({red},{green},{blue})" stroke="#d0d7de"/>',
        _text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 5, f"{weight:.2f}", ink),
    ]


def _text(x: float, y: float, text: str, color: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
