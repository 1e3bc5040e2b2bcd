"""`make test-deep`: what the tests notice, by random changes of the product.

    python -m tests.deep_mutations [PATH ...] [--draws N] [--seed N] [--again]

PATH is a module or package, `attention/cost.py` for example. Changes are made in a copy of the working tree, whose
tests run until one fails: those of `make test` that run the changed line, by coverage of the unchanged copy, then those
marked slow. Finished changes are recorded in a file, so that a second call resumes; `--again` tries its survivors once
more. The exit status is 1 if too many changes survive: some are equal in meaning to what was there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from coverage import CoverageData

KILLED: Final = 0.9  # the share of changes that tests must notice
TIME_LIMIT: Final = "the time limit of"  # a change that hangs; or a machine that is busy with something else
ROOT: Final = Path(__file__).resolve().parent.parent
PROGRESS: Final = ROOT / ".mutations-progress.json"
PACKAGE: Final = "service/attention_service"
PATHS: Final = ("attention", "backends", "comparison", "pipeline", "codecs")
NOT_COPIED: Final = (".git", ".venv*", ".hypothesis", ".*_cache", "__pycache__", "build", "dist", "node_modules")
# Coverage that keeps which tests ran a line. Without branches, which are not asked for.
BY_TEST: Final = ("branch = true", 'dynamic_context = "test_function"')
STAGES: Final = ("line", "slow")
PARALLEL: Final = ("-n", "2", "--dist", "worksteal")

OPERATORS: Final[dict[type[ast.AST], tuple[str, str]]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
}  # fmt: skip
NAMES: Final = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


class Change(NamedTuple):
    """Bytes of a module, and what replaces them. text: the place, and its line before and after, for readers"""

    path: str
    line: int
    start: int
    stop: int
    new: bytes
    text: str


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those below it that say what is computed: no annotations, decorators, assertions or texts."""
    yield node
    skipped = {getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "decorator_list", ())}
    for child in ast.iter_child_nodes(node):
        is_check = isinstance(child, ast.Assert) or (isinstance(child, ast.keyword) and child.arg == "strict")
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not (child in skipped or is_check or is_typing or isinstance(child, ast.JoinedStr)):
            yield from visited(child)


def operators(node: ast.AST) -> Iterator[tuple[Any, ast.AST]]:
    """The operators of a node, each with the operand before it."""
    if isinstance(node, ast.Compare):
        yield from zip([node.left, *node.comparators], node.ops, strict=False)
    elif isinstance(node, ast.BoolOp):
        yield from ((value, node.op) for value in node.values[:-1])
    elif isinstance(node, ast.BinOp | ast.AugAssign):
        yield node.left if isinstance(node, ast.BinOp) else node.target, node.op


def edits(node: Any, random: Random) -> Iterator[tuple[Any, Any, str, str]]:
    """Changes of a node: line and column from which a text is looked for, the text, and what replaces it."""
    for operand, operator in operators(node):
        if type(operator) in OPERATORS:
            yield operand.end_lineno, operand.end_col_offset, *OPERATORS[type(operator)]
    match node:
        case ast.UnaryOp(op=ast.Not()):
            yield node.lineno, node.col_offset, "not", ""
        case ast.Constant(value=bool(value)):
            yield node.lineno, node.col_offset, str(value), str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node.lineno, node.col_offset, ast.unparse(node), f"({value + random.choice((1, -1))})"
        case ast.Name(id=name) if name in NAMES:
            yield node.lineno, node.col_offset, name, NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES:
            yield node.value.end_lineno, node.value.end_col_offset, name, NAMES[name]
        case ast.Return(value=ast.UnaryOp(op=ast.USub()) as minus):
            yield minus.lineno, minus.col_offset, "-", ""


def changes_of(path: str, source: bytes, random: Random) -> Iterator[Change]:
    """All changes of a module."""
    lines = source.splitlines(keepends=True)
    for node in visited(ast.parse(source)):
        for number, column, old, new in edits(node, random):
            start = sum(map(len, lines[: number - 1])) + column
            place = source.find(old.encode(), start)
            if place < 0 or source[start:place].strip(b" \t\n(),."):
                continue  # a number that is not written as Python prints it, or a comment in between
            row = source.count(b"\n", 0, place)
            begin = sum(map(len, lines[:row]))
            after = source[begin:place] + new.encode() + source[place + len(old) : begin + len(lines[row])]
            text = f"{path}:{row + 1}: {lines[row].decode().strip()}  ->  {after.decode().strip()}"
            yield Change(path, row + 1, place, place + len(old), new.encode(), text)


def node_id(context: str, root: Path) -> str:
    """What pytest calls the test function of a context of coverage: `tests.test_x.TestY.test_z`."""
    parts = context.split(".")
    module = next(n for n in range(len(parts), 0, -1) if (root / "/".join(parts[:n])).with_suffix(".py").is_file())
    return "::".join([f"{'/'.join(parts[:module])}.py", *parts[module:]])


class Copy:
    """A copy of the working tree with at most one changed module, and runs of its tests."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        self.environment = os.environ | {"PYTHONPATH": str(self.root / "service")}
        where = [sys.executable, "-c", "import attention_service; print(attention_service.__file__)"]
        found = subprocess.check_output(where, cwd=self.root, env=self.environment, text=True)
        assert found.strip() == str(self.root / PACKAGE / "__init__.py"), f"tests would import {found}"
        self._written = int(time.time())
        self._coverage = CoverageData()

    def measure(self) -> None:
        """Run the tests that are not marked slow on the unchanged copy, and keep which of them run each line."""
        configuration = self.root / "pyproject.toml"
        configuration.write_text(configuration.read_text(encoding="utf-8").replace(*BY_TEST), encoding="utf-8")
        tests = ["run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *PARALLEL]
        for command in (tests, ["combine", "-q"]):
            line = [sys.executable, "-m", "coverage", *command]
            subprocess.run(line, cwd=self.root, env=self.environment, check=True)
        self._coverage = CoverageData(str(self.root / ".coverage"))
        self._coverage.read()

    def tests_of(self, change: Change) -> list[str]:
        """The tests that run the changed line; where it runs on import only, those that run any line of its module."""
        lines = self._coverage.contexts_by_lineno(str(self.root / PACKAGE / change.path))
        everywhere = {context for contexts in lines.values() for context in contexts}
        for contexts in (set(lines.get(change.line, [])), everywhere):
            if tests := {node_id(context, self.root) for context in contexts if context.startswith("tests.")}:
                return sorted(tests)
        return []

    def changes(self, paths: list[str], random: Random) -> list[Change]:
        """All changes of modules and packages. Without torch and Ray, their backends are imported by no test."""
        package = self.root / PACKAGE
        modules = [module for path in paths for module in sorted({package / path, *(package / path).rglob("*.py")})]
        kept = [module for module in modules if module.suffix == ".py" and not {"torch", "ray"} & {*module.parts}]
        return [
            change
            for module in kept
            for change in changes_of(module.relative_to(package).as_posix(), module.read_bytes(), random)
        ]

    def write(self, path: str, source: bytes) -> None:
        """Write a module, with a time of its own: Python knows compiled files by size and whole seconds."""
        module = self.root / PACKAGE / path
        module.write_bytes(source)
        self._written += 1
        os.utime(module, (self._written, self._written))

    def killed_by(self, change: Change, arguments: list[str], limit: float) -> str | None:
        """The first test that fails with a change, or what else ended the run; None if all pass. limit: in seconds"""
        source = (self.root / PACKAGE / change.path).read_bytes()
        self.write(change.path, source[: change.start] + change.new + source[change.stop :])
        try:
            return self.first_failure(arguments, limit)
        finally:
            self.write(change.path, source)

    def first_failure(self, arguments: list[str], limit: float | None = None) -> str | None:
        """The first test that fails; None if all pass."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=self.root, env=self.environment, start_new_session=True, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return f"{TIME_LIMIT} {limit:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode == 0:
            return None
        match = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
        return match[1] if match else f"{output.strip().splitlines()[-1:]}"


def arguments_of(stage: str, copy: Copy, change: Change) -> list[str]:
    """What pytest runs in a stage for a change. No test runs a line that is never reached."""
    if stage == "slow":
        return [*PARALLEL, "-m", "slow"]
    tests = copy.tests_of(change)
    return tests and [*PARALLEL, "-m", "not slow", *tests]


def run_stage(stage: str, changes: list[Change], copy: Copy, progress: dict[str, Any]) -> None:
    """Run the tests of a stage for all changes that survived so far. The unchanged copy passes them first."""
    killed, survived, seconds = progress["killed"], progress["survived"], progress["seconds"]
    left = [change for change in changes if change.text not in killed and stage not in survived.get(change.text, [])]
    start = time.monotonic()
    if left and stage == "line":
        copy.measure()
        seconds[stage] = time.monotonic() - start
    elif left and stage not in seconds:
        if failed := copy.first_failure(arguments_of(stage, copy, left[0])):
            sys.exit(f"{failed} fails without any change")
        seconds[stage] = time.monotonic() - start
    for change in left:
        arguments = arguments_of(stage, copy, change)
        test = copy.killed_by(change, arguments, 60 + 5 * seconds[stage]) if arguments else None
        if test:
            killed[change.text] = test
        else:
            survived.setdefault(change.text, []).append(stage)
        print(f"{change.text}  {f'killed by {test}' if test else f'SURVIVED the {stage} tests'}", flush=True)
        PROGRESS.write_text(json.dumps(progress, indent=1))


def main() -> None:
    """Draw changes, run the tests with each, and print which survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=list(PATHS))
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="try survivors, and what ended at a time limit, once more")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy is removed
    progress: dict[str, Any] = {"seed": options.seed, "seconds": {}, "killed": {}, "survived": {}}
    if PROGRESS.exists():
        progress = json.loads(PROGRESS.read_text())
    if progress["seed"] != options.seed:
        sys.exit(f"{PROGRESS} holds the progress of seed {progress['seed']}: delete it to start anew")
    if options.again:
        progress["survived"] = {}
        progress["killed"] = {text: test for text, test in progress["killed"].items() if TIME_LIMIT not in test}
    with tempfile.TemporaryDirectory() as folder:
        copy, random = Copy(Path(folder)), Random(options.seed)
        found = copy.changes(options.paths, random)
        changes = random.sample(found, min(options.draws, len(found)))
        print(f"{len(changes)} of {len(found)} changes, seed {options.seed}", flush=True)
        for stage in STAGES:
            run_stage(stage, changes, copy, progress)
    survivors = [change.text for change in changes if change.text not in progress["killed"]]
    for text in survivors:
        print(f"SURVIVED: {text}")
    ended = sum(TIME_LIMIT in progress["killed"].get(change.text, "") for change in changes)
    print(f"{len(changes) - len(survivors)} of {len(changes)} changes are killed, {ended} of these at a time limit")
    sys.exit(len(survivors) > (1 - KILLED) * len(changes))


if __name__ == "__main__":
    main()
