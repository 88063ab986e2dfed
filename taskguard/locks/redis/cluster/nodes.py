"""Calls to the nodes of a Redis Cluster: to the node that serves a key's slot, and its successor.

Guarantees
* A call goes to the node that serves the slot, as far as is known. MOVED and ASK are followed, at
  most `_MOST_REDIRECTIONS` times.
* The slots are read when they are first needed, when a slot has moved, and when a node gives no
  answer: from any other node that answers. One thread reads them for all that need them at about
  the same time. Nothing polls.
* A node that gives no answer costs a call `1 + retries` times the bounds of `link.py`, and the
  search for its successor `_search_s`, however many nodes are down.
* Many calls are sent to all nodes before the first reply is read. Several silent nodes cost them
  one timeout, not one each. A node that accepts no new connection costs `connect_timeout_s` more.
  From then on it comes last.
* TRYAGAIN is retried for a fraction of a second. Then it raises LockServerUnavailableError, like
  every other failure. The error names the node and the cluster.

Does not guarantee that a node still owns a slot that it considers its own. For a moment after a
failover two nodes serve the slot, and grants of the old one are lost.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redis.address import cluster_from_url, from_url
from taskguard.locks.redis.link import RedisLink, Sent, driver, quiet_options
from taskguard.locks.redis.protocol import Script, pack
from taskguard.native import allocate_lock
from taskguard.values import value

if TYPE_CHECKING:
    from taskguard.locks.redis.cluster.topology import Topology

__all__ = ["Call", "ClusterLink"]

# Pauses between tries while the entries of a key move to another node.
_PAUSES_S = (0.01, 0.04, 0.1)
_MOST_REDIRECTIONS = 5
# The slots are not read again this soon, for example by threads that run into the same dead node.
_FRESH_S = 0.1
# redis-py before 6 has no classes for these on connections to single servers.
_CODES = ("MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "NOSCRIPT")

_Address = tuple[str, int]


@value
class Call:
    """One script on the entries of one slot."""

    script: Script
    keys: list[bytes]
    arguments: list[bytes]

    def packed(self) -> bytes:
        """Return the command."""
        keys = (b"%d" % len(self.keys), *self.keys)
        return pack(b"EVALSHA", self.script.sha, *keys, *self.arguments)


class ClusterLink:
    """Calls to a cluster. It has a `RedisLink`'s methods for the calls of one slot."""

    failover_s: float = 0.0  # as `Traits` has it

    def __init__(
        self,
        url: str,
        *,
        socket_timeout_s: float,
        connect_timeout_s: float,
        retries: int,
        longest_block_s: float,
    ) -> None:
        plain, self._startup = cluster_from_url(url)
        self.address = "the cluster " + ",".join(f"{host}:{port}" for host, port in self._startup)
        self._retries = retries
        redis = driver()
        self._errors = errors = redis.exceptions
        self._timeouts = (errors.TimeoutError, TimeoutError)
        kinds = (errors.MovedError, errors.AskError, errors.TryAgainError, errors.ClusterDownError)
        self._code_of = dict(zip((*kinds, errors.NoScriptError), _CODES, strict=True))
        kind, options = from_url(plain, redis)
        timeouts = {"socket_timeout": socket_timeout_s, "socket_connect_timeout": connect_timeout_s}
        self._connection = kind
        self._options = timeouts | options | quiet_options(redis)
        self._answer_s = float(self._options["socket_timeout"])
        # Maximum time of a search for a node that answers, however many nodes do not.
        self._search_s = 2 * (self._answer_s + float(self._options["socket_connect_timeout"]))
        self._make = partial(
            RedisLink,
            (kind, options),
            cluster=self.address,
            socket_timeout_s=socket_timeout_s,
            connect_timeout_s=connect_timeout_s,
            retries=0,  # retried here, since another node may serve the slot by then
            longest_block_s=longest_block_s,
        )
        self._links: dict[_Address, RedisLink] = {}
        self._a_link = self._link_at(self._startup[0])
        self._topology: Topology | None = None
        self._why: LockServerUnavailableError | None = None
        self._silent_at_s: dict[_Address, float] = {}
        self._read_at_s = float("-inf")
        self._turn = allocate_lock()
        self._pid = os.getpid()

    # -- calls to one slot

    def call(
        self,
        script: Script,
        keys: list[bytes],
        arguments: list[bytes],
        *,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a script at the node of its keys. `on_retry`: as of a `RedisLink`."""
        return self._follow(
            keys[0],
            lambda link, asking: link.call(script, keys, arguments, asking=asking),
            on_retry,
        )

    def block(self, names: Sequence[bytes], timeout_s: float) -> list[bytes] | None:
        """Run BLPOP on entries of one slot. If the slot moves meanwhile, return None early."""
        until_s = time.monotonic() + timeout_s

        def wait(link: RedisLink, asking: bool) -> list[bytes] | None:
            left_s = max(0.01, until_s - time.monotonic())
            if asking:
                # Entries of the slot are at two nodes, and no command may name two of them.
                time.sleep(min(left_s, _PAUSES_S[-1]))
                return None
            return link.block(names, left_s)

        found: list[bytes] | None = None
        try:
            found = self._follow(names[0], wait)
        except LockServerUnavailableError as error:
            # UNBLOCKED: the node was a master and is a replica now.
            if not self.is_moving(error) and "UNBLOCKED" not in str(error):
                raise
        return found

    def is_moving(self, answer: Any) -> bool:
        """Return whether entries of a slot are at two nodes just now."""
        return self._code(answer) == "TRYAGAIN"

    # -- calls to many slots

    def call_all(
        self, calls: Sequence[Call], *, on_retry: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Return for each script its reply or its LockServerUnavailableError.

        One message goes to each node. A call is made again alone if its slot has moved, if the
        node does not know the script, or if the connection broke.
        """
        until_s = time.monotonic() + 2 * self._answer_s
        found: list[Any] = [None] * len(calls)
        asked: dict[RedisLink, list[int]] = {}
        for number, call in enumerate(calls):
            try:
                asked.setdefault(self._link_of(call.keys[0]), []).append(number)
            except LockServerUnavailableError as error:
                found[number] = error
        self._exchange(calls, asked, found)
        lost = [each for each in asked if any(self._is_lost(found[n]) for n in asked[each])]
        for link in lost:
            self._silent_at_s[link.at] = time.monotonic()  # no search begins with one of them
        for link in lost:
            on_retry()
            self._search(besides=link)
        for link, numbers in asked.items():
            for number in numbers:
                if self._may_work_now(link, calls[number], found[number]):
                    if time.monotonic() > until_s:
                        break
                    found[number] = self._answer_of(calls[number], on_retry)
        return found

    def _exchange(
        self, calls: Sequence[Call], asked: dict[RedisLink, list[int]], found: list[Any]
    ) -> None:
        """Write to each node, then fill in each node's replies."""
        under_way: dict[RedisLink, Sent] = {}
        try:
            # A connection to a node that was silent last may take time: the others come first.
            for link in sorted(asked, key=lambda each: self._silent_at_s.get(each.at, 0.0)):
                numbers = asked[link]
                try:
                    under_way[link] = link.send([calls[number].packed() for number in numbers])
                except LockServerUnavailableError as error:
                    _fill(found, numbers, repeat(error))
            until_s = time.monotonic() + self._answer_s
            for link, sent in under_way.items():
                within_s = max(0.0, until_s - time.monotonic())
                try:
                    _fill(found, asked[link], sent.replies(within_s=within_s))
                except LockServerUnavailableError as error:
                    _fill(found, asked[link], repeat(error))
        finally:
            for sent in under_way.values():
                sent.end()

    def _may_work_now(self, link: RedisLink, call: Call, answer: Any) -> bool:
        """Return whether to make a call alone. A silent node stays silent."""
        if isinstance(getattr(answer, "__cause__", None), self._timeouts):
            return self._successor(call.keys[0], link) is not link
        return bool(self._code(answer)) or self._is_lost(answer)

    def _answer_of(self, call: Call, on_retry: Callable[[], None]) -> Any:
        try:
            return self.call(call.script, call.keys, call.arguments, on_retry=on_retry)
        except LockServerUnavailableError as error:
            return error

    # -- calls to any node

    def nodes(self) -> tuple[list[RedisLink], list[RedisLink]]:
        """Return the masters and replicas that the cluster announces just now."""
        self._read_slots()
        if self._topology is None or self._why is not None:
            raise self._unknown()
        masters, replicas = self._topology.masters(), self._topology.replicas()
        return [*map(self._link_at, masters)], [*map(self._link_at, replicas)]

    def ask_any(self, command: bytes) -> Any:
        """Return the reply of the first node that answers."""
        error = self._unknown()
        for address in self._known():
            try:
                return self._link_at(address).ask(command)
            except LockServerUnavailableError as this:
                error = this
                if self.was_refused(this):
                    break
        raise error

    def was_refused(self, error: LockServerUnavailableError) -> bool:
        """Return whether a node answered with a refusal."""
        return isinstance(error.__cause__, self._errors.ResponseError)

    def close(self) -> None:
        """Close idle connections. Calls in flight go on; later calls connect again."""
        for link in list(self._links.values()):
            link.close()

    # -- redirections and failures

    def _follow(
        self,
        name: bytes,
        attempt: Callable[[RedisLink, bool], Any],
        on_retry: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return the attempt's result at the node of this entry. Follow redirections."""
        redirections, retries, pauses = _MOST_REDIRECTIONS, self._retries, iter(_PAUSES_S)
        link, asking = self._link_of(name), False
        while True:
            try:
                return attempt(link, asking)
            except LockServerUnavailableError as error:
                code, last = self._code(error), link
                asking = code == "ASK"
                if code in ("MOVED", "ASK"):
                    link = self._named(error, last)
                    if code == "MOVED":
                        # The node that got the slot knows which slots moved with it.
                        self._read_slots(first=link)
                elif code == "TRYAGAIN":
                    pause_s = next(pauses, None)
                    if pause_s is None:
                        raise
                    time.sleep(pause_s)
                    link = self._successor(name, last)
                    continue
                elif code == "CLUSTERDOWN" or self._is_lost(error):
                    # A node in the minority of a split network also reports CLUSTERDOWN.
                    self._search(besides=last)
                    link = self._successor(name, last)
                else:
                    raise
                redirections -= link is not last
                retries -= link is last
                if redirections < 0 or retries < 0:
                    raise
                if not code:
                    on_retry()

    def _code(self, answer: Any) -> str:
        """Return what a node says about a slot or a script; "" for anything else."""
        cause = getattr(answer, "__cause__", None)
        if not isinstance(cause, self._errors.ResponseError):
            return ""
        word = str(cause).partition(" ")[0]
        return self._code_of.get(type(cause)) or (word if word in _CODES else "")

    def _is_lost(self, answer: Any) -> bool:
        """Return whether this is no answer, so that a fresh connection may help."""
        cause = getattr(answer, "__cause__", None)
        return cause is not None and self._a_link.may_pass(cause)

    def _named(self, error: LockServerUnavailableError, by: RedisLink) -> RedisLink:
        """Return the node that a MOVED or ASK names. Without a host, it is at the same host."""
        host, _, port = str(error.__cause__).split()[-1].rpartition(":")
        return self._link_at((by.at[0] if host in ("", "?") else host, int(port)))

    # -- the slots

    def _link_of(self, name: bytes) -> RedisLink:
        """Return the node of an entry's slot. Raises LockServerUnavailableError."""
        address = self._topology.node_of(name) if self._topology else None
        if address is None:
            self._read_slots()
            address = self._topology.node_of(name) if self._topology else None
        if address is not None:
            return self._link_at(address)
        if self._topology is None:
            raise self._unknown()
        raise LockServerUnavailableError(
            f"No node of the lock server {self.address} serves the slot of "
            f"{name.decode('utf-8', 'replace')}. Find the slot with CLUSTER NODES, and assign it "
            "to a node with CLUSTER ADDSLOTS."
        )

    def _successor(self, name: bytes, link: RedisLink) -> RedisLink:
        """Return the node that serves the entry's slot by now, or the same if none is known."""
        address = self._topology.node_of(name) if self._topology else None
        return self._link_at(address) if address else link

    def _search(self, *, besides: RedisLink) -> None:
        """Read the slots after a node gave no answer."""
        besides.close()  # the idle connections are as old as the one that failed
        self._silent_at_s[besides.at] = time.monotonic()
        self._read_slots(besides=besides)

    def _read_slots(
        self, *, besides: RedisLink | None = None, first: RedisLink | None = None
    ) -> None:
        """Read which node serves which slots, unless another thread does so meanwhile."""
        came_at_s, pause_s = time.monotonic(), 0.002
        if self._pid != os.getpid():
            # A thread of the parent may have had it at the fork.
            self._turn, self._pid = allocate_lock(), os.getpid()
        turn = self._turn
        # Poll instead of blocking, because both greenlets and native threads may want the lock.
        while not turn.acquire(False):
            if time.monotonic() - came_at_s > self._search_s:
                # A signal may have interrupted the call that holds it. Two readers do no harm.
                self._turn = allocate_lock()
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        try:
            if self._read_at_s + _FRESH_S < came_at_s:
                self._query_slots(besides, first)
                self._read_at_s = time.monotonic()
        finally:
            turn.release()

    def _query_slots(self, besides: RedisLink | None, first: RedisLink | None) -> None:
        """Query one node after the other until one answers, or the time is over."""
        from taskguard.locks.redis.cluster.topology import Topology, cause_of  # imports redis-py

        errors = self._errors
        kinds = (errors.RedisError, errors.RedisClusterException, OSError, IndexError)
        addresses = dict.fromkeys([*([first.at] if first else ()), *self._known(), *self._startup])
        if besides is not None:
            addresses.pop(besides.at, None)
        until_s = time.monotonic() + self._search_s
        # Those that were silent last are queried last.
        for address in sorted(addresses, key=lambda each: self._silent_at_s.get(each, 0.0)):
            try:
                found = Topology(address, self._connection, self._options)
            except kinds as error:
                self._why = self._explained(address, cause_of(error))
                if not self.was_refused(self._why):
                    self._silent_at_s[address] = time.monotonic()
                if time.monotonic() > until_s:
                    return
            else:
                self._silent_at_s.pop(address, None)
                self._topology, self._why = found, None
                used = {*found.masters(), *found.replicas(), *self._startup}
                for other in self._links.keys() - used:
                    self._silent_at_s.pop(other, None)
                    self._links.pop(other).close()
                return

    def _known(self) -> list[_Address]:
        return self._topology.masters() if self._topology else self._startup

    def _link_at(self, address: _Address) -> RedisLink:
        link = self._links.get(address)
        return link if link is not None else self._links.setdefault(address, self._make(at=address))

    def _explained(self, address: _Address, cause: Exception) -> LockServerUnavailableError:
        if isinstance(cause, IndexError):
            cause = self._errors.ResponseError("it knows of no slots")
        error = self._link_at(address).unavailable(cause)
        if "cluster support disabled" in str(error):
            error = LockServerUnavailableError(f"{error} It is a single server: write redis://.")
        error.__cause__ = cause
        return error

    def _unknown(self) -> LockServerUnavailableError:
        """Return the error of a call while no node is known."""
        why = self._why
        error = LockServerUnavailableError(
            str(why) if why else f"The lock server {self.address} has not answered yet."
        )
        error.__cause__ = why and why.__cause__
        return error


def _fill(found: list[Any], numbers: list[int], answers: Iterable[Any]) -> None:
    for number, answer in zip(numbers, answers, strict=False):
        found[number] = answer
