"""FastAPI tuned by hand: the raw body, orjson in both directions, no validation."""

from __future__ import annotations

import numpy as np
import orjson
from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.post("/attention")
async def attention(request: Request) -> Response:
    """Return output and weights of softmax attention."""
    body = orjson.loads(await request.body())
    query, key, value = (np.array(body[name], np.float32) for name in ("query", "key", "value"))
    scores = query @ key.T / np.float32(np.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    answer = {"output": weights @ value, "attention_weights": weights}
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
