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
from pathlib import Path

FINISHED = "finished"  # a file in a shared environment, written last
MADE_OF = "made-of"  # a file in FOLDER, written last: what it was made of
TORCH = "torch"  # a file in FOLDER: its requirement of torch, which the Makefile keeps until another is asked for


def digest(*parts: bytes) -> str:
    """A hash of parts, of which each has its own length."""
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def pip(environment: Path, *arguments: str) -> None:
    """Install into an environment."""
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments], check=True)


def site_packages(environment: Path) -> Path:
    """Where an environment has its packages."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def install(shared: Path, options: argparse.Namespace) -> None:
    """Install the locks into a new environment. torch comes without hashes, and models without what they depend on."""
    shutil.rmtree(shared, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", shared], check=True)
    if options.torch:
        pip(shared, *options.torch.split())
    pip(shared, "--require-hashes", *(word for lock in options.locks for word in ("--requirement", lock)))
    if options.models:
        pip(shared, "--require-hashes", "--no-deps", "--requirement", options.models)
    (shared / FINISHED).touch()


def link(script: Path, shared: Path, folder: Path) -> None:
    """Let a script of the shared environment run with the Python of the folder; link what is no script of Python."""
    first, _, rest = script.read_bytes().partition(b"\n")
    place = folder / "bin" / script.name
    if first.startswith(f"#!{shared}/bin/python".encode()):
        place.write_bytes(f"#!{folder}/bin/python\n".encode() + rest)
        place.chmod(0o755)
    else:
        place.symlink_to(script)


def front(folder: Path, shared: Path, options: argparse.Namespace) -> None:
    """Make the folder: an environment that finds the packages and the scripts of the shared one."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    (site_packages(folder) / "shared.pth").write_text(f"import site; site.addsitedir({str(site_packages(shared))!r})\n")
    for script in (shared / "bin").iterdir():
        if not (folder / "bin" / script.name).exists():
            link(script, shared, folder)
    if options.project:
        pip(folder, "--no-deps", "--no-build-isolation", "--editable", ".")
    if options.torch:
        (folder / TORCH).write_text(options.torch)


def main() -> None:
    """Make the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="of the checkout, .venv-NAME")
    parser.add_argument("locks", nargs="+")
    parser.add_argument("--torch", help="requirements of torch with options of pip; no lock has them")
    parser.add_argument("--models", help="a lock of packages that are installed without their dependencies")
    parser.add_argument("--project", action="store_true", help="install the checkout too")
    options = parser.parse_args()
    folder = Path(options.folder).absolute()
    environments = Path(os.environ.get("ENVIRONMENTS") or Path.home() / ".cache" / "attention-service").absolute()
    environments.mkdir(parents=True, exist_ok=True)
    locks = [Path(lock).read_bytes() for lock in (*options.locks, *([options.models] if options.models else ()))]
    python = f"{sys.version} {os.path.realpath(sys.executable)} {platform.machine()} {options.torch}"
    name = f"{folder.name.lstrip('.')}-{digest(python.encode(), *locks)}"
    shared = environments / name
    project = Path("pyproject.toml").read_bytes() if options.project else b""
    made_of = f"{shared} {digest(str(folder).encode(), project, Path(__file__).read_bytes())}"
    # One process at a time makes an environment, and the folders in front of it.
    with (environments / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_installed = (shared / FINISHED).exists()
        if is_installed and (folder / MADE_OF).exists() and (folder / MADE_OF).read_text() == made_of:
            return
        if not is_installed:
            install(shared, options)
        front(folder, shared, options)
        (folder / MADE_OF).write_text(made_of)


if __name__ == "__main__":
    main()
