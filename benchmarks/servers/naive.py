"""FastAPI as most people write it: nested lists, validated by pydantic."""

from __future__ import annotations

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()


class Request(BaseModel):
    """Matrices as lists."""

    query: list[list[float]]
    key: list[list[float]]
    value: list[list[float]]


class Answer(BaseModel):
    """Matrices as lists."""

    output: list[list[float]]
    attention_weights: list[list[float]]


@app.post("/attention")
async def attention(request: Request) -> Answer:
    """Return output and weights of softmax attention."""
    query, key, value = np.array(request.query), np.array(request.key), np.array(request.value)
    scores = query @ key.T / np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return Answer(output=(weights @ value).tolist(), attention_weights=weights.tolist())
