"""What `check()` looks at in a ZooKeeper.

Guarantees: each server of the URL is asked once, within the time-outs. Does not guarantee that
servers which the URL leaves out are well.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Callable

from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.http import Endpoint
from taskguard.locks.zookeeper.address import Address
from taskguard.locks.zookeeper.session import OldServerError, RefusedError, Session
from taskguard.locks.zookeeper.wire import Nodes, creating, freeing

__all__ = ["check"]

_MOST_SAID = 65_536
_READ_ONLY = "Mode: read-only"


def check(address: Address, connect: Callable[[], Session], *, timeout_s: float) -> list[Finding]:
    """What is wrong with the servers, the session and the rights.

    Raises LockServerUnavailableError where no server answers at all.
    """
    found = []
    modes: dict[Endpoint, str] = {}
    silent: dict[Endpoint, OSError] = {}
    for endpoint in address.endpoints:
        try:
            modes[endpoint] = _mode_of(endpoint, address, timeout_s)
        except OSError as error:
            silent[endpoint] = error
    if not modes:
        raise LockServerUnavailableError(
            f"The lock server {address.hosts} gave no answer: "
            + "; ".join(f"{each}: {error}" for each, error in silent.items())
            + "."
        ) from next(iter(silent.values()))
    found += [_of_silent_server(endpoint, error) for endpoint, error in silent.items()]
    if all(mode in ("", _READ_ONLY) for mode in modes.values()):
        return [*found, _of_quorum(address, read_only=_READ_ONLY in modes.values())]
    try:
        session = connect()
        found += _of_session(address, session)
        _try_a_lock(session)
    except RefusedError as error:
        found.append(_of_rights(address, error))
    except OldServerError as error:
        found.append(_of_version(address, error))
    return found


def _mode_of(endpoint: Endpoint, address: Address, timeout_s: float) -> str:
    """What it is: alone, leader, follower, read-only; "" for one that serves nobody.

    `srvr` is the one word that every server answers as it comes. Where it has been forbidden, the
    server is well as far as that is known.
    """
    with contextlib.ExitStack() as stack:
        place = (endpoint.host, endpoint.port)
        wire = stack.enter_context(socket.create_connection(place, timeout_s))
        if address.tls is not None:
            wire = stack.enter_context(address.tls.wrap_socket(wire, server_hostname=endpoint.host))
        wire.sendall(b"srvr")
        said = b""
        while len(said) < _MOST_SAID and (more := wire.recv(4096)):
            said += more
    text = said.decode("utf-8", "replace")
    if "not currently serving" in text:
        return ""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line.startswith("Mode:")), "Mode: not said")


def _try_a_lock(session: Session) -> None:
    """Each step of a lock, on a key that nobody has."""
    session.prepare()
    session.raise_epoch()
    name = f"check-{uuid.uuid4().hex}"
    nodes = Nodes(f"{session.root}/lock/{name}", f"{session.root}/owner/{name}")
    with session.doubtful([nodes]):
        session.change(creating(nodes, b"-:0:taskguard doctor", session.acl))
        session.holds()
        session.change(freeing(nodes))


def _of_silent_server(endpoint: Endpoint, error: OSError) -> Finding:
    return Finding(
        "zookeeper_server",
        Level.WARNING,
        where=f"the lock server {endpoint}",
        what=f"It does not answer, while others do: {error}.",
        why="One more that fails may be one too many.",
        mend="Start it again, or take it out of the URL.",
    )


def _of_quorum(address: Address, *, read_only: bool) -> Finding:
    said = "It is read-only" if read_only else "It is not serving requests"
    return Finding(
        "zookeeper_quorum",
        Level.ERROR,
        where=f"the lock server {address.hosts}",
        what=f"{said}: no majority of its servers is there.",
        why="Without one nothing is granted.",
        mend="Start the servers that are missing: `echo srvr | nc HOST 2181` says what each is.",
    )


def _of_session(address: Address, session: Session) -> list[Finding]:
    asked_s, got_s = address.session_s, session.timeout_s
    if asked_s == got_s:
        return []
    if got_s < asked_s:
        why = (
            "A process that is silent for that long, in a pause or by its network, loses its locks."
        )
        limit = "maxSessionTimeout"
    else:
        why = "The locks of a worker that is killed stay for that long."
        limit = "minSessionTimeout"
    return [
        Finding(
            "zookeeper_session",
            Level.WARNING,
            where=f"the lock server {address.hosts}",
            what=f"It keeps a session for {got_s:g} s, and {asked_s:g} s were asked for.",
            why=why,
            mend=f"Set {limit}={asked_s * 1000:.0f} in its zoo.cfg, or ?session_s={got_s:g} in the "
            "URL.",
        )
    ]


def _of_rights(address: Address, error: RefusedError) -> Finding:
    return Finding(
        "zookeeper_rights",
        Level.ERROR,
        where=f"the lock server {address.hosts}",
        what=str(error),
        why="No lock can be taken.",
        mend="Name the user in the URL, zookeeper://user:password@…, or give it the rights "
        "(setAcl).",
    )


def _of_version(address: Address, error: OldServerError) -> Finding:
    return Finding(
        "zookeeper_version",
        Level.ERROR,
        where=f"the lock server {address.hosts}",
        what=str(error),
        why="Locks can be taken there, and none can be renewed.",
        mend="Run ZooKeeper 3.6 or later.",
    )
