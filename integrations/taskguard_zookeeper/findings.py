"""What `check()` looks at in a ZooKeeper.

Guarantees: each server of the URL is asked once, within the time-outs. Does not guarantee that
servers which the URL leaves out are well.
"""

from __future__ import annotations

import contextlib
import re
import socket
import uuid
from collections.abc import Callable

from taskguard import Finding, Level
from taskguard.errors import LockServerUnavailableError
from taskguard.locks import Endpoint
from taskguard_zookeeper.address import Address
from taskguard_zookeeper.session import RefusedError, Session
from taskguard_zookeeper.wire import Nodes, creating, freeing

__all__ = ["check"]

_MOST_SAID = 65_536
_READ_ONLY = "read-only"
_LEAST_VERSION = (3, 6)


def check(
    address: Address, open_session: Callable[[], Session], *, timeout_s: float
) -> list[Finding]:
    """What is wrong with the servers, the session and the rights.

    Raises LockServerUnavailableError where no server answers at all.
    """
    serving: dict[Endpoint, dict[str, str]] = {}
    silent: dict[Endpoint, OSError] = {}
    for endpoint in address.endpoints:
        try:
            serving[endpoint] = _said_by(endpoint, address, timeout_s)
        except OSError as error:
            silent[endpoint] = error
    if not serving:
        raise LockServerUnavailableError(
            f"The lock server {address.hosts} gave no answer: "
            + "; ".join(f"{each}: {error}" for each, error in silent.items())
            + "."
        ) from next(iter(silent.values()))
    found = [_of_silent_server(endpoint, error) for endpoint, error in silent.items()]
    modes = {said.get("Mode") for said in serving.values()}
    if modes <= {None, _READ_ONLY}:
        return [*found, _of_quorum(address, read_only=_READ_ONLY in modes)]
    old = [_of_version(endpoint, said) for endpoint, said in serving.items() if _is_old(said)]
    if old:
        return [*found, *old]
    session = open_session()
    try:
        session.connect()
        found += _of_session(address, session)
        _try_a_lock(session)
    except RefusedError as error:
        found.append(_of_rights(address, error))
    finally:
        session.end().join(timeout_s)
    return found


def _said_by(endpoint: Endpoint, address: Address, timeout_s: float) -> dict[str, str]:
    """What a server says of itself; nothing if it serves nobody.

    `srvr` is the one word that every server answers as it comes. Where it has been forbidden, the
    server is well as far as that is known.
    """
    with contextlib.ExitStack() as stack:
        place = (endpoint.host, endpoint.port)
        wire = stack.enter_context(socket.create_connection(place, timeout_s))
        if address.tls is not None:
            wire = stack.enter_context(address.tls.wrap_socket(wire, server_hostname=endpoint.host))
        wire.sendall(b"srvr")
        answer = b""
        while len(answer) < _MOST_SAID and (more := wire.recv(4096)):
            answer += more
    text = answer.decode("utf-8", "replace")
    if "not currently serving" in text:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {"Mode": "", **{name: value.strip() for name, _, value in lines}}


def _is_old(said: dict[str, str]) -> bool:
    version = re.match(r"(\d+)\.(\d+)", said.get("Zookeeper version", ""))
    return version is not None and (int(version[1]), int(version[2])) < _LEAST_VERSION


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
        fix="Start it again, or take it out of the URL.",
    )


def _of_quorum(address: Address, *, read_only: bool) -> Finding:
    said = "It is read-only" if read_only else "It is not serving requests"
    return Finding(
        "zookeeper_quorum",
        Level.ERROR,
        where=f"the lock server {address.hosts}",
        what=f"{said}: no majority of its servers is there.",
        why="Without one nothing is granted.",
        fix="Start the servers that are missing: `echo srvr | nc HOST 2181` says what each is.",
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
            fix=f"Set {limit}={asked_s * 1000:.0f} in its zoo.cfg, or ?session_s={got_s:g} in the "
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
        fix="Name the user in the URL, zookeeper://user:password@…, or give it the rights "
        "(setAcl).",
    )


def _of_version(endpoint: Endpoint, said: dict[str, str]) -> Finding:
    return Finding(
        "zookeeper_version",
        Level.ERROR,
        where=f"the lock server {endpoint}",
        what=f"It is a ZooKeeper {said['Zookeeper version'].partition('-')[0]}.",
        why="One before 3.6 does not say what a session holds, so that no lock can be renewed.",
        fix="Run ZooKeeper 3.6 or later.",
    )
