"""The servers that are measured, each with its command and its forms."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.forms import KEY_HASH, Form, fetch, lists, our_tensors, tensors, v2_base64, v2_binary, v2_json
from benchmarks.serving import Running, serving
from benchmarks.workloads import workloads

PEER_FOLDER = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True, eq=False)
class Server:
    """How to start a server and what to send it.

    command: it takes --port; json, binary: the forms that it is asked in, the latter None where it has none;
    package: of a peer, the distribution that its folder's requirements pin
    """

    name: str
    command: list[str]
    json: Form
    binary: Form | None = None
    package: str | None = None

    @property
    def installed(self) -> bool:
        """Whether its interpreter is there: that of a peer is made by `make bench-peers`."""
        return Path(self.command[0]).exists()

    def form(self, binary: bool) -> Form | None:
        return self.binary if binary else self.json

    def version(self) -> str:
        """Of a peer, as it is pinned."""
        pins = (Path(self.command[0]).parents[2] / "requirements.txt").read_text().splitlines()
        return next(version for name, _, version in (pin.partition("==") for pin in pins) if name == self.package)

    @contextmanager
    def started(self) -> Iterator[Running]:
        """The server while it runs, once it has answered the smallest request. Errors: NotStarted."""
        request = self.json.encode(workloads()["W1"])
        with serving(self.command, lambda port: fetch(port, request), ATTENTION_API_KEYS=KEY_HASH) as running:
            yield running


def _uvicorn(name: str, application: str, form: Form) -> Server:
    return Server(
        name, [sys.executable, "-m", "uvicorn", "--no-access-log", "--log-level", "warning", application], form
    )


def _peer(name: str, folder: str, package: str, json: Form, binary: Form) -> Server:
    command = [f"{PEER_FOLDER / folder}/.venv/bin/python", "-m", f"benchmarks.peers.{folder}.server"]
    return Server(name, command, json, binary, package)


# Its path says how many bytes it answers with.
FLOOR = _uvicorn("bare uvicorn, canned answer", "benchmarks.servers.floor:app", lists("/0"))
NAIVE = _uvicorn("FastAPI, lists of lists", "benchmarks.servers.naive:app", lists("/attention"))
BY_HAND = _uvicorn("FastAPI by hand", "benchmarks.servers.by_hand:app", lists("/attention"))
OURS = Server(
    "this service", [sys.executable, "-m", "service", "serve"], lists("/attention", dtype="float32"), our_tensors()
)
# The same server once more, asked as Triton is.
OURS_OIP = Server("this service, OIP binary", OURS.command, v2_json(), v2_binary())
MLSERVER = _peer("MLServer", "mlserver", "mlserver", v2_json(), v2_base64())
BENTOML = _peer("BentoML", "bentoml", "bentoml", lists("/attention"), tensors("/tensors"))
KSERVE = _peer("KServe", "kserve", "kserve", v2_json(), v2_binary())
LITSERVE = _peer("LitServe", "litserve", "litserve", lists("/predict"), tensors("/predict"))
RAY = _peer("Ray Serve", "ray", "ray", lists("/"), tensors("/"))
TRITON = _peer("Triton", "triton", "nvidia-pytriton", v2_json(), v2_binary())

PEERS = (MLSERVER, BENTOML, KSERVE, LITSERVE, RAY, TRITON)
SERVERS = (FLOOR, NAIVE, BY_HAND, *PEERS, OURS, OURS_OIP)
