"""Faults that a worker asks for at a boundary of its delivery, and a test brings about.

    with FaultInjector({"flush": flush, "broker": restart}) as injector:   # in the test's process
        environment["CRASH_FAULTS"] = str(injector.port)
    inject(port, "flush", "line")                                          # in a worker

Guarantees: `inject` returns when the fault has happened, or is about to happen to what its process
asks next; it raises if the fault could not be brought about.
"""

from __future__ import annotations

import os
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

__all__ = ["FaultInjector", "inject"]

_LONGEST_S = 120.0


def inject(port: int, fault: str, line: str) -> None:
    """Let the fault of this name happen to this process, now, in the line that it is at."""
    with socket.create_connection(("127.0.0.1", port), _LONGEST_S) as connection:
        connection.sendall(f"{fault} {os.getpid()} {line}\n".encode())
        answer = connection.makefile().readline().strip()
    if answer != "done":
        raise AssertionError(f"the fault {fault!r} did not happen: {answer}")


class FaultInjector:
    """Causes faults, one after the other.

    Args:
        faults: functions by name, called with the process id and the line that requested the fault.

    Attributes:
        counts: how many of each there were.
        failed: errors of faults that could not be caused.
    """

    def __init__(self, faults: Mapping[str, Callable[[int, str], object]]) -> None:
        mutex = threading.Lock()
        self.counts = Counter[str]()
        self.failed: list[str] = []
        counts, failed = self.counts, self.failed

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                fault, pid, line = self.rfile.readline().decode().split()
                try:
                    with mutex:
                        faults[fault](int(pid), line)
                        counts[fault] += 1
                    self.wfile.write(b"done\n")
                except Exception as error:  # the process that requested it gets the error
                    failed.append(f"{fault}: {error!r}")
                    self.wfile.write(f"{error!r}\n".encode())

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
