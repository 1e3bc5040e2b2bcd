"""Files that commands and the library write: as a whole, or not at all."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import attention_service
from attention_service.cli import main
from attention_service.whole_file import whole_file
from tests.helpers.layers import write_layers

PACKAGE: Final = Path(attention_service.__file__).parent
OLD: Final = b"old"
REQUEST: Final = {"input": np.eye(9).tolist()}
# What each command writes, by its arguments; it is the whole file that is tested, whatever is in it.
COMMANDS: Final = {
    "picture.svg": ["heatmap", "request.json", "-o", "picture.svg"],
    "picture.png": ["heatmap", "request.json", "-o", "picture.png"],
    "inputs.json": ["inputs", "--output", "inputs.json"],
    "inputs.npz": ["inputs", "--output", "inputs.npz"],
    "inputs.safetensors": ["inputs", "--output", "inputs.safetensors"],
    "suite/index.json": ["conformance", "write", "suite", "--cases", "3"],
    "page.html": ["page.html"],  # of `AttentionResult.page`
}
# Runs each command where no file may have more bytes than the last argument says.
CHILD: Final = """
import json, resource, sys
from pathlib import Path
import attention_service
from attention_service.cli import main

def run(arguments):
    if len(arguments) > 1:
        return main(arguments)
    result = attention_service.attend(**json.loads(Path("request.json").read_text()))
    try:
        result.page(arguments[0])
    except OSError as error:
        print(error, file=sys.stderr)
        return 2

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
print(json.dumps([run(arguments) for arguments in json.loads(sys.argv[1])]))
"""


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def run_on_full_disk(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    (folder / "request.json").write_text(json.dumps(REQUEST))
    arguments = [sys.executable, "-B", "-c", CHILD, json.dumps(list(COMMANDS.values())), str(limit)]
    path = os.pathsep.join([str(PACKAGE.parent), *sys.path])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, env=environment, check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_file_of_before_or_none(tmp_path: Path) -> None:
    """And no other file, and an error with the name of the file."""
    for is_there in (False, True):
        folder = tmp_path / str(is_there)
        (folder / "suite").mkdir(parents=True)
        for name in COMMANDS if is_there else ():
            (folder / name).write_bytes(OLD)
        found = run_on_full_disk(folder, 100)
        assert 0 not in json.loads(found.stdout.splitlines()[-1]), found
        errors = found.stderr.splitlines()
        assert len(errors) == len(COMMANDS)
        for name, error in zip(COMMANDS, errors, strict=True):
            assert "File too large" in error
            assert (name if name != "suite/index.json" else "suite/") in error
        # A suite that is written again is none before its last file.
        kept = {name for name in COMMANDS if is_there and name != "suite/index.json"}
        assert names(folder) == {"request.json"} | kept
        assert {(folder / name).read_bytes() for name in kept} <= {OLD}


@pytest.mark.slow
def test_a_disk_with_room_has_all_files(tmp_path: Path) -> None:
    """The control of the test above."""
    (tmp_path / "suite").mkdir()
    assert json.loads(run_on_full_disk(tmp_path, 2**30).stdout.splitlines()[-1]) == [0] * 6 + [None]
    assert set(COMMANDS) <= names(tmp_path)
    assert len(names(tmp_path)) == 1 + len(COMMANDS) + 3


def test_an_interrupt_leaves_the_file_of_before(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(OLD)

    def interrupted() -> None:
        with whole_file(file) as written:
            written.write(b"new")
            written.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert file.read_bytes() == OLD
    assert names(tmp_path) == {"file"}


def test_a_killed_process_leaves_the_file_of_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(OLD)
    program = (
        "import os, signal\nfrom attention_service.whole_file import whole_file\n"
        "with whole_file('file') as file:\n file.write(b'new')\n file.flush()\n os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    assert ended.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == OLD


def test_only_one_module_opens_files_for_writing() -> None:
    """Files that the package writes are written by `whole_file`."""
    for path in PACKAGE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or path.name == "whole_file.py":
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            writes = called == "open" and any(set(mode) <= set("wax+bt") for mode in modes if mode)
            is_zip = "codecs" in path.parts  # an archive in memory
            assert called not in ("write_text", "write_bytes", "NamedTemporaryFile"), path
            assert not writes or is_zip, path


def test_modes_and_links_stay(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with whole_file(tmp_path / "new") as file:
            file.write(b"new")
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640
    (tmp_path / "new").chmod(0o600)
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "other").symlink_to("none yet")
    for name in ("link", "other"):
        with whole_file(tmp_path / name) as file:
            file.write(name.encode())
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "new").read_bytes() == b"link"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "none yet").read_bytes() == b"other"
    assert names(tmp_path) == {"new", "link", "other", "none yet"}


def test_a_stored_file_can_be_read_by_a_service_of_another_user(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with whole_file(tmp_path / "layer", stored=True) as file:
            file.write(b"new")
    finally:
        os.umask(mask)
    assert (tmp_path / "layer").stat().st_mode & 0o777 == 0o644


def test_pipes_and_standard_output_are_written_to(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    assert main(["heatmap", str(tmp_path / "request.json"), "-o", str(tmp_path / "picture.svg")]) == 0
    picture = (tmp_path / "picture.svg").read_bytes()
    os.mkfifo(tmp_path / "pipe.svg")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe.svg").read_bytes()))
    reader.start()
    assert main(["heatmap", str(tmp_path / "request.json"), "-o", str(tmp_path / "pipe.svg")]) == 0
    reader.join()
    assert read == [picture]
    (tmp_path / "out.svg").symlink_to("/dev/stdout")
    command = f"{sys.executable} -m attention_service heatmap request.json -o out.svg"
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    shell = {"cwd": tmp_path, "env": environment, "shell": True, "check": True}
    assert subprocess.run(command, **shell, stdout=subprocess.PIPE).stdout == picture  # type: ignore[call-overload]  # options by **
    subprocess.run(f"{{ {command}; echo end; }} >> file", **shell)  # type: ignore[call-overload]  # options by **
    assert (tmp_path / "file").read_bytes() == picture + b"end\n", "it is still the file of the shell"


def test_what_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "request.json").write_text(json.dumps(REQUEST))
    (tmp_path / "folder.svg").mkdir()
    for name, reason in (("none/a.svg", "No such file or directory"), ("folder.svg", "Is a directory")):
        assert main(["heatmap", str(tmp_path / "request.json"), "-o", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err == f"{tmp_path / name}: {reason}\n"
    assert names(tmp_path) == {"request.json"}


def test_a_stored_file_takes_the_place_of_a_link(tmp_path: Path) -> None:
    """Layers are no links: whoever may write into their folder does not write elsewhere by them."""
    (tmp_path / "elsewhere").write_bytes(OLD)
    folder = tmp_path / "layers"
    folder.mkdir()
    (folder / "bert-0.json").symlink_to("../elsewhere")
    write_layers(folder, 0)
    assert (tmp_path / "elsewhere").read_bytes() == OLD
    assert names(folder) == {"bert-0.json", "bert-0.safetensors"}
    assert not (folder / "bert-0.json").is_symlink()


def test_archives_are_those_of_numpy(tmp_path: Path) -> None:
    assert main(["inputs", "--output", str(tmp_path / "inputs.npz")]) == 0
    with np.load(io.BytesIO((tmp_path / "inputs.npz").read_bytes())) as archive:
        assert archive["query"].ndim
