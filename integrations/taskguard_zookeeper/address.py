"""Parse the URL of a ZooKeeper.

Guarantees: a malformed URL raises a ConfigurationError, which shows only the URL's scheme. The
servers are not contacted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlencode

from taskguard.errors import ConfigurationError
from taskguard.locks import Endpoint, Tls, check_number, parse_url

__all__ = ["Address", "parse_address"]

_SESSION_S = 10.0
_MOST_SESSION_S = 86_400.0
# Segments of a path in ZooKeeper: none is empty, "." or "..".
_CHROOT = re.compile(r"(/(?!\.{1,2}(/|$))[^/\x00-\x1f\x7f-\x9f]+)*")


@dataclass(frozen=True, slots=True)
class Address:
    """The servers, and how to connect to them.

    Attributes:
        endpoints: the servers.
        chroot: the path of all data, or "" for the root.
        user: the user, or "".
        password: the user's password, or "".
        session_s: the requested session timeout, in seconds.
        tls: the TLS settings, or None without TLS.
    """

    endpoints: tuple[Endpoint, ...]
    chroot: str
    user: str
    password: str = field(repr=False)
    session_s: float
    tls: Tls | None

    @property
    def hosts(self) -> str:
        """The servers, separated by commas, for kazoo and for messages."""
        return ",".join(map(str, self.endpoints))


def parse_address(url: str) -> Address:
    """Parse `zookeeper://[user:password@]host[:port],…[/chroot][?session_s=10]`, or `zookeepers://`.

    Raises ConfigurationError.
    """
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    credentials, at, place = where.rpartition("@")
    hosts, slash, chroot = place.partition("/")
    chroot = unquote(f"{slash}{chroot}".rstrip("/"))
    options = dict(parse_qsl(query, keep_blank_values=True))
    session = options.pop("session_s", str(_SESSION_S))
    try:
        session_s = float(session)
    except ValueError:
        session_s = 0.0
    if not _CHROOT.fullmatch(chroot):
        raise ConfigurationError(
            f"The lock server's URL {scheme}://… is malformed: the part after the hosts is not a "
            f"path in ZooKeeper. Write {scheme}://[user:password@]host[:port],host[:port]/path."
        )
    check_number("session_s", session_s, at_least=0.1, at_most=_MOST_SESSION_S)
    plain = f"{scheme}://{credentials}{at}{hosts}" + (f"?{urlencode(options)}" if options else "")
    found = parse_url(plain, plain="zookeeper", tls="zookeepers", port=2181)
    return Address(
        endpoints=found.endpoints,
        chroot=chroot,
        user=found.user,
        password=found.password,
        session_s=session_s,
        tls=found.tls,
    )
