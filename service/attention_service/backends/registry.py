"""The backends that can be asked for. Each is imported when it is first used."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from attention_service.attention import spec
from attention_service.backends.base import Backend
from attention_service.errors import UnknownBackend

# Module and class of each backend.
BACKENDS: Final[dict[spec.Backend, tuple[str, str]]] = {
    "numpy": ("attention_service.backends.numpy.backend", "NumpyBackend"),
    "torch": ("attention_service.backends.torch.backend", "TorchBackend"),
    "ray": ("attention_service.backends.ray.backend", "RayBackend"),
}
# The backend that has CUDA devices.
CUDA: Final = "torch"


class Backends:
    """Makes each backend once.

    preferred: the backend for requests that ask for `auto`. If it is `auto` itself, the backend that sees a GPU is
    taken, else NumPy.
    threads: that each backend computes with; None leaves the threads of the process as they are
    ray_address: of the cluster that the backend ray computes on; "" for one that it starts here; None to refuse
    that backend

    Errors: UnknownBackend.
    """

    def __init__(
        self, preferred: spec.Backend = "numpy", threads: int | None = None, ray_address: str | None = ""
    ) -> None:
        self._threads = threads
        self._ray_address = ray_address
        self._made: dict[spec.Backend, Backend] = {}
        self.preferred = preferred
        if preferred == "auto":
            self.preferred = "numpy"
            with suppress(UnknownBackend):
                if self._make(CUDA).is_gpu("auto"):
                    self.preferred = CUDA
        self._make(self.preferred)

    def choose(self, name: spec.Backend, device: str) -> Backend:
        """The backend for what a request asks for. Errors: UnknownBackend."""
        name = self._resolve(name, device)
        return self._made.get(name) or self._make(name)

    def may_wait(self, name: str, device: str) -> bool:
        """True if choosing a backend, or an estimate by it, can take seconds. Names may be those of no backend."""
        chosen = self._resolve(name, device)
        if chosen not in BACKENDS or self._refuses(chosen):
            return False
        module, kind = BACKENDS[chosen]
        loaded = sys.modules.get(module)
        return loaded is None or bool(getattr(loaded, kind).is_remote)

    def _resolve(self, name: Any, device: str) -> spec.Backend:
        found: spec.Backend = name
        if name == "auto":
            found = CUDA if device.startswith("cuda") else self.preferred
        return found

    def _refuses(self, name: spec.Backend) -> bool:
        return name == "ray" and self._ray_address is None

    @property
    def lost(self) -> bool:
        """True once this process can no longer use a device of a backend."""
        return any(backend.lost for backend in self._made.values())

    def _make(self, name: spec.Backend) -> Backend:
        if self._refuses(name):
            hint = "ATTENTION_RAY_ADDRESS or ATTENTION_BACKEND=ray must be set where the service runs"
            raise UnknownBackend.at("/backend", "a backend that the settings of the service allow", name, hint)
        module, kind = BACKENDS[name]
        options = {"address": self._ray_address} if name == "ray" else {}
        try:
            found: type[Backend] = getattr(import_module(module), kind)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.startswith("attention_service"):
                raise
            hint = f"install attention-service[{name}] where the service runs"
            missing = f"{name} without {error.name}"
            raise UnknownBackend.at("/backend", "a backend that is installed", missing, hint) from None
        return self._made.setdefault(name, found(self._threads, **options))
