"""The command line, run in separate processes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from attention_service import __version__
from attention_service.cli import main
from attention_service.runtime import health
from attention_service.settings import Settings
from benchmarks.serving import free_port
from tests.cases import CASES, FOLDER
from tests.conftest import serving
from tests.helpers.waiting import TIMEOUT

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}


def run(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("attention-service")), *arguments]
    own = ENVIRONMENT | environment
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=own, timeout=TIMEOUT, check=False)


def test_compute_prints_the_same_response_as_the_server(tmp_path: Path, client: httpx.Client) -> None:
    case = next(case for case in CASES if case.name == "animals_projected")
    path = tmp_path / "request.json"
    path.write_text(json.dumps(case.request))
    done = run("compute", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    served = client.post("/attention", json=case.request).json()
    assert {**answer, "metadata": 0} == {**served, "metadata": 0}
    assert answer["metadata"] | {"request_id": 0} == served["metadata"] | {"request_id": 0}


def test_compute_reads_standard_input() -> None:
    done = run("compute", "-", stdin='{"input": [[1]]}')
    assert json.loads(done.stdout)["output"] == [[1]]


def test_heatmap_reads_standard_input_and_prints() -> None:
    done = run("heatmap", "-", "-o", "-", "--title", "piped", stdin='{"input": [[1]], "query_tokens": ["one"]}')
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("<svg ")
    assert ">piped</text>" in done.stdout
    assert "one → one: 1" in done.stdout
    wrong = run("heatmap", "-", "-o", "-", stdin='{"input": [[1, NaN]]}')
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == "InvalidJSON: /input/0/1: expected a finite number, got NaN\n"


@pytest.mark.skipif(
    find_spec("transformers") is not None, reason="tests/peers has what the command does with the extra"
)
def test_page_says_which_extra_it_needs(tmp_path: Path) -> None:
    done = run("page", "a text", "--model", "a", "-o", str(tmp_path / "it.html"))
    assert (done.returncode, done.stdout) == (2, "")
    extra = "pip install 'attention-service[transformers]'"
    assert done.stderr == f"this command needs the extra transformers, and torch: {extra}\n"
    assert list(tmp_path.iterdir()) == []
    missing = run("page", "a text", "--model", "a", "-o", str(tmp_path / "no" / "it.html"))
    assert (missing.returncode, missing.stderr) == (
        2,
        f"{tmp_path}/no/it.html: expected a file in a directory that exists\n",
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--layers", "3", "-1", "a text"],
            "TEXT: expected one text in quotes, got '-1', 'a text'. Several layers are",
        ),
        (["--layers", "a text"], "argument --layers: expected indices like 3 or 3,-1, got a text"),
        (["--layers", "-2,-1", "a text"], "one that begins with - stands behind =, as in --layers=-2,-1"),
        (["-o", "it.png", "a text"], "it.png: expected a name that ends in .html"),
        (["--model", "a/b/c", "a text"], "--model a/b/c: expected a directory of a model, or its name on the hub; got"),
        (["--model", ".", "a text"], "as save_pretrained() writes both: it has no config.json"),
    ],
)
def test_page_says_what_is_wrong_before_it_loads_a_model(arguments: list[str], text: str, tmp_path: Path) -> None:
    given = ["--model", str(tmp_path), "-o", str(tmp_path / "it.html"), *arguments]
    done = run("page", *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_compute_prints_the_problem_of_a_bad_request() -> None:
    done = run("compute", "-", stdin='{"input": [[1], [2, 3]]}')
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "InvalidArray: /input/1: expected a row of 1, as the first, got a row of 2\n"
    missing = run("compute", str(FOLDER / "no-such-file.json"))
    assert missing.returncode == 2
    assert "No such file" in missing.stderr
    limits = {"ATTENTION_MEMORY_LIMIT": "16MiB", "ATTENTION_MAX_BODY_BYTES": "1MiB"}
    weights_of_72_megabytes = json.dumps({"input": [[1]] * 3000})
    limited = run("compute", "-", stdin=weights_of_72_megabytes, **limits)
    assert (limited.returncode, limited.stderr.split(":")[0]) == (1, "MemoryLimit")


@pytest.mark.slow
def test_an_invalid_setting_is_named() -> None:
    done = run("compute", "-", stdin='{"input": [[1]]}', ATTENTION_MAX_BODY_BYTES="much")
    assert done.returncode == 2
    assert done.stderr.startswith("ATTENTION_MAX_BODY_BYTES: ")
    assert len(done.stderr.splitlines()) == 1


def test_version_and_usage_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"
    with pytest.raises(SystemExit, match="2"):
        main([])


def test_the_help_of_serve_says_where_all_other_settings_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "`attention-service settings`" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["openapi", "settings"])
def test_openapi_and_settings_do_not_depend_on_the_environment(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for port in ("8", "9"):
        monkeypatch.setenv("ATTENTION_PORT", port)
        assert main([command]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["settings", "openapi"])
def test_a_closed_output_pipe_is_not_an_error(command: str) -> None:
    """As in `attention-service settings | head -1`, but with a pipe that is closed from the start."""
    call = [sys.executable, "-m", "attention_service", command]
    with subprocess.Popen(call, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, b"")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["settings", "openapi", "key"])
def test_a_full_output_is_an_error_on_one_line(command: str) -> None:
    call = [sys.executable, "-m", "attention_service", command]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(call, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (2, b"standard output: No space left on device\n")


@pytest.mark.slow
def test_several_workers_serve_one_port() -> None:
    """Each worker responds on the shared port."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "attention_service",
        "serve",
        "--port",
        str(port),
        "--workers",
        "2",
        "--threads",
        "1",
    ]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            started = 0
            while started < 2:
                started += "startup complete" in process.stderr.readline()
            for _ in range(10):  # each on a new connection
                answer = httpx.post(f"http://127.0.0.1:{port}/attention", json={"input": [[1]]}, timeout=TIMEOUT)
                assert answer.json()["output"] == [[1]]
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=TIMEOUT)
        finally:
            process.kill()


@pytest.mark.slow
def test_health_exits_with_0_only_for_a_ready_server(client: httpx.Client) -> None:
    """The exit status is 0 for a ready server; for others, or without a server, 1 with the reason."""
    port = str(client.base_url.port)
    well = run("health", ATTENTION_HOST="0.0.0.0", ATTENTION_PORT=port)
    assert (well.returncode, well.stdout, well.stderr) == (0, "", "")
    absent = run("health", ATTENTION_PORT=str(free_port()))
    assert absent.returncode == 1
    assert "refused" in absent.stderr
    with serving(FastAPI()) as other:
        status = run("health", ATTENTION_PORT=str(other.base_url.port))
    assert (status.returncode, status.stderr.split(": ")[1]) == (1, "status 404\n")


@pytest.mark.slow
def test_key_prints_a_key_and_its_hash() -> None:
    key, hashed = run("key").stdout.splitlines()
    assert len(key) == 43
    assert hashed == f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_health_uses_the_host_and_port_of_the_settings() -> None:
    """The command reads the environment without the settings module, with the same defaults."""
    defaults = Settings.model_construct()
    assert health.address({}) == (defaults.host, defaults.port)
    assert health.address({"ATTENTION_HOST": "::", "ATTENTION_PORT": "9"}) == ("::1", 9)


@pytest.mark.slow
def test_health_reports_an_invalid_port() -> None:
    wrong = run("health", ATTENTION_PORT="tcp://10.0.0.1:8000")
    assert (wrong.returncode, wrong.stderr) == (2, "ATTENTION_PORT: expected a number\n")


@pytest.mark.slow
def test_health_imports_few_modules() -> None:
    code = "import sys; from attention_service.cli import main; main(['health']); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "attention_service"], ["-m", "attention_service", "serve", "--port", "0"]])
def test_serve_runs_until_sigterm(command: list[str]) -> None:
    """The log has the free port; SIGTERM ends the server with exit status 0."""
    environment = ENVIRONMENT | {"ATTENTION_PORT": "0", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if "running on" in line)
            url = next(word for word in line.split() if word.startswith("http://"))
            assert httpx.get(f"{url}/health/ready", timeout=TIMEOUT).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=TIMEOUT) == 0
        finally:
            process.kill()
