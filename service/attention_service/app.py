"""The FastAPI application: its routes, its middleware, and the objects that requests share."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from anyio import to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from attention_service.errors import ServiceError
from attention_service.http.auth import Guard
from attention_service.http.entry import Entry
from attention_service.http.problems import on_defect, on_http_exception, on_service_error, on_validation_error
from attention_service.observability.metrics import Metrics
from attention_service.pipeline.engine import Engine
from attention_service.routes import inference, layers, openapi, operations, page, tensors
from attention_service.runtime.process import end_with_parent, tune, when_told_to_stop
from attention_service.settings import Settings, load_settings
from attention_service.settings.checks import split_list
from attention_service.version import __version__

if TYPE_CHECKING:  # an extra
    from attention_service.observability.tracing import Tracing

logger = logging.getLogger("attention")

# The header of binary tensors in the inference protocol.
BINARY: Final = "Inference-Header-Content-Length"

DESCRIPTION = """\
Computes scaled dot-product attention exactly: send matrices, get the output, the attention weights and, if you ask for
them, all intermediate results.

Axes are named by letters: `b` batch, `h` heads, `l` tokens (`q` in the query, `k` in key and value), `d` features.
Errors are problem details (RFC 9457) with a stable `code` and a JSON pointer to each fault. On an optional field
`null` means absent, which is its default if it names no other one. npz and safetensors hold arrays by the names of
their fields, nested ones dotted, and the rest as JSON text (docs/formats.md). A sentence describes each field here;
docs/attention.md has the rest.
"""
TAGS = [
    {"name": "attention", "description": "Compute attention."},
    {"name": "operations", "description": "Health, metrics, and what problem codes mean."},
    {"name": "stored layers", "description": "Describe the layers that requests can name."},
    {"name": "inference protocol", "description": "Compute attention with clients of Triton, KServe and others (v2)."},
]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """While the service runs: warm up, answer gRPC as well, and keep the metrics updated that other workers expose.

    At the end send the spans that are left: processes of several workers end without the handlers of `atexit`.
    """
    state = app.state
    background = [] if state.engine.ready else [asyncio.create_task(warm_up(state.engine))]
    if state.metrics is not None and state.metrics.shared:
        background.append(asyncio.create_task(state.metrics.keep_updated()))

    def begin_stop(number: int = 0) -> None:
        state.engine.stopping = True
        if state.rpc is not None:
            state.rpc.begin_stop(drain=number == signal.SIGTERM)

    if state.rpc is not None:
        await state.rpc.start()
    when_told_to_stop(begin_stop)
    try:
        yield
    finally:
        if not state.engine.stopping:  # no signal has come
            begin_stop()
        for task in background:
            task.cancel()
        if state.rpc is not None:
            await state.rpc.stop()
        if state.metrics is not None:
            state.metrics.update()  # for scrapes of other workers
        if state.tracing is not None:
            await state.tracing.flush()


async def warm_up(engine: Engine) -> None:
    """Load the backend in a worker thread. Until then the service is alive, but not ready."""
    try:
        await to_thread.run_sync(engine.warm_up, abandon_on_cancel=True)
    except Exception:
        logger.exception("cannot compute as ATTENTION_BACKEND says, and so will not be ready")


def grpc_server() -> Any:
    """The class of the gRPC server. Errors: SystemExit that names the extra, if gRPC is not installed."""
    try:
        from attention_service.rpc.server import RPC
    except ImportError as error:
        raise SystemExit(f"ATTENTION_GRPC_PORT: install attention-service[grpc] ({error})") from None
    return RPC


def tracing() -> Tracing:
    """Makes spans. Errors: SystemExit that names the extra, if OpenTelemetry is not installed, or a wrong variable."""
    try:
        from attention_service.observability.tracing import Tracing

        return Tracing()
    except ImportError as error:
        raise SystemExit(f"ATTENTION_TRACING: install attention-service[otel] ({error})") from None
    except ValueError as error:
        sys.stderr.write(f"ATTENTION_TRACING: a variable OTEL_* is wrong: {error}\n")
        raise SystemExit(2) from None


def from_environment() -> FastAPI:
    """The application with the settings of the environment: the factory for any ASGI server.

    It also tunes the process that it runs in: garbage collection, malloc and the switch interval of threads (see
    `attention_service.runtime.process.tune`), and ends a worker process when its parent dies. `create_app` does none of
    this.

    Errors: SystemExit with status 2, after one line on standard error for each invalid setting.
    """
    app = create_app(load_settings())
    tune()
    end_with_parent()
    return app


def create_app(settings: Settings) -> FastAPI:
    """The application with these settings. It reads nothing from the environment and starts nothing."""
    engine = Engine(settings)
    service_metrics = Metrics(engine.admission) if settings.metrics else None
    spans: Tracing | None = None
    if settings.tracing:
        spans = tracing()
        engine.new_timings = spans.timings
    app = FastAPIOffline(
        title="Attention service",
        version=__version__,
        summary="Exact attention over HTTP: the output, the weights, and all intermediate results.",
        description=DESCRIPTION,
        openapi_tags=TAGS,
        license_info={"name": "Apache-2.0", "identifier": "Apache-2.0"},
        servers=[{"url": "/", "description": "This server"}],
        redoc_url=None,
        static_url="/docs-assets",
        swagger_ui_parameters={"validatorUrl": None},  # the validator badge would be fetched from elsewhere
        redirect_slashes=False,
        separate_input_output_schemas=False,
        lifespan=lifespan,
        exception_handlers={
            ServiceError: on_service_error,
            HTTPException: on_http_exception,
            MemoryError: on_service_error,
            RequestValidationError: on_validation_error,
            Exception: on_defect,
        },
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    own = middleware(settings, engine, service_metrics, spans)
    app.build_middleware_stack = partial(build_middleware_stack, app, own)  # type: ignore[method-assign]  # see there
    app.state.settings = settings
    app.state.engine = engine
    app.state.metrics = service_metrics
    app.state.tracing = spans
    app.state.rpc = None
    if settings.grpc_port is not None:
        app.state.rpc = grpc_server()(settings, engine, service_metrics, spans)
    add_routes(app)
    if service_metrics is not None:
        start_at_0(app, service_metrics)
    app.openapi = partial(openapi.build, app)  # type: ignore[method-assign]  # as FastAPI documents it
    return app


def add_routes(app: FastAPI) -> None:
    """Add all operations."""
    page.add_document(app)
    tensors.add_routes(app)
    inference.add_routes(app)
    app.include_router(layers.router)
    app.include_router(inference.router)
    app.include_router(operations.router)
    app.include_router(page.router)
    if app.state.settings.metrics:
        app.include_router(operations.metrics_router)


def start_at_0(app: FastAPI, service_metrics: Metrics) -> None:
    """Start the counters of the operations on tensors, with each status that the API document names."""
    for route in app.routes:
        if isinstance(route, tensors.TensorRoute):
            service_metrics.start_at_0("http", route.path, [200, *map(int, route.responses)])


def middleware(
    settings: Settings, engine: Engine, service_metrics: Metrics | None, spans: Tracing | None
) -> list[Middleware]:
    """The middleware around the routes, from the outside in. spans: makes the spans of requests, if not None"""
    found = [Middleware(Entry, engine=engine, metrics=service_metrics, tracing=spans)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=split_list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", BINARY, "X-Request-ID", "traceparent", "tracestate"],
            expose_headers=["X-Request-ID", "Server-Timing", "Retry-After", BINARY],
        )
        found.append(cors)
    if settings.has_keys:
        found.append(Middleware(Guard, settings=settings))
    return [*found, Middleware(tensors.AnswerTensors)]


def build_middleware_stack(app: FastAPI, own: list[Middleware]) -> ASGIApp:
    """The middleware that the application was given, and inside it the service's own, around FastAPI's layers.

    FastAPI would put three layers around all middleware, which take a while for what `Entry` does as well.
    """
    added, app.user_middleware = app.user_middleware, []
    stack = FastAPI.build_middleware_stack(app)
    app.user_middleware = added
    for kind, arguments, options in reversed([*added, *own]):
        stack = kind(stack, *arguments, **options)
    return stack
