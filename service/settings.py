"""Settings, read from the environment (prefix ATTENTION_) when the service starts, and frozen from then on."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

# A body in JSON and its numbers need up to six times the memory of its text: two bytes give eight.
JSON_MEMORY = 6


class Settings(BaseSettings):
    """Everything that can be set. Sizes take units, like 64MiB."""

    model_config = SettingsConfigDict(env_prefix="ATTENTION_", frozen=True, extra="ignore")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all.")
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
        ByteSize(2 * 2**30),
        gt=0,
        description="Memory for requests, of all workers together: a quarter for bodies, the rest for computing. A "
        "request that would need more than there is, by an estimate made before it, is refused with 413; one that "
        "needs more than is free waits.",
    )
    concurrency: int = Field(
        2,
        ge=1,
        le=1024,
        description="Large requests that a worker reads or computes at once; small ones need no place.",
    )
    queue: int = Field(
        64, ge=0, description="Large requests that wait, in all workers together; others are refused with 503."
    )
    time_limit: float = Field(
        60,
        gt=0,
        description="Seconds that a request may take until it is computed; then it is stopped, 504.",
    )
    read_timeout: float = Field(
        30, gt=0, description="Seconds within which a request must have arrived, or its sender is cut off, 408."
    )
    write_timeout: float = Field(
        30,
        gt=0,
        description="Seconds that a client may take to accept the next part of an answer.",
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

    @property
    def body_memory(self) -> int:
        """Bytes of a worker for bodies and what is read from them: room for one of the largest, at least."""
        return max(self.memory_limit // (4 * self.workers), JSON_MEMORY * self.max_body_bytes)

    @property
    def work_memory(self) -> int:
        """Bytes of a worker for computing."""
        return self.memory_limit * 3 // (4 * self.workers)

    @property
    def places_to_wait(self) -> int:
        """Requests that may wait in a worker."""
        return -(-self.queue // self.workers)

    @property
    def compute_threads(self) -> int:
        """Threads of a worker, the default worked out."""
        return self.threads or max(1, cpu_count() // self.workers)


def cpu_count() -> int:
    """Processors that this process may use: by its affinity, and by the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def table() -> str:
    """All settings as a Markdown table."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.default.human_readable() if isinstance(field.default, ByteSize) else field.default
        shown = "" if default in ("", None) else f"`{default}`"
        rows.append(f"| `ATTENTION_{name.upper()}` | {shown} | {field.description} |")
    return "\n".join(rows)
