"""The command `heatmap`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_service.commands.terminal import CommandError, natural, reported


def add_commands(add: Callable[..., Any]) -> None:
    """Add the command. add: adds a command by its name, function, help and description, and returns its parser"""
    heatmap = add(
        "heatmap",
        run_heatmap,
        "draw the attention weights of a request, or a score stage",
        "Draw the attention weights of a request, or a score stage, as SVG or PNG. What the options say replaces the "
        "fields of `heatmap` in the request.",
    )
    heatmap.add_argument(
        "request",
        metavar="REQUEST",
        help="file with the fields of POST /attention: .json .npz .safetensors .pt, or - for standard input; or the "
        "folder of a recording by the flight recorder of FlashInfer, or of one of its calls",
    )
    heatmap.add_argument("--call", type=natural, metavar="N", help="which call of attention of the recording, from 0")
    heatmap.add_argument(
        "--sequence", type=natural, metavar="B", help="the sequence of the recorded call that is drawn (default: 0)"
    )
    heatmap.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="file to write, .svg or .png, or - to print the SVG"
    )
    heatmap.add_argument(
        "--stage",
        help="attention_weights (default), scores, scaled_scores, capped_scores, masked_scores, or with grad_output "
        "their gradients grad_scores, grad_scaled_scores or grad_masked_scores",
    )
    heatmap.add_argument("--scale", help="how weights become colours: linear (default) or log")
    heatmap.add_argument("--vmax", type=float, help="the number at the end of the colours (default: the largest)")
    heatmap.add_argument("--bins", help="what a cell of several numbers shows: max (default) or mean")
    heatmap.add_argument("--max-cells", type=int, help="most cells on each side of a head (default: 512)")
    heatmap.add_argument("--batch-entry", type=int, help="the batch entry that is drawn (default: 0)")
    heatmap.add_argument("--theme", help="auto (default), light or dark")
    heatmap.add_argument("--width-mm", type=float, help="width on paper, in mm (default: 96 pixels to the inch)")
    heatmap.add_argument("--dpi", type=int, help="pixels of a PNG to the inch (default: 192)")
    heatmap.add_argument("--title", help="text above the picture (default: what is drawn)")


def run_heatmap(options: argparse.Namespace) -> int:
    """Write the picture of the command, and return the exit status."""
    from attention_service.backends.registry import Backends
    from attention_service.commands.files import read_request
    from attention_service.render.heatmap import Heatmap, make_heatmap_request
    from attention_service.schemas.heatmap import HeatmapOptions

    own = {name: value for name in HeatmapOptions.model_fields if (value := getattr(options, name, None)) is not None}
    with reported():
        path = Path(options.request)
        if path.is_dir():
            from attention_service.commands.recordings import read_sequence

            decoded = read_sequence(path, options.call, options.sequence or 0)
        elif options.call is not None or options.sequence is not None:
            flag = "--sequence" if options.call is None else "--call"
            raise CommandError(f"{flag}: expected the folder of a recording, got {path}", 2)
        else:
            decoded = read_request(path)
        given = decoded.fields.get("heatmap")
        decoded.fields["heatmap"] = {**given, **own} if isinstance(given, dict) else own if given is None else given
        picture = Heatmap(make_heatmap_request(decoded), Backends().choose("numpy", "cpu"))
        try:
            if options.output == "-":
                sys.stdout.buffer.write(picture.svg.encode())
            else:
                picture.save(options.output)
        except ValueError as error:  # of the name of the file
            raise CommandError(str(error), 2) from None
    return 0
