"""The commands `attention-service layers …`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attention_service.commands.terminal import CommandError, Progress, reported
from attention_service.printable import printable

VARIABLE: Final = "ATTENTION_LAYERS"
MODULE: Final = (
    "Hidden states enter where the family's attention module takes them: a norm in front of the module, the residual "
    "sum and what follows it are not part of the layer."
)


def add_commands(commands: Any) -> None:
    """Add the command `layers` to the subcommands of a parser, as `add_subparsers` returns them."""
    top = commands.add_parser("layers", help="stored layers, which requests name")
    inner = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, text: str, description: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = inner.add_parser(name, help=text, description=description)
        command.set_defaults(run=run)
        command.add_argument("--dir", metavar="DIR", help=f"directory of the layers (default: {VARIABLE})")
        return command

    add("list", _list, "list all layers", "List all layers: name, size, source. Exit status 1 if one cannot be used.")
    show = add("show", _show, "describe a layer", "Print the tensors, options, hash and source of a layer.")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--json", action="store_true", help="print JSON, as GET /layers/NAME returns it")
    remove = add("remove", _remove, "remove a layer", "Remove the files of a layer.")
    remove.add_argument("name", metavar="NAME")
    _add_import(add)


def _add_import(add: Any) -> None:
    command = add(
        "import",
        _import,
        "make a layer from a checkpoint",
        "Make a layer from a checkpoint of Hugging Face, or of torch.nn.MultiheadAttention. Only its tensors are read. "
        "What a request cannot express is refused.",
    )
    text = "directory with config.json and model.safetensors (or several files and their index), or one file"
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=text)
    command.add_argument("--layer", type=int, metavar="N", help="index of the layer, from 0; -1 is the last")
    command.add_argument("--name", metavar="NAME", required=True, help="name of the layer in requests")
    command.add_argument("--replace", action="store_true", help="replace a layer of this name")
    command.add_argument("--family", help="family of the model (default: by config.json); torch for MultiheadAttention")
    command.add_argument("--prefix", help="how the names of its tensors begin, if several modules fit")
    command.add_argument("--heads", type=int, metavar="N", help="number of heads, for --family torch")
    text = "positions of rotary tables, which scaled embeddings need (default: those of the model, at most 8192)"
    command.add_argument("--positions", type=int, metavar="N", help=text)


def _folder(options: argparse.Namespace) -> Path:
    """The directory of the layers. Errors: CommandError if none is named, or it is none."""
    given = options.dir or os.environ.get(VARIABLE)
    if not given:
        raise CommandError(f"which directory? Set {VARIABLE}, or say --dir DIR", 2)
    folder = Path(given)
    if not folder.is_dir():
        raise CommandError(f"{given}: there is no such directory", 2)
    return folder


def _list(options: argparse.Namespace) -> int:
    from pydantic import ByteSize

    from attention_service.layers.store import LayerStore

    layers = LayerStore(_folder(options), sys.maxsize).describe_all()
    width = max((len(layer.name) for layer in layers), default=0)
    for layer in layers:
        size = "" if layer.error else ByteSize(layer.nbytes).human_readable()
        print(f"{layer.name:{width}}  {size:>9}  {printable(layer.error or layer.source)}")
    return int(any(layer.error for layer in layers))


def _show(options: argparse.Namespace) -> int:
    from attention_service.layers.store import LayerStore

    with reported():
        layer = LayerStore(_folder(options), sys.maxsize).describe(options.name)
    if options.json:
        print(layer.model_dump_json(indent=2, exclude_none=True, ensure_ascii=True))
        return 0
    lines = [f"name     {layer.name}", f"hash     {layer.hash}", f"source   {layer.source}"]
    lines += [f"option   {name} = {json.dumps(value)}" for name, value in layer.options.items()]
    lines += [f"tensor   {tensor.name} {tensor.dtype} {tuple(tensor.shape)}" for tensor in layer.tensors]
    print("\n".join([*map(printable, lines), "", MODULE]))
    return 0


def _remove(options: argparse.Namespace) -> int:
    from attention_service.layers.files import remove_layer
    from attention_service.layers.names import is_name

    folder, name = _folder(options), options.name
    with reported(unreadable=1):
        try:
            if not is_name(name):
                raise FileNotFoundError
            remove_layer(folder, name)
        except FileNotFoundError:
            raise CommandError(f"{name}: there is no such layer") from None
    return 0


def _import(options: argparse.Namespace) -> int:
    from attention_service.layers.families import FAMILIES
    from attention_service.layers.files import paths_of, write_layer
    from attention_service.layers.importing import import_layer
    from attention_service.layers.names import RULE, is_name
    from attention_service.layers.tensors import BadFile

    folder, name = _folder(options), options.name
    if not is_name(name):
        raise CommandError(f"--name: expected {RULE}", 2)
    if options.family is not None and options.family not in FAMILIES:
        raise CommandError(f"--family: expected one of {', '.join(FAMILIES)}", 2)
    if paths_of(folder, name)[0].exists() and not options.replace:
        raise CommandError(f"{name}: there is such a layer; say --replace to replace it")
    how = {key: getattr(options, key) for key in ("family", "prefix", "heads", "positions")}
    with reported(unreadable=1):
        try:
            with Progress() as progress:
                imported = import_layer(Path(options.checkpoint), options.layer, **how, progress=_shown(progress))
            layer = write_layer(folder, name, imported.arrays, imported.options, imported.source)
        except BadFile as error:
            raise CommandError(f"{options.checkpoint}: {error}") from None
    print(f"{name}: {printable(layer.source)}\n{MODULE}")
    return 0


def _shown(progress: Progress) -> Callable[[str, int], None]:
    """A function that shows the name of each tensor that was read, and how much was read so far."""
    sizes: list[int] = []

    def show(name: str, size: int) -> None:
        sizes.append(size)
        progress.show(f"{sum(sizes) / 1e6:.1f} MB read: {name}")

    return show
