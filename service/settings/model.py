"""Settings, read from the environment (prefix ATTENTION_) when the service starts, and frozen from then on."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import ByteSize, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.runtime.machine import cpu_count, memory_total
from service.settings.files import check_certificate, check_folder, check_key, check_keys_file
from service.settings.keys import parse_hashes

# 1,000 tokens with their scores and weights in float64 take 16 MB: with less, ordinary requests are refused.
LEAST_MEMORY: Final = ByteSize(16 * 2**20)
MOST_MEMORY_BY_DEFAULT: Final = ByteSize(2 * 2**30)
# Defaults that depend on the machine, as the table of settings shows them.
DEFAULT_TEXTS: Final = {"memory_limit": "half of the available memory, at most 2 GiB"}


def default_memory_limit() -> ByteSize:
    """Half of the memory that this process may use, at most 2 GiB."""
    total = memory_total()
    return ByteSize(MOST_MEMORY_BY_DEFAULT if total is None else min(MOST_MEMORY_BY_DEFAULT, total // 2))


class Settings(BaseSettings):
    """Everything that can be set. Sizes take units, like 64MiB."""

    model_config = SettingsConfigDict(
        env_prefix="ATTENTION_", frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for the Open Inference Protocol over gRPC; 0 takes a free one. Default: none. Needs "
        "attention-service[grpc].",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", description="The least severe messages that are logged."
    )
    max_body_bytes: ByteSize = Field(ByteSize(64 * 2**20), gt=0, description="Larger bodies are refused with 413.")
    memory_limit: ByteSize = Field(
        default_factory=default_memory_limit,
        description="Memory for the data of all requests at work, of all workers together: bodies, arrays, computing, "
        "answers. A request that would need more is refused with 413; one that needs more than is free waits, or is "
        "refused with 503. At least 16 MiB, and at least ATTENTION_MAX_BODY_BYTES.",
    )
    concurrency: int = Field(
        2,
        ge=1,
        le=1024,
        description="Large requests that a worker reads or computes at once; small ones need no slot.",
    )
    queue: int = Field(
        64, ge=0, description="Large requests that wait, in all workers together; others are refused with 503."
    )
    time_limit: float = Field(
        60,
        gt=0,
        description="Seconds that a request may take until it is computed; then it is stopped, 504, or 503 if it "
        "still waits.",
    )
    read_timeout: float = Field(
        30,
        gt=0,
        description="Seconds within which a request head must be complete, and after which a body must keep up with "
        "ATTENTION_READ_RATE.",
    )
    read_rate: ByteSize = Field(
        ByteSize(16 * 2**10),
        gt=0,
        description="Bytes a second that a request body must arrive with on average, once ATTENTION_READ_TIMEOUT has "
        "passed; slower bodies are refused with 408.",
    )
    write_timeout: float = Field(
        30,
        gt=0,
        description="Seconds without any progress after which a client that does not read its response is "
        "disconnected.",
    )
    http_parser: Literal["h11", "httptools"] = Field(
        "h11",
        description="HTTP/1.1 parser: h11 checks strictly; httptools is faster and meant for servers behind a proxy "
        "that normalises requests.",
    )
    api_keys: str = Field(
        "",
        description="Hashes of the keys that callers may use, comma-separated, as `attention-service key` prints them. "
        "None, here or in the file: everybody may call.",
    )
    api_keys_file: Path | None = Field(
        None, description="A file with more of them, one a line; read again when it changes, within a second."
    )
    protect_metrics: bool = Field(False, description="Whether /metrics needs a key, too.")
    cors_origins: str = Field(
        "", description="Origins whose pages may call from a browser, comma-separated; * for all. Default: none."
    )
    tls_certificate: Path | None = Field(None, description="Certificate chain (PEM), to serve HTTPS. With the key.")
    tls_key: Path | None = Field(None, description="Its private key (PEM).")
    log_format: Literal["human", "json"] = Field("human", description="Of the log, on standard error.")
    metrics: bool = Field(True, description="Whether to count requests, for /metrics.")
    metrics_folder: Path | None = Field(
        None,
        description="Where several workers write what they counted, so that each can tell it all. Default: a temporary "
        "folder, if there are several.",
    )
    tracing: bool = Field(
        False, description="Whether to send OpenTelemetry traces; OTEL_* say where. Needs attention-service[otel]."
    )
    grace: int = Field(
        60, ge=0, description="Seconds that requests at work have to end when the service is told to stop."
    )
    workers: int = Field(1, ge=1, le=256, description="Processes that answer requests, each with all that follows.")
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of a worker that compute on the CPU; 0 shares the processors that it may use among the "
        "workers.",
    )
    backend: Literal["numpy", "torch", "auto"] = Field(
        "numpy",
        description="What computes where a request does not say. auto: torch where it sees a GPU, else NumPy.",
    )
    batch_window: float | None = Field(
        None,
        ge=0,
        description="Seconds that a small request may wait while others are computed, to be computed together with "
        "those like it that come meanwhile; 0: never. Default: 0.002 where a GPU computes, else 0.",
    )
    inline_flops: int = Field(
        5_000_000,
        ge=0,
        description="Requests of at most so many operations are computed in the event loop, as handing them to a "
        "thread would take longer than they do, and up to 20 times as large ones while nobody else is at work; others "
        "in a thread.",
    )

    experimental: Annotated[frozenset[Literal["padding", "flex_attention", "cudnn_first"]], NoDecode] = Field(
        frozenset(),
        description="Fast paths for GPUs that were not measured yet, comma-separated: `padding` (requests of unequal "
        "lengths in one batch), `flex_attention` (FlexAttention for masks by position), `cudnn_first` (the kernel of "
        "cuDNN before others). Default: none.",
    )

    @field_validator("experimental", mode="before")
    @classmethod
    def _split_experimental(cls, names: object) -> object:
        return {name.strip() for name in names.split(",") if name.strip()} if isinstance(names, str) else names

    @field_validator("memory_limit")
    @classmethod
    def _check_memory_limit(cls, limit: ByteSize, info: ValidationInfo) -> ByteSize:
        body = info.data.get("max_body_bytes", 0)
        if limit < LEAST_MEMORY:
            raise ValueError(f"expected at least {LEAST_MEMORY.human_readable()}, got {limit.human_readable()}")
        if limit < body:
            expected = f"ATTENTION_MAX_BODY_BYTES ({body.human_readable()})"
            raise ValueError(f"expected at least {expected}, got {limit.human_readable()}")
        return limit

    @field_validator("api_keys")
    @classmethod
    def _check_api_keys(cls, hashes: str) -> str:
        parse_hashes(hashes)
        return hashes

    @field_validator("api_keys_file")
    @classmethod
    def _check_api_keys_file(cls, file: Path | None) -> Path | None:
        if file is not None:
            check_keys_file(file)
        return file

    @field_validator("tls_certificate")
    @classmethod
    def _check_tls_certificate(cls, certificate: Path | None) -> Path | None:
        if certificate is not None:
            check_certificate(certificate)
        return certificate

    @field_validator("tls_key")
    @classmethod
    def _check_tls_key(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_certificate" not in info.data:  # which is wrong itself
            return key
        certificate = info.data["tls_certificate"]
        if certificate is not None:
            check_key(certificate, key)
        elif key is not None:
            raise ValueError("expected ATTENTION_TLS_CERTIFICATE beside the key")
        return key

    @field_validator("metrics_folder")
    @classmethod
    def _check_metrics_folder(cls, folder: Path | None) -> Path | None:
        if folder is not None:
            check_folder(folder)
        return folder

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        if backend == "torch" and not all(map(find_spec, ("torch", "array_api_compat"))):
            raise ValueError("torch is not there; install attention-service[torch]")
        return backend

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys.strip(" ,")) or self.api_keys_file is not None

    @property
    def memory_per_worker(self) -> int:
        """Bytes of a worker for the data of all its requests."""
        return self.memory_limit // self.workers

    @property
    def queue_per_worker(self) -> int:
        """Requests that may wait in a worker."""
        return -(-self.queue // self.workers)

    @property
    def compute_threads(self) -> int:
        """Threads of a worker, the default worked out."""
        return self.threads or max(1, cpu_count() // self.workers)


def load_settings(**flags: object) -> Settings:
    """The settings of the environment, `flags` before them.

    Errors: SystemExit with status 2, after one line on standard error for each setting that is wrong.
    """
    try:
        return Settings(**flags)  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        for found in error.errors(include_url=False, include_input=False):
            name = "_".join(str(step) for step in found["loc"]).upper()
            reason = found["msg"].removeprefix("Value error, ")
            sys.stderr.write(f"ATTENTION_{name}: {reason}\n")
        raise SystemExit(2) from None


def table() -> str:
    """All settings as a Markdown table, alike on every machine."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        shown = DEFAULT_TEXTS.get(name) or _shown(field.default)
        values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        choices = f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""
        rows.append(f"| `ATTENTION_{name.upper()}` | {shown} | {field.description}{choices} |")
    return "\n".join(rows)


def _shown(default: Any) -> str:
    if default in ("", None, frozenset()):
        return ""
    return f"`{default.human_readable() if isinstance(default, ByteSize) else default}`"
