"""The methods of the protocol: health, metadata, inference. Each takes a call and returns the message of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import grpc
from google.protobuf.json_format import ParseDict

from attention_service.codecs.oip import check_model
from attention_service.codecs.oip.grpc import GRPCCodec, parse
from attention_service.codecs.oip.messages import HEALTH, MESSAGES, SERVICE
from attention_service.errors import BadRequest, Busy, LayerUnavailable, MethodNotAllowed, TooSlow, drop_tracebacks
from attention_service.observability.requests import ComputedRequest
from attention_service.pipeline.deadline import Deadline
from attention_service.pipeline.engine import Engine
from attention_service.pipeline.run import run
from attention_service.rpc.calls import Call, Method
from attention_service.schemas.inference import MODEL_METADATA, SERVER_METADATA, layer_metadata
from attention_service.settings import Settings
from attention_service.version import MODEL, MODEL_VERSION

# Copies of a message in memory: as it was received, and its tensors.
COPIES: Final = 2
# Part of the memory that messages may take while they are received: one in so many.
RECEIVING_SHARE: Final = 4


class Inference:
    """The methods by their paths. Those without parameters receive no message.

    open_methods: need no key; refusing: True once the server stops and accepts no inference any longer
    """

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self.refusing = False
        largest = COPIES * settings.max_body_bytes
        self._receiving = asyncio.Semaphore(max(1, engine.admission.memory // (RECEIVING_SHARE * largest)))
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        self.methods = {f"/{SERVICE}/{name}": method for name, method in methods.items()}
        # Clients that balance by health watch without a key, and go on where there is no Watch.
        self.open_methods = {f"/{HEALTH}/Check": self._check_health, f"/{HEALTH}/Watch": self.unknown}

    async def unknown(self, call: Call) -> bytes:
        """Refuse a method that does not exist. Errors: MethodNotAllowed."""
        names = ", ".join(path.rpartition("/")[2] for path in self.methods)
        raise MethodNotAllowed.at("", f"a method among {names}", "another")

    async def _check_health(self, call: Call) -> bytes:
        """Health checking of gRPC: of the whole server, whatever service the message names, which is not received."""
        return _written("HealthCheckResponse", status="SERVING" if await self._is_ready() else "NOT_SERVING")

    async def _server_live(self, call: Call) -> bytes:
        try:
            self._engine.check_alive()
        except Busy:
            return _written("ServerLiveResponse", live=False)
        return _written("ServerLiveResponse", live=True)

    async def _server_ready(self, call: Call) -> bytes:
        return _written("ServerReadyResponse", ready=await self._is_ready())

    async def _server_metadata(self, call: Call) -> bytes:
        return _written("ServerMetadataResponse", **SERVER_METADATA.model_dump())

    async def _model_ready(self, call: Call) -> bytes:
        name = await self._model_of("ModelReadyRequest", call)
        return _written("ModelReadyResponse", ready=await self._is_ready(name))

    async def _model_metadata(self, call: Call) -> bytes:
        name = await self._model_of("ModelMetadataRequest", call)
        metadata = MODEL_METADATA if name == MODEL else layer_metadata(await self._engine.layers.describe(name))
        return _written("ModelMetadataResponse", **metadata.model_dump())

    async def _is_ready(self, model: str = MODEL) -> bool:
        """False while the service loads or stops, and for a stored layer whose files cannot be used."""
        try:
            self._engine.check_ready()
            if model != MODEL:
                await self._engine.layers.describe(model)
        except (Busy, LayerUnavailable):
            return False
        return True

    async def _model_of(self, name: str, call: Call) -> str:
        """The model that a message names. Errors: NotFound for one that is not there."""
        request = parse(name, await self._receive(call))
        check_model(request.name, request.version or MODEL_VERSION, await self._engine.layers.names())
        model: str = request.name
        return model

    async def _receive(self, call: Call) -> bytes:
        """The message of a call.

        gRPC tells no length before the message is complete, and receives it by itself. So a bounded number of calls
        receive at a time, each with memory for the largest message.

        Errors: Busy, TooSlow, BadRequest.
        """
        execution, seconds = call.execution, self._settings.read_timeout
        most = min(COPIES * self._settings.max_body_bytes, self._engine.admission.memory)
        execution.lease.begin()
        try:
            async with asyncio.timeout(seconds), self._receiving:
                execution.deadline.restart()
                await execution.grow(most)
                message = await call.context.read()
        except TimeoutError:
            raise TooSlow.at("", f"a request that arrives within {seconds:g} s", "only a part of it") from None
        if message is grpc.aio.EOF:  # or one that was too long, which gRPC has refused by itself
            raise BadRequest.at("", f"one message of at most {self._settings.max_body_bytes} bytes", "none")
        body: bytes = message
        execution.lease.shrink(COPIES * len(body))
        return body

    async def _infer(self, call: Call) -> bytes:
        if self.refusing:
            self._engine.check_running()
        body = await self._receive(call)
        return await run_to_end(self._compute(call, body), call.execution.deadline)

    async def _compute(self, call: Call, body: bytes) -> bytes:
        """The answer to a request. Errors: ServiceError of every kind, Cancelled."""
        execution = call.execution
        codec = GRPCCodec(body, await self._engine.layers.names())
        encoded = await run(self._engine, self._engine.attention, body, codec, codec, execution, call.record.request_id)
        message = b"".join(encoded.chunks)
        call.record.computed = ComputedRequest.of(execution, codec.media_type, codec.media_type)
        return message


async def run_to_end(work: Coroutine[Any, Any, bytes], deadline: Deadline) -> bytes:
    """The result of a coroutine. If the caller is cancelled, the deadline is: the coroutine may wait for a thread."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        deadline.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            drop_tracebacks(task.exception())  # an exception that is never retrieved would be logged
        raise


def _written(name: str, /, **fields: Any) -> bytes:
    """A message of this name, serialized."""
    message: bytes = ParseDict(fields, MESSAGES[name]()).SerializeToString()
    return message
