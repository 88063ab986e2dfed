"""The steps of a lock on a Redis Cluster: those of one server, and what several keys need.

What they guarantee, and what stands in the server, is in the package's docstring.
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

# Tokens of several keys are level after one round, unless a lease ran out in the middle.
_LEVELLINGS = 3
# A lease that is as good as released.
_NO_TIME_S = 0.001


class RedisClusterLocks(RedisLocks):
    """A `LockProvider` on a Redis Cluster.

    Args:
        server: `redis+cluster://[user:password@]host:port,host:port`, or `rediss+cluster://` for
            TLS: some of its nodes, by which the others are found.
        namespace, socket_timeout_s, connect_timeout_s, retries: as of `RedisLocks`, for each node.
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
        """Take all keys or none: one in one round trip, several in order."""
        if len(keys) == 1:
            return super().acquire(
                keys, owner, ttl_s=ttl_s, with_fence=with_fence, wait_s=wait_s, limit=limit
            )
        taken: list[str] = []
        wish = {"ttl_s": ttl_s, "with_fence": with_fence, "wait_s": wait_s}
        try:
            answer = self._take_each(keys, owner, taken, **wish)
        except LockServerUnavailableError:
            with contextlib.suppress(LockServerUnavailableError):  # then it ends with its lease
                self._give_back(taken, owner)
            raise
        if isinstance(answer, Held):
            self._give_back(taken, owner)
            # It may have been called for one that it did not come to ask for.
            self._leave_lines(keys[keys.index(answer.key) + 1 :], owner)
        return answer

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Free the keys that are still the owner's, each for its first waiter; leave its line.

        False if none was; True if a first attempt got no reply, for it may have freed them. Where a
        node gives no answer, those of the others are freed, and it raises; so it does for a share
        of a key whose slot is on its way, which then ends with its lease.
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
                # Its entries are in two places, and no script may touch them all: without a word
                # to those who wait, who ask again after a second.
                answers[number] = self._handed((keys[number],), owner, owner, _NO_TIME_S)[0]
        return any(_answered(answers))

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to their true owner for `ttl_s`."""
        return any(_answered(self._handed(keys, owner, to, ttl_s)))

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases, in one round trip to each node, all at once.

        Those of a node that gives no answer are UNANSWERED, and renewed or not; the others have
        their answers. Raises where nobody answers.
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
        """A node's clock, in µs since 1970."""
        seconds, micros = self._link.ask_any(pack(b"TIME"))
        return int(seconds) * 1_000_000 + int(micros)

    def _make_link(self, server: Any, **bounds: Any) -> Any:
        if not isinstance(server, str):
            raise ConfigurationError(
                f"Locks on a Redis Cluster are made of its URL, not of a {type(server).__name__}: "
                "redis+cluster://host:port,host:port."
            )
        return ClusterLink(server, **bounds)

    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return super()._locks(tuple(map(_escaped, keys)))

    # -- several keys

    def _take_each(
        self, keys: tuple[str, ...], owner: Owner, taken: list[str], *, ttl_s: float, **wish: Any
    ) -> Granted | Held:
        """Take the keys in order; `taken` are those that were not the owner's before.

        All who want several of the same keys meet at the first of them. Every step may be asked
        twice: so the tokens are made level by asking again for those that are below the highest,
        with that as the least. Whose lease ran out meanwhile is taken anew, above it, or is
        another's.
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
            f"The lock server {self._link.address} takes longer than the lease of {ttl_s:g} s to "
            f"give {len(keys)} keys: {', '.join(keys)}. Give them a longer one."
        )

    def _take(self, key: str, owner: Owner, taken: list[str], **wish: Any) -> int | Held:
        """One of several keys: its token, which is `least` or above."""
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
                f"The lock server {self._link.address} gave no answer when "
                f"{', '.join(keys)} had to be given back. Try again."
            )

    def _leave_lines(self, keys: tuple[str, ...], owner: Owner) -> None:
        """It waits in one line. What gets no answer it leaves by not being heard of there."""
        self._link.call_all(
            [Call(self._step_back, *self._release_words((key,), owner)) for key in keys]
        )

    def _handed(self, keys: tuple[str, ...], owner: Owner, to: Owner, ttl_s: float) -> list[Any]:
        words = (self._hand_over_words((key,), owner, to, ttl_s) for key in keys)
        return self._link.call_all([Call(self._hand_over, *each) for each in words])


def _escaped(key: str) -> str:
    """Begins with something else than `}`, and is no other key's."""
    return key if key and key[0] not in "}\\" else "\\" + key


def _answered(answers: list[Any]) -> list[Any]:
    """The answers, where there are all of them."""
    for answer in answers:
        if isinstance(answer, LockServerUnavailableError):
            raise answer
    return answers


def _together(answers: list[Any]) -> str:
    """What became of a lease by what became of each of its keys."""
    found = {
        Renewal.UNANSWERED
        if isinstance(answer, LockServerUnavailableError)
        else RENEWALS[answer[0]]
        for answer in answers
    }
    worst = (Renewal.TAKEN, Renewal.GONE, Renewal.UNANSWERED)
    return next((each for each in worst if each in found), Renewal.RENEWED)
