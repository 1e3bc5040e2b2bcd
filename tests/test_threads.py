"""Threads give back what they take of the process whatever is raised; forks and the end of Python do not stop them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from attention_service.backends import threads
from attention_service.backends.threads import TilePool, single_threaded_blas

# For tests of children.
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
# Of two libraries, each of which is set twice.
SETS = 4


class Library:
    """A library of BLAS that is interrupted when its number of threads is set."""

    user_api = "blas"

    def __init__(self, interrupts: list[bool], *, is_set_before: bool) -> None:
        self.num_threads = 3
        self._interrupts, self._is_set_before = interrupts, is_set_before

    def set_num_threads(self, number: int) -> None:
        is_interrupted = self._interrupts.pop(0) if self._interrupts else False
        if self._is_set_before or not is_interrupted:
            self.num_threads = number
        if is_interrupted:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_set_before", [True, False])
@pytest.mark.parametrize("which", range(SETS))
def test_an_interrupt_gives_blas_its_threads_back(
    which: int, is_set_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = [number == which for number in range(SETS)]
    libraries = [Library(interrupts, is_set_before=is_set_before) for _ in range(2)]
    monkeypatch.setattr(threads, "_blas", lambda: libraries)
    with pytest.raises(KeyboardInterrupt), single_threaded_blas():
        assert [library.num_threads for library in libraries] == [1, 1]
    assert [library.num_threads for library in libraries] == [3, 3]
    with single_threaded_blas(), single_threaded_blas():
        assert [library.num_threads for library in libraries] == [1, 1]
    assert [library.num_threads for library in libraries] == [3, 3]


def test_an_interrupt_leaves_a_thread_free_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {0, 2, 5}
    now = set(allowed)

    def move(_: int, processors: set[int]) -> None:
        now.clear()
        now.update(processors)
        if len(processors) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*now}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", move, raising=False)
    with pytest.raises(KeyboardInterrupt):
        list(TilePool(2).run(str, range(9)))
    assert now == allowed


START = """
import atexit, os, signal, sys, threading
import numpy as np
import attention_service
from attention_service.comparison import sample
from attention_service.backends import threads
from attention_service.library import calls

query = np.random.default_rng(0).standard_normal((2, 70, 8)).astype("f4")

def status():
    return attention_service.compare(np.zeros_like(query), query, query, query, layout="hld").verdict.status
"""
# A thread that compares waits within a function, which holds a lock, while the process forks.
FORK = """
calls.cpu_count = lambda: 1
within, forked, function = threading.Event(), threading.Event(), {owner}.{name}

def held(*arguments):
    if threading.current_thread() is thread:
        within.set()
        forked.wait()
    return function(*arguments)

{owner}.{name} = held
thread = threading.Thread(target=status)
thread.start()
within.wait()
child = os.fork()
if child == 0:
    signal.alarm(240)
    os._exit(17 if (status(), status()) == ("wrong", "wrong") else 1)
forked.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
print(status())
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
@forks
@pytest.mark.parametrize(("owner", "name"), [("threads", "_take_control"), ("sample.Kept", "_add")])
def test_a_child_compares_though_it_was_forked_beside_a_comparison(owner: str, name: str) -> None:
    assert run(START + FORK.format(owner=owner, name=name)) == "wrong\n"


@pytest.mark.slow
@forks
def test_a_child_has_threads_of_its_own() -> None:
    program = """
with calls.all_processors() as backend:
    pool = backend.pool
child = os.fork()
if child == 0:
    with calls.all_processors() as backend:
        os._exit(17 if backend.pool is not pool else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(START + program) == "17\n"


@pytest.mark.slow
@forks
def test_blas_has_its_threads_in_a_child_that_was_forked_beside_a_comparison() -> None:
    program = """
before = [one.num_threads for one in threads._blas()]
for one in threads._blas():
    one.set_num_threads(2)
with threads.single_threaded_blas():
    child = os.fork()
    if child == 0:
        os._exit(17 if [one.num_threads for one in threads._blas()] == [2] * len(before) else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(START + program) == "17\n"


def test_an_entry_alone_has_the_bits_that_it_has_in_a_batch_though_blas_has_threads() -> None:
    """Which share out a sum of more than ten thousand products, and round it otherwise."""
    program = """
for one in threads._blas():
    one.set_num_threads(2)
random = np.random.default_rng(0)
query, key, value = (random.standard_normal((5, 1, length, 1)) for length in (1, 12_000, 12_000))
batch = attention_service.attend(query, key, value).output
alone = [attention_service.attend(*(x[i : i + 1] for x in (query, key, value))).output for i in range(5)]
print((np.concatenate(alone) == batch).all())
"""
    assert run(START + program) == "True\n"


class Loaded(NamedTuple):
    """A library as threadpoolctl finds it."""

    filepath: str
    user_api: str


@pytest.mark.parametrize("own", ["numpy.libs/libblas.so", "numpy/.dylibs/libblas.dylib"])
def test_only_the_blas_of_numpy_is_held_if_it_has_one(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = Path(np.__file__).resolve().parent.parent
    libraries = [Loaded(f"{packages}/{name}", "blas") for name in (own, "scipy.libs/libblas.so", "numpy_other/b")]
    monkeypatch.setattr(threads, "ThreadpoolController", lambda: SimpleNamespace(lib_controllers=libraries))
    assert threads._blas.__wrapped__() == libraries[:1]
    del libraries[0]
    assert threads._blas.__wrapped__() == libraries


def test_large_requests_in_many_threads_give_blas_its_threads_back() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
for one in threads._blas():
    one.set_num_threads(2)
tokens = np.random.default_rng(0).standard_normal((1024, 64)).astype("f4")
alone = attention_service.attend(tokens, tokens, tokens)
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(lambda _: attention_service.attend(tokens, tokens, tokens), range(16)))
print(all((one[name] == alone[name]).all() for one in results for name in ("output", "attention_weights")))
print([one.num_threads for one in threads._blas()] == [2] * len(threads._blas()))
"""
    assert run(START + program) == "True\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        START + "calls.cpu_count = lambda: 2\natexit.register(lambda: print(status()))",
        START + "calls.cpu_count = lambda: 2\nstatus()\natexit.register(lambda: print(status()))",
        START + "calls.cpu_count = lambda: 2\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print(status()))).start()",
        "import atexit, threading\natexit.register(lambda: exec(START, {}))\n"
        f"START = {START + 'calls.cpu_count = lambda: 2; print(status())'!r}",
    ],
    ids=["first", "again", "thread", "import"],
)
def test_comparisons_while_python_ends(program: str) -> None:
    assert run(program) == "wrong\n"
