"""The methods of the protocol: health, metadata, inference, each from one message to another."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

import grpc
from anyio import to_thread
from google.protobuf.json_format import ParseDict

from service.codecs import never, oip_grpc
from service.codecs.decoded import Body, Decoded
from service.codecs.oip_messages import MESSAGES
from service.codecs.oip_outputs import Wish
from service.engine import Engine
from service.errors import BadRequest, Busy, Fault, MethodNotAllowed, TooSlow, settle
from service.metrics import Tally, note_computed
from service.reading import read, read_in_thread
from service.rpc.calls import Exchange, Method
from service.schemas.inference import MODEL, MODEL_METADATA, SERVER_METADATA, VERSION, check_model
from service.schemas.request import AttentionRequest
from service.schemas.response import answer
from service.settings import Settings
from service.stop import Stop

MEDIA_TYPE: Final = "application/grpc"
# Bytes of a message without its raw tensors that are read in about a millisecond, and of these, which are copied once.
SMALL_HEAD: Final = 2**15
SMALL_BODY: Final = 2**22
# How many times the memory of a message it takes: as it came, and its tensors.
COPIES: Final = 2
# A byte in a typed field makes an integer of eight; while it is read, a few times so much is taken.
GROWTH: Final = 8
EFFORT: Final = 32
# Bytes of an answer that are written in a thread.
LARGE_ANSWER: Final = 2**20


class Reader:
    """Reads one inference, and remembers how its answer is wanted. Errors: InvalidTensors, if it is no message."""

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

    @property
    def effort(self) -> int:
        """How many times the memory of a body is used while it is read."""
        return COPIES if self._is_small else EFFORT

    def memory(self, length: int, limit: int) -> int:
        """Bytes for a body of this length and its arrays."""
        return COPIES * length + GROWTH * len(self._message.head)

    def decode(self, body: Body, limit: int) -> Decoded:
        """The fields of the request. Errors: NotFound besides those of the codec."""
        request = oip_grpc.parse("ModelInferRequest", self._message.head)
        check_model(request.model_name, request.model_version or VERSION)
        decoded, self.wish = oip_grpc.decode(request, self._message.raw)
        return decoded


class Inference:
    """What the service answers. methods: by their names, those that need nothing but their name read no message."""

    def __init__(self, settings: Settings, engine: Engine, tally: Tally | None) -> None:
        self._settings = settings
        self._engine = engine
        self._tally = tally
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
        """The message of a call, which is read no sooner than there is memory for the largest: none says its length.

        Errors: Busy, TooSlow, BadRequest.
        """
        call, seconds = exchange.call, self._settings.read_timeout
        call.hold(await self._engine.bodies.enter(COPIES * self._settings.max_body_bytes, call.stop))
        try:
            async with asyncio.timeout(seconds):
                message = await exchange.context.read()
        except TimeoutError:
            raise TooSlow(Fault("", f"a request that arrives within {seconds:g} s", "only a part of it")) from None
        if message is grpc.aio.EOF:  # or one that was too long, which gRPC has refused by itself
            raise BadRequest.at("", f"one message of at most {self._settings.max_body_bytes} bytes", "none")
        body: bytes = message
        return body

    async def _infer(self, exchange: Exchange) -> bytes:
        body = await self._receive(exchange)
        return await to_its_end(self._computed(exchange, body), exchange.call.stop)

    async def _computed(self, exchange: Exchange, body: bytes) -> bytes:
        """The answer to a request. Errors: ServiceError of every kind, Abandoned."""
        call, engine, limit = exchange.call, self._engine, self._settings.max_body_bytes
        call.timings.begin()
        reader = Reader(body)
        call.resize(min(reader.memory(len(body), limit), engine.bodies.memory))
        if len(body) <= reader.inline:
            job, _ = read(AttentionRequest, reader, body, call, limit)
        else:
            job = await read_in_thread(AttentionRequest, reader, body, call, engine, limit)
        result = await engine.attend(job, call, job.plan.returned_bytes)
        fields = answer(job.spec, result, exchange.request_id)
        assert reader.wish is not None
        write = partial(oip_grpc.encode, fields, reader.wish, MODEL, VERSION)
        written = write() if job.plan.returned_bytes < LARGE_ANSWER else await to_thread.run_sync(write)
        call.timings.step("encode")
        call.resize(COPIES * len(written) if engine.is_quick(job) else 0)  # others have memory for their answers
        exchange.noted = note_computed(
            self._tally, (MEDIA_TYPE, MEDIA_TYPE), fields["metadata"], len(body), len(written), call.timings
        )
        return written


async def to_its_end(work: Coroutine[Any, Any, bytes], stop: Stop) -> bytes:
    """The result of work that is not cancelled with its caller, as threads are not, but told to end early."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.abandon()
        await asyncio.wait([task])
        if not task.cancelled():
            settle(task.exception())  # which would be logged, too, as if it had been forgotten
        raise


def _written(name: str, /, **fields: Any) -> bytes:
    """A message in bytes."""
    message: bytes = ParseDict(fields, MESSAGES[name]()).SerializeToString()
    return message
