"""The steps of a lock that a majority grants. What they guarantee is in the package's docstring."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.base import Granted, Held, Hold, Holder, Renewal, Traits
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.provider import read_holders
from taskguard.locks.redlock.asking import ask, hear, read
from taskguard.locks.redlock.checks import look_at
from taskguard.locks.redlock.commands import Call, Commands
from taskguard.locks.redlock.election import Election
from taskguard.locks.redlock.line import LATE, Line, Refusal
from taskguard.locks.redlock.servers import Servers
from taskguard.locks.redlock.spread import Spread
from taskguard.model.lease import Owner
from taskguard.model.policy import DAY_S, check_number

__all__ = ["RedlockLocks"]

_WAIT_SLICE_S = 1.0
_MOST_REFUSALS = 1_000


class RedlockLocks:
    """A `LockProvider` on several independent Redis or Valkey servers.

    Args:
        servers: a URL (`redlock://host1,host2,host3`, `redlocks://…` for TLS), or a list of the
            servers' URLs and `redis.Redis` clients.
        namespace: what every key in the servers begins with.
        socket_timeout_s: how long a majority's replies may take; one that is late delays nothing.
        connect_timeout_s: how long connections may take.
        longest_ttl_s: no vote has a server that runs for less than this, or than the longest ttl
            that was asked for here: it may have forgotten such a lease of another process.
    """

    def __init__(
        self,
        servers: str | Sequence[Any],
        *,
        namespace: str = "taskguard",
        socket_timeout_s: float = 1.0,
        connect_timeout_s: float = 1.0,
        longest_ttl_s: float = 0.0,
    ) -> None:
        check_number("socket_timeout_s", socket_timeout_s, at_least=0.001, at_most=DAY_S)
        check_number("connect_timeout_s", connect_timeout_s, at_least=0.001, at_most=DAY_S)
        check_number("longest_ttl_s", longest_ttl_s, at_least=0.0)
        targets = _servers_of(servers) if isinstance(servers, str) else list(servers)
        if not targets:
            raise ConfigurationError("Redlock needs servers: redlock://host1,host2,host3.")
        links = [
            RedisLink(
                target,
                socket_timeout_s=socket_timeout_s,
                connect_timeout_s=connect_timeout_s,
                retries=0,
                longest_block_s=_WAIT_SLICE_S,
            )
            for target in targets
        ]
        self.namespace = namespace
        self._commands = Commands(namespace)
        self._servers = Servers(links, silence_s=socket_timeout_s)
        self._quorum = self._servers.quorum
        self._longest_s = longest_ttl_s
        # Where a key's last refusal came from: there a release finds that somebody waits.
        self._refused_at: dict[str, int] = {}
        self._spread = Spread(self._servers, self._commands)

    @property
    def traits(self) -> Traits:
        """Leases without tokens."""
        return Traits(tokens=False)

    def __repr__(self) -> str:
        addresses = ",".join(server.link.address for server in self._servers.all)
        return f"<RedlockLocks {addresses} namespace={self.namespace!r}>"

    # -- taking -------------------------------------------------------------------------------

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys at a majority, or none. There is no token: the fence is 0."""
        del with_fence
        self._longest_s = max(self._longest_s, ttl_s)
        lines = self._servers.take()
        election = Election(
            self._servers,
            lines,
            self._commands,
            keys=keys,
            owner=owner,
            ttl_s=ttl_s,
            wait_s=wait_s,
            had=self._spread.held(owner),
        )
        known = False
        try:
            refusals = election.run(self._start(keys[0]), longest_s=self._longest_s)
            known = True
        except LockServerUnavailableError:
            known = True
            raise
        finally:
            if known:
                self._servers.put(lines)
            else:
                lines.close()
        if refusals is not None:
            return self._held(refusals, keys)
        self._spread.note(keys, owner, ttl_s, election.asked_at_s, election.asked)
        return Granted(0, ttl_s)

    def _held(self, refusals: dict[int, list[Any]], keys: tuple[str, ...]) -> Held:
        index, (_, number, holder, _) = next(iter(refusals.items()))
        left_ms = max(reply[3] for reply in refusals.values())
        key = keys[number - 1]
        if len(self._refused_at) >= _MOST_REFUSALS:
            self._refused_at.clear()
        self._refused_at[key] = index
        return Held(
            key=key,
            owner=Owner.parse(holder.decode("utf-8", "replace")),
            remaining_s=left_ms / 1000 if left_ms >= 0 else DAY_S,
        )

    def _start(self, key: str) -> int:
        return zlib.crc32(key.encode("utf-8", "surrogatepass")) % self._servers.count

    # -- all others ---------------------------------------------------------------------------

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys wherever the lock stands, and wake waiters."""
        only = self._spread.end(keys, owner)
        replies, missing = self._everywhere(self._commands.release(keys, owner), only)
        freed = sum(reply > 0 for reply in replies)
        if freed:
            return freed + missing >= self._quorum
        return False

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys over to their true owner, wherever the lock stands."""
        only = self._spread.end(keys, owner)
        call = self._commands.hand_over(keys, owner, to, ttl_s)
        replies, missing = self._everywhere(call, only)
        handed = sum(reply > 0 for reply in replies)
        return handed > 0 and handed + missing >= self._quorum

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases, some 250 keys in a command; all servers work at the same time."""
        if not holds:
            return []
        self._longest_s = max(self._longest_s, *(hold.ttl_s for hold in holds))
        calls = self._commands.renew(holds)
        letters = [b"".join(texts) for texts in self._pipelined(calls)]
        columns = [bytes(column) for column in zip(*letters, strict=True)]
        answers = [self._renewal(column) for column in columns]
        over = (Renewal.TAKEN, Renewal.GONE)
        lost = [hold for hold, answer in zip(holds, answers, strict=True) if answer in over]
        if lost:
            self._give_up(lost)
        return answers

    def _renewal(self, votes: bytes) -> str:
        stands = votes.count(b"R")
        if stands >= self._quorum:
            return Renewal.RENEWED
        if stands + self._servers.count - len(votes) >= self._quorum:
            return Renewal.UNANSWERED  # it may stand where nothing was said in time
        return Renewal.TAKEN if b"T" in votes else Renewal.GONE

    def _give_up(self, lost: Sequence[Hold]) -> None:
        """What still stands on a minority keeps others out, and is of no use to its owner."""
        for hold in lost:
            self._spread.end(hold.keys, hold.owner)
        with contextlib.suppress(LockServerUnavailableError):
            self._pipelined([self._commands.release(hold.keys, hold.owner) for hold in lost])

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key may have been released, a second at most: then ask again."""
        del owner
        if timeout_s <= 0:
            return
        slice_s = max(0.01, min(timeout_s, _WAIT_SLICE_S))
        now_s = SYSTEM_CLOCK.monotonic_s()
        start, servers = self._refused_at.get(key, self._start(key)), self._servers.all
        order = servers[start:] + servers[:start]
        chosen = min(order, key=lambda server: server.away_until_s > now_s)
        try:
            chosen.link.ask(self._commands.wait(key, slice_s), blocks=True)
        except LockServerUnavailableError as error:
            if not chosen.link.was_refused(error):
                chosen.note_failure(error)
            raise

    def holders(self, key: str) -> list[Holder]:
        """Return the holder that a majority of the servers names, or may name."""
        found: dict[Owner, list[Holder]] = {}
        silent: list[LockServerUnavailableError] = []
        for server in self._servers.all:
            try:
                reply = server.link.call(*self._commands.holders(key))
            except LockServerUnavailableError as error:
                silent.append(error)
                continue
            for each in read_holders(key, reply):
                found.setdefault(each.owner, []).append(each)
        if self._servers.count - len(silent) < self._quorum:
            raise silent[0]
        return [
            replace(max(named, key=lambda each: each.remaining_s), fence=0)
            for named in found.values()
            if len(named) + len(silent) >= self._quorum
        ]

    def check(self) -> list[Finding]:
        """What is wrong with the servers, each by itself and together."""
        return look_at([server.link for server in self._servers.all])

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._servers.close()

    # -- scatter and gather -------------------------------------------------------------------

    def _everywhere(self, call: Call, only: frozenset[int] | None) -> tuple[list[int], int]:
        """The replies, and how many there may be besides. Waits for no minority that is late."""
        wanted = frozenset(range(self._servers.count)) if only is None else only
        heard: dict[int, int] = {}
        for last in (False, True):
            lines = self._servers.take(all_of_them=True)
            known = False
            try:
                asked = [line for line in lines.there() if line.index in wanted - heard.keys()]
                for line in asked:
                    if line.late_at_s:
                        line.send(call.by_source)
                ask([line for line in asked if not line.late_at_s], call)
                self._hear(asked, call)
                known = True
            finally:
                if known:
                    self._servers.put(lines)
                else:
                    lines.close()
            heard |= {line.index: line.reply for line in asked if type(line.reply) is int}
            if last or not _has_broken(asked):
                break
        missing = len(wanted) - len(heard)
        if not any(heard.values()) and missing >= self._quorum:
            raise self._servers.too_few(len(heard), asked)
        return list(heard.values()), missing

    def _hear(self, asked: list[Line], call: Call) -> None:
        until_s = SYSTEM_CLOCK.monotonic_s() + self._servers.silence_s
        while True:
            late = [line for line in asked if line.reply is LATE]
            if len(late) <= self._servers.count - self._quorum and len(late) < len(asked):
                return
            if not late or SYSTEM_CLOCK.monotonic_s() >= until_s:
                return
            for line in late:
                read(line, call)

    def _pipelined(self, calls: list[Call]) -> list[list[Any]]:
        """Several commands to every server at once; the replies of those that gave all."""
        packed = b"".join(call.packed for call in calls)
        heard: dict[int, list[Any]] = {}
        for last in (False, True):
            lines = self._servers.take(all_of_them=True)
            known = False
            try:
                asked = [line for line in lines.there() if line.index not in heard]
                for line in asked:
                    line.send(packed, len(calls))
                self._hear_all(asked, calls, heard)
                known = True
            finally:
                if known:
                    self._servers.put(lines)
                else:
                    lines.close()
            if last or not _has_broken(asked):
                break
        if len(heard) < self._quorum:
            raise self._servers.too_few(len(heard), asked)
        return list(heard.values())

    def _hear_all(self, asked: list[Line], calls: list[Call], heard: dict[int, list[Any]]) -> None:
        until_s = SYSTEM_CLOCK.monotonic_s() + self._servers.silence_s
        waiting = asked
        while waiting:
            for line in waiting:
                replies = hear(line, calls)
                if replies is not None:
                    refused = next((r for r in replies if type(r) is Refusal), None)
                    if refused is None:
                        heard[line.index] = replies
                    else:
                        line.reply = refused
            waiting = [line for line in waiting if line.reply is LATE]
            # Where all that answered agree, it does not matter what the others say.
            said = list(heard.values())
            agreed = len(said) >= self._quorum and said.count(said[0]) >= self._quorum
            if agreed or SYSTEM_CLOCK.monotonic_s() >= until_s:
                break


def _has_broken(asked: Sequence[Line]) -> bool:
    """An idle connection that its server has closed: another one may do."""
    return any(line.error is not None for line in asked)


def _servers_of(url: str) -> list[str]:
    """`redlock://user:password@a:1,b:2/0?option=1`: a URL for each."""
    scheme, _, rest = url.partition("://")
    kind = {"redlock": "redis", "redlocks": "rediss"}.get(scheme.lower())
    place, separator, after = rest.partition("/")
    if not separator:
        place, separator, after = rest.partition("?")
    credentials, at, hosts = place.rpartition("@")
    named = [host.strip() for host in hosts.split(",")]
    if kind is None or not all(named):
        raise ConfigurationError(
            "The lock servers' URL cannot be read. It reads redlock://[user:password@]host1:port,"
            "host2:port,host3:port[/database], redlocks:// for TLS; characters such as / # ? @ : , "
            "in a password are percent-encoded (urllib.parse.quote)."
        )
    return [f"{kind}://{credentials}{at}{host}{separator}{after}" for host in named]
