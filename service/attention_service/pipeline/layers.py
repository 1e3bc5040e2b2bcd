"""The stored layers of a worker, for its event loop: files are read in worker threads, each layer by one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from anyio import to_thread

from attention_service.codecs.decoded import Decoded, text_of
from attention_service.errors import ServiceError, TimeLimit, UnknownLayer, drop_tracebacks, quote
from attention_service.layers.layer import LAYER, Layer
from attention_service.layers.store import INTERVAL, SETUP, LayerStore
from attention_service.pipeline.execution import Execution
from attention_service.schemas.layers import StoredLayer, StoredLayers


class Layers:
    """The stored layers. store: reads them; None for a service that has none"""

    def __init__(self, store: LayerStore | None) -> None:
        self._store = store
        self._reading: dict[str, asyncio.Task[Layer]] = {}
        self._listing: asyncio.Task[bytes] | None = None
        self._listed = 0.0

    async def of(self, decoded: Decoded, execution: Execution) -> Layer | None:
        """The layer that a request names; None if it names none, or something that is no name.

        Errors: UnknownLayer, LayerUnavailable, TimeLimit, Cancelled.
        """
        name = text_of(decoded.fields.get(LAYER))
        if name is None:
            return None
        if self._store is None:
            raise UnknownLayer.at(f"/{LAYER}", "a service with stored layers", quote(name), SETUP)
        return self._store.fresh(name) or await self._wait(self._store, name, execution)

    async def names(self) -> frozenset[str]:
        """The names of all layers."""
        if self._store is None:
            return frozenset()
        known = self._store.listed()
        return await to_thread.run_sync(self._store.names) if known is None else known

    async def all(self) -> bytes:
        """What all layers are, as the JSON of StoredLayers. The files are looked at by one caller in each INTERVAL."""
        if self._store is None:
            return _list_of([])
        now = asyncio.get_running_loop().time()
        if self._listing is None or (self._listing.done() and now - self._listed >= INTERVAL):
            self._listed, store = now, self._store
            self._listing = asyncio.create_task(to_thread.run_sync(lambda: _list_of(store.describe_all())))
        return await asyncio.shield(self._listing)

    async def describe(self, name: str) -> StoredLayer:
        """What a layer is. Errors: UnknownLayer, LayerUnavailable."""
        if self._store is None:
            raise UnknownLayer.at(f"/{LAYER}", "a service with stored layers", quote(name), SETUP)
        return await to_thread.run_sync(self._store.describe, name)

    async def _wait(self, store: LayerStore, name: str, execution: Execution) -> Layer:
        """A layer whose files must be looked at. While another request does that, its last version."""
        task = self._reading.get(name)
        if task is None:
            task = self._reading[name] = asyncio.create_task(to_thread.run_sync(store.get, name))
            task.add_done_callback(lambda done: self._end(name, done))
        elif (last := store.last(name)) is not None:
            return last
        try:
            async with execution.cancel_on_disconnect(), asyncio.timeout(execution.deadline.left):
                return await execution.deadline.wait(asyncio.shield(task))
        except TimeoutError:
            raise TimeLimit.at(
                f"/{LAYER}", "a layer that is read within the time limit", "one that takes more"
            ) from None
        except ServiceError as error:  # which other requests may wait for, too
            kind, faults, headers = type(error), error.faults, error.headers
        raise kind(*faults, headers=headers)

    def _end(self, name: str, task: asyncio.Task[Any]) -> None:
        del self._reading[name]
        if not task.cancelled():
            drop_tracebacks(task.exception())  # an exception that is never retrieved would be logged


def _list_of(layers: list[StoredLayer]) -> bytes:
    return StoredLayers(layers=layers).model_dump_json(exclude_none=True).encode()
