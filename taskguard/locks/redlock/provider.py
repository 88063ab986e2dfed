"""`RedlockLocks`: locks that a majority grants. The package's docstring has the guarantees."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.base import Granted, Held, Hold, Holder, Renewal, Traits
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.provider import read_holders
from taskguard.locks.redlock.commands import Call, Commands
from taskguard.locks.redlock.election import Election
from taskguard.locks.redlock.servers import Servers
from taskguard.model.lease import Owner
from taskguard.model.policy import DAY_S, check_number

__all__ = ["RedlockLocks"]

_WAIT_SLICE_S = 1.0
_MOST_REFUSALS = 1_000
_MOST_GRANTS = 10_000


class RedlockLocks:
    """A `LockProvider` on several independent Redis or Valkey servers.

    Args:
        servers: a URL (`redlock://host1,host2,host3`, `redlocks://…` for TLS), or a list of the
            servers' URLs and `redis.Redis` clients.
        namespace: the first part of every key in the servers.
        socket_timeout_s: how long to wait for a majority's replies. A server that owes a reply for
            longer is taken to be down.
        connect_timeout_s: how long a connection may take.
        longest_ttl_s: the longest lease of other processes, if it is longer than those of this
            process. A server that has been running for less than that has no vote.
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
        # The server that refused a key last. It knows the waiter, which a release wakes there.
        self._refused_at: dict[str, int] = {}
        # The keys of each owner, by its nonce. A failed repetition of its acquire keeps them.
        self._granted: dict[str, frozenset[str]] = {}

    @property
    def traits(self) -> Traits:
        """Leases without tokens."""
        return Traits(tokens=False)

    def __repr__(self) -> str:
        addresses = ",".join(server.link.address for server in self._servers.all)
        return f"<RedlockLocks {addresses} namespace={self.namespace!r}>"

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys at a majority, or none. There is no token: the fence is 0."""
        del with_fence
        self._longest_s = max(self._longest_s, ttl_s)
        with self._servers.channels() as channels:
            election = Election(
                self._servers,
                channels,
                self._commands,
                keys=keys,
                owner=owner,
                ttl_s=ttl_s,
                wait_s=wait_s,
                had=self._granted.get(owner.nonce, frozenset()),
            )
            refusals = election.run(longest_s=self._longest_s)
        if refusals is not None:
            return self._held(refusals, keys)
        self._note_granted(keys, owner)
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

    def _note_granted(self, keys: tuple[str, ...], owner: Owner) -> None:
        self._granted[owner.nonce] = self._granted.get(owner.nonce, frozenset()).union(keys)
        if len(self._granted) > _MOST_GRANTS:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):  # another thread did
                del self._granted[next(iter(self._granted))]

    def _note_ended(self, keys: tuple[str, ...], owner: Owner) -> None:
        left = self._granted.pop(owner.nonce, frozenset()).difference(keys)
        if left:
            self._granted[owner.nonce] = left

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys on every server, and wake waiters."""
        self._note_ended(keys, owner)
        return self._everywhere(self._commands.release(keys, owner))

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys over to their true owner, on every server."""
        self._note_ended(keys, owner)
        return self._everywhere(self._commands.hand_over(keys, owner, to, ttl_s))

    def _everywhere(self, call: Call) -> bool:
        """Return whether a majority of the servers did it, or may have done it."""
        quorum, blocking = self._servers.quorum, self._servers.blocking

        def is_enough(answers: dict[int, list[Any]]) -> bool:
            done = _done(answers)
            return done >= quorum or len(answers) - done >= blocking

        with self._servers.channels() as channels:
            # A server that owes a reply may have granted the keys meanwhile.
            for channel in channels.open():
                if channel.owed:
                    channel.tell([call])
            answers = self._servers.ask(channels, [call], is_enough=is_enough)
            done, missing = _done(answers), self._servers.count - len(answers)
            if not done and missing >= quorum:
                raise self._servers.too_few(channels, len(answers))
        return done > 0 and done + missing >= quorum

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases, some 250 keys in a command; all servers work at the same time."""
        if not holds:
            return []
        self._longest_s = max(self._longest_s, *[hold.ttl_s for hold in holds])
        calls = self._commands.renew(holds)
        with self._servers.channels() as channels:
            answers = self._servers.ask(
                channels, calls, is_enough=self._agree, others_s=self._servers.silence_s
            )
            if len(answers) < self._servers.quorum:
                raise self._servers.too_few(channels, len(answers))
            letters = [b"".join(texts) for texts in answers.values()]
            found = [self._renewal(bytes(column)) for column in zip(*letters, strict=True)]
            over = (Renewal.TAKEN, Renewal.GONE)
            lost = [hold for hold, answer in zip(holds, found, strict=True) if answer in over]
            # A lease on a minority is useless to its owner, and hinders others.
            self._servers.tell(
                channels, [self._commands.release(hold.keys, hold.owner) for hold in lost]
            )
        for hold in lost:
            self._note_ended(hold.keys, hold.owner)
        return found

    def _agree(self, answers: dict[int, list[Any]]) -> bool:
        """Return True if the answers of the other servers do not matter."""
        said = list(answers.values())
        return len(said) >= self._quorum and said.count(said[0]) >= self._quorum

    def _renewal(self, votes: bytes) -> str:
        stands = votes.count(b"R")
        if stands >= self._quorum:
            return Renewal.RENEWED
        if stands + self._servers.count - len(votes) >= self._quorum:
            return Renewal.UNANSWERED  # a server that was not heard may keep the lease
        return Renewal.TAKEN if b"T" in votes else Renewal.GONE

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key may have been released, or for a second. Then try to acquire it."""
        del owner
        if timeout_s <= 0:
            return
        slice_s = max(0.01, min(timeout_s, _WAIT_SLICE_S))
        now_s = SYSTEM_CLOCK.monotonic_s()
        first, servers = self._refused_at.get(key, 0), self._servers.all
        order = servers[first:] + servers[:first]
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
        """Return what is wrong with the servers, each by itself and together."""
        from taskguard.locks.redlock import health  # not for deliveries

        return health.check([server.link for server in self._servers.all])

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._servers.close()


def _done(answers: dict[int, list[Any]]) -> int:
    return sum([reply[0] > 0 for reply in answers.values()])


def _servers_of(url: str) -> list[str]:
    """Split `redlock://user:password@a:1,b:2/0?option=1` into a URL for each server."""
    scheme, _, rest = url.partition("://")
    kind = {"redlock": "redis", "redlocks": "rediss"}.get(scheme.lower())
    place, separator, after = rest.partition("/")
    if not separator:
        place, separator, after = rest.partition("?")
    credentials, at, hosts = place.rpartition("@")
    named = [host.strip() for host in hosts.split(",")]
    if kind is None or not all(named):
        raise ConfigurationError(
            "The lock servers' URL cannot be read. Write redlock://[user:password@]host1:port,"
            "host2:port,host3:port[/database], or redlocks:// for TLS, and percent-encode "
            "characters such as / # ? @ : , in a password (urllib.parse.quote)."
        )
    return [f"{kind}://{credentials}{at}{host}{separator}{after}" for host in named]
