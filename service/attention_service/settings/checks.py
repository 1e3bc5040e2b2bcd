"""Checks of settings. Each returns the setting or raises ValueError, with a text that quotes neither paths nor keys."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

from attention_service.settings.files import check_regular
from attention_service.settings.keys import parse_hashes, read_hashes

HOST: Final = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*|\[[\da-fA-F:.]+\]")
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")
# What OpenSSL says of a key that is of another certificate: of the same type, and of another type.
MISMATCH = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


@contextmanager
def _refused(reason: str) -> Iterator[None]:
    """Turn an OSError inside into a ValueError with this reason and the message of the system."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{reason}: {error.strerror}") from None


def check_backend(backend: str) -> str:
    """The name of a backend, if what it needs is installed."""
    if backend == "torch" and not all(map(find_spec, ("torch", "array_api_compat"))):
        raise ValueError("torch is not there; install attention-service[torch]")
    if backend == "ray" and find_spec("ray") is None:
        raise ValueError("Ray is not there; install attention-service[ray]")
    return backend


def check_hashes(hashes: str) -> str:
    """The hashes of keys, comma-separated, if all are hashes."""
    parse_hashes(hashes)
    return hashes


def split_list(text: str) -> list[str]:
    """The items of a comma-separated text."""
    return [item.strip() for item in text.split(",") if item.strip()]


def check_hosts(hosts: str) -> str:
    """The names of hosts, comma-separated, if a Host header can have them, or they are patterns of such ones."""
    if not all(map(HOST.fullmatch, split_list(hosts))):
        raise ValueError("expected names like attention.example, without a scheme, port or path, or *.example, or *")
    return hosts


def check_origins(origins: str) -> str:
    """The origins, comma-separated, if browsers send such ones: a scheme and a host, maybe a port (RFC 6454)."""
    for origin in split_list(origins):
        if origin not in ("*", "null") and ORIGIN.fullmatch(origin) is None:
            raise ValueError("expected origins like https://app.example:8443, without a path, or *, or null")
    return origins


def check_keys_file(file: Path) -> Path:
    """The file, if it can be read and holds nothing but hashes of keys."""
    with _refused("the file cannot be read"):
        read_hashes(file)
    return file


def check_certificate(certificate: Path) -> Path:
    """The file, if it can be read and holds a certificate in PEM."""
    with _refused("the file cannot be read"):
        check_regular(certificate)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
        except ssl.SSLError:  # a subclass of OSError
            raise ValueError("the file holds no certificate in PEM") from None
    return certificate


def check_private_key(certificate: Path, key: Path | None) -> None:
    """Raise ValueError if a server cannot use this private key with the certificate.

    The key is in the certificate's own file if `key` is None.
    """
    with _refused("the file cannot be read"):
        for file in (certificate, key or certificate):
            check_regular(file)
        try:
            # The empty password keeps OpenSSL from asking for one on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            if error.reason in MISMATCH:
                raise ValueError("the key is not that of ATTENTION_TLS_CERTIFICATE") from None
            if error.reason:
                reason = error.reason.replace("_", " ").lower()
                raise ValueError(f"the key cannot be used with ATTENTION_TLS_CERTIFICATE: {reason}") from None
            place = "the file" if key else "not set, and the file of ATTENTION_TLS_CERTIFICATE"
            raise ValueError(f"{place} holds no private key in PEM without a passphrase") from None


def check_layers(folder: Path) -> Path:
    """The folder, if it can be listed."""
    with _refused("this is not a folder that can be read"), os.scandir(folder):
        return folder


def check_folder(folder: Path) -> Path:
    """The folder, if files can be written in it. It is made if there is none."""
    with _refused("this is not a folder that can be written to"):
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
