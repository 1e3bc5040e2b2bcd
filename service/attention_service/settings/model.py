"""The settings: read from the environment (prefix ATTENTION_) when the service starts, and immutable from then on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import AfterValidator, ByteSize, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from attention_service.errors import quote
from attention_service.runtime.machine import ROOT, cpu_count, memory_limit, memory_total
from attention_service.settings.checks import (
    check_backend,
    check_certificate,
    check_folder,
    check_hashes,
    check_hosts,
    check_keys_file,
    check_layers,
    check_origins,
    check_private_key,
)
from attention_service.settings.keys import parse_hashes

# 1,000 tokens with their scores and weights in float64 take 16 MB: with less, ordinary requests are refused.
LEAST_MEMORY: Final = ByteSize(16 * 2**20)
# Without a container: other programs share the memory of the machine. Memory of a container is for the service alone.
MOST_MEMORY_OF_MACHINE: Final = ByteSize(2 * 2**30)
# What is expected where pydantic's own words do not say it.
EXPECTED: Final = {
    "bool_parsing": "true or false",
    "int_parsing": "an integer",
    "float_parsing": "a number",
    "byte_size": "a number of bytes, like 512MiB",
    "byte_size_unit": "a number of bytes, like 512MiB",
    "string_too_short": "at least 1 character",
}
OF_KUBERNETES: Final = re.compile("_SERVICE_(HOST|PORT)|_PORT_[0-9]+_")
# Defaults that depend on the machine, as the table of settings shows them.
DEFAULT_TEXTS: Final = {
    "memory_limit": "half of the memory limit of the container; without one, half of the memory of the machine, at "
    "most 2 GiB"
}


def default_memory_limit(root: Path = ROOT) -> ByteSize:
    """Half of the memory limit of this process; if it has none, half of the machine's memory, at most 2 GiB.

    root: the folder that holds `proc` and `sys`
    """
    limit = memory_limit(root)
    if limit is not None:
        return ByteSize(limit // 2)
    total = memory_total(root)
    return ByteSize(MOST_MEMORY_OF_MACHINE if total is None else min(MOST_MEMORY_OF_MACHINE, total // 2))


class Settings(BaseSettings):
    """All settings. Sizes may have units, like 64MiB."""

    model_config = SettingsConfigDict(
        env_prefix="ATTENTION_", frozen=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on. 0.0.0.0 listens on all addresses.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0 picks a free port.")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for the Open Inference Protocol over gRPC. 0 picks a free port. Default: no gRPC. Needs "
        "attention-service[grpc].",
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "info", description="Least severe level that is logged. Requests are logged at info."
    )
    max_body_bytes: ByteSize = Field(
        ByteSize(64 * 2**20), gt=0, description="Largest request body. Larger bodies are refused with 413."
    )
    memory_limit: ByteSize = Field(
        default_factory=default_memory_limit,
        description="Memory budget for the data of all requests in progress: bodies, arrays, intermediate results, "
        "responses. The workers divide it equally. A request that needs more than the share of its worker is refused "
        "with 413; a request that needs more than is free waits, or is refused with 503. At least 16 MiB, and at "
        "least ATTENTION_MAX_BODY_BYTES; JSON may take 22 times its length to decode (30 times on Python 3.14), and "
        "the service says at its start if the largest body might not fit. A container's memory limit is the least "
        "limit of its control groups (versions 1 and 2) and of its address space.",
    )
    concurrency: int = Field(
        2,
        ge=1,
        le=1024,
        description="Slots of each worker: how many large requests it decodes or computes at the same time. Small "
        "requests need no slot.",
    )
    queue: int = Field(
        64,
        ge=0,
        description="Length of the queue: how many large requests may wait, in all workers together. Further large "
        "requests are refused with 503.",
    )
    time_limit: float = Field(
        60,
        gt=0,
        description="Seconds from the complete body to the end of the computation. Then the computation is stopped "
        "with 504; a request that is still in the queue is refused with 503.",
    )
    read_timeout: float = Field(
        30,
        gt=0,
        description="Seconds within which a request head must be complete, else the connection is closed without a "
        "response. A body that arrives ends with 408 when its sender is so many seconds behind ATTENTION_READ_RATE, "
        "which a silent one is after this time, whatever it sent before.",
    )
    read_rate: ByteSize = Field(
        ByteSize(16 * 2**10),
        gt=0,
        description="Bytes per second that the sender of a request body must reach, see ATTENTION_READ_TIMEOUT, and "
        "the reader of a response, see ATTENTION_WRITE_TIMEOUT. Time in which the service waits for memory does not "
        "count.",
    )
    write_timeout: float = Field(
        30,
        gt=0,
        description="Seconds by which a client may be behind ATTENTION_READ_RATE in reading a response, before the "
        "connection is closed. A client that reads nothing has so many seconds.",
    )
    keep_alive: int = Field(
        620,
        ge=1,
        description="Seconds without a request after which a connection is closed. It must be more than a proxy in "
        "front of the service keeps idle connections, or the proxy loses requests. Responses announce it as "
        "`Keep-Alive: timeout=620`.",
    )
    http_parser: Literal["h11", "httptools"] = Field(
        "h11",
        description="HTTP/1.1 parser. h11 is strict. httptools is faster and less strict: use it only behind a proxy "
        "that normalises requests.",
    )
    api_keys: Annotated[str, AfterValidator(check_hashes)] = Field(
        "",
        description="Hashes of the API keys, comma-separated, as `attention-service key` prints them. Requests need "
        "no key if neither this nor ATTENTION_API_KEYS_FILE is set.",
    )
    api_keys_file: Annotated[Path, AfterValidator(check_keys_file)] | None = Field(
        None,
        description="File with further hashes, one per line, each with a name for the log if one follows it after a "
        "space. A change takes effect within a second. While the file "
        "cannot be read, or has a line that is no hash, the last ones are valid, and the log has an error.",
    )
    protect_metrics: bool = Field(False, description="Whether /metrics needs an API key, too.")
    protect_docs: bool = Field(
        False,
        description="Whether the documentation (/, /docs, /openapi.json, /problems/…) needs an API key, too. Browsers "
        "cannot open it then.",
    )
    cors_origins: Annotated[str, AfterValidator(check_origins)] = Field(
        "",
        description="Origins whose pages may call the service from a browser, comma-separated, like "
        "https://app.example:8443; * for all; null for pages that are opened from a file. Default: none.",
    )
    allowed_hosts: Annotated[str, AfterValidator(check_hosts)] = Field(
        "",
        description="Names that the Host header of a request may have besides `localhost` and the addresses of this "
        "machine, comma-separated, without ports; `*.example.org` for all below a name, `*` for all. Default: no other "
        "names if ATTENTION_HOST is a loopback address, else all.",
    )
    tls_certificate: Annotated[Path, AfterValidator(check_certificate)] | None = Field(
        None,
        description="Certificate chain (PEM). With it, the service speaks TLS only: HTTPS, and gRPC over TLS. A "
        "changed certificate is presented to new connections within a second; one that cannot be used, never.",
    )
    tls_key: Path | None = Field(
        None,
        description="Private key of the certificate (PEM, without a passphrase). Default: in the file of the "
        "certificate.",
    )
    log_format: Literal["human", "json"] = Field("human", description="Format of the log on standard error.")
    metrics: bool = Field(True, description="Whether to collect metrics and serve them at /metrics.")
    metrics_folder: Annotated[Path, AfterValidator(check_folder)] | None = Field(
        None,
        description="Directory in which several workers share their metrics, so that each reports the sum of all. It "
        "must hold nothing else. Default: a temporary directory, if there are several workers.",
    )
    tracing: bool = Field(
        False,
        description="Whether to send OpenTelemetry traces. The variables OTEL_* say where to. Needs "
        "attention-service[otel].",
    )
    drain: float = Field(
        1,
        ge=0,
        le=300,
        description="Seconds after SIGTERM in which the service goes on to accept requests while a client is "
        "connected. It is not ready then, and tells each client to close its connection after the next response. After "
        "SIGINT, and under other servers than `attention-service serve`, it stops "
        "accepting at once; with several workers within half a second.",
    )
    grace: int = Field(
        60, ge=0, description="Seconds that requests in progress have to finish after the service is told to stop."
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Worker processes. They share the port and divide ATTENTION_MEMORY_LIMIT, ATTENTION_QUEUE and the "
        "processors.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="Threads of each worker that compute on the CPU. 0 divides the available processors among the "
        "workers.",
    )
    backend: Annotated[Literal["numpy", "torch", "ray", "auto"], AfterValidator(check_backend)] = Field(
        "numpy",
        description="Backend for requests that do not name one. auto is torch if torch finds a GPU, else NumPy.",
    )
    ray_address: str = Field(
        "",
        description="Address of the Ray cluster that the backend ray computes on, like 10.0.0.5:6379. Without one, the "
        "service starts a cluster on its own machine if ATTENTION_BACKEND is ray, and else refuses requests that ask "
        "for ray (docs/scaling.md).",
    )
    inline_flops: int = Field(
        5_000_000,
        ge=0,
        description="Requests of at most this many floating-point operations are small: on the CPU they are computed "
        "in the event loop (inline) and need no slot, if they take at most 8 MiB of memory. Requests of up to 20 times "
        "as many are computed there, too, while no other large request is in progress; all others in a worker thread. "
        "0 computes every request in a worker thread.",
    )

    layers: Annotated[Path, AfterValidator(check_layers)] | None = Field(
        None,
        description="Directory of stored layers, which requests name as `layer` (docs/layers.md). The service reads it "
        "only. A changed layer is read again within a second. Default: no layers.",
    )
    layers_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="Memory for stored layers, which the workers divide equally, beside ATTENTION_MEMORY_LIMIT. Layers "
        "that were not used for longest make room for others. Default: half of ATTENTION_MEMORY_LIMIT.",
    )

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

    @field_validator("tls_key")
    @classmethod
    def _check_tls_key(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_certificate" not in info.data:  # which is wrong itself
            return key
        certificate = info.data["tls_certificate"]
        if certificate is not None:
            check_private_key(certificate, key)
        elif key is not None:
            raise ValueError("expected ATTENTION_TLS_CERTIFICATE beside the key")
        return key

    @property
    def has_keys(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys.strip(" ,")) or self.api_keys_file is not None

    @property
    def layer_bytes(self) -> int:
        """Memory of one worker for stored layers."""
        return (self.memory_limit // 2 if self.layers_memory is None else self.layers_memory) // self.workers

    @property
    def compute_threads(self) -> int:
        """Threads of one worker that compute: `threads`, or an equal share of the processors for 0."""
        return self.threads or max(1, cpu_count() // self.workers)

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster that requests may use: "" for one that the service starts, None for none."""
        return self.ray_address or ("" if self.backend == "ray" else None)


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Lines about variables that look like settings and are none, but for those that Kubernetes makes of Services."""
    lines = []
    for name in sorted(environment):
        setting = name.removeprefix("ATTENTION_").lower()
        if name.startswith("ATTENTION_") and setting not in Settings.model_fields and not OF_KUBERNETES.search(name):
            close = get_close_matches(setting, Settings.model_fields, n=1, cutoff=0.8)
            hint = f"; did you mean ATTENTION_{close[0].upper()}?" if close else ""
            lines.append(f"{name}: there is no such setting, it is ignored{hint}\n")
    return lines


def load_settings(**flags: object) -> Settings:
    """The settings of the environment, replaced by `flags` where given.

    Errors: SystemExit with status 2, after one line on standard error for each invalid setting.
    """
    try:
        return Settings(**flags)  # type: ignore[arg-type]  # pydantic checks them
    except ValidationError as error:
        for found in error.errors(include_url=False):
            sys.stderr.write(f"ATTENTION_{str(found['loc'][0]).upper()}: {_reason(found)}\n")
        raise SystemExit(2) from None


def _reason(found: ErrorDetails) -> str:
    """Why a setting is not valid. The errors of validators say it themselves, without what may be secret."""
    if found["type"] == "value_error":
        return found["msg"].removeprefix("Value error, ")
    plain = re.sub("^(Input|String) should (be|have) ", "", found["msg"])
    expected = EXPECTED.get(found["type"], plain)
    return f"expected {expected}, got {quote(str(found['input']))}"


def table() -> str:
    """All settings as a Markdown table, the same on every machine."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        shown = DEFAULT_TEXTS.get(name) or _shown(field.default)
        values = ("true", "false") if field.annotation is bool else ()
        if get_origin(field.annotation) is Literal:
            values = get_args(field.annotation)
        choices = f" One of {', '.join(f'`{value}`' for value in values)}." if values else ""
        rows.append(f"| `ATTENTION_{name.upper()}` | {shown} | {field.description}{choices} |")
    return "\n".join(rows)


def effective(settings: Settings) -> str:
    """These settings as lines of an environment file, with what their defaults mean here; secrets are left out."""
    values = dict(settings) | {"threads": settings.compute_threads}
    if settings.layers is not None:
        values["layers_memory"] = settings.layer_bytes * settings.workers
    lines = []
    for name, value in values.items():
        variable = f"ATTENTION_{name.upper()}"
        if name == "api_keys":
            count = len(parse_hashes(value))
            lines.append(f"# {variable}: {count} {'hash' if count == 1 else 'hashes'}")
        elif value in (None, ""):
            lines.append(f"# {variable} is not set")
        else:
            lines.append(f"{variable}={str(value).lower() if isinstance(value, bool) else value}")
    return "\n".join(lines)


def _shown(default: Any) -> str:
    if default in ("", None):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default.human_readable() if isinstance(default, ByteSize) else default}`"
