"""The command `page`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attention_service.commands.terminal import CommandError, Progress, reported

EXTRA: Final = "this command needs the extra transformers, and torch: pip install 'attention-service[transformers]'"
SUFFIXES: Final = (".html", ".htm")
# Names on the hub: a name, or an organisation and a name.
NAME: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# What a page shows of each step before the masks.
EVERY_STAGE: Final = ("query", "key", "value", "scores", "scaled_scores", "capped_scores")


def add_commands(add: Callable[..., Any]) -> None:
    """Add the command. add: adds a command by its name, function, help and description, and returns its parser"""
    page = add(
        "page",
        run_page,
        "write the attention of a model on a text as one HTML file",
        "Run a model of Hugging Face transformers on a text, and write what its tokens attend to, in all layers and "
        "heads, as one HTML file, which needs no server. Of a model with an encoder and a decoder the encoder runs. "
        "Needs the extra transformers.",
    )
    page.add_argument("text", metavar="TEXT", help="what the model reads, in quotes")
    page.add_argument("more", nargs="*", help=argparse.SUPPRESS)  # for an error that says what is wrong
    page.add_argument("--model", metavar="MODEL", required=True, help="directory of a model, or its name on the hub")
    page.add_argument("-o", "--output", metavar="FILE", required=True, help="file to write, .html")
    for name in ("layers", "heads"):  # one argument each: more would take the text, too
        page.add_argument(f"--{name}", type=_indices, metavar="N,N", help=f"indices of {name}, like 3,5 (default: all)")
    page.add_argument(
        "--every-stage",
        action="store_true",
        help="with queries, keys, values and all scores, for each number by hand; the file is four times as large",
    )
    page.add_argument("--title", help="title of the page (default: the names of model and text)")


def run_page(options: argparse.Namespace) -> int:
    """Write the page of the command, and return the exit status."""
    _check(options)  # before a large model is loaded
    output, text = Path(options.output), options.text
    try:
        import torch
        from huggingface_hub.utils import logging as hub_logging
        from transformers import AutoConfig, AutoModel, AutoTokenizer
        from transformers.utils import logging

        from attention_service.render.drawing import counted
        from attention_service.transformers import capture
    except ImportError:
        raise CommandError(EXTRA, 2) from None
    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with Progress() as progress:
        progress.show(f"loading {options.model}")
        with _one_line(_failed(options.model), 2):
            config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
            model = AutoModel.from_pretrained(options.model, config=config, trust_remote_code=False).eval()
        if config.is_encoder_decoder:
            model = model.get_encoder()
        progress.show("running the model")
        with _one_line(options.model, 1):
            inputs = tokenizer(text, return_tensors="pt")
            tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
            include = ["attention_weights", *(EVERY_STAGE if options.every_stage else ())]
            chosen = {"layers": options.layers, "heads": options.heads, "include": include, "tokens": tokens}
            with torch.no_grad(), capture(model=model, **chosen) as captured:
                model(**inputs)
            if not captured:
                raise ValueError("this model does not call its attention by the interface of transformers")
            name = Path(options.model).resolve().name if Path(options.model).exists() else options.model
            with reported():
                captured.page(output, title=options.title or f"{name}: {text}")
    heads = max(len(call.heads) for call in captured.calls)
    parts = counted(len(captured), "layer"), counted(heads, "head"), counted(len(tokens), "token")
    print(f"{output}: {', '.join(parts)}, {output.stat().st_size:,} bytes")
    return 0


def _indices(text: str) -> list[int]:
    """The type of an argument that is a list of indices. Errors: ArgumentTypeError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected indices like 3 or 3,-1, got {text}") from None


def _check(options: argparse.Namespace) -> None:
    """Check what can be known before the model is loaded. Errors: CommandError."""
    output, model = Path(options.output), Path(options.model)
    if options.more:
        got = ", ".join(repr(text) for text in [options.text, *options.more])
        raise CommandError(f"TEXT: expected one text in quotes, got {got}. Several layers are --layers 3,5", 2)
    if output.suffix.lower() not in SUFFIXES:
        raise CommandError(f"{output}: expected a name that ends in .html", 2)
    if output.is_dir() or not output.parent.is_dir():
        raise CommandError(f"{output}: expected a file in a directory that exists", 2)
    if not model.is_dir() and (model.exists() or not NAME.fullmatch(options.model)):
        there = "a file" if model.exists() else "nothing there"
        raise CommandError(
            f"--model {options.model}: expected a directory of a model, or its name on the hub; got {there}", 2
        )
    if model.is_dir() and not (model / "config.json").is_file():
        raise CommandError(f"{_failed(options.model)}: it has no config.json", 2)


def _failed(model: str) -> str:
    """What an error of loading a model begins with."""
    if Path(model).is_dir():
        return f"--model {model}: expected a directory of a model and its tokenizer, as save_pretrained() writes both"
    return f"--model {model}: no such directory, and no such model could be loaded from the Hugging Face hub"


@contextmanager
def _one_line(model: str, status: int) -> Iterator[None]:
    """Turn any error into a CommandError with its first line: files of models and their code raise all kinds.

    model: what the line begins with
    """
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(
            f"{model}: {str(error).strip().partition(chr(10))[0] or type(error).__name__}", status
        ) from None
