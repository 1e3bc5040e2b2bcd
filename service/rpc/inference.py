"""The methods of the protocol: health, metadata, inference, each from one message to another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.json_format import ParseDict

from service.codecs import never
from service.codecs.decoded import Body, Decoded
from service.codecs.oip import grpc as oip_grpc
from service.codecs.oip.messages import MESSAGES
from service.codecs.oip.outputs import Wish
from service.errors import BadRequest, Busy, Fault, MethodNotAllowed, TooSlow, settle
from service.observability.metrics import ComputedRequest
from service.pipeline.deadline import Deadline
from service.pipeline.engine import Engine, in_thread
from service.rpc.calls import Exchange, Method
from service.schemas.inference import MODEL, MODEL_METADATA, SERVER_METADATA, VERSION, check_model
from service.schemas.request import AttentionRequest
from service.schemas.response import answer
from service.settings import Settings

MEDIA_TYPE: Final = "application/grpc"
# Bytes of a message without its raw tensors that are read in about a millisecond, and of these, which are copied once.
SMALL_HEAD: Final = 2**15
SMALL_BODY: Final = 2**22
# How many times the memory of a message it takes: as it came, and its tensors.
COPIES: Final = 2
# Part of the memory that messages may take while they are received: one in so many.
RECEIVING_SHARE: Final = 4
# Bytes of an answer that are written in a thread.
LARGE_ANSWER: Final = 2**20


class MessageDecoder:
    """Decodes one inference, and keeps which outputs it wants. Errors: InvalidTensors, if it is no message."""

    packed = False
    quick = staticmethod(never)

    def __init__(self, body: bytes) -> None:
        self._message = oip_grpc.split(body)
        self._is_small = len(self._message.head) <= SMALL_HEAD
        self.wish: Wish | None = None

    @property
    def inline(self) -> int:
        """Up to which length a body is read at once."""
        return SMALL_BODY if self._is_small else SMALL_HEAD

    def decode_bound(self, length: int, limit: int) -> int:
        """Bytes that a message of this length, and decoding it, take at most."""
        return oip_grpc.decode_bound(length)

    def decode_bytes(self, body: Body, limit: int) -> int:
        """The same for this message."""
        return oip_grpc.decode_bytes(self._message, len(body))

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the request. Errors: NotFound besides those of the codec."""
        request = oip_grpc.parse("ModelInferRequest", self._message.head)
        check_model(request.model_name, request.model_version or VERSION)
        decoded, self.wish = oip_grpc.decode(request, self._message.raw)
        return decoded


class Inference:
    """What the service answers. methods: by their names, those that need nothing but their name read no message."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        largest = COPIES * settings.max_body_bytes
        self._receiving = asyncio.Semaphore(max(1, engine.admission.memory // (RECEIVING_SHARE * largest)))
        self.methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }

    async def unknown(self, exchange: Exchange) -> bytes:
        """Errors: MethodNotAllowed."""
        raise MethodNotAllowed(Fault("", f"a method among {', '.join(self.methods)}", "another"))

    async def _server_live(self, exchange: Exchange) -> bytes:
        return _written("ServerLiveResponse", live=True)

    async def _server_ready(self, exchange: Exchange) -> bytes:
        return _written("ServerReadyResponse", ready=self._is_ready())

    async def _server_metadata(self, exchange: Exchange) -> bytes:
        return _written("ServerMetadataResponse", **SERVER_METADATA.model_dump())

    async def _model_ready(self, exchange: Exchange) -> bytes:
        await self._named("ModelReadyRequest", exchange)
        return _written("ModelReadyResponse", ready=self._is_ready())

    async def _model_metadata(self, exchange: Exchange) -> bytes:
        await self._named("ModelMetadataRequest", exchange)
        return _written("ModelMetadataResponse", **MODEL_METADATA.model_dump())

    def _is_ready(self) -> bool:
        try:
            self._engine.check_ready()
        except Busy:
            return False
        return True

    async def _named(self, name: str, exchange: Exchange) -> None:
        """Errors: NotFound for a message that names another model."""
        request = oip_grpc.parse(name, await self._receive(exchange))
        check_model(request.name, request.version or VERSION)

    async def _receive(self, exchange: Exchange) -> bytes:
        """The message of a call.

        gRPC tells no length before the message is complete, and receives it by itself. So a bounded number of calls
        receive at a time, each with memory for the largest message.

        Errors: Busy, TooSlow, BadRequest.
        """
        execution, seconds = exchange.execution, self._settings.read_timeout
        most = min(COPIES * self._settings.max_body_bytes, self._engine.admission.memory)
        execution.admit(most)
        try:
            async with asyncio.timeout(seconds), self._receiving:
                await execution.grow(most)
                message = await exchange.context.read()
        except TimeoutError:
            raise TooSlow(Fault("", f"a request that arrives within {seconds:g} s", "only a part of it")) from None
        if message is grpc.aio.EOF:  # or one that was too long, which gRPC has refused by itself
            raise BadRequest.at("", f"one message of at most {self._settings.max_body_bytes} bytes", "none")
        body: bytes = message
        execution.shrink(COPIES * len(body))
        execution.restart_time_limit()
        return body

    async def _infer(self, exchange: Exchange) -> bytes:
        body = await self._receive(exchange)
        return await run_to_end(self._computed(exchange, body), exchange.execution.deadline)

    async def _computed(self, exchange: Exchange, body: bytes) -> bytes:
        """The answer to a request. Errors: ServiceError of every kind, Cancelled."""
        execution, engine = exchange.execution, self._engine
        execution.timings.begin()
        decoder = MessageDecoder(body)
        request = await engine.prepare(AttentionRequest, decoder, body, execution)
        returned = request.plan.returned_bytes
        assert decoder.wish is not None
        encoding = oip_grpc.encode_bytes(returned, raw=decoder.wish.default)
        result = await engine.attend(request, execution, encoding)
        fields = answer(request.spec, result, exchange.request_id)
        write = partial(oip_grpc.encode, fields, decoder.wish, MODEL, VERSION)
        written = write() if returned < LARGE_ANSWER else await in_thread(execution.deadline, write)
        execution.timings.step("encode")
        execution.shrink(COPIES * len(written))
        backend, kernel = fields["metadata"]["backend"], fields["metadata"]["kernel"]
        exchange.computed = ComputedRequest(MEDIA_TYPE, MEDIA_TYPE, backend, kernel, len(body), execution.timings)
        return written


async def run_to_end(work: Coroutine[Any, Any, bytes], deadline: Deadline) -> bytes:
    """The result of a coroutine that is not cancelled with its caller, as threads cannot be: its deadline ends."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        deadline.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            settle(task.exception())  # which would be logged, too, as if it had been forgotten
        raise


def _written(name: str, /, **fields: Any) -> bytes:
    """A message in bytes."""
    message: bytes = ParseDict(fields, MESSAGES[name]()).SerializeToString()
    return message
