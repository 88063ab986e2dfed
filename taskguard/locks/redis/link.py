"""Calls to one Redis or Valkey server: connections, timeouts, retries and errors.

Guarantees
* A call is tried at most `1 + retries` times, and ends within about
  `(1 + retries) * (connect_timeout_s + 2 * socket_timeout_s)`. redis-py's own silent retries (ten
  for `redis.Redis()`) are switched off, even for a client of the user.
* Every failure is a LockServerUnavailableError, which names host, port and database, and never a
  password.
* redis-py alone sends commands and reads replies, by its public interface.
* A connection whose reply may be incomplete is closed and never used again, for example after a
  time limit, a signal or `GreenletExit` interrupted the call.
* Threads may call at once. A fork starts with no connection. Under gevent and eventlet, native
  threads share no connections with greenlets.

Does not guarantee:

* a timeout of name resolution, because the system has none, or of a user's own Sentinel object;
* that a failed call had no effect. So every script may be repeated.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from taskguard.drivers import extras_named
from taskguard.errors import (
    ConfigurationError,
    LockServerUnavailableError,
)
from taskguard.findings import Finding
from taskguard.locks.redis.address import (
    address_of,
    from_client,
    from_url,
    refuse_unknown_certificates,
)
from taskguard.locks.redis.protocol import Script, pack
from taskguard.locks.redis.refusals import Refusal, may_pass, refusal_of, unavailable

__all__ = ["Connections", "RedisLink", "Sent", "driver", "quiet_options"]

_MOST_IDLE = 64
# Lets a node of a cluster accept the next command for a slot that is moving to it.
_ASKING = pack(b"ASKING")


class RedisLink:
    """Calls to one server.

    Args:
        target: a URL, the result of `from_url`, or a redis-py client whose address to use.
        socket_timeout_s: how long one reply may take.
        connect_timeout_s: how long one connection may take.
        retries: how often a call without a reply is made again.
        longest_block_s: how much later a blocking command may answer.
        address: the server's name in messages, if it is not host and port.
        at: host and port of a node of a cluster, instead of those in the URL.
        cluster: the name in messages of the node's cluster.
    """

    def __init__(
        self,
        target: Any,
        *,
        socket_timeout_s: float,
        connect_timeout_s: float,
        retries: int,
        longest_block_s: float,
        address: str | None = None,
        at: tuple[str, int] | None = None,
        cluster: str = "",
    ) -> None:
        self._redis = driver()
        self._target = target  # a Sentinel's connections know their pool by a weak reference
        self._errors = self._redis.exceptions
        self._retries = retries
        bounds = {
            "socket_timeout": socket_timeout_s,
            "socket_connect_timeout": connect_timeout_s,
        }
        if isinstance(target, str):
            target = from_url(target, self._redis)
        if isinstance(target, tuple):
            kind, options = target
            options = bounds | options  # timeouts in the URL take precedence
        else:
            kind, options = from_client(target)
            options |= bounds
        if at is not None:
            options |= {"host": at[0], "port": at[1]}
            address = f"{at[0]}:{at[1]} of {cluster}"
        self._cluster = cluster
        self.at = at or ("", 0)
        self.address = address or address_of(options)
        refuse_unknown_certificates(options, self.address)
        options |= quiet_options(self._redis)
        # A blocking command answers late by design, so it has connections of its own.
        patient = options | {"socket_timeout": options["socket_timeout"] + longest_block_s}
        self._prompt = self._connections(kind, options)
        self._patient = self._connections(kind, patient)
        self._check(kind, options)

    def call(
        self,
        script: Script,
        keys: list[bytes],
        arguments: list[bytes],
        *,
        asking: bool = False,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a script: one round trip, or two if the server does not know the script.

        `on_retry` is called before the script is sent again because no answer came.
        """
        rest = (b"%d" % len(keys), *keys, *arguments)
        try:
            command = pack(b"EVALSHA", script.sha, *rest)
            return self.ask(command, asking=asking, on_retry=on_retry)
        except LockServerUnavailableError as error:
            if not isinstance(error.__cause__, self._errors.NoScriptError):
                raise
        # EVAL makes the server remember the script, and cannot miss it in between.
        command = pack(b"EVAL", script.source, *rest)
        return self.ask(command, asking=asking, on_retry=on_retry)

    def ask(
        self,
        command: bytes,
        *,
        blocks: bool = False,
        asking: bool = False,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Any:
        """Send a command and return its reply.

        `blocks`: the server may take up to `longest_block_s`. `asking`: the key's slot is moving to
        this node of a cluster.
        """
        connections = self._patient if blocks else self._prompt
        for left in range(self._retries, -1, -1):
            try:
                return self._ask_once(connections, command, asking=asking)
            except (self._errors.RedisError, OSError) as error:
                if left and self.may_pass(error):
                    # The idle connections are as old as the one that failed.
                    connections.close()
                    on_retry()
                    continue
                raise self.unavailable(error) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def connect(self, *commands: bytes) -> tuple[Any, list[Any]]:
        """Return a new connection for the caller, and a reply or a refusal for each command."""
        try:
            connection = self._prompt.connected()
        except (self._errors.RedisError, OSError) as error:
            raise self.unavailable(error) from error
        answers: list[Any] = []
        try:
            connection.send_packed_command(list(commands), check_health=False)
            while len(answers) < len(commands):
                try:
                    answers.append(connection.read_response(disable_decoding=True))
                except self._errors.ResponseError as error:
                    answers.append(self.unavailable(error))
        except (self._errors.RedisError, OSError) as error:
            raise self.unavailable(error) from error
        finally:
            if len(answers) < len(commands):
                connection.disconnect()
        return connection, answers

    def block(self, names: Sequence[bytes], timeout_s: float) -> list[bytes] | None:
        """Wait until one of these lists has an element. Remove it, and return list and element.

        The first list that has one counts. Return None after the timeout.
        """
        found: list[bytes] | None = self.ask(
            pack(b"BLPOP", *names, b"%.3f" % timeout_s), blocks=True
        )
        return found

    def send(self, commands: Sequence[bytes]) -> Sent:
        """Send commands in one write, once. `replies()` waits for their replies."""
        errors = self._errors
        try:
            connection = self._prompt.take()
            try:
                connection.send_packed_command([b"".join(commands)], check_health=False)
            except BaseException:
                connection.disconnect()
                raise
        except (errors.RedisError, OSError) as error:
            self._prompt.close()
            raise self.unavailable(error) from error
        return Sent(
            connection,
            len(commands),
            back_to=self._prompt,
            errors=errors,
            unavailable=self.unavailable,
        )

    def refusal_of(self, error: BaseException | None) -> Refusal | None:
        """Return why the server refused. None: it gave no answer."""
        return refusal_of(error, self._errors)

    def was_refused(self, error: LockServerUnavailableError) -> bool:
        """Return whether the server answered with a refusal."""
        return isinstance(error.__cause__, self._errors.ResponseError)

    def may_pass(self, error: BaseException | None) -> bool:
        """Return whether a new connection may help. It does not help against a refusal."""
        return may_pass(error, self._errors)

    def unavailable(self, error: Exception) -> LockServerUnavailableError:
        """Return the error, with the server's address and without its password."""
        return unavailable(error, self._errors, address=self.address, cluster=self._cluster)

    # As `Traits` has it.
    failover_s: float = 0.0

    def check(self) -> list[Finding]:
        """Return what is wrong with the servers that lead to this one, such as Sentinels."""
        return []

    def close(self) -> None:
        """Close idle connections. Calls in progress go on, and later calls connect again."""
        self._prompt.close()
        self._patient.close()

    def _ask_once(
        self,
        connections: Connections,
        command: bytes,
        *,
        asking: bool = False,
    ) -> Any:
        connection = connections.take()
        known = False
        try:
            connection.send_packed_command(
                [_ASKING + command if asking else command], check_health=False
            )
            try:
                if asking:
                    connection.read_response(disable_decoding=True)
                reply = connection.read_response(disable_decoding=True)
            except self._errors.ResponseError as error:
                # A refusal is a complete reply. Leave a demoted master for good.
                known = not asking and not isinstance(error, self._errors.ReadOnlyError)
                raise
            known = True
            return reply
        finally:
            if known:
                connections.put(connection)
            else:
                connections.drop(connection)

    def _connections(self, kind: Callable[..., Any], options: dict[str, Any]) -> Connections:
        return Connections(lambda: kind(**options))

    def _check(self, kind: Callable[..., Any], options: dict[str, Any]) -> None:
        """Refuse unknown options at once rather than at the first task."""
        try:
            kind(**options)
        except (TypeError, ValueError, self._errors.RedisError) as error:
            name = re.search(r"keyword argument '(\w+)'", str(error))
            which = f"the option {name[1]}" if name else "one of the options"
            # Not chained: the error may show the options' values, including the password.
            raise ConfigurationError(
                f"The lock server {self.address}: redis-py does not accept {which} of its URL or "
                f"client ({type(error).__name__})."
            ) from None


class Sent:
    """Commands that were sent on one connection, which no other call uses meanwhile."""

    def __init__(
        self,
        connection: Any,
        count: int,
        *,
        back_to: Connections,
        errors: Any,
        unavailable: Callable[[Exception], LockServerUnavailableError],
    ) -> None:
        self._connection = connection
        self._left = count
        self._back_to = back_to
        self._errors = errors
        self._unavailable = unavailable

    def replies(self, *, within_s: float) -> list[Any]:
        """Return a reply for each command. A refusal is the error that it would be raised as.

        Raises LockServerUnavailableError if a reply did not come. The first reply has to come
        `within_s`, and each later one within the connection's own timeout.
        """
        found: list[Any] = []
        try:
            if not self._connection.can_read(timeout=within_s):
                raise self._errors.TimeoutError("Timeout reading from socket")
            while self._left:
                try:
                    found.append(self._connection.read_response(disable_decoding=True))
                except self._errors.ResponseError as error:
                    refusal = self._unavailable(error)
                    refusal.__cause__ = error
                    found.append(refusal)
                self._left -= 1
        except (self._errors.RedisError, OSError) as error:
            self._back_to.close()  # its idle ones are as old
            raise self._unavailable(error) from error
        finally:
            self.end()
        return found

    def end(self) -> None:
        """Return the connection for reuse, or close it if it owes replies. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._left:
            connection.disconnect()
        else:
            self._back_to.put(connection)


class Connections:
    """Idle connections. The one that was used last is taken first."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._idle: dict[int, deque[Any]] = {}
        self._pid = os.getpid()

    def take(self) -> Any:
        """Return an idle connection, or a new one that is connected."""
        try:
            return self._lane().pop()
        except IndexError:
            return self.connected()

    def connected(self) -> Any:
        """Return a new connection that is connected."""
        connection = self._make()
        # Explicitly, because a connection that connects at its first command skips Sentinel.
        connection.connect()
        return connection

    def put(self, connection: Any) -> None:
        """Keep a connection for the next call, unless there are enough idle ones."""
        lane = self._lane()
        if len(lane) < _MOST_IDLE:
            lane.append(connection)
        else:
            connection.disconnect()

    def drop(self, connection: Any) -> None:
        """Close a connection whose reply may be incomplete."""
        connection.disconnect()

    def close(self) -> None:
        """Close the idle connections of this lane. Other lanes close theirs after failures."""
        idle = self._lane()
        while idle:
            try:
                idle.pop().disconnect()
            except IndexError:  # another thread was faster
                return

    def _lane(self) -> deque[Any]:
        if self._pid != os.getpid():
            # Drop the parent's connections without closing them, because the parent uses them.
            self._idle, self._pid = {}, os.getpid()
        # Sockets of gevent and eventlet belong to the native thread that made them.
        plain = socket.socket.__module__ == "socket"
        lane = 0 if plain else threading.get_native_id()
        found = self._idle.get(lane)
        return found if found is not None else self._idle.setdefault(lane, deque())


def driver() -> Any:
    """Return the package redis. Raises MissingDriverError."""
    with extras_named("A lock on Redis or Valkey"):
        import redis
    return redis


def quiet_options(redis: Any) -> dict[str, Any]:
    """Return the options that switch off redis-py's own retries and side conversations."""
    options: dict[str, Any] = {
        "retry": None,
        "retry_on_error": [],
        "retry_on_timeout": False,
        "health_check_interval": 0,
        "decode_responses": False,
        # RESP2 needs no HELLO and has no pushed messages to tell from replies.
        "protocol": 2,
    }
    # CLIENT SETINFO costs a round trip each and is a refusal in the log of a restricted user.
    if hasattr(redis, "DriverInfo"):
        # Not None, which redis-py 7 replaces by its own name and version.
        return options | {"driver_info": redis.DriverInfo(name="", lib_version="")}
    return options | {"lib_name": None, "lib_version": None}
