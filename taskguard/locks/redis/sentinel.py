"""The master that a group of Sentinels names, by redis-py's Sentinel client.

Guarantees
* A connection is used only if its server said by ROLE that it is a master, and if the Sentinels
  named it a second ago at most. So a replaced master is left within that time, even while it goes
  on granting locks.
* After a connection breaks, or a master refuses writes, the Sentinels are queried before the next
  connection.
* A majority of the Sentinels is queried, and the highest configuration epoch wins. The Sentinels
  agree among themselves by the same rule.
* A Sentinel has `SentinelUrl.timeout_s` for an answer. After a silence it is left out for some
  seconds, and then queried last. If all are silent, locks go on at the known master.
* While most Sentinels consider the master down, calls fail at once.

Does not guarantee that a master never grants what another master has granted. Replication is
asynchronous. A master that is cut off grants locks for a second here. It grants them for longer
to clients that reach no Sentinel.

The Sentinel's user needs +sentinel|master. The servers' user needs +role and what locks need.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.drivers import extras_named
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.redis.link import Connections, RedisLink, driver, quiet_options
from taskguard.locks.redis.sentinel_url import SentinelUrl

with extras_named("A lock behind Sentinel"):
    from redis import ConnectionPool, Redis
    from redis.exceptions import (
        AuthenticationError,
        NoPermissionError,
        ReadOnlyError,
        RedisError,
        ResponseError,
    )
    from redis.sentinel import Sentinel

__all__ = ["SentinelLink", "Sentinels"]

# Maximum age of the cached master address.
_LOOK_EVERY_S = 1.0
# A Sentinel that gave no answer is left out for this long.
_SILENCE_S = 5.0
# Duration of a failover after the master counts as down: 1.7 s where it was measured.
_ELECTION_S = 3.0


class Sentinels(Sentinel):
    """redis-py's client of one group, changed to trust a majority. Threads may share it.

    redis-py trusts the first Sentinel that answers, and queries it again as long as it answers. If
    that Sentinel is cut off together with an old master, locks stay at the old master. redis-py
    also queries the Sentinels for each connection, and waits for each silent one.
    """

    def __init__(self, url: SentinelUrl, options: dict[str, Any]) -> None:
        super().__init__([])  # type: ignore[no-untyped-call]
        self.name = url.name
        # Made here, since `Sentinel` takes no class of connections.
        self.sentinels = [
            Redis(
                connection_pool=ConnectionPool(
                    connection_class=url.kind, **options | {"host": host, "port": port}
                )
            )
            for host, port in url.sentinels
        ]
        self._silent: dict[Redis, tuple[float, LockServerUnavailableError]] = {}
        self._master: tuple[str, int] | None = None
        self._epoch = -1
        self._doubted = True
        self._due_s = 0.0

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return host and port of the master, as they were a second ago at most.

        Raises LockServerUnavailableError if no Sentinel has answered yet, or if they wait for
        another master.
        """
        now_s = SYSTEM_CLOCK.monotonic_s()
        if self._master is not None and now_s < self._due_s:
            return self._master
        # Meanwhile other threads use the known master.
        self._due_s = now_s + _LOOK_EVERY_S
        states, silent = self._majority(now_s)
        if states:
            return self._believe(service_name, states)
        if self._master is not None:
            return self._master
        raise LockServerUnavailableError(" ".join(map(str, silent))) from silent[0].__cause__

    def doubt(self) -> None:
        """Query the Sentinels before the next connection."""
        self._doubted, self._due_s = True, 0.0

    def state(self, sentinel: Redis) -> dict[str, Any]:
        """Return a Sentinel's state of the master. Raises LockServerUnavailableError."""
        try:
            # `sentinel_master()` of redis-py 6 raises a TypeError, since its parser gets an option.
            found: Any = sentinel.execute_command("SENTINEL MASTER", self.name)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _explained(sentinel, self.name, error) from error
        return dict(found)

    def is_down(self, state: dict[str, Any]) -> bool:
        """Return whether this Sentinel, or a quorum of them, considers the master down."""
        return not self.check_master_state(state, self.name)  # type: ignore[no-untyped-call]

    def _majority(
        self, now_s: float
    ) -> tuple[list[dict[str, Any]], list[LockServerUnavailableError]]:
        """Return the states of enough Sentinels, or of all that answer, and the others' errors."""
        states: list[dict[str, Any]] = []
        silent: list[LockServerUnavailableError] = []
        for sentinel in self.sentinels:
            until_s, said = self._silent.get(sentinel, (0.0, None))
            if said is not None and now_s < until_s:
                silent.append(said)
                continue
            try:
                states.append(self.state(sentinel))
            except LockServerUnavailableError as error:
                self._silent[sentinel] = SYSTEM_CLOCK.monotonic_s() + _SILENCE_S, error
                silent.append(error)
                continue
            self._silent.pop(sentinel, None)
            # Go on if this Sentinel does not know the last failover, or considers the master down:
            # another Sentinel may know a newer master.
            newest = max(states, key=_epoch)
            stands = _epoch(newest) >= self._epoch and not self.is_down(newest)
            if stands and 2 * len(states) > len(self.sentinels):
                break
        self.sentinels = sorted(self.sentinels, key=lambda each: each in self._silent)
        return states, silent

    def _believe(self, name: str, states: list[dict[str, Any]]) -> tuple[str, int]:
        newest = max(states, key=_epoch)
        host, port = self._master = newest["ip"], newest["port"]
        self._epoch = _epoch(newest)
        down = [each for each in states if self.is_down(each)]
        if self._doubted and newest in down and 2 * len(down) > len(states):
            self._due_s = 0.0
            raise LockServerUnavailableError(
                f"The lock server {name} at {host}:{port} is down according to its Sentinels. They "
                "have not named another master yet."
            )
        self._doubted = False
        return host, port


class SentinelLink(RedisLink):
    """Calls to the server that a group of Sentinels names."""

    def __init__(self, url: str, **bounds: Any) -> None:
        known = SentinelUrl.parse(url, driver())
        hosts = ",".join(f"{host}:{port}" for host, port in known.sentinels)
        database = known.server_options.get("db") or 0
        self._url = known
        self._groups: dict[tuple[int, int], Sentinels] = {}
        super().__init__(
            (known.kind, known.server_options),
            address=f"{known.name}/{database} by the Sentinels {hosts}",
            **bounds,
        )

    @property
    def sentinels(self) -> Sentinels:
        """The Sentinels, by connections of this process and, under gevent, of this thread."""
        plain = socket.socket.__module__ == "socket"
        lane = os.getpid(), 0 if plain else threading.get_native_id()
        found = self._groups.get(lane)
        if found is None:
            timeouts = dict.fromkeys(
                ("socket_timeout", "socket_connect_timeout"), self._url.timeout_s
            )
            options = self._url.sentinel_options | timeouts | quiet_options(driver())
            # Forget the groups of a parent process.
            self._groups = {
                each: group for each, group in self._groups.items() if each[0] == lane[0]
            }
            found = self._groups.setdefault(lane, Sentinels(self._url, options))
        return found

    def check(self) -> list[Finding]:
        """Return the Sentinels of the URL that give no answer, and read how long a failover takes.

        Raises LockServerUnavailableError if no Sentinel answers.
        """
        from taskguard.locks.findings import LOCK_SERVER_MEMBER  # not for deliveries

        states: list[dict[str, Any]] = []
        silent: list[LockServerUnavailableError] = []
        for sentinel in self.sentinels.sentinels:
            try:
                states.append(self.sentinels.state(sentinel))
            except LockServerUnavailableError as error:
                silent.append(error)
        if not states:
            raise silent[0]
        newest = max(states, key=_epoch)
        self.failover_s = newest["down-after-milliseconds"] / 1000 + _ELECTION_S
        where = f"the lock server {self.address}"
        return [LOCK_SERVER_MEMBER.at(where, error=error) for error in silent]

    def close(self) -> None:
        """Close idle connections to servers and Sentinels."""
        super().close()
        for sentinel in self.sentinels.sentinels:
            sentinel.close()

    def _connections(self, kind: Callable[..., Any], options: dict[str, Any]) -> Connections:
        return _ToTheMaster(self, kind, options)


class _ToTheMaster(Connections):
    """Idle connections to the present master."""

    def __init__(
        self, link: SentinelLink, kind: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        super().__init__(self._connection)
        self._link, self._kind = link, kind
        self._options = options | {"redis_connect_func": _refuse_replicas}

    def take(self) -> Any:
        """Return an idle connection to the master, or a new one."""
        host, port = self._address()
        idle = self._lane()
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.port == port and connection.host == host:
                return connection
            connection.disconnect()
        try:
            return self.connected()
        except (RedisError, OSError):
            self._link.sentinels.doubt()
            raise

    def drop(self, connection: Any) -> None:
        """Close the connection, and query the Sentinels before the next one."""
        connection.disconnect()
        self._link.sentinels.doubt()

    def _connection(self) -> Any:
        host, port = self._address()
        return self._kind(**self._options | {"host": host, "port": port})

    def _address(self) -> tuple[str, int]:
        sentinels = self._link.sentinels
        return sentinels.discover_master(sentinels.name)


def _refuse_replicas(connection: Any) -> None:
    """Log in, and check by ROLE that the server is a master."""
    connection.on_connect()
    connection.send_command("ROLE")
    role = connection.read_response(disable_decoding=True)[0].decode()
    if role != "master":
        raise ReadOnlyError(
            f"{connection.host}:{connection.port}, which Sentinel names, is a {role}"
        )


def _epoch(state: dict[str, Any]) -> int:
    return int(state.get("config-epoch", 0))


def _explained(sentinel: Redis, name: str, error: Exception) -> LockServerUnavailableError:
    where = sentinel.connection_pool.connection_kwargs
    if isinstance(error, AuthenticationError):
        rest = "refuses user or password: {}. Correct sentinel_username and sentinel_password."
    elif isinstance(error, NoPermissionError):
        rest = "forbids SENTINEL MASTER: {}. Give its user +sentinel|master."
    elif isinstance(error, ResponseError):
        rest = (
            f"knows no master by the name {name!r}: {{}}. Give the name that follows 'sentinel "
            "monitor' in sentinel.conf."
        )
    else:
        rest = "gave no answer: {}."
    said = str(error).rstrip(".") or type(error).__name__
    return LockServerUnavailableError(
        f"The Sentinel {where['host']}:{where['port']} {rest.format(said)}"
    )
