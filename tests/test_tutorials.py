"""A newcomer can follow the tutorials: docs/tutorial-by-hand.md and docs/tutorial-kernel.md print what they show.

tests/peers/test_tutorial.py follows docs/tutorial-model.md, which needs a trained model.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.documents import ROOT
from tests.helpers.tutorial import follow


def test_attention_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert follow("docs/tutorial-by-hand.md", tmp_path) > 8
    drawn = (tmp_path / "attention.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "images" / "attention.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_find_the_bug_in_a_kernel(tmp_path: Path) -> None:
    assert follow("docs/tutorial-kernel.md", tmp_path) > 4
