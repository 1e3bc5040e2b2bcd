"""Heatmaps: seconds and bytes of pictures of usual sizes, from the fields of a request to the bytes of the picture.

python -m benchmarks.heatmaps
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import numpy as np

from attention_service.backends.registry import Backends
from attention_service.codecs.decoded import Decoded
from attention_service.render.heatmap import PNG, SVG, draw, make_heatmap_request

ROUNDS: Final = 7
DIM: Final = 64
# Heads, tokens, media type, options of the picture.
PICTURES: Final[tuple[tuple[int, int, str, dict[str, Any]], ...]] = (
    (1, 16, SVG, {}),
    (12, 64, SVG, {}),
    (12, 64, PNG, {}),
    (1, 4096, PNG, {}),
    (1, 4096, PNG, {"bins": "mean"}),
    (1, 32768, PNG, {"bare": True}),
)


def main() -> None:
    """Print a line for each picture."""
    backend = Backends(threads=2).choose("numpy", "cpu")
    for heads, tokens, media_type, options in PICTURES:
        random = np.random.default_rng(0)
        arrays = random.standard_normal((3, heads, tokens, DIM)).astype(np.float32)
        fields = dict(zip(("query", "key", "value"), arrays, strict=True))
        fields |= {"layout": "hld", "is_causal": True, "heatmap": options}
        parts, size = [], 0
        for _ in range(ROUNDS if tokens < 10_000 else 1):
            start = time.perf_counter()
            size = len(draw(make_heatmap_request(Decoded(fields, frozenset())), media_type, backend))
            parts.append(time.perf_counter() - start)
        name = f"{heads} heads × {tokens} tokens, {media_type}, {options or 'as it is'}"
        print(f"{name:60} {statistics.median(parts) * 1e3:8.0f} ms {size / 1e3:8.0f} KB")


if __name__ == "__main__":
    main()
