"""The computation that all peers share, so that they differ in serving only."""

from __future__ import annotations

import argparse

import numpy as np


def attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return output and weights of softmax attention over the last two axes, in float32."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= np.float32(query.shape[-1] ** -0.5)
    scores -= scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, weights


def port() -> int:
    """Return the value of --port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    return int(parser.parse_args().port)
