"""Follows a tutorial as a reader does: saves its files, edits them, runs its commands, and pastes its programs."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.documents import BLOCKS, Block

NUMBER = re.compile(r"-?\d+\.\d*")


def follow(page: str, folder: Path, apart: float = 0) -> int:
    """Do what the blocks of a tutorial say, in their order, in an empty folder that is the current one.

    A block with a title is a file, or a change of one; a block of text is what the block before it prints. Numbers with
    a point may be `apart`. Returns how many outputs were compared. Errors: AssertionError if one differs.
    """
    names: dict[str, Any] = {}
    printed, compared = "", 0
    for block in (block for block in BLOCKS if block.page == page):
        if block.language == "text":
            assert_same(printed, block.text, apart, str(block))
            compared += 1
        elif block.language == "sh":
            printed = "" if block.text.startswith("pip install") else block.run(folder=folder)
        elif block.language == "diff":
            edit(folder, block)
        elif block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")
        else:
            with redirect_stdout(StringIO()) as output, np.errstate(invalid="ignore"):
                exec(block.text, names)  # the project's own page
            printed = output.getvalue()
    return compared


def edit(folder: Path, block: Block) -> None:
    """Replace the lines of a file that begin with - in the block by those that begin with +."""
    assert block.title
    file = folder / block.title
    old, new = ("".join(f"{line[1:]}\n" for line in block.text.splitlines() if line.startswith(sign)) for sign in "-+")
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, block
    file.write_text(text.replace(old, new), encoding="utf-8")


def assert_same(printed: str, shown: str, apart: float, place: str) -> None:
    """The texts are the same, but for numbers with a point that are close, and for the seconds that pytest took."""
    printed, shown = (re.sub(r"(?<= in )\d+\.\d+s", "a while", text) for text in (printed, shown))
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", shown), place
    for one, other in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        assert abs(float(one) - float(other)) <= apart, place
