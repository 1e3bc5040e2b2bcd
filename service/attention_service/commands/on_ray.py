"""The option of commands that have many things computed, which Ray does on a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from attention_service.commands.terminal import FAILED, reported

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def add_option(command: argparse.ArgumentParser, text: str) -> None:
    """Add the option. text: what is a task"""
    text = f"{text} is a task of the Ray cluster at ATTENTION_RAY_ADDRESS, or of one that starts on this machine"
    command.add_argument("--ray", action="store_true", help=text)


@contextmanager
def ray_map() -> Iterator[Map]:
    """What applies a function to items as `map` does, each by a task. Errors: CommandError.

    Until it ends, what is printed goes to standard error, as messages of Ray do that would stand in a result.
    """
    from attention_service.backends.registry import Backends
    from attention_service.settings import load_settings

    with reported(invalid=FAILED), redirect_stdout(sys.stderr):
        backend: Any = Backends(ray_address=load_settings().ray_address).choose("ray", "cpu")
        import ray

        try:
            yield backend.map
        finally:
            ray.shutdown()
