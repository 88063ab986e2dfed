"""The calls of a lock on a Redis Cluster. They extend those of one server by several keys.

The package's docstring has the guarantees and the entries in the server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.base import Granted, Held, Hold, Renewal
from taskguard.locks.redis.cluster.nodes import Call, ClusterLink
from taskguard.locks.redis.protocol import Script, pack
from taskguard.locks.redis.provider import RENEWALS, RedisLocks
from taskguard.model.lease import Owner

__all__ = ["RedisClusterLocks"]

# Several keys have equal tokens after one round, unless a lease expired meanwhile.
_LEVELLINGS = 3
# A lease of this length is practically a release.
_NO_TIME_S = 0.001


class RedisClusterLocks(RedisLocks):
    """A `LockProvider` on a Redis Cluster.

    Args:
        server: `redis+cluster://[user:password@]host:port,host:port`, or `rediss+cluster://` for
            TLS, with some of its nodes. taskguard finds the others.
        namespace, socket_timeout_s, connect_timeout_s, retries: see `RedisLocks`; for each node.
    """

    _link: ClusterLink

    def __init__(self, server: Any, **options: Any) -> None:
        super().__init__(server, **options)
        self._step_back = Script("step_back", after="line")

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
        """Take all keys or none: one key in one round trip, several one by one."""
        if len(keys) == 1:
            return super().acquire(
                keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s, limit=limit
            )
        taken: list[str] = []
        wish = {"ttl_s": ttl_s, "with_fence": with_fence, "wait_s": wait_s}
        try:
            answer = self._take_each(keys, owner, taken, **wish)
        except LockServerUnavailableError:
            with contextlib.suppress(LockServerUnavailableError):  # then the leases expire
                self._give_back(taken, owner)
            raise
        if isinstance(answer, Held):
            self._give_back(taken, owner)
            # A later key may be reserved for this owner, which did not try that key.
            self._leave_lines(keys[keys.index(answer.key) + 1 :], owner)
        return answer

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Free the keys that the owner still holds, each for its first waiter; leave their lines.

        Return False if it held none. Return True if a first attempt got no reply, because that may
        have freed them. If a node gives no answer, free the keys of the others, and raise. Raise
        also for a share of a key whose slot is being moved: the share then ends with its lease.
        """
        if len(keys) == 1:
            try:
                return super().release(keys, owner, limit=limit)
            except LockServerUnavailableError as error:
                if limit != 1 or not self._link.is_moving(error):
                    raise
        retries: list[None] = []
        return self._free_each(keys, owner, lambda: retries.append(None)) or bool(retries)

    def _free_each(self, keys: Sequence[str], owner: Owner, on_retry: Callable[[], None]) -> bool:
        """Free the keys that are still the owner's. Return True if there was one."""
        calls = [Call(self._release, *self._release_words((key,), owner)) for key in keys]
        answers = self._link.call_all(calls, on_retry=on_retry)
        for number, answer in enumerate(answers):
            if self._link.is_moving(answer):
                # The key's entries are at two nodes, and no script may touch them all. So let the
                # lease end without notifying waiters, which try again after a second.
                answers[number] = self._handed((keys[number],), owner, owner, _NO_TIME_S)[0]
        return any(_answered(answers))

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        return any(_answered(self._handed(keys, owner, to, ttl_s)))

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases, in one round trip to each node, to all nodes at the same time.

        If a node gives no answer, its leases are UNANSWERED: they may have been renewed. Raise if
        no node answers.
        """
        singles = [Hold((key,), hold.owner, hold.ttl_s) for hold in holds for key in hold.keys]
        answers = self._link.call_all(
            [Call(self._renew, *self._renew_words([single])) for single in singles]
        )
        if answers and all(isinstance(each, LockServerUnavailableError) for each in answers):
            raise answers[0]
        letters = iter(answers)
        return [_together([next(letters) for _ in hold.keys]) for hold in holds]

    def check(self) -> list[Finding]:
        """Return what is wrong with the cluster and its nodes."""
        from taskguard.locks.redis.cluster import health  # not for deliveries

        return health.check(self._link)

    def now_us(self) -> int:
        """Return a node's time, in µs since 1970."""
        seconds, micros = self._link.ask_any(pack(b"TIME"))
        return int(seconds) * 1_000_000 + int(micros)

    def _make_link(self, server: Any, **bounds: Any) -> Any:
        if not isinstance(server, str):
            raise ConfigurationError(
                f"Locks on a Redis Cluster need its URL, not a {type(server).__name__}. Pass "
                "redis+cluster://host:port,host:port."
            )
        return ClusterLink(server, **bounds)

    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return super()._locks(tuple(map(_escaped, keys)))

    # -- several keys

    def _take_each(
        self, keys: tuple[str, ...], owner: Owner, taken: list[str], *, ttl_s: float, **wish: Any
    ) -> Granted | Held:
        """Take the keys in order. Add those that the owner did not hold before to `taken`.

        Because of the order, competing owners meet at the first key that both want. To get equal
        tokens, take each key with a lower token again, with the highest token as the least. If its
        lease expired meanwhile, the owner gets a higher token, or another owner has the key.
        """
        tokens = dict.fromkeys(keys, -1)
        token = 0
        for _ in range(_LEVELLINGS):
            for key in keys:
                if tokens[key] >= token:
                    continue
                answer = self._take(key, owner, taken, least=token, ttl_s=ttl_s, **wish)
                if isinstance(answer, Held):
                    return answer
                tokens[key] = answer
                token = max(token, answer)
            if all(each == token for each in tokens.values()):
                return Granted(token, ttl_s)
        raise LockServerUnavailableError(
            f"The lock server {self._link.address} needs longer than the lease of {ttl_s:g} s to "
            f"grant {len(keys)} keys: {', '.join(keys)}. Use a longer ttl."
        )

    def _take(self, key: str, owner: Owner, taken: list[str], **wish: Any) -> int | Held:
        """Take one of several keys. Return its token, which is at least `least`."""
        retries: list[None] = []
        reply = self._link.call(
            self._acquire,
            *self._acquire_words((key,), owner, **wish),
            on_retry=lambda: retries.append(None),
        )
        if reply[0] != 1:
            return self._held((key,), reply)
        # A first attempt that got no reply may have taken it.
        if key not in taken and (not reply[2] or retries):
            taken.append(key)
        return int(reply[1])

    def _give_back(self, keys: Sequence[str], owner: Owner) -> None:
        """Free the keys that were taken before another key was refused.

        Raises LockServerUnavailableError if a request got no reply, even if its retry got one. That
        request may arrive late. If the owner asked again and was granted the keys, the late request
        would free them while it holds them.
        """
        retries: list[None] = []
        self._free_each(keys, owner, lambda: retries.append(None))
        if retries:
            raise LockServerUnavailableError(
                f"The lock server {self._link.address} gave no answer when taskguard freed "
                f"{', '.join(keys)} after a refusal. Try again."
            )

    def _leave_lines(self, keys: tuple[str, ...], owner: Owner) -> None:
        """Leave the lines of these keys. If a node gives no answer, its entries there expire."""
        self._link.call_all(
            [Call(self._step_back, *self._release_words((key,), owner)) for key in keys]
        )

    def _handed(self, keys: tuple[str, ...], owner: Owner, to: Owner, ttl_s: float) -> list[Any]:
        words = (self._hand_over_words((key,), owner, to, ttl_s) for key in keys)
        return self._link.call_all([Call(self._hand_over, *each) for each in words])


def _escaped(key: str) -> str:
    """Return the key so that it does not begin with `}`. The result is unique to the key."""
    return key if key and key[0] not in "}\\" else "\\" + key


def _answered(answers: list[Any]) -> list[Any]:
    """Return the answers, or raise the first error among them."""
    for answer in answers:
        if isinstance(answer, LockServerUnavailableError):
            raise answer
    return answers


def _together(answers: list[Any]) -> str:
    """Return the result for a lease from the results for its keys."""
    found = {
        Renewal.UNANSWERED
        if isinstance(answer, LockServerUnavailableError)
        else RENEWALS[answer[0]]
        for answer in answers
    }
    worst = (Renewal.TAKEN, Renewal.GONE, Renewal.UNANSWERED)
    return next((each for each in worst if each in found), Renewal.RENEWED)
