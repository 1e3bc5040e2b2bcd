"""Functions of the user, as commands call them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attention_service.commands.terminal import FAILED, CommandError

if TYPE_CHECKING:  # commands import what they need when they run
    from attention_service.codecs.decoded import Decoded
    from attention_service.conformance.target import Target

SUFFIXES: Final = (".json", ".npz", ".safetensors", ".pt", ".npy")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say how a function is called."""
    command.add_argument(
        "--torch", action="store_true", help="call the function with tensors of torch in the place of ndarrays"
    )
    command.add_argument("--device", help="the device of these tensors, such as cuda; implies --torch (default: cpu)")


def is_target(text: str) -> bool:
    """True for `module:function`, unless there is such a file."""
    return ":" in text and Path(text).suffix not in SUFFIXES and not Path(text).exists()


def load(name: str, options: argparse.Namespace) -> Target:
    """The function `module:function`, also of a module in this directory. Errors: CommandError."""
    from attention_service.conformance.target import TargetFailed, WithTensors, load_target

    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the report
            target = load_target(name)
    except (ImportError, ValueError, TargetFailed) as error:
        raise CommandError(str(error), FAILED) from None
    if not options.torch and options.device is None:
        return target
    device = options.device or "cpu"
    try:
        return WithTensors(target, device)
    except ModuleNotFoundError:
        raise CommandError("--torch: expected torch, got no such module (pip install torch)", FAILED) from None
    except Exception as error:  # torch has many for a device that it does not know, or cannot use
        reason = str(error).partition("\n")[0]
        raise CommandError(f"--device: expected a device that torch has, got {device} ({reason})", FAILED) from None


def answer_of(name: str, options: argparse.Namespace, decoded: Decoded, field: str) -> Any:
    """What a function returns for a request or a call, by name, arrays as ndarrays.

    decoded: arguments of a call that came as lists become those that the function is called with
    field: that the answer stands for, actual or against

    Errors: CommandError, InvalidRequest.
    """
    from attention_service.codecs.array_objects import as_numpy
    from attention_service.commands.files import holds_call
    from attention_service.conformance.arguments import arguments_of_call, arguments_of_request
    from attention_service.conformance.target import Unsupported, present
    from attention_service.library.engine_calls import returned

    target, is_call = load(name, options), holds_call(decoded)
    try:
        arguments = arguments_of_call(target, decoded) if is_call else arguments_of_request(target, decoded)
    except Unsupported as error:
        raise CommandError(f"{name}: {error}", FAILED) from None
    answer = _run(name, target, arguments)
    found = returned(answer) if is_call else as_numpy(present(answer), f"/{field}")
    if not found:
        raise CommandError(f"{name}: expected the output or a dict of arrays, got nothing", FAILED)
    return found


def _run(name: str, target: Target, arguments: Mapping[str, Any]) -> Any:
    """What a function returns. Errors: CommandError for whatever it raises."""
    from attention_service.conformance.target import TargetFailed, Unsupported, run

    try:
        with redirect_stdout(sys.stderr):
            return run(target, arguments)
    except Unsupported as error:
        raise CommandError(f"{name} does not support this request: {error}", FAILED) from None
    except (Exception, SystemExit) as error:  # of somebody else's code: anything, but no exit status of its choice
        raise CommandError(str(TargetFailed(name, error, target)), FAILED) from None
