"""Make a virtual environment of this checkout whose packages are installed once for all checkouts of a machine.

    python requirements/environment.py FOLDER LOCK ... [--torch REQUIREMENT] [--models LOCK] [--project]

What the locks name is installed below $ENVIRONMENTS, in an environment for each hash of the locks and of Python. FOLDER
is a small environment in front of it, in which the checkout itself is installed with --project. Returns at once if
FOLDER is made of the same already.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FINISHED = "finished"  # a file in a shared environment, written last
MADE_OF = "made-of"  # a file in FOLDER, written last: what it was made of
TORCH = "torch"  # a file in FOLDER: its requirement of torch, which the Makefile keeps until another is asked for


# How pip lets a script run with a Python whose path is long or has spaces: as a shell, which Python reads as a string.
EXEC = "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"


def digest(*parts: bytes) -> str:
    """A hash of parts, of which each has its own length."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def pip(environment: Path, *arguments: str) -> None:
    """Install into an environment."""
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments], check=True)


def site_packages(environment: Path) -> Path:
    """Where an environment has its packages."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def install(shared: Path, options: argparse.Namespace, given: list[bytes]) -> None:
    """Install the locks into a new environment. torch comes without hashes, and models without what they depend on."""
    shutil.rmtree(shared, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", shared], check=True)
    if options.torch:
        pip(shared, *options.torch.split())
    pip(shared, "--require-hashes", *(word for lock in options.locks for word in ("--requirement", lock)))
    if options.models:
        pip(shared, "--require-hashes", "--no-deps", "--requirement", options.models)
    if contents(options) != given:
        sys.exit(f"{shared} is not what it is named for: a lock changed while it was installed. Run this again.")
    (shared / FINISHED).touch()


def link(script: Path, shared: Path, folder: Path) -> None:
    """Let a script of the shared environment run with the Python of the folder; link what is no script of Python."""
    place, head = folder / "bin" / script.name, f"{shared}/bin/python".encode()
    lines = script.read_bytes().split(b"\n", 3)
    if lines[0].startswith(b"#!" + head):
        rest = b"\n".join(lines[1:])
    elif lines[0] == b"#!/bin/sh" and head in lines[1]:
        rest = b"\n".join(lines[3:])
    else:
        place.symlink_to(script)
        return
    place.write_bytes(EXEC.format(python=folder / "bin" / "python").encode() + rest)
    place.chmod(0o755)


def front(folder: Path, shared: Path, options: argparse.Namespace) -> None:
    """Make the folder: an environment that finds the packages and the scripts of the shared one."""
    (folder / MADE_OF).unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    if options.torch:
        (folder / TORCH).write_text(options.torch)
    (site_packages(folder) / "shared.pth").write_text(f"import site; site.addsitedir({str(site_packages(shared))!r})\n")
    for script in (shared / "bin").iterdir():
        if script.is_file() and not (folder / "bin" / script.name).exists():
            link(script, shared, folder)
    if options.project:
        pip(folder, "--no-deps", "--no-build-isolation", "--editable", ".")


def contents(options: argparse.Namespace) -> list[bytes]:
    """The bytes of all locks."""
    return [Path(lock).read_bytes() for lock in (*options.locks, *([options.models] if options.models else ()))]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process is that locks the same file."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Make the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="of the checkout, .venv-NAME")
    parser.add_argument("locks", nargs="+")
    parser.add_argument("--torch", help="requirements of torch with options of pip; no lock has them")
    parser.add_argument("--models", help="a lock of packages that are installed without their dependencies")
    parser.add_argument("--project", action="store_true", help="install the checkout too")
    options = parser.parse_args()
    folder = Path(os.path.abspath(options.folder))
    default = Path.home() / ".cache" / "attention-service"
    environments = Path(os.path.abspath(os.environ.get("ENVIRONMENTS") or default))
    environments.mkdir(parents=True, exist_ok=True)
    own, place = Path(__file__).read_bytes(), str(folder).encode()
    with locked(environments / f"{digest(place)}.lock"):
        given = contents(options)
        python = [
            sys.version,
            os.path.realpath(sys.executable),
            platform.machine(),
            options.torch,
            bool(options.models),
        ]
        name = f"{folder.name.lstrip('.')}-{digest(repr(python).encode(), own, *given)}"
        project = Path("pyproject.toml").read_bytes() if options.project else b""
        made_of = f"{environments / name} {digest(place, project)}"
        with locked(environments / f"{name}.lock"):
            is_installed = (environments / name / FINISHED).exists()
            if not is_installed:
                install(environments / name, options, given)
            if not is_installed or not (folder / MADE_OF).exists() or (folder / MADE_OF).read_text() != made_of:
                front(folder, environments / name, options)
                (folder / MADE_OF).write_text(made_of)


if __name__ == "__main__":
    main()
