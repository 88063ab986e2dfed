"""TLS with certificate files that may be replaced while the process runs.

Guarantees: each new connection uses the files as they are at that moment. If they cannot be used,
for example in the middle of a replacement, the connection uses the former certificates.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

from taskguard.errors import ConfigurationError

__all__ = ["FILES", "Tls"]

logger = logging.getLogger("taskguard")

FILES = ("ca", "cert", "key")

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Tls:
    """The trusted authorities and the client's certificate, as paths of PEM files.

    Raises ConfigurationError if the files cannot be used.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = {name: files[name] for name in FILES if name in files}
        # Without a file of authorities, watch the system's file, which updates replace, too.
        system = ssl.get_default_verify_paths().cafile
        watched = [*self._files.values(), *([] if "ca" in files or system is None else [system])]
        self._watched = tuple(watched)
        self._complained: _Stamp | None = None
        stamp = self._stamp()
        try:
            self._read: tuple[_Stamp, ssl.SSLContext] = stamp, self._made()
        except OSError as error:  # also ssl.SSLError
            raise ConfigurationError(
                f"The lock server's certificates cannot be used ({self._named}): {error}."
            ) from error

    def wrap_socket(self, plain: socket.socket, *, server_hostname: str) -> ssl.SSLSocket:
        """Begin TLS on a connected socket."""
        return self.context().wrap_socket(plain, server_hostname=server_hostname)

    def context(self) -> ssl.SSLContext:
        """Return a context of the files as they are now."""
        stamp, context = self._read
        now = self._stamp()
        if now == stamp:
            return context
        try:
            context = self._made()
        except OSError as error:
            if self._complained != now:
                self._complained = now
                logger.warning(
                    "new certificates of the lock server cannot be used yet (%s): %s",
                    self._named,
                    error,
                )
            return context
        # `now` was read before the files. If a file changes meanwhile, the next connection sees it.
        self._read = now, context
        return context

    @property
    def _named(self) -> str:
        return ", ".join(f"{name}={path}" for name, path in self._files.items())

    def _made(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._files.get("ca"))
        if "cert" in self._files:
            context.load_cert_chain(self._files["cert"], self._files.get("key"))
        return context

    def _stamp(self) -> _Stamp:
        return tuple(map(_stamp_of, self._watched))


def _stamp_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
