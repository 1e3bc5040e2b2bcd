"""The servers that are measured, each with its command, its environment and its request formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.forms import (
    KEY_HASH,
    Form,
    fetch,
    float32_digits,
    lists,
    our_tensors,
    tensors,
    typed_array,
    v2_base64,
    v2_binary,
    v2_json,
)
from benchmarks.serving import Running, serving
from benchmarks.workloads import BEHIND_NGINX, HOST, workloads

# One thread for each server: BLAS takes all processors otherwise, and its idle threads spin, beside other servers.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "ATTENTION_THREADS": "1"}
PEER_FOLDER = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True, eq=False)
class Server:
    """How to start a server, and the formats of its requests.

    command: takes --port PORT; json, binary: request formats (binary is None if the server is not measured in one);
    package: for a peer, the distribution that its requirements.txt pins; environment: more variables of its process
    loads: names of the workloads that it is measured with; empty for all
    """

    name: str
    command: list[str]
    json: Form
    binary: Form | None = None
    package: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    loads: tuple[str, ...] = ()

    @property
    def installed(self) -> bool:
        """True if the server's Python interpreter exists; `make bench-peers` creates those of the peers."""
        return Path(self.command[0]).exists()

    @property
    def title(self) -> str:
        """The name, with the version for a peer."""
        if self.package is None:
            return self.name
        pins = (Path(self.command[0]).parents[2] / "requirements.txt").read_text().splitlines()
        versions = (version for name, _, version in (pin.partition("==") for pin in pins) if name == self.package)
        return f"{self.name} {next(versions)}"

    def form(self, binary: bool) -> Form | None:
        """Return the binary or the JSON format."""
        return self.binary if binary else self.json

    @contextmanager
    def started(self, **variables: str) -> Iterator[Running]:
        """Run the server, and yield once it has answered W1. variables: of its process. Errors: NotStarted."""
        request = self.json.encode(workloads()["W1"])
        variables = {"ATTENTION_API_KEYS": KEY_HASH, **variables, **self.environment}
        with serving(self.command, lambda port: fetch(port, request), **variables) as running:
            yield running


def _uvicorn(name: str, application: str, parser: str, json: Form, binary: Form | None = None) -> Server:
    options = ["--http", parser, "--no-access-log", "--log-level", "warning"]
    return Server(name, [sys.executable, "-m", "uvicorn", *options, application], json, binary)


def _floor(parser: str) -> Server:
    # The path of a request says how many bytes to answer with.
    return _uvicorn(f"bare uvicorn, {parser}", "benchmarks.servers.floor:app", parser, lists("/0"))


def _by_hand(parser: str) -> Server:
    forms = lists("/attention"), tensors("/tensors")
    return _uvicorn(f"FastAPI by hand, {parser}", "benchmarks.servers.by_hand:app", parser, *forms)


def _ours(name: str, parser: str, json: Form, binary: Form) -> Server:
    command = [sys.executable, "-m", "attention_service", "serve"]
    environment = {"ATTENTION_HTTP_PARSER": parser, "ATTENTION_ALLOWED_HOSTS": HOST}
    return Server(name, command, json, binary, environment=environment)


def _two_workers(server: Server) -> Server:
    """The server with two worker processes, for the smallest requests."""
    options = [] if "attention_service" in server.command else ["--workers", "2"]
    return replace(
        server,
        name=f"{server.name}, 2 workers",
        command=[*server.command, *options],
        environment={**server.environment, "ATTENTION_WORKERS": "2"},
        loads=("W1 httpx", BEHIND_NGINX),
    )


def _peer(name: str, folder: str, package: str, json: Form, binary: Form) -> Server:
    command = [f"{PEER_FOLDER / folder}/.venv/bin/python", "-m", f"benchmarks.peers.{folder}.server"]
    return Server(name, command, json, binary, package)


# uvicorn's HTTP parsers. The service uses the first one by default.
PARSERS = ("h11", "httptools")
FLOORS = {parser: _floor(parser) for parser in PARSERS}
FLOOR = FLOORS["h11"]
NAIVE = _uvicorn("FastAPI, lists of lists", "benchmarks.servers.naive:app", "auto", lists("/attention"))
BY_HAND = {parser: _by_hand(parser) for parser in PARSERS}
OURS_BY_PARSER = {
    parser: _ours(f"this service, {parser}", parser, lists("/attention", dtype="float32"), our_tensors())
    for parser in PARSERS
}
OURS = OURS_BY_PARSER["h11"]
OURS_OIP = _ours("this service, h11, OIP", "h11", v2_json(), v2_binary())
# JSON with arrays in base64: in the answers, beside shorter numbers in the requests, and in both.
BASE64: dict[str, Callable[[np.ndarray], object]] = {
    "base64 answers": lambda array: array.tolist(),
    "base64 answers, float32 digits": float32_digits,
    "base64": typed_array,
}
OURS_BASE64 = tuple(
    replace(
        OURS_BY_PARSER["httptools"],
        name=f"this service, httptools, {name}",
        json=lists("/attention", write, dtype="float32", encoding="base64"),
        loads=("W2", "W3"),
    )
    for name, write in BASE64.items()
)
MLSERVER = _peer("MLServer", "mlserver", "mlserver", v2_json(), v2_base64())
BENTOML = _peer("BentoML", "bentoml", "bentoml", lists("/attention"), tensors("/tensors"))
KSERVE = _peer("KServe", "kserve", "kserve", v2_json(), v2_binary())
LITSERVE = _peer("LitServe", "litserve", "litserve", lists("/predict"), tensors("/predict"))
RAY = _peer("Ray Serve", "ray", "ray", lists("/"), tensors("/"))
TRITON = _peer("Triton", "triton", "nvidia-pytriton", v2_json(), v2_binary())

PEERS = (MLSERVER, BENTOML, KSERVE, LITSERVE, RAY, TRITON)
# By hand and the service, by parser and number of workers.
PAIRS = {(parser, 1): (BY_HAND[parser], OURS_BY_PARSER[parser]) for parser in PARSERS}
PAIRS |= {(parser, 2): (_two_workers(BY_HAND[parser]), _two_workers(OURS_BY_PARSER[parser])) for parser in PARSERS}
# Compared with each other in every run, --quick included.
ONE_WORKER = (*BY_HAND.values(), *OURS_BY_PARSER.values())
CORE = (*ONE_WORKER, *(server for (_, workers), pair in PAIRS.items() if workers == 2 for server in pair))
SERVERS = (*FLOORS.values(), NAIVE, *CORE, OURS_OIP, *OURS_BASE64, *PEERS)
