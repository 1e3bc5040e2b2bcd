"""Invalid settings end the service with a one-line message; valid ones are accepted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from attention_service.app import from_environment
from attention_service.cli import main
from attention_service.settings import Settings, table, unknown_variables
from tests.helpers.waiting import TIMEOUT

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ATTENTION_")}
TLS = Path(__file__).parent / "tls"
LOCALHOST = TLS / "localhost.pem"
SERVE = [sys.executable, "-m", "attention_service", "serve", "--port", "0"]
SECRET = "my-secret-key"
FORM = "(sha256: and 64 hexadecimal digits, as `attention-service key` prints)"
MISSING, UNREADABLE = "No such file or directory", "Is a directory"
NO_KEY = "the file holds no private key in PEM without a passphrase"

# Variables, in which {folder} is the folder of the fixture below, and the line that they cause.
ORIGINS = "expected origins like https://app.example:8443, without a path, or *, or null"
HOSTS = "expected names like attention.example, without a scheme, port or path, or *.example, or *"
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "no hash": ({"API_KEYS": SECRET}, f"API_KEYS: hash 1 is not the hash of a key {FORM}"),
    "only commas": ({"API_KEYS": ","}, "API_KEYS: there is no hash between the commas"),
    "no keys file": ({"API_KEYS_FILE": "{folder}/no"}, f"API_KEYS_FILE: the file cannot be read: {MISSING}"),
    "unreadable keys": ({"API_KEYS_FILE": "{folder}"}, f"API_KEYS_FILE: the file cannot be read: {UNREADABLE}"),
    "no hash in file": ({"API_KEYS_FILE": "{folder}/secret"}, f"API_KEYS_FILE: line 2 is not the hash of a key {FORM}"),
    "no text in file": ({"API_KEYS_FILE": "{folder}/bytes"}, "API_KEYS_FILE: the file is not UTF-8 text"),
    "host with scheme": ({"ALLOWED_HOSTS": "a.example, https://b.example"}, f"ALLOWED_HOSTS: {HOSTS}"),
    "host with port": ({"ALLOWED_HOSTS": "a.example:80"}, f"ALLOWED_HOSTS: {HOSTS}"),
    "wrong pattern": ({"ALLOWED_HOSTS": "a*.example"}, f"ALLOWED_HOSTS: {HOSTS}"),
    "no certificate": ({"TLS_CERTIFICATE": "{folder}/no"}, f"TLS_CERTIFICATE: the file cannot be read: {MISSING}"),
    "unreadable certificate": ({"TLS_CERTIFICATE": "{folder}"},
                               f"TLS_CERTIFICATE: the file cannot be read: {UNREADABLE}"),
    "certificate not in PEM": ({"TLS_CERTIFICATE": "{folder}/secret", "TLS_KEY": "{folder}/key.pem"},
                               "TLS_CERTIFICATE: the file holds no certificate in PEM"),
    "certificate cut off": ({"TLS_CERTIFICATE": "{folder}/cut.pem"},
                            "TLS_CERTIFICATE: the file holds no certificate in PEM"),
    "certificate alone": ({"TLS_CERTIFICATE": "{folder}/certificate.pem"},
                          "TLS_KEY: not set, and the file of ATTENTION_TLS_CERTIFICATE holds no private key in PEM "
                          "without a passphrase"),
    "key alone": ({"TLS_KEY": "{folder}/key.pem"}, "TLS_KEY: expected ATTENTION_TLS_CERTIFICATE beside the key"),
    "no key": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": "{folder}/no"},
               f"TLS_KEY: the file cannot be read: {MISSING}"),
    "unreadable key": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": "{folder}"},
                       f"TLS_KEY: the file cannot be read: {UNREADABLE}"),
    "key not in PEM": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": "{folder}/secret"},
                       f"TLS_KEY: {NO_KEY}"),
    "encrypted key": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": f"{TLS}/encrypted-key.pem"},
                      f"TLS_KEY: {NO_KEY}"),
    "another key": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": f"{TLS}/other-key.pem"},
                    "TLS_KEY: the key is not that of ATTENTION_TLS_CERTIFICATE"),
    "key of another type": ({"TLS_CERTIFICATE": "{folder}/certificate.pem", "TLS_KEY": f"{TLS}/ed25519-key.pem"},
                            "TLS_KEY: the key is not that of ATTENTION_TLS_CERTIFICATE"),
    "little memory": ({"MEMORY_LIMIT": "1MiB"}, "MEMORY_LIMIT: expected at least 16.0MiB, got 1.0MiB"),
    "memory for less than a body": ({"MEMORY_LIMIT": "63MiB"}, "MEMORY_LIMIT: expected at least "
                                    "ATTENTION_MAX_BODY_BYTES (64.0MiB), got 63.0MiB"),
    "infinite time": ({"READ_TIMEOUT": "inf"}, "READ_TIMEOUT: expected a finite number, got 'inf'"),
    "no time": ({"TIME_LIMIT": "0"}, "TIME_LIMIT: expected greater than 0, got '0'"),
    "no number": ({"GRPC_PORT": "grpc"}, "GRPC_PORT: expected an integer, got 'grpc'"),
    "no size": ({"MEMORY_LIMIT": "2 apples"}, "MEMORY_LIMIT: expected a number of bytes, like 512MiB, got '2 apples'"),
    "no rate": ({"READ_RATE": "0"}, "READ_RATE: expected greater than 0, got '0'"),
    "no such parser": ({"HTTP_PARSER": "nginx"}, "HTTP_PARSER: expected 'h11' or 'httptools', got 'nginx'"),
    "no such format": ({"LOG_FORMAT": "text"}, "LOG_FORMAT: expected 'human' or 'json', got 'text'"),
    "no such level": ({"LOG_LEVEL": "loud"},
                      "LOG_LEVEL: expected 'critical', 'error', 'warning', 'info' or 'debug', got 'loud'"),
    "no such backend": ({"BACKEND": "jax"}, "BACKEND: expected 'numpy', 'torch', 'ray' or 'auto', got 'jax'"),
    "neither true nor false": ({"METRICS": "maybe"}, "METRICS: expected true or false, got 'maybe'"),
    "origin without a scheme": ({"CORS_ORIGINS": "https://a.example, localhost:9000"}, f"CORS_ORIGINS: {ORIGINS}"),
    "origin with a path": ({"CORS_ORIGINS": "https://app.example/"}, f"CORS_ORIGINS: {ORIGINS}"),
    "folder nowhere": ({"METRICS_FOLDER": "{folder}/no/metrics"},
                       f"METRICS_FOLDER: this is not a folder that can be written to: {MISSING}"),
    "folder that is a file": ({"METRICS_FOLDER": "{folder}/secret"},
                              "METRICS_FOLDER: this is not a folder that can be written to: File exists"),
    "empty host": ({"HOST": ""}, "HOST: expected at least 1 character, got ''"),
    "host that is no name": ({"HOST": "a" * 64}, f"HOST: {'a' * 64}: no host has this name"),
    "host that is not known": ({"HOST": "::1%nowhere"}, "HOST: ::1%nowhere: Name or service not known"),
    "host of another machine": ({"HOST": "192.0.2.1"}, "HOST: 192.0.2.1: Cannot assign requested address"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files for settings."""
    folder = tmp_path_factory.mktemp("settings")
    both = LOCALHOST.read_text()
    start = both.index("-----BEGIN PRIVATE KEY-----")
    (folder / "certificate.pem").write_text(both[:start])
    (folder / "cut.pem").write_text(both[: start - 100])
    (folder / "key.pem").write_text(both[start:])
    (folder / "secret").write_text(f"# people\n{SECRET}\n")
    (folder / "bytes").write_bytes(b"\xff\xfe")
    return folder


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command until it ends, with these variables; their names get the prefix ATTENTION_."""
    environment = ENVIRONMENT | {f"ATTENTION_{name}": value for name, value in variables.items()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@pytest.fixture(scope="module")
def port_in_use() -> Iterator[str]:
    """A port that is in use, so that a service ends even if the settings are valid by mistake."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_setting_ends_serve_with_one_line(
    name: str, folder: Path, port_in_use: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command runs in this process; the next test starts a separate one, as users do."""
    variables, line = WRONG[name]
    for key in os.environ.keys() - ENVIRONMENT.keys():
        monkeypatch.delenv(key)
    for key, value in variables.items():
        monkeypatch.setenv(f"ATTENTION_{key}", value.replace("{folder}", str(folder)))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=r"^2$"):
            main(["serve", "--port", port_in_use])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capfd.readouterr() == ("", f"ATTENTION_{line}\n")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_ends_serve_with_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as port_in_use:
        port = port_in_use.getsockname()[1]
        done = run([*SERVE[:-1], str(port)], WORKERS=workers)
    assert (done.returncode, done.stderr) == (2, f"ATTENTION_PORT: 127.0.0.1:{port}: Address already in use\n")


def test_every_invalid_setting_has_its_line() -> None:
    done = run(SERVE, API_KEYS=SECRET, TIME_LIMIT="nan", WORKERS="many")
    assert done.returncode == 2
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == [
        "ATTENTION_TIME_LIMIT",
        "ATTENTION_API_KEYS",
        "ATTENTION_WORKERS",
    ]
    assert SECRET not in done.stderr


@pytest.mark.slow
def test_an_invalid_setting_ends_stock_uvicorn_with_the_same_line() -> None:
    command = [sys.executable, "-m", "uvicorn", "attention_service.app:from_environment", "--factory", "--port", "0"]
    done = run(command, API_KEYS=SECRET)
    assert (done.returncode, done.stderr) == (2, f"ATTENTION_API_KEYS: hash 1 is not the hash of a key {FORM}\n")


def test_from_environment_raises_system_exit_for_an_invalid_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTENTION_MEMORY_LIMIT", "1")
    with pytest.raises(SystemExit) as ended:
        from_environment()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ATTENTION_MEMORY_LIMIT: expected at least 16.0MiB, got 1B\n"


def test_variables_that_are_no_settings_are_named() -> None:
    known = ["ATTENTION_PORT", "ATTENTION_API_KEYS", "HOME"]
    of_kubernetes = ["ATTENTION_SERVICE_HOST", "ATTENTION_SERVICE_PORT_HTTP", "ATTENTION_PORT_80_TCP_ADDR"]
    assert unknown_variables([*known, *of_kubernetes]) == []
    assert unknown_variables(["ATTENTION_API_KEY", "ATTENTION_X"]) == [
        "ATTENTION_API_KEY: there is no such setting, it is ignored; did you mean ATTENTION_API_KEYS?\n",
        "ATTENTION_X: there is no such setting, it is ignored\n",
    ]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1"])
@pytest.mark.parametrize(
    "name", [name for name, field in Settings.model_fields.items() if "float" in str(field.annotation)]
)
def test_every_number_of_seconds_is_finite_and_not_negative(name: str, value: str) -> None:
    with pytest.raises(ValidationError) as error:
        Settings(**{name: value})  # type: ignore[arg-type]  # pydantic checks them
    assert [found["loc"] for found in error.value.errors()] == [(name,)]


def test_an_error_of_pydantic_quotes_no_key() -> None:
    """The error may be printed unchanged."""
    with pytest.raises(ValidationError) as error:
        Settings(api_keys=SECRET)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"tls_certificate": "{folder}/certificate.pem", "tls_key": "{folder}/key.pem"},
        {"tls_certificate": str(LOCALHOST)},  # the file contains the key, too
        {"memory_limit": "16MiB", "max_body_bytes": "16MiB"},
        {"api_keys": f"sha256:{'0' * 64}, "},
        {"api_keys": ""},
        {"http_parser": "httptools", "read_rate": "1KiB"},
    ],
    ids=str,
)
def test_valid_settings_are_accepted(given: dict[str, str], folder: Path) -> None:
    values: dict[str, Any] = {name: value.replace("{folder}", str(folder)) for name, value in given.items()}
    settings = Settings(**values)
    assert settings.model_fields_set == values.keys()


def test_the_metrics_folder_is_created(tmp_path: Path) -> None:
    for _ in range(2):  # the second time it exists already
        assert Settings(metrics_folder=tmp_path / "metrics").metrics_folder == tmp_path / "metrics"
        assert list(tmp_path.iterdir()) == [tmp_path / "metrics"]
        assert list((tmp_path / "metrics").iterdir()) == []


@pytest.mark.slow
def test_the_memory_limit_is_half_of_the_address_space() -> None:
    """Of the files of control groups, tests/test_machine.py has examples."""
    code = (
        "import resource, sys; limit = int(sys.argv[1]); resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
        "from attention_service.settings import Settings; print(int(Settings().memory_limit))"
    )
    assert run([sys.executable, "-c", code, str(2**30)]).stdout == f"{2**29}\n"
    assert Settings().memory_limit >= 2**24
    assert Settings.model_construct().memory_limit == Settings().memory_limit


@pytest.mark.slow
def test_effective_settings_are_what_the_service_uses_without_secrets(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each setting, in the form of an environment file, which gives the same settings again."""
    hashed, other = (f"sha256:{digit * 64}" for digit in "ab")
    given = {"MEMORY_LIMIT": "100 MiB", "THREADS": "0", "WORKERS": "2", "API_KEYS": f"{hashed} Ada,{other}"}
    given |= {"METRICS": "no", "LAYERS": str(tmp_path), "TIME_LIMT": "1"}
    for name in [name for name in os.environ if name.startswith("ATTENTION_")]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(f"ATTENTION_{name}", value)
    assert main(["settings", "--effective"]) == 0
    printed = capsys.readouterr()
    lines = dict(line.lstrip("# ").replace(" is not set", "=").split("=", 1) for line in printed.out.splitlines()
                 if "API_KEYS:" not in line)  # fmt: skip
    expected = Settings()
    assert lines["ATTENTION_MEMORY_LIMIT"] == str(100 * 2**20)
    assert lines["ATTENTION_THREADS"] == str(expected.compute_threads)
    assert lines["ATTENTION_LAYERS_MEMORY"] == str(50 * 2**20)
    assert lines["ATTENTION_METRICS"] == "false"
    assert lines["ATTENTION_TLS_KEY"] == ""
    assert "# ATTENTION_API_KEYS: 2 hashes\n" in printed.out
    assert hashed not in printed.out
    assert "did you mean ATTENTION_TIME_LIMIT?" in printed.err
    assert len(printed.out.splitlines()) == len(Settings.model_fields)
    for name in given:
        monkeypatch.delenv(f"ATTENTION_{name}")
    for name, value in lines.items():
        if value:
            monkeypatch.setenv(name, value)
    changed = {"api_keys": expected.api_keys, "threads": 0, "layers_memory": None}
    assert Settings().model_copy(update=changed) == expected


def test_a_wrong_environment_has_no_effective_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATTENTION_API_KEYS", SECRET)
    with pytest.raises(SystemExit) as stopped:
        main(["settings", "--effective"])
    assert (stopped.value.code, capsys.readouterr().out) == (2, "")


def test_the_table_of_settings_has_every_choice_and_is_the_same_on_every_machine() -> None:
    rows = {line.split("`")[1]: line for line in table().splitlines()[2:]}
    kinds = {name: field.annotation for name, field in Settings.model_fields.items()}
    literals = {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}
    assert literals["log_format"] == ("human", "json")
    assert {"log_level", "backend", "http_parser"} < literals.keys()
    booleans = [name for name, kind in kinds.items() if kind is bool]
    for name, values in {**literals, **dict.fromkeys(booleans, ("true", "false"))}.items():
        choices = ", ".join(f"`{value}`" for value in values)
        assert rows[f"ATTENTION_{name.upper()}"].endswith(f" One of {choices}. |")
    assert "| `true` |" in rows["ATTENTION_METRICS"]
    assert "| half of the memory limit of the container; without one, " in rows["ATTENTION_MEMORY_LIMIT"]
    assert "| `16.0KiB` |" in rows["ATTENTION_READ_RATE"]
    command = [sys.executable, "-m", "attention_service", "settings"]
    limited = ["sh", "-c", 'ulimit -v 1048576; exec "$@"', "sh", *command]
    assert run(limited).stdout == f"{table()}\n"  # as in this process, which has all memory
