"""Where requests of models are computed: in this process, or by a service over HTTP."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache
from logging import getLogger
from typing import Any, Final, NamedTuple

import httpx
import numpy as np

from attention_service import torch_arrays
from attention_service.codecs.array_objects import as_numpy
from attention_service.codecs.safetensors import SafetensorsCodec, request_bytes
from attention_service.library import attend

LOG: Final = getLogger(__name__)
URL: Final = "ATTENTION_SERVICE_URL"
KEY: Final = "ATTENTION_SERVICE_KEY"
# A large layer may take long; the service has its own time limit.
TIMEOUT: Final = httpx.Timeout(600, connect=10)
# The status of a busy service, how often it is asked, and the most seconds between two of them.
BUSY: Final = 503
TRIES: Final = 5
MOST_SECONDS: Final = 10.0


class ServiceFailed(RuntimeError):
    """The service over HTTP did not answer with a result."""


class Target(NamedTuple):
    """Where requests are computed. url: None for this process; backend, device, dtype: as in docs/attention.md"""

    url: str | None
    key: str | None
    backend: str
    device: str
    dtype: str | None


_place: Target | None = None


def use(
    url: str | None = None,
    *,
    key: str | None = None,
    backend: str = "auto",
    device: str = "auto",
    dtype: str | None = None,
) -> None:
    """Compute the attention of models by the service at `url` from now on, or in this process if it is None.

    Without a call, the environment variables ATTENTION_SERVICE_URL and ATTENTION_SERVICE_KEY count.

    Args:
        url: The service, as in http://127.0.0.1:8000.
        key: Its API key, if it needs one.
        backend: auto, numpy or torch.
        device: auto, cpu, cuda or cuda:N.
        dtype: What layers and their gradients are computed in, like float64; results are rounded to the types of the
            model's tensors. Default: that of query, key and value, for half types float32.
    """
    global _place
    _place = Target(url, key, backend, device, dtype)


def place() -> Target:
    """Where requests are computed now."""
    return _place or Target(os.environ.get(URL) or None, os.environ.get(KEY) or None, "auto", "auto", None)


def compute(fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a result by name. fields: of a request, with tensors.

    Errors: InvalidRequest in this process, ServiceFailed over HTTP.
    """
    _say_what_is_copied(fields["query"].device)
    where = place()
    wanted = dict(fields) | {"backend": where.backend, "device": where.device, "dtype": where.dtype}
    if where.url is None:
        return dict(attend(**wanted))
    return _post(where.url, where.key, wanted)


def as_tensor(array: np.ndarray, like: Any) -> Any:
    """An array as a tensor on the device of another tensor and of its type. On a CPU it shares the array's memory."""
    tensor = torch_arrays.as_tensor(array if array.flags.writeable else array.copy())
    return tensor.to(device=like.device, dtype=like.dtype)


@cache  # once for each device
def _say_what_is_copied(device: Any) -> None:
    if device.type != "cpu":
        LOG.warning("attention-service computes from copies: each layer's query, key and value leave %s", device)


def _post(url: str, key: str | None, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of the answer of POST /attention. A busy service is asked again.

    Errors: ServiceFailed.
    """
    kind = SafetensorsCodec.media_type
    headers = {"Content-Type": kind, "Accept": kind} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = request_bytes(as_numpy(fields))
    for attempt in range(1, TRIES + 1):
        try:
            answer = _client().post(f"{url.rstrip('/')}/attention", content=body, headers=headers)
        except httpx.HTTPError as error:
            raise ServiceFailed(f"{url}: {type(error).__name__}: {error}") from error
        if answer.status_code != BUSY:
            break
        if attempt == TRIES:
            raise ServiceFailed(f"{url} is busy, after {TRIES} tries: {BUSY}: {answer.text[:2000]}")
        time.sleep(_seconds(answer.headers.get("Retry-After", "")))
    if answer.status_code != 200:
        raise ServiceFailed(f"{url}: {answer.status_code}: {answer.text[:2000]}")
    content = bytearray(answer.content)  # writable, so that tensors may share its memory
    return {
        name: value
        for name, value in SafetensorsCodec().decode(content, len(content)).fields.items()
        if isinstance(value, np.ndarray)
    }


def _seconds(retry_after: str) -> float:
    """How long to wait by a header, 1 second if it has no number: proxies may send a date."""
    return min(float(retry_after), MOST_SECONDS) if retry_after.isdecimal() else 1.0


@cache
def _client() -> httpx.Client:
    """One client for all layers, so that they share a connection."""
    return httpx.Client(timeout=TIMEOUT)
