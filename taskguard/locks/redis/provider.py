"""The steps of a lock on one Redis server: each is one script, and may be asked twice.

What they guarantee, and what stands in the server, is in the package's docstring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.lease import Owner
from taskguard.locks.base import Granted, Held, Hold, Renewal, Traits
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import Script, pack
from taskguard.policy import DAY_S, MOST_ROWS, check_number

__all__ = ["RENEWALS", "RedisLocks", "eviction_of"]

_FENCE_EXPIRY_MS = b"86400000"
_WAKE_EXPIRY_MS = b"1000"
# One wait lasts so long at most: the caller then asks again, so that a wake-up that got lost
# with its waiter, or a lease that ran out, costs the others a second and no more.
WAIT_SLICE_S = 1.0
# The flag outlives the slice by what a slow caller needs to ask again.
_WAITERS_FLAG_S = 3.0
# So many keys keep the server busy for about half a millisecond.
_KEYS_PER_RENEWAL = 250
RENEWALS = {ord("R"): Renewal.RENEWED, ord("G"): Renewal.GONE, ord("T"): Renewal.TAKEN}
# Only a key that somebody else wrote has no expiry.
_NO_EXPIRY_S = 86_400.0


class RedisLocks:
    """A `LockProvider` on Redis or Valkey.

    Args:
        server: a URL, or a `redis.Redis` client (of Sentinel's `master_for()`, for example) whose
            address and credentials are used, on connections of this object's own.
        namespace: what every key in the server begins with.
        socket_timeout_s: how long one reply may take.
        connect_timeout_s: how long one connection may take.
        retries: how often a call that got no reply is asked again.
    """

    def __init__(
        self,
        server: Any,
        *,
        namespace: str = "taskguard",
        socket_timeout_s: float = 1.0,
        connect_timeout_s: float = 1.0,
        retries: int = 1,
    ) -> None:
        if not namespace or set(namespace) & set("{} \r\n*?[]"):
            raise ConfigurationError(
                f"The namespace {namespace!r} cannot begin a key: use letters, digits, '-', '_', "
                "'.' and ':'."
            )
        check_number("socket_timeout_s", socket_timeout_s, at_least=0.001, at_most=DAY_S)
        check_number("connect_timeout_s", connect_timeout_s, at_least=0.001, at_most=DAY_S)
        check_number("retries", retries, at_least=0, at_most=MOST_ROWS, whole=True)
        self._link = self._make_link(
            server,
            socket_timeout_s=socket_timeout_s,
            connect_timeout_s=connect_timeout_s,
            retries=retries,
            longest_block_s=WAIT_SLICE_S,
        )
        self._before = f"{namespace}:{{".encode()
        self.namespace = namespace
        self._acquire = Script("acquire")
        self._release = Script("release")
        self._hand_over = Script("hand_over")
        self._renew = Script("renew")

    @property
    def traits(self) -> Traits:
        """Leases with tokens."""
        return Traits()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._link.address} namespace={self.namespace!r}>"

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none, in one round trip."""
        reply = self._link.call(
            self._acquire,
            *self._acquire_words(keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s),
        )
        if reply[0] == 1:
            return Granted(int(reply[1]), ttl_s)
        return self._held(keys, reply)

    def _acquire_words(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        *,
        ttl_s: float,
        with_fence: bool,
        wait_s: float,
        least: int = 0,
    ) -> tuple[list[bytes], list[bytes]]:
        """Names and arguments; a token is `least` or above."""
        flag_s = min(wait_s, _WAITERS_FLAG_S)
        names = [
            name
            for lock in self._locks(keys)
            for name in (lock, lock + b":fence", lock + b":waiters", lock + b":wake")
        ]
        arguments = [
            _bytes(str(owner)),
            _ms(ttl_s),
            b"1" if with_fence else b"0",
            _ms(flag_s) if wait_s > 0 else b"0",
            _FENCE_EXPIRY_MS,
            _WAKE_EXPIRY_MS,
        ]
        return names, [*arguments, b"%d" % least] if least else arguments

    def _held(self, keys: tuple[str, ...], reply: Any) -> Held:
        _, number, value, pttl_ms = reply
        return Held(
            key=keys[number - 1],
            owner=Owner.parse(value.decode("utf-8", "replace")),
            remaining_s=pttl_ms / 1000 if pttl_ms >= 0 else _NO_EXPIRY_S,
        )

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that are still the owner's and wake one waiter of each.

        False if none was; True if a first attempt got no reply, for it may have freed them.
        """
        retries: list[None] = []
        freed = self._link.call(
            self._release,
            *self._release_words(keys, owner),
            on_retry=lambda: retries.append(None),
        )
        return bool(freed or retries)

    def _release_words(
        self, keys: tuple[str, ...], owner: Owner
    ) -> tuple[list[bytes], list[bytes]]:
        names = [
            name
            for lock in self._locks(keys)
            for name in (lock, lock + b":waiters", lock + b":wake")
        ]
        return names, [_bytes(str(owner)), _WAKE_EXPIRY_MS]

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        return bool(
            self._link.call(self._hand_over, *self._hand_over_words(keys, owner, to, ttl_s))
        )

    def _hand_over_words(
        self, keys: tuple[str, ...], owner: Owner, to: Owner, ttl_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        return self._locks(keys), [_bytes(str(owner)), _bytes(str(to)), _ms(ttl_s)]

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases, some 250 keys in a round trip.

        Where a later batch gets no answer, the whole call raises: the leases of the earlier ones
        are renewed all the same, and renewing them again does no harm.
        """
        answers: list[str] = []
        for batch in _batches(holds):
            reply = self._link.call(self._renew, *self._renew_words(batch))
            answers += [RENEWALS[letter] for letter in reply]
        return answers

    def _renew_words(self, holds: Sequence[Hold]) -> tuple[list[bytes], list[bytes]]:
        names = [lock for hold in holds for lock in self._locks(hold.keys)]
        arguments = [
            word
            for hold in holds
            for word in (_bytes(str(hold.owner)), _ms(hold.ttl_s), b"%d" % len(hold.keys))
        ]
        return names, arguments

    def wait(self, key: str, *, timeout_s: float) -> None:
        """Block until the key may have been released, a second at most: then ask again."""
        if timeout_s <= 0:
            return
        slice_s = max(0.01, min(timeout_s, WAIT_SLICE_S))
        (lock,) = self._locks((key,))
        self._link.block(lock + b":wake", slice_s)

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._link.close()

    def check(self) -> list[Finding]:
        """What is wrong with the server's settings; empty where this user may not ask."""
        finding = eviction_of(self._link)
        return [finding] if finding else []

    def _make_link(self, server: Any, **bounds: Any) -> Any:
        return RedisLink(server, **bounds)

    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return [b"%b%b}" % (self._before, _bytes(key)) for key in keys]


def eviction_of(link: RedisLink) -> Finding | None:
    """Whether a server throws locks away when it is full; None where this user may not ask."""
    try:
        info = link.ask(pack(b"INFO", b"memory")).decode("utf-8", "replace")
    except LockServerUnavailableError as error:
        if link.was_refused(error):
            return None
        raise
    values = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy = values.get("maxmemory_policy", "noeviction")
    if policy == "noeviction" or values.get("maxmemory", "0") == "0":
        return None
    return Finding(
        "eviction",
        Level.WARNING,
        where=f"the lock server {link.address}",
        what=f"It has maxmemory-policy {policy}.",
        why="When it is full it throws locks away.",
        mend="CONFIG SET maxmemory-policy noeviction, or give locks a server of their own.",
    )


def _batches(holds: Sequence[Hold]) -> Iterator[list[Hold]]:
    batch: list[Hold] = []
    size = 0
    for hold in holds:
        if batch and size + len(hold.keys) > _KEYS_PER_RENEWAL:
            yield batch
            batch, size = [], 0
        batch.append(hold)
        size += len(hold.keys)
    if batch:
        yield batch


def _bytes(text: str) -> bytes:
    # Lone surrogates have no UTF-8; they pass, so that a strange message id loses no message.
    return text.encode("utf-8", "surrogatepass")


def _ms(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))
