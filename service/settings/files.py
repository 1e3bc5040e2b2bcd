"""Checks of settings that name files: each raises ValueError with a text that quotes neither paths nor contents."""

from __future__ import annotations

import ssl
from pathlib import Path
from tempfile import TemporaryFile

from service.settings.keys import read_hashes

# What OpenSSL says of a key that is of another certificate: of the same type, and of another type.
MISMATCH = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})


def check_keys_file(file: Path) -> None:
    """Raise ValueError if the file cannot be read or holds anything but hashes of keys."""
    try:
        read_hashes(file)
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None


def check_certificate(certificate: Path) -> None:
    """Raise ValueError if the file cannot be read or holds no certificate in PEM."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(certificate)
    except ssl.SSLError:  # a subclass of OSError
        raise ValueError("the file holds no certificate in PEM") from None
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None


def check_key(certificate: Path, key: Path | None) -> None:
    """Raise ValueError if a server cannot use this private key with the certificate.

    The key is in the certificate's own file if `key` is None.
    """
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
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror}") from None


def check_folder(folder: Path) -> None:
    """Make the folder if there is none. Raise ValueError if no file can be written in it."""
    try:
        folder.mkdir(exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"this is not a folder that can be written to: {error.strerror}") from None
