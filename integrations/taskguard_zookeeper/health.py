"""Check a ZooKeeper: read the facts once, then judge them.

Guarantees: sends one request to each server of the URL, within the timeouts. Knows only the servers
in the URL.
"""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from taskguard.errors import LockServerUnavailableError
from taskguard.locks import LOCK_SERVER_MEMBER, LOCK_SERVER_QUORUM, Endpoint, Finding
from taskguard_zookeeper import findings
from taskguard_zookeeper.address import Address
from taskguard_zookeeper.session import RefusedError, Session
from taskguard_zookeeper.wire import Nodes, creating, freeing

__all__ = ["check", "judge"]

_MOST_SAID = 65_536
_LEAST_VERSION = (3, 6)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server.

    Attributes:
        error: why it gave no answer. None: it answered.
        mode: "leader", "read-only", …; "" if unknown; None if it serves no requests.
        version: its version, or "" if unknown.
    """

    error: OSError | None = None
    mode: str | None = ""
    version: str = ""

    @property
    def is_serving(self) -> bool:
        """Return whether it accepts writes."""
        return self.error is None and self.mode not in (None, "read-only")

    @property
    def is_old(self) -> bool:
        """Return whether it cannot list a session's nodes."""
        found = re.match(r"(\d+)\.(\d+)", self.version)
        return found is not None and (int(found[1]), int(found[2])) < _LEAST_VERSION


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """A session that was opened.

    Attributes:
        asked_s: the requested session timeout, in seconds.
        got_s: the session timeout that the server granted, in seconds.
        refused: why this user may not take locks. None: it may.
    """

    asked_s: float
    got_s: float
    refused: RefusedError | None = None


@dataclass(frozen=True, slots=True)
class ZooKeeperFacts:
    """The servers of the URL by address, and a session if one can be opened."""

    servers: dict[str, ServerFacts] = field(default_factory=dict)
    session: SessionFacts | None = None


def check(
    address: Address, open_session: Callable[[], Session], *, timeout_s: float
) -> list[Finding]:
    """Return what is wrong with the servers, the session and the rights.

    Raises LockServerUnavailableError if no server answers.
    """
    servers = {str(each): _read(each, address, timeout_s) for each in address.endpoints}
    errors = {name: each.error for name, each in servers.items() if each.error is not None}
    if len(errors) == len(servers):
        raise LockServerUnavailableError(
            f"The lock server {address.hosts} gave no answer: "
            + "; ".join(f"{name}: {error}" for name, error in errors.items())
            + "."
        ) from next(iter(errors.values()))
    session = None
    if any(each.is_serving and not each.is_old for each in servers.values()):
        session = _read_session(address, open_session(), timeout_s)
    return list(judge(ZooKeeperFacts(servers, session), address=address.hosts))


def judge(facts: ZooKeeperFacts, *, address: str) -> Iterator[Finding]:
    """Judge the servers, the session and the rights."""
    where = f"the lock server {address}"
    for name, server in facts.servers.items():
        if server.error is not None:
            yield LOCK_SERVER_MEMBER.at(f"the lock server {name}", error=f"{server.error}.")
        elif server.is_serving and server.is_old:
            yield findings.ZOOKEEPER_VERSION.at(f"the lock server {name}", version=server.version)
    if not any(server.is_serving for server in facts.servers.values()):
        error = "its servers are read-only or serve no requests."
        yield LOCK_SERVER_QUORUM.at(where, error=error, command="echo srvr | nc HOST 2181")
    session = facts.session
    if session is None:
        return
    if session.refused is not None:
        yield findings.LOCK_SERVER_RIGHTS.at(where, error=session.refused)
    elif session.got_s != session.asked_s:
        yield findings.ZOOKEEPER_SESSION.at(
            where,
            got_s=session.got_s,
            asked_s=session.asked_s,
            limit=f"{'max' if session.got_s < session.asked_s else 'min'}SessionTimeout",
            limit_ms=session.asked_s * 1000,
        )


def _read(endpoint: Endpoint, address: Address, timeout_s: float) -> ServerFacts:
    """Read a server's answer to `srvr`, the only command that is enabled by default."""
    try:
        with contextlib.ExitStack() as stack:
            place = (endpoint.host, endpoint.port)
            wire = stack.enter_context(socket.create_connection(place, timeout_s))
            if address.tls is not None:
                wrapped = address.tls.wrap_socket(wire, server_hostname=endpoint.host)
                wire = stack.enter_context(wrapped)
            wire.sendall(b"srvr")
            answer = b""
            while len(answer) < _MOST_SAID and (more := wire.recv(4096)):
                answer += more
    except OSError as error:
        return ServerFacts(error=error)
    text = answer.decode("utf-8", "replace")
    if "not currently serving" in text:
        return ServerFacts(mode=None)
    lines = (line.partition(":") for line in text.splitlines())
    values = {name: value.strip() for name, _, value in lines}
    version = values.get("Zookeeper version", "").partition("-")[0]
    return ServerFacts(mode=values.get("Mode", ""), version=version)


def _read_session(address: Address, session: Session, timeout_s: float) -> SessionFacts:
    try:
        session.connect()
        _try_a_lock(session)
    except RefusedError as error:
        return SessionFacts(address.session_s, address.session_s, refused=error)
    finally:
        session.end().join(timeout_s)
    return SessionFacts(address.session_s, session.timeout_s)


def _try_a_lock(session: Session) -> None:
    """Try each step of a lock, on a key of its own."""
    session.prepare()
    session.raise_epoch()
    name = f"check-{uuid.uuid4().hex}"
    nodes = Nodes(f"{session.root}/lock/{name}", f"{session.root}/owner/{name}")
    with session.doubtful([nodes]):
        session.change(creating(nodes, b"-:0:taskguard doctor", session.acl))
        session.holds()
        session.change(freeing(nodes))
