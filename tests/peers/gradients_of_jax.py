"""Gradients of random requests in float64, as JAX differentiates attention composed of jax.numpy; in float32, as it
differentiates its own jax.nn.dot_product_attention, of requests that this can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_service import attend

jax.config.update("jax_enable_x64", True)

OPTIONS = (
    "mask",
    "bias",
    "is_causal",
    "window",
    "alibi_slopes",
    "softcap",
    "sinks",
    "scale",
    "scale by head",
    "sigmoid",
)
SAID_BY_JAX = {"mask", "bias", "is_causal", "window", "scale"}
# Of the largest number of a gradient, or of 1. The softmax of jax.nn.dot_product_attention is in float32.
ALLOWED, ALLOWED_FLOAT32 = 1e-10, 1e-5
Arrays = Mapping[str, Any]


def by_jax(random: np.random.Generator) -> float:
    """The largest deviation of the gradients of both backends in a random request, divided by what is allowed."""
    b, g, groups, q, k, d, e = (int(x) for x in random.integers(1, (4, 4, 4, 13, 13, 17, 17)))
    h, names = g * groups, {name for name in OPTIONS if random.random() < 0.25}
    is_said = names <= SAID_BY_JAX and bool(random.random() < 0.5)
    e = d if is_said else e
    shapes = {"query": (b, h, q, d), "key": (b, g, k, d), "value": (b, g, k, e)}
    shapes |= {name: shape for name, shape in {"bias": (b, h, q, k), "alibi_slopes": (h,)}.items() if name in names}
    shapes |= {"sinks": (h,)} if "sinks" in names and "sigmoid" not in names else {}
    shapes |= {"scale": (h,)} if "scale by head" in names else {"scale": ()} if "scale" in names else {}
    arrays = {name: np.asarray(random.normal(size=shape)) for name, shape in shapes.items()}
    seen = np.ones((b, h, q, k), bool)
    request: dict[str, Any] = {"query_offset": 0}
    distances = np.arange(k) - np.arange(q)[:, None]
    if "mask" in names:
        request["mask"] = random.random((b, h, q, k)) < 0.6
        seen &= request["mask"]
    if "is_causal" in names:
        request["is_causal"] = True
        seen &= distances <= 0
    if "window" in names:
        request["window"] = {"left": int(random.integers(1, 6)), "right": int(random.integers(0, 4))}
        seen &= (distances >= -request["window"]["left"]) & (distances <= request["window"]["right"])
    request |= {"softcap": float(random.uniform(0.5, 5))} if "softcap" in names else {}
    request |= {"normalization": "sigmoid"} if "sigmoid" in names else {}
    cotangent, of_logsumexp = random.normal(size=(b, h, q, e)), random.normal(size=(b, h, q))
    request |= {"grad_output": cotangent, "gradients": "all"}
    if is_said:
        cotangent *= seen.any(-1)[..., None]  # rows without a key are means of all values there
        expected = _of_their_own(arrays, request, cotangent)
    else:
        has_logsumexp = "sigmoid" not in names
        request |= {"grad_logsumexp": of_logsumexp} if has_logsumexp else {}

        def function(given: Arrays) -> tuple[jax.Array, jax.Array]:
            return composed(given, seen, distances, request.get("softcap"), is_sigmoid=not has_logsumexp)

        expected = _gradients(function, arrays, (cotangent, of_logsumexp * has_logsumexp))
    worst, allowed = 0.0, ALLOWED_FLOAT32 if is_said else ALLOWED
    for backend in ("numpy", "torch"):
        found = attend(**arrays, **request, backend=backend)
        for name, array in expected.items():
            right = np.asarray(array)
            deviation = np.abs(found[f"grad_{name}"] - right).max() / (1 + np.abs(right).max())
            worst = max(worst, float(np.nan_to_num(deviation, nan=np.inf)) / allowed)
    return worst


def composed(
    arrays: Arrays, seen: np.ndarray, distances: np.ndarray, softcap: float | None, *, is_sigmoid: bool
) -> tuple[jax.Array, jax.Array]:
    """Output (b, h, q, e) and logsumexp (b, h, q), which is 0 in rows without a key and for the sigmoid."""
    query, groups = arrays["query"], arrays["query"].shape[1] // arrays["key"].shape[1]
    key, value = (jnp.repeat(arrays[name], groups, axis=1) for name in ("key", "value"))
    scale = jnp.asarray(arrays.get("scale", query.shape[-1] ** -0.5))
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * (scale[:, None, None] if scale.ndim else scale)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    scores = scores + arrays["bias"] if "bias" in arrays else scores
    if "alibi_slopes" in arrays:
        scores = scores - arrays["alibi_slopes"][:, None, None] * np.abs(distances)
    if is_sigmoid:
        weights = jnp.where(seen, jax.nn.sigmoid(scores), 0)
        return weights @ value, jnp.zeros(scores.shape[:3])
    if "sinks" in arrays:
        sinks = jnp.broadcast_to(arrays["sinks"][:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([jnp.where(seen, scores, -jnp.inf), sinks], axis=-1)
        return jax.nn.softmax(scores)[..., :-1] @ value, jax.nn.logsumexp(scores, axis=-1)
    sees = seen.any(-1, keepdims=True)
    scores = jnp.where(seen, scores, jnp.where(sees, -jnp.inf, 0))
    weights = jnp.where(sees, jax.nn.softmax(scores), 0)
    return weights @ value, jnp.where(sees[..., 0], jax.nn.logsumexp(scores, axis=-1), 0)


def _of_their_own(arrays: Arrays, request: Mapping[str, Any], cotangent: np.ndarray) -> dict[str, jax.Array]:
    """The gradients of jax.nn.dot_product_attention, without that of a scale, which is no array there."""
    window = request.get("window")
    options: dict[str, Any] = {"scale": float(arrays["scale"]) if "scale" in arrays else None}
    options |= {"mask": request.get("mask"), "is_causal": request.get("is_causal", False)}
    options |= {"local_window_size": None if window is None else (window["left"], window["right"])}
    given = {name: array for name, array in arrays.items() if name != "scale"}

    def function(given: Arrays) -> jax.Array:
        query, key, value = (given[name].swapaxes(1, 2) for name in ("query", "key", "value"))
        found = jax.nn.dot_product_attention(query, key, value, bias=given.get("bias"), **options)
        return found.swapaxes(1, 2)

    return _gradients(function, given, cotangent)


def _gradients(function: Callable[[Arrays], Any], arrays: Arrays, cotangents: Any) -> dict[str, jax.Array]:
    """The gradients of arrays by name, compiled as a whole, which takes a fifth of the time of single operations."""
    compiled = jax.jit(lambda given, cotangents: jax.vjp(function, given)[1](cotangents))
    [found] = compiled(dict(arrays), cotangents)
    return dict(found)
