"""The commands of `attention-service layers`, and texts of files and requests that commands print on a terminal."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from attention_service.cli import main
from attention_service.layers.store import LayerStore
from tests.helpers.checkpoints import (
    CAUSAL,
    LLAMA,
    LLAMA_CONFIG,
    checkpoint,
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama", LLAMA_CONFIG, LLAMA)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "layers"
    path.mkdir()
    monkeypatch.setenv("ATTENTION_LAYERS", str(path))
    return path


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["layers", *arguments])
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_the_commands(folder: Path, llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    how = ("import", str(llama), "--layer", "1", "--name", "llama-1")
    status, out, err = run(capfd, *how)
    assert (status, err) == (0, "")
    assert "model.layers.1.self_attn of llama" in out
    assert "hidden states after the norm" in out
    assert LayerStore(folder, 2**20).get("llama-1").options == CAUSAL
    status, _, err = run(capfd, *how)
    assert (status, "--replace" in err) == (1, True)
    assert run(capfd, *how, "--replace")[0] == 0
    status, out, _ = run(capfd, "list")
    assert (status, out.split()[0]) == (0, "llama-1")
    status, out, _ = run(capfd, "show", "llama-1")
    assert "option   num_heads = 4" in out
    assert "tensor   projection.query.weight F32 (16, 8)" in out
    assert "Hidden states enter where the family's attention module takes them" in out
    status, out, _ = run(capfd, "show", "llama-1", "--json")
    assert json.loads(out)["options"] == CAUSAL
    (folder / "broken.json").write_text("{")
    status, out, _ = run(capfd, "list", "--dir", str(folder))
    assert (status, "cannot be parsed" in out) == (1, True)
    assert run(capfd, "show", "broken")[0] == 1
    assert run(capfd, "remove", "broken")[0] == 0
    assert run(capfd, "remove", "llama-1")[0] == 0
    assert list(folder.iterdir()) == []
    for command in (("remove", "llama-1"), ("remove", "../x"), ("show", "llama-1")):
        assert run(capfd, *command)[0] == 1


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        (("--name", "attention"), 2, "--name: expected"),
        (("--name", "a/b"), 2, "--name: expected"),
        (("--family", "mamba"), 2, "--family: expected one of bert"),
        (("--layer", "5"), 1, "--layer: expected 0 to 1, or -1 for the last of them, got 5"),
        (("--layer", "-3"), 1, "--layer: expected 0 to 1, or -1 for the last of them, got -3"),
        (("--dir", "/nowhere"), 2, "no such directory"),
    ],
)
def test_wrong_imports(
    more: tuple[str, ...], status: int, text: str, folder: Path, llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["layers", "import", str(llama), "--layer", "1", "--name", "x", *more])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert text in capfd.readouterr().err
    assert list(folder.iterdir()) == []


ESCAPES = "\x1b[31m\x9b2J\u202e\n\x07"
ESCAPED = r"\x1b[31m\x9b2J\u202e\n\x07"


def controls(text: str) -> set[str]:
    """The characters of a text that would move a cursor or turn a line around."""
    return {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


def test_names_and_texts_of_files_are_escaped_on_a_terminal(
    folder: Path, llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ESCAPES.replace("\n", "")
    place = f"{line}.layers.1.self_attn."
    given = {name.replace("model.layers.1.self_attn.", place): array for name, array in LLAMA.items()}
    strange = checkpoint(tmp_path / "strange\x1b[0m", LLAMA_CONFIG, given)
    status, out, _ = run(capfd, "import", str(strange), "--layer", "1", "--name", "strange")
    assert (status, ESCAPED.replace(r"\n", "") in out) == (0, True)
    about = json.loads((folder / "strange.json").read_text()) | {"source": ESCAPES}
    (folder / "strange.json").write_text(json.dumps(about))
    (folder / "wrong.json").write_text(json.dumps(about | {"options": {ESCAPES: 1}}))
    (folder / "wrong.safetensors").write_bytes((folder / "strange.safetensors").read_bytes())
    texts = [out]
    for command in (
        ("list",),
        ("show", "strange"),
        ("show", "strange", "--json"),
        ("show", "wrong"),
        ("show", ESCAPES),
        ("remove", ESCAPES),
        ("import", str(llama) + ESCAPES, "--layer", "1", "--name", "other"),
        ("import", str(llama), "--layer", "1", "--name", "other", "--prefix", ESCAPES),
    ):
        _, out, err = run(capfd, *command)
        texts += [out, err]
        assert out + err
    assert [controls(text) for text in texts] == [set()] * len(texts)
    assert ESCAPED in texts[1]


def test_what_requests_say_is_escaped_on_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = {"query": [[1]], "key": [[1]], "value": [[1]]}
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    wrong.write_text(json.dumps(request | {"rotary": {ESCAPES: {ESCAPES: 1}}, ESCAPES: ESCAPES, "backend": ESCAPES}))
    right.write_text(json.dumps(request))
    absent = str(tmp_path / ESCAPES)
    picture = str(tmp_path / "x.svg")
    for command in (
        ["compute", str(wrong)],
        ["compute", absent],
        ["compute", str(right), ESCAPES],
        ["compare", str(wrong)],
        ["compare", absent],
        ["compare", str(right), absent],
        ["heatmap", str(wrong), "-o", picture],
        ["heatmap", absent, "-o", picture],
        ["heatmap", str(right), "-o", ESCAPES],
        ["inputs", "--kills", ESCAPES],
        ["inputs", "--like", absent],
        ["conformance", "run", ESCAPES, "--dir", absent],
    ):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(main(command))
        captured = capfd.readouterr()
        assert ended.value.code in (1, 2, 3)
        assert captured.err
        assert controls(captured.out + captured.err) == set(), command


def test_a_title_has_no_control_characters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = tmp_path / "right.json"
    request.write_text(json.dumps({"query": [[1]], "key": [[1]], "value": [[1]], "heatmap": {"title": ESCAPES}}))
    assert main(["heatmap", str(request), "-o", "-"]) == 0
    assert not controls(capfd.readouterr().out) - {"\u202e"}  # which is part of a text from right to left


def test_a_directory_must_be_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("ATTENTION_LAYERS", raising=False)
    assert main(["layers", "list"]) == 2
    assert "ATTENTION_LAYERS" in capfd.readouterr().err


def test_progress_is_shown_on_a_terminal(
    folder: Path, llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    status, _, err = run(capfd, "import", str(llama), "--layer", "1", "--name", "llama-1")
    assert (status, "MB read: model.layers.1.self_attn.q_proj.weight" in err) == (0, True)
    assert err.endswith("\r\033[K")
    monkeypatch.setattr("os.replace", refuse)
    status, _, err = run(capfd, "import", str(llama), "--layer", "1", "--name", "llama-2")
    assert (status, "no space left" in err) == (1, True)


def refuse(*given: Any) -> None:
    raise OSError(28, "no space left")
