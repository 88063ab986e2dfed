"""The way to the nodes of a Redis Cluster: which has a key's slot, and what to do when it has not.

Guarantees
* A call is sent to the node that has the slot, as far as is known; what the nodes themselves say of
  slots that moved is followed, at most `_MOST_REDIRECTIONS` times.
* The slots are asked for when they are first needed, when a slot has moved, and when a node does
  not answer: of any other node that does, by one thread at a time, for all who run into it at about
  the same time. Nobody asks from time to time.
* A node that gives no answer costs a call `1 + retries` times the bounds of `link.py`, and what is
  asked of the others nothing but the wait for it.
* "Try again", "the cluster is down" and the like are tried for a fraction of a second and are then
  LockServerUnavailableError, as everything else is; it names the node and the cluster.

Does not guarantee that a node which thinks that it has a slot still has it: for a moment after a
failover two do, and what the old one grants is lost.
"""

from __future__ import annotations

import binascii
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

from taskguard.errors import LockServerUnavailableError
from taskguard.locks.redis.address import cluster_from_url
from taskguard.locks.redis.link import RedisLink, Sent, driver
from taskguard.locks.redis.protocol import Script, pack
from taskguard.native import allocate_lock
from taskguard.values import value

__all__ = ["SLOTS", "Call", "ClusterLink", "Place", "slot_of"]

SLOTS = 16_384
_MOST_REDIRECTIONS = 5
# "Try again" is true for as long as the entries of a key are on their way.
_PAUSES_S = (0.01, 0.04, 0.1)
# What has moved is looked up once a second at most while a reshard goes on: each refusal names the
# node all the same.
_BETWEEN_MOVES_S = 1.0
# A node is silent, what it had has moved, and the new one does not know the script.
_ROUNDS = 4
# What was said so long ago is said again: threads that run into one dead node do not come together.
_FRESH_S = 0.1
# So many commands in one write: what they answer fits into the buffers of any connection.
_MOST_AT_ONCE = 1_000

_CLUSTER_SLOTS = pack(b"CLUSTER", b"SLOTS")


def slot_of(name: bytes) -> int:
    """The slot of an entry: by its hash tag, the first `{…}` that is not empty."""
    start = name.find(b"{") + 1
    if start:
        end = name.find(b"}", start)
        if end > start:
            name = name[start:end]
    return binascii.crc_hqx(name, 0) % SLOTS


@value
class Call:
    """One script on the entries of one slot."""

    script: Script
    keys: list[bytes]
    arguments: list[bytes]

    def packed(self, *, by_source: bool = False) -> bytes:
        """As it goes over the wire; by its source the server remembers the script."""
        start = (b"EVAL", self.script.source) if by_source else (b"EVALSHA", self.script.sha)
        return pack(*start, b"%d" % len(self.keys), *self.keys, *self.arguments)


@value
class Place:
    """A node as the cluster announces it."""

    id: str
    link: RedisLink
    is_replica: bool


class ClusterLink:
    """Calls to a cluster; has the methods of a `RedisLink` for what is of one slot."""

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
        plain, addresses = cluster_from_url(url)
        shown = ",".join(f"{host}:{port}" for host, port in addresses)
        self.address = f"the cluster {shown}"
        self._errors = errors = driver().exceptions
        # Before redis-py 6 connections to single servers know none of these by class.
        self._codes = {
            errors.MovedError: "MOVED",
            errors.AskError: "ASK",
            errors.TryAgainError: "TRYAGAIN",
            errors.ClusterDownError: "CLUSTERDOWN",
            errors.NoScriptError: "NOSCRIPT",
        }
        self._timeouts = (errors.TimeoutError, TimeoutError)
        self._retries = retries
        # So long a search for a node that answers may take, whatever the number of those that
        # do not.
        self._search_s = 2 * (socket_timeout_s + connect_timeout_s)
        self._patience_s = 2 * socket_timeout_s

        def make(at: tuple[str, int]) -> RedisLink:
            return RedisLink(
                plain,
                at=at,
                cluster=self.address,
                socket_timeout_s=socket_timeout_s,
                connect_timeout_s=connect_timeout_s,
                retries=0,  # asked again here, where another node may be the one to ask
                longest_block_s=longest_block_s,
            )

        self._make = make
        self._links = {at: make(at) for at in addresses}
        self._startup = list(self._links.values())
        self._silent_at_s: dict[RedisLink, float] = {}
        self._slots: list[RedisLink | None] = [None] * SLOTS
        self._places: list[Place] = []
        self._why: LockServerUnavailableError | None = None
        self._ended_at_s = float("-inf")
        self._turn = allocate_lock()
        self._pid = os.getpid()

    # -- of one slot

    def call(
        self,
        script: Script,
        keys: list[bytes],
        arguments: list[bytes],
        *,
        on_retry: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run a script where its keys are; `on_retry`: as a `RedisLink` does."""
        slot = slot_of(keys[0])
        link = self._slots[slot] or self._found(slot)
        try:
            return link.call(script, keys, arguments)
        except LockServerUnavailableError as error:
            return self._follow(
                slot,
                link,
                error,
                lambda link, asking: link.call(script, keys, arguments, asking=asking),
                on_retry,
            )

    def is_moving(self, answer: Any) -> bool:
        """Whether entries of a slot are in two places just now."""
        return self._code(_cause(answer)) == "TRYAGAIN"

    def block(self, names: Sequence[bytes], timeout_s: float) -> list[bytes] | None:
        """BLPOP of entries of one slot where they are. It may move meanwhile: that ends it, or it
        goes on."""
        until_s = time.monotonic() + timeout_s

        def wait(link: RedisLink, asking: bool) -> Any:
            left_s = b"%.3f" % max(0.01, until_s - time.monotonic())
            try:
                return link.ask(pack(b"BLPOP", *names, left_s), blocks=True, asking=asking)
            except LockServerUnavailableError as error:
                if not self.is_moving(error):
                    raise
            # Of a slot in two places a command may name one entry.
            return link.ask(pack(b"BLPOP", names[0], left_s), blocks=True, asking=asking)

        slot = slot_of(names[0])
        link = self._slots[slot] or self._found(slot)
        found: list[bytes] | None = None
        try:
            found = wait(link, False)
        except LockServerUnavailableError as error:
            if "UNBLOCKED" not in str(error):  # a master that is one no more
                found = self._follow(slot, link, error, wait, lambda: None)
        return found

    # -- of many

    def call_all(
        self, calls: Sequence[Call], *, on_retry: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """A reply for each script, or the LockServerUnavailableError that came of it.

        In one round trip where nothing has moved: one write to each node, all at once.
        """
        until_s = time.monotonic() + self._patience_s
        found: list[Any] = [None] * len(calls)
        slots = [slot_of(call.keys[0]) for call in calls]
        left: Sequence[int] = range(len(calls))
        strangers: set[RedisLink] = set()  # nodes that do not know the scripts
        for _ in range(_ROUNDS):
            asked = self._by_link(slots, left, found)
            self._ask_at_once(calls, asked, strangers, found)
            strangers, left = set(), []
            for link, numbers in asked.items():
                left += self._again(link, slots, numbers, found, strangers, on_retry)
            if not left:
                break
        for number, answer in enumerate(found):
            # Those that are on their way to another node just now.
            if self._code(_cause(answer)) and time.monotonic() < until_s:
                found[number] = self._call_once_more(calls[number], on_retry)
        return found

    def _by_link(
        self, slots: list[int], numbers: Sequence[int], found: list[Any]
    ) -> dict[RedisLink, list[int]]:
        asked: dict[RedisLink, list[int]] = {}
        nobody: LockServerUnavailableError | None = None
        for number in numbers:
            link = self._slots[slots[number]]
            if link is None and nobody is None:
                try:
                    link = self._found(slots[number])
                except LockServerUnavailableError as error:
                    nobody = error  # not asked for again for each of them
            if link is None:
                found[number] = nobody
            else:
                asked.setdefault(link, []).append(number)
        return asked

    def _ask_at_once(
        self,
        calls: Sequence[Call],
        asked: dict[RedisLink, list[int]],
        strangers: set[RedisLink],
        found: list[Any],
    ) -> None:
        """A write to each node, then what each has answered; as often as there is something."""
        left = {link: list(numbers) for link, numbers in asked.items()}
        while left:
            under_way: list[tuple[RedisLink, Sent]] = []
            try:
                for link, numbers in list(left.items()):
                    part = [calls[number] for number in numbers[:_MOST_AT_ONCE]]
                    try:
                        under_way.append((link, link.send(_packed(part, link in strangers))))
                    except LockServerUnavailableError as error:
                        _fill(found, left.pop(link), repeat(error))
                for link, sent in under_way:
                    try:
                        _fill(found, left[link], sent.replies())
                    except LockServerUnavailableError as error:
                        _fill(found, left.pop(link), repeat(error))
            finally:
                for _, sent in under_way:
                    sent.end()
            left = {k: v[_MOST_AT_ONCE:] for k, v in left.items() if v[_MOST_AT_ONCE:]}

    def _again(
        self,
        link: RedisLink,
        slots: list[int],
        numbers: list[int],
        found: list[Any],
        strangers: set[RedisLink],
        on_retry: Callable[[], None],
    ) -> list[int]:
        """Those of a node's calls that another round may help, after asking what has moved."""
        again: list[int] = []
        silent: BaseException | None = None
        for number in numbers:
            cause = _cause(found[number])
            if cause is None:
                continue
            code = self._code(cause)
            if code == "NOSCRIPT":
                strangers.add(link)
                again.append(number)
            elif code == "MOVED":
                self._moved(slots[number], self._named(cause, link))
                again.append(number)
            elif link.may_pass(cause):
                if silent is None:
                    silent = cause
                    self._after_silence(slots[number], link)
                # A connection that broke may have been an old one. One that is silent stays so.
                broken = not isinstance(cause, self._timeouts)
                if broken or self._slots[slots[number]] is not link:
                    again.append(number)
        if silent is not None and again:
            on_retry()
        return again

    def _call_once_more(self, call: Call, on_retry: Callable[[], None]) -> Any:
        try:
            return self.call(call.script, call.keys, call.arguments, on_retry=on_retry)
        except LockServerUnavailableError as error:
            return error

    # -- of any node

    def places(self) -> list[Place]:
        """Masters and replicas, as they are announced just now."""
        self._look_up()
        if self._why is not None:
            raise self._why
        return self._places

    def ask_any(self, command: bytes) -> Any:
        """What the first node says that answers."""
        links = list(dict.fromkeys(link for link in self._slots if link)) or self._startup
        for link in links:
            try:
                return link.ask(command)
            except LockServerUnavailableError as error:
                if link is links[-1] or link.was_refused(error):
                    raise
        raise AssertionError("unreachable: a cluster has an address")

    def was_refused(self, error: LockServerUnavailableError) -> bool:
        """Whether a node answered, and what it said was no."""
        return isinstance(error.__cause__, self._errors.ResponseError)

    def close(self) -> None:
        """Close what is idle. Calls in flight go on; later calls connect again."""
        for link in list(self._links.values()):
            link.close()

    # -- what goes wrong

    def _follow(
        self,
        slot: int,
        link: RedisLink,
        error: LockServerUnavailableError,
        attempt: Callable[[RedisLink, bool], Any],
        on_retry: Callable[[], None],
    ) -> Any:
        """The call at another node, or at the same again: as its error says."""
        redirections, retries, pauses = _MOST_REDIRECTIONS, self._retries, iter(_PAUSES_S)
        while True:
            cause = _cause(error)
            code = self._code(cause)
            asking = code == "ASK"
            if code in ("MOVED", "ASK"):
                redirections -= 1
                link = self._named(cause, link)
                if not asking:
                    self._moved(slot, link)
            elif code in ("TRYAGAIN", "CLUSTERDOWN"):
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise error
                link = self._after_pause(slot, link, code, pause_s)
            elif link.may_pass(cause):
                owner = self._after_silence(slot, link)
                if owner is link:
                    retries -= 1
                else:
                    redirections -= 1
                link = owner
                if retries >= 0:
                    on_retry()
            else:
                raise error
            if retries < 0 or redirections < 0:
                raise error
            try:
                return attempt(link, asking)
            except LockServerUnavailableError as next_error:
                error = next_error

    def _code(self, cause: BaseException | None) -> str:
        """What a node says of a slot, or of a script; "" for anything else."""
        if not isinstance(cause, self._errors.ResponseError):
            return ""
        for kind, code in self._codes.items():
            if isinstance(cause, kind):
                return code
        word = str(cause).partition(" ")[0]
        return word if word in self._codes.values() else ""

    def _named(self, refusal: BaseException | None, by: RedisLink) -> RedisLink:
        """The node that a MOVED or an ASK names; without a host it is at the host that said so."""
        host, _, port = str(refusal).split()[-1].rpartition(":")
        return self._link_at((_host(host) or by.host, int(port)))

    def _moved(self, slot: int, to: RedisLink) -> None:
        """A slot has moved, and others probably with it: its new node knows best."""
        if self._slots[slot] is to:
            return
        if time.monotonic() - self._ended_at_s > _BETWEEN_MOVES_S:
            self._look_up(first=to, waits=False)
        self._slots[slot] = to

    def _after_pause(self, slot: int, link: RedisLink, code: str, pause_s: float) -> RedisLink:
        time.sleep(pause_s)
        if code == "CLUSTERDOWN":
            # It may be on the lesser side of the network, and its slots another's on the other.
            self._look_up(besides=link)
        return self._slots[slot] or link

    def _after_silence(self, slot: int, link: RedisLink) -> RedisLink:
        """Whom to ask after a node gave no answer: what the others say, or the same again."""
        link.close()  # the idle ones are as old as the one that failed
        self._silent_at_s[link] = time.monotonic()
        self._look_up(besides=link)
        return self._slots[slot] or link

    # -- who has which slots

    def _found(self, slot: int) -> RedisLink:
        """The node of a slot that nobody is known to have, once it was asked for."""
        self._look_up()
        link = self._slots[slot]
        if link is not None:
            return link
        if self._why is not None:
            raise LockServerUnavailableError(str(self._why)) from self._why.__cause__
        raise LockServerUnavailableError(
            f"The lock server {self.address} has a slot, {slot}, that none of its nodes serves: "
            "CLUSTER NODES tells which it has, CLUSTER ADDSLOTS gives it to one."
        )

    def _look_up(
        self,
        *,
        besides: RedisLink | None = None,
        first: RedisLink | None = None,
        waits: bool = True,
    ) -> None:
        """Ask who has which slots; what another thread was told meanwhile will do."""
        asked_at_s, pause_s = time.monotonic(), 0.002
        turn = self._turn_of_this_process()
        # By looking rather than waiting: greenlets and threads of the system may come for it.
        while not turn.acquire(False):
            if not waits or time.monotonic() - asked_at_s > self._search_s:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        try:
            if self._ended_at_s + _FRESH_S < asked_at_s:
                self._ask_for_slots(besides, first)
                self._ended_at_s = time.monotonic()
        finally:
            turn.release()

    def _ask_for_slots(self, besides: RedisLink | None, first: RedisLink | None) -> None:
        until_s = time.monotonic() + self._search_s
        most, best, places = 0, None, self._places
        for link in self._to_ask(besides, first):
            try:
                rows = link.ask(_CLUSTER_SLOTS)
            except LockServerUnavailableError as error:
                self._why = _explained(error)
                if not link.was_refused(error):
                    self._silent_at_s[link] = time.monotonic()
                if time.monotonic() > until_s:
                    break
                continue
            self._silent_at_s.pop(link, None)
            slots, announced = self._read(rows, link.host)
            covered = SLOTS - slots.count(None)
            if covered > most:
                most, best, places = covered, slots, announced
            if covered == SLOTS:
                break
        if best is not None:
            self._slots, self._places, self._why = best, places, None
            self._forget_the_others()

    def _to_ask(self, besides: RedisLink | None, first: RedisLink | None) -> list[RedisLink]:
        """Those that were silent last come last."""
        known = [link for link in self._slots if link]
        links = dict.fromkeys([*([first] if first else []), *known, *self._startup])
        links.pop(besides, None)  # type: ignore[arg-type]
        return sorted(links, key=lambda link: self._silent_at_s.get(link, 0.0))

    def _read(self, rows: Any, host: str) -> tuple[list[RedisLink | None], list[Place]]:
        slots: list[RedisLink | None] = [None] * SLOTS
        places: dict[RedisLink, Place] = {}
        for first, last, *nodes in rows:
            links = [self._link_at((_host(node[0]) or host, int(node[1]))) for node in nodes]
            slots[first : last + 1] = [links[0]] * (last + 1 - first)
            for link, node in zip(links, nodes, strict=True):
                places[link] = Place(node[2].decode(), link, link is not links[0])
        return slots, list(places.values())

    def _link_at(self, at: tuple[str, int]) -> RedisLink:
        link = self._links.get(at)
        return link if link is not None else self._links.setdefault(at, self._make(at))

    def _forget_the_others(self) -> None:
        used = {*self._slots, *self._startup, *(place.link for place in self._places)}
        for at, link in list(self._links.items()):
            if link not in used:
                self._links.pop(at, None)
                self._silent_at_s.pop(link, None)
                link.close()

    def _turn_of_this_process(self) -> Any:
        if self._pid != os.getpid():
            # A thread of the parent may have had it at the fork.
            self._turn, self._pid = allocate_lock(), os.getpid()
        return self._turn


def _cause(answer: Any) -> BaseException | None:
    return answer.__cause__ if isinstance(answer, LockServerUnavailableError) else None


def _host(said: bytes | str | None) -> str:
    """A host as a node announces it; "" for one that does not know its own."""
    text = said.decode() if isinstance(said, bytes) else said or ""
    return "" if text == "?" else text


def _packed(calls: Sequence[Call], by_source: bool) -> list[bytes]:
    """What goes to one node; where it does not know a script, the first call brings it."""
    known: set[str] = set()
    commands = []
    for call in calls:
        commands.append(call.packed(by_source=by_source and call.script.name not in known))
        known.add(call.script.name)
    return commands


def _fill(found: list[Any], numbers: list[int], answers: Iterable[Any]) -> None:
    for number, answer in zip(numbers, answers, strict=False):
        found[number] = answer


def _explained(error: LockServerUnavailableError) -> LockServerUnavailableError:
    if "cluster support disabled" not in str(error):
        return error
    told = LockServerUnavailableError(f"{error} It is one server: write redis:// for it.")
    told.__cause__ = error.__cause__
    return told
