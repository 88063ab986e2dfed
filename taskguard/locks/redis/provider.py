"""The steps of a lock on one Redis server: each is one script, and may be called twice.

The package's docstring has the guarantees and the entries in the server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.base import (
    KEPT_S,
    PROMOTED,
    Granted,
    Held,
    Hold,
    Holder,
    Renewal,
    Traits,
    in_batches,
)
from taskguard.locks.redis.link import RedisLink
from taskguard.locks.redis.protocol import Script, pack
from taskguard.locks.redis.refusals import Refusal
from taskguard.locks.redis.sentinel_url import is_sentinel_url
from taskguard.model.lease import Owner, new_owner
from taskguard.model.policy import DAY_S, MOST_ROWS, check_number

if TYPE_CHECKING:
    from taskguard.locks.redis.health import RedisFacts

__all__ = ["RENEWALS", "RedisLocks", "read_holders"]

_FENCE_EXPIRY_MS = b"86400000"
_HINT_EXPIRY_MS = b"86400000"
_PROMOTED = str(PROMOTED).encode()
# Maximum time of one wait. The caller then asks again. So a wake-up that was lost with its waiter,
# or an expired lease, costs the others a second at most.
WAIT_SLICE_S = 1.0
# Random, so that waiters that came at the same moment do not ask again at the same moment.
_SHORTEST_SLICE = 0.75
# A waiter that was called and did not come in this time has lost the key: GRACE_MS in line.lua.
_LOOK_S = 0.06
# This many keys keep the server busy for about half a millisecond.
_KEYS_PER_RENEWAL = 250
RENEWALS = {ord("R"): Renewal.RENEWED, ord("G"): Renewal.GONE, ord("T"): Renewal.TAKEN}
# Only a key that another program wrote has no expiry.
_NO_EXPIRY_S = 86_400.0
# Lease of the locks that `check()` tries, in case the process ends meanwhile.
_TRIAL_S = 2.0


class RedisLocks:
    """A `LockProvider` on Redis or Valkey.

    Args:
        server: a URL, or a `redis.Redis` client (of Sentinel's `master_for()`, for example). This
            object uses the client's address and credentials, on connections of its own.
        namespace: the first part of every key in the server.
        socket_timeout_s: how long one reply may take.
        connect_timeout_s: how long one connection may take.
        retries: how often a call without a reply is made again.
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
        self._acquire = Script("acquire", after="line")
        self._release = Script("release", after="line")
        self._share = Script("share", after="line")
        self._unshare = Script("unshare", after="line")
        self._hand_over = Script("hand_over")
        self._leave_hint = Script("leave_hint")
        self._renew = Script("renew")
        self._holders = Script("holders")

    @property
    def traits(self) -> Traits:
        """Fair leases with tokens and hints, which several owners can share."""
        return Traits(failover_s=self._link.failover_s, fair=True, shares=True, hints=True)

    @property
    def address(self) -> str:
        """Host, port and database."""
        return str(self._link.address)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._link.address} namespace={self.namespace!r}>"

    def acquire(
        self,
        keys: tuple[str, ...],
        owner: Owner,
        *,
        ttl_s: float,
        with_fence: bool,
        wait_s: float,
        limit: int = 1,
    ) -> Granted | Held:
        """Take all keys or none, or a share of one, in one round trip."""
        names, words = self._acquire_words(
            keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s
        )
        if limit != 1:
            words.append(b"%d" % limit)
        return self._granted(keys, names, words, ttl_s=ttl_s, shares=limit != 1)

    def _granted(
        self,
        keys: tuple[str, ...],
        names: list[bytes],
        words: list[bytes],
        *,
        ttl_s: float,
        shares: bool = False,
    ) -> Granted | Held:
        script = self._share if shares else self._acquire
        reply = self._link.call(script, names, words)
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
        """Return names and arguments. A token is `least` or above."""
        names = [
            name for lock in self._locks(keys) for name in (lock, lock + b":fence", lock + b":line")
        ]
        arguments = [
            _bytes(str(owner)),
            _ms(ttl_s),
            b"1" if with_fence else b"0",
            b"1" if wait_s > 0 else b"0",
            _FENCE_EXPIRY_MS,
        ]
        return names, [*arguments, b"%d" % least] if least else arguments

    def _held(self, keys: tuple[str, ...], reply: Any) -> Held:
        _, number, value, pttl_ms, shared = reply
        return Held(
            key=keys[number - 1],
            owner=Owner.parse(value.decode("utf-8", "replace")),
            remaining_s=_left_s(pttl_ms),
            shared=bool(shared),
        )

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Free the keys that are still the owner's, each for its first waiter, and stop waiting.

        Return False if none was the owner's, and True if a first attempt got no reply, because that
        may have freed them.
        """
        retries: list[None] = []
        freed = self._link.call(
            self._release if limit == 1 else self._unshare,
            *self._release_words(keys, owner),
            on_retry=lambda: retries.append(None),
        )
        return bool(freed or retries)

    def leave_hint(self, key: str) -> bool:
        """Leave a hint for the next release of the key. Return whether the key is free."""
        (lock,) = self._locks((key,))
        return bool(self._link.call(self._leave_hint, [lock, _hint_of(lock)], [_HINT_EXPIRY_MS]))

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        """Release the key, and take its hint. If a first attempt got no reply, both results are
        True, because that may have taken them."""
        retries: list[None] = []
        names, words = self._release_words((key,), owner)
        names.append(_hint_of(names[0]))
        words += [_PROMOTED, _ms(KEPT_S)]
        freed, hint = self._link.call(
            self._release, names, words, on_retry=lambda: retries.append(None)
        )
        return bool(freed or retries), bool(hint or retries)

    def acquire_promoted(
        self, key: str, owner: Owner, *, ttl_s: float, wait_s: float
    ) -> Granted | Held:
        """Take a key, even if it is reserved for a promoted message."""
        names, words = self._acquire_words(
            (key,), owner, ttl_s=ttl_s, with_fence=False, wait_s=wait_s
        )
        return self._granted((key,), names, [*words, b"0", _PROMOTED], ttl_s=ttl_s)

    def _release_words(
        self, keys: tuple[str, ...], owner: Owner
    ) -> tuple[list[bytes], list[bytes]]:
        names = [name for lock in self._locks(keys) for name in (lock, lock + b":line")]
        return names, [_bytes(str(owner))]

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

        If a later batch gets no answer, the call raises although earlier batches were renewed.
        Renewing them again does no harm.
        """
        answers: list[str] = []
        for batch in in_batches(holds, most_keys=_KEYS_PER_RENEWAL):
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

    def wait(self, key: str, owner: Owner, *, timeout_s: float, limit: int = 1) -> None:
        """Block until the key is reserved for the owner, for a second at most. Then ask again."""
        del limit  # the server knows it
        if timeout_s <= 0:
            return
        slice_s = min(timeout_s, WAIT_SLICE_S * random.uniform(_SHORTEST_SLICE, 1.0))  # noqa: S311
        (lock,) = self._locks((key,))
        wake, look = lock + b":wake:" + _bytes(owner.nonce), lock + b":look"
        woken = self._link.block([wake, look], max(0.01, slice_s))
        if woken is not None and woken[0] == look:
            # Another waiter was called. Either it comes now, or this one may be next.
            self._link.block([wake], max(0.01, min(timeout_s, _LOOK_S)))

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key, by one request."""
        (lock,) = self._locks((key,))
        return read_holders(key, self._link.call(self._holders, [lock, lock + b":fence"], []))

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._link.close()

    def check(self) -> list[Finding]:
        """Return what is wrong with the server, and its settings if this user may read them.

        Tries each step of a lock once, on a key of its own, which it releases.
        """
        from taskguard.locks.redis import health  # not for deliveries

        where = f"the lock server {self._link.address}"
        found: list[Finding] = self._link.check()
        try:
            facts = self.facts()
            found += health.judge(facts, where=where)
            if facts.is_usable:
                self._try_each_step()
        except LockServerUnavailableError as error:
            refusal = self._link.refusal_of(error)
            if refusal is None:
                raise
            found.append(health.judge_refusal(refusal, error, where=where))
        return found

    def now_us(self) -> int:
        """Return the server's time, in µs since 1970."""
        seconds, micros = self._link.ask(pack(b"TIME"))
        return int(seconds) * 1_000_000 + int(micros)

    def facts(self) -> RedisFacts:
        """Read the server's facts. A fact that this user may not read has the best value."""
        from taskguard.locks.redis import health  # not for deliveries

        try:
            return health.facts_of(self._link.ask(pack(b"INFO")).decode("utf-8", "replace"))
        except LockServerUnavailableError as error:
            if self._link.refusal_of(error) is not Refusal.RIGHTS:
                raise
            return health.RedisFacts()  # locks do not need that right

    def _try_each_step(self) -> None:
        keys = (f"check:{new_owner().nonce}",)
        first, second, waiter = new_owner(), new_owner(), new_owner()
        self.acquire(keys, first, ttl_s=_TRIAL_S, with_fence=True, wait_s=0.0)
        try:
            # With a waiter the release wakes it, and its wait ends at once.
            self.acquire(keys, waiter, ttl_s=_TRIAL_S, with_fence=True, wait_s=_TRIAL_S)
            self.renew([Hold(keys, first, _TRIAL_S)])
            self.hand_over(keys, first, to=second, ttl_s=_TRIAL_S)
            self.leave_hint(keys[0])
        finally:
            self.release_and_take_hint(keys[0], second)
            self.release(keys, first)
        try:
            self.wait(keys[0], waiter, timeout_s=_TRIAL_S)
            self.acquire(keys, waiter, ttl_s=_TRIAL_S, with_fence=True, wait_s=0.0)
        finally:
            self.release(keys, waiter)
        (lock,) = self._locks(keys)
        self._link.ask(pack(b"DEL", lock + b":fence"))

    def _make_link(self, server: Any, **bounds: Any) -> Any:
        if is_sentinel_url(server):
            from taskguard.locks.redis.sentinel import SentinelLink  # only where asked for

            return SentinelLink(server, **bounds)
        return RedisLink(server, **bounds)

    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return [b"%b%b}" % (self._before, _bytes(key)) for key in keys]


def _bytes(text: str) -> bytes:
    # Lone surrogates have no UTF-8. They pass, so that no message is lost by a strange id.
    return text.encode("utf-8", "surrogatepass")


def read_holders(key: str, reply: list[Any]) -> list[Holder]:
    """Return the holders in an answer of holders.lua."""
    fence, shared, *pairs = reply
    return [
        Holder(
            key,
            Owner.parse(value.decode("utf-8", "replace")),
            int(fence),
            _left_s(left_ms),
            shared=bool(shared),
        )
        for value, left_ms in zip(pairs[::2], pairs[1::2], strict=True)
    ]


def _left_s(pttl_ms: int) -> float:
    return pttl_ms / 1000 if pttl_ms >= 0 else _NO_EXPIRY_S


def _hint_of(lock: bytes) -> bytes:
    return lock + b":hint"


def _ms(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))
