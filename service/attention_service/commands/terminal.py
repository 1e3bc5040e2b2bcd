"""What commands have in common: a type of arguments, errors on one line, progress on a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from attention_service.printable import printable

# The exit status of errors where 1 and 2 say something else.
FAILED: Final = 3
# Seconds after which progress of what is often done at once is shown.
PATIENCE: Final = 1.0
# Seconds between two texts that show progress.
PERIOD: Final = 0.2
# What moves the cursor to the start of its line, and removes the text of it.
CLEAR: Final = "\r\033[K"


def natural(text: str) -> int:
    """The type of an argument that is a number of at least 0. Errors: ValueError, ArgumentTypeError."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError("expected 0 or more")
    return number


class CommandError(Exception):
    """Raised to end a command with an exit status, after a message on one line of standard error."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def reported(invalid: int = 1, unreadable: int = 2) -> Iterator[None]:
    """Turn errors of requests and of files into CommandError.

    invalid, unreadable: exit statuses for a request that is not valid, and for a file that cannot be read or written
    """
    from attention_service.errors import ServiceError

    try:
        yield
    except ServiceError as error:
        raise CommandError(f"{type(error).__name__}: {error}", invalid) from None
    except MemoryError:
        raise CommandError("the machine has too little memory for this request", invalid) from None
    except BrokenPipeError:  # `main` ends quietly
        raise
    except OSError as error:
        place = "" if error.filename is None else f"{error.filename}: "
        raise CommandError(f"{place}{error.strerror}", unreadable) from None


class Progress:
    """A line on a terminal that shows how far a command is; the end of the `with` statement removes it.

    patience: seconds before a text is shown

    Results are printed to the standard output of its start.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self._results = sys.stdout
        self._started = time.monotonic()
        self._next = self._started + patience
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Show the text, and the seconds since the start, in place of the last text, unless that is too recent."""
        now = time.monotonic()
        if now >= self._next and sys.stderr.isatty():
            self._next, self._shown = now + PERIOD, f"{CLEAR}{printable(text)}, {now - self._started:.0f} s"
            print(self._shown, end="", file=sys.stderr, flush=True)

    def print_above(self, line: str) -> None:
        """Print a line of a result in the place of the text, which then stands below it."""
        if not self._shown:
            print(line, file=self._results, flush=True)
            return
        print(CLEAR, end="", file=sys.stderr, flush=True)
        print(line, file=self._results, flush=True)
        print(self._shown, end="", file=sys.stderr, flush=True)
