"""Colour maps: viridis for weights, and a diverging map for numbers with a sign.

A map is eleven colours, with linear interpolation in sRGB between them. The page has the same ones.
"""

from __future__ import annotations

from typing import Final

import numpy as np

# viridis by S. van der Walt and N. Smith (CC0), at 0, 0.1, … 1: equal steps look equal, also to the colour-blind.
SEQUENTIAL: Final = (
    "#440154",
    "#482475",
    "#414487",
    "#355f8d",
    "#2a788e",
    "#21918c",
    "#22a884",
    "#44bf70",
    "#7ad151",
    "#bddf26",
    "#fde725",
)
# RdBu by C. Brewer (Apache-2.0), blue for negative numbers.
DIVERGING: Final = (
    "#053061",
    "#2166ac",
    "#4393c3",
    "#92c5de",
    "#d1e5f0",
    "#f7f7f7",
    "#fddbc7",
    "#f4a582",
    "#d6604d",
    "#b2182b",
    "#67001f",
)
LEVELS: Final = 256


def rgb(colour: str) -> tuple[int, int, int]:
    """The red, green and blue of a colour like #440154, 0 to 255 each."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def table(anchors: tuple[str, ...]) -> np.ndarray:
    """The 256 colours of a map, (256, 3), uint8."""
    places = np.linspace(0, 1, len(anchors))
    wanted = np.linspace(0, 1, LEVELS)
    channels = np.array([rgb(colour) for colour in anchors], np.float64).T
    colours = np.stack([np.interp(wanted, places, channel) for channel in channels], axis=1)
    return np.rint(colours).astype(np.uint8)


def is_dark(colour: tuple[int, int, int]) -> bool:
    """True if white text is easier to read on a colour than black text (WCAG 2 relative luminance)."""
    shares = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
    luminance: float = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return luminance < 0.179


def mixed(one: tuple[int, int, int], other: tuple[int, int, int], share: float) -> tuple[int, int, int]:
    """A colour between two: `share` of the second."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue
