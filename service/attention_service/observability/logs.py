"""The log: one line an event, for people or for machines. API keys, bodies and values of arrays are never logged."""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Final

import orjson

from attention_service.printable import printable
from attention_service.settings import Settings

# Fields of a line about a request, then of the line about the start, in this order.
FIELDS = (
    "request_id", "trace_id", "client", "key", "method", "path", "status", "milliseconds", "received", "sent", "code",
    "kernel", "version", "backend", "workers", "threads", "memory_limit", "keys",
)  # fmt: skip
# Characters that would make several fields of one.
SEPARATOR: Final = re.compile(r"""[ "'=]""")


class HumanFormatter(logging.Formatter):
    """`12:00:00 INFO message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one, indented: its message may hold what looks like a line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in fields_of(record).items())
        message = printable(record.getMessage())  # that of a library may quote what a client sent
        text = f"{clock} {record.levelname:7} {message} {fields}".rstrip()
        if not record.exc_info:
            return text
        return "\n  ".join([text, *map(printable, self.formatException(record.exc_info).split("\n"))])


class JsonFormatter(logging.Formatter):
    """An object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The event as JSON, the traceback within it."""
        event: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(event | fields_of(record), default=str).decode()


def _quoted(value: Any) -> str:
    """The text of a field, in ASCII, as a path may hold anything, and in quotes if it could be read as several."""
    text = str(value).encode("unicode_escape").decode("ascii")
    return '"' + text.replace('"', r"\"") + '"' if SEPARATOR.search(text) else text


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line, without those that are empty."""
    return {name: record.__dict__[name] for name in FIELDS if record.__dict__.get(name) not in (None, "")}


def log_config(settings: Settings) -> dict[str, Any]:
    """For logging.config.dictConfig: the service's log and uvicorn's, in one form, to standard error."""
    formatter = HumanFormatter if settings.log_format == "human" else JsonFormatter
    loggers = {name: {"level": settings.log_level.upper()} for name in ("attention", "uvicorn")}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": formatter}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        # Its warnings quote headers that clients send, of any length.
        "loggers": loggers | {"opentelemetry": {"level": "ERROR"}},
    }
