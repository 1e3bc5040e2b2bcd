"""The process that starts several workers and replaces those that end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import time

from uvicorn import Config
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess


class Supervisor(Multiprocess):
    """uvicorn's supervisor, which logs the end of a worker as an error, and where the service runs once one answers."""

    def __init__(self, config: Config) -> None:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        self._socket = socket.socket(family)  # `config.bind_socket` would log that it runs
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((config.host, config.port))
        self._socket.set_inheritable(True)
        self._answers = False
        super().__init__(config, [self._socket])

    def run(self) -> None:
        """Run until a signal comes. Errors: SystemExit with uvicorn's status if a worker cannot start."""
        super().run()
        if any(process.exitcode == STARTUP_FAILURE for process in self.processes):
            sys.exit(STARTUP_FAILURE)

    def init_processes(self) -> None:
        """Start the workers."""
        super().init_processes()
        self._close_ends_of_workers()

    def _close_ends_of_workers(self) -> None:
        """Leave the workers' ends of their pipes to them, so that one that ended is not waited for."""
        for process in self.processes:
            process.child_conn.close()

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended or do not answer."""
        before, start = set(self.processes), time.monotonic()
        super().keep_subprocess_alive()
        waited = time.monotonic() - start >= self.config.timeout_worker_healthcheck
        self._close_ends_of_workers()
        for process in before - set(self.processes):
            status = process.exitcode or 0
            how = "" if status >= 0 else f" ({signal.strsignal(-status)})"
            silence = f" after {self.config.timeout_worker_healthcheck} s without an answer" if waited else ""
            text = "worker [%s] ended with status %s%s%s; another starts"
            logging.getLogger("attention").error(text, process.pid, status, how, silence)
        if not self._answers and any(process.is_ready() for process in self.processes):
            self._answers = True
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            place = f"{'https' if self.config.is_ssl else 'http'}://{host}:{self._socket.getsockname()[1]}"
            logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", place)
