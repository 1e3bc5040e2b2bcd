"""Make a virtual environment of this checkout whose packages are installed once for all checkouts of a machine.

    python requirements/environment.py FOLDER LOCK ... [--torch REQUIREMENT] [--models LOCK] [--project]

What the locks name is installed below $ENVIRONMENTS, in an environment for each hash of the locks and of Python. FOLDER
is a small environment in front of it, in which the checkout itself is installed with --project. Environments that no
checkout has asked for in 30 days are removed.
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
import time
from pathlib import Path

KEPT_DAYS = 30
FINISHED = "finished"  # a file in a shared environment, written last


def pip(environment: Path, *arguments: str) -> None:
    """Install into an environment."""
    subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "--quiet", *arguments], check=True)


def install(shared: Path, options: argparse.Namespace) -> None:
    """Install the locks into a new environment. torch comes without hashes, and models without what they depend on."""
    shutil.rmtree(shared, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", shared], check=True)
    if options.torch:
        pip(shared, *options.torch.split())
    pip(shared, "--require-hashes", *(word for lock in options.locks for word in ("--requirement", lock)))
    if options.models:
        pip(shared, "--require-hashes", "--no-deps", "--requirement", options.models)


def remove_old(folder: Path) -> None:
    """Remove environments that were not asked for in a long time."""
    for finished in folder.glob(f"*/{FINISHED}"):
        if time.time() - finished.stat().st_mtime > KEPT_DAYS * 24 * 3600:
            shutil.rmtree(finished.parent)


def shared_environment(options: argparse.Namespace) -> Path:
    """The environment with the packages, installed by the first process that asks for it."""
    folder = Path(os.environ.get("ENVIRONMENTS") or Path.home() / ".cache" / "attention-service")
    folder.mkdir(parents=True, exist_ok=True)
    locks = [Path(lock).read_bytes() for lock in (*options.locks, *([options.models] if options.models else ()))]
    parts = [f"{sys.version} {sys.executable} {platform.machine()} {options.torch}".encode(), *locks]
    name = f"{Path(options.folder).name.lstrip('.')}-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name / FINISHED).exists():
            remove_old(folder)
            install(folder / name, options)
        (folder / name / FINISHED).touch()
    return folder / name


def site_packages(environment: Path) -> Path:
    """Where an environment has its packages."""
    return environment / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def link(script: Path, shared: Path, folder: Path) -> None:
    """Let a script of the shared environment run with the Python of the folder; link what is no script of Python."""
    first, _, rest = script.read_bytes().partition(b"\n")
    place = folder / "bin" / script.name
    if first.startswith(f"#!{shared}/bin/python".encode()):
        place.write_bytes(f"#!{folder.resolve()}/bin/python\n".encode() + rest)
        place.chmod(0o755)
    else:
        place.symlink_to(script)


def main() -> None:
    """Make the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="of the checkout, .venv-NAME")
    parser.add_argument("locks", nargs="+")
    parser.add_argument("--torch", help="requirements of torch with options of pip; no lock has them")
    parser.add_argument("--models", help="a lock of packages that are installed without their dependencies")
    parser.add_argument("--project", action="store_true", help="install the checkout too")
    options = parser.parse_args()
    shared, folder = shared_environment(options), Path(options.folder)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    (site_packages(folder) / "shared.pth").write_text(f"import site; site.addsitedir({str(site_packages(shared))!r})\n")
    for script in (shared / "bin").iterdir():
        if not (folder / "bin" / script.name).exists():
            link(script, shared, folder)
    if options.project:
        pip(folder, "--no-deps", "--no-build-isolation", "--editable", ".")


if __name__ == "__main__":
    main()
