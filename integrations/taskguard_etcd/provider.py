"""A lock provider on etcd: each change is one transaction that fails if a key has changed.

The package's docstring has the guarantees and the data in the server.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks import (
    Finding,
    Granted,
    Held,
    Hold,
    Holder,
    Owner,
    Renewal,
    Traits,
    check_number,
    in_batches,
    parse_url,
)
from taskguard_etcd.link import EtcdLink, RefusedError
from taskguard_etcd.messages import (
    Entry,
    delete,
    entries,
    has_lease,
    has_value,
    is_absent,
    is_at,
    is_less,
    lease_of,
    nested,
    put,
    read,
    several,
    spread,
)

__all__ = ["EtcdLocks"]

# For etcd's usual election timeout of 1 s.
_MIN_TTL_S = 2.0
# Maximum length of one wait, in seconds. Then the caller tries again.
_WAIT_SLICE_S = 1.0
# Only a key that another program wrote has no lease.
_NO_EXPIRY_S = 86_400.0
# How often a step is repeated because the lease or the holder that it found has just ended.
_TRIES = 5
# Keys of a renewal, 32 x 32 in one transaction, of about 100 bytes each.
_WIDTH = 32
_KEYS_PER_RENEWAL = _WIDTH * _WIDTH
_MOST_REMEMBERED = 10_000
_NOT_FOUND = "lease not found"
_EXISTS = "lease already exists"


class EtcdLocks:
    """A `LockProvider` on etcd 3.4 or later, by its JSON gateway.

    Args:
        server: etcd://[user:password@]host[:port],…, or etcds:// for TLS.
        namespace: the prefix of every key in the server. Default: "taskguard".
        socket_timeout_s: the timeout for one reply, in seconds. Default: 1.
        connect_timeout_s: the timeout for one connection, in seconds. Default: 1.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        server: str,
        *,
        namespace: str = "taskguard",
        socket_timeout_s: float = 1.0,
        connect_timeout_s: float = 1.0,
    ) -> None:
        if not namespace or not namespace.isprintable():
            raise ConfigurationError(
                f"The namespace {namespace!r} cannot begin a key: it is empty or has unprintable "
                "characters. Choose another one."
            )
        check_number("socket_timeout_s", socket_timeout_s, at_least=0.001)
        check_number("connect_timeout_s", connect_timeout_s, at_least=0.001)
        self._link = EtcdLink(
            parse_url(server, plain="etcd", tls="etcds", port=2379),
            socket_timeout_s=socket_timeout_s,
            connect_timeout_s=connect_timeout_s,
        )
        self.namespace = namespace
        self._epoch = f"{namespace}/epoch"
        self._min_ttl_s = _MIN_TTL_S
        # Expected end of the holds of refused keys, by `time.monotonic()`. Until then, a further
        # acquire reads the key before it requests a lease.
        self._taken: dict[str, float] = {}

    @property
    def traits(self) -> Traits:
        """Leases with tokens. They last whole seconds."""
        return Traits(min_ttl_s=self._min_ttl_s)

    def __repr__(self) -> str:
        return f"<EtcdLocks {self._link.address} namespace={self.namespace!r}>"

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none.

        This needs two requests if the keys are free, or if one is known to be held. Otherwise it
        needs four.
        """
        del wait_s  # etcd notifies every waiter
        if self._is_taken(keys):
            held = self._held(keys, self._look(keys), owner)
            if held is not None:
                return held
        for _ in range(_TRIES):
            lease = self._lease(owner, keys, ttl_s)
            with contextlib.suppress(_EndedError):
                taken = self._take(keys, owner, lease, with_fence=with_fence)
                if isinstance(taken, Granted):
                    self._forget(keys)
                    return taken
                self._revoke_unused(lease, keys)
                held = self._held(keys, taken, owner)
                if held is not None:
                    return held
        raise self._restless(keys)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that the owner still has, by ending their lease: one request.

        Return False if it has none. Return True if a first attempt got no reply, because it may
        have freed them.
        """
        retries: list[None] = []
        lease = lease_of(owner, keys)
        if self._revoke(lease, on_retry=lambda: retries.append(None)):
            return True
        # The keys may have been taken together with others, or one by one.
        operations = [
            nested(when=[has_value(name, str(owner))], then=[delete(name)])
            for name in self._names(keys)
        ]
        answer = self._link.call("/v3/kv/txn", several(then=operations))
        freed = any(each["response_txn"].get("succeeded") for each in answer["responses"])
        return freed or bool(retries)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that `owner` still has over to the owner `to`, for `ttl_s` seconds."""
        for _ in range(_TRIES):
            found = self._look(keys)
            mine = [n for n, each in zip(self._names(keys), found, strict=True) if _of(each, owner)]
            if not mine:
                return any(_of(each, to) for each in found)
            # If that owner already has a lease, it stays as it is.
            lease = lease_of(to, keys)
            with contextlib.suppress(_ExistsError):
                self._grant(lease, ttl_s)
            operations = [
                nested(when=[has_value(name, str(owner))], then=[put(name, str(to), lease)])
                for name in mine
            ]
            with contextlib.suppress(_EndedError):
                self._change(several(then=operations))
        raise self._restless(keys)

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases: two requests for some 1,000 keys.

        The first renews the leases, the second looks whether they still have the keys. If a later
        batch gets no answer, the call raises although earlier batches were renewed. Renewing them
        again does no harm.
        """
        return [
            answer
            for batch in in_batches(holds, most_keys=_KEYS_PER_RENEWAL)
            for answer in self._renew(batch)
        ]

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key is released, for at most a second. Then the caller tries again."""
        del owner
        if timeout_s <= 0:
            return
        until_s = time.monotonic() + min(timeout_s, _WAIT_SLICE_S)
        (name,) = self._names((key,))
        answer = self._link.call("/v3/kv/range", read(name)["requestRange"])
        if "kvs" not in answer:
            return
        watch = {
            "create_request": {
                "key": read(name)["requestRange"]["key"],
                "start_revision": str(int(answer["header"]["revision"]) + 1),
                "filters": ["NOPUT"],
            }
        }
        left_s = max(0.01, until_s - time.monotonic())
        with contextlib.closing(self._link.listen("/v3/watch", watch, timeout_s=left_s)) as events:
            for said in events:
                if "events" in said or "canceled" in said:
                    return

    def holders(self, key: str) -> list[Holder]:
        """Return the holder of a key, by three requests."""
        (entry,) = self._look((key,))
        if entry is None:
            return []
        epoch = self._epoch_at(entry.created)
        fence = 0 if epoch is None else int(epoch.value) + entry.created
        return [Holder(key, entry.owner, fence, self._remaining_s(entry.lease))]

    def check(self) -> list[Finding]:
        """Return findings about the cluster, as far as this user may read it."""
        from taskguard_etcd import health  # not for deliveries

        return health.check(self._link, self._epoch)

    def close(self) -> None:
        """Close idle connections. The next call connects again."""
        self._link.close()

    # -- taking -------------------------------------------------------------------------------

    def _take(
        self, keys: tuple[str, ...], owner: Owner, lease: _Lease, *, with_fence: bool
    ) -> Granted | list[Entry | None]:
        """Return a grant, or the entries if another owner holds a key.

        First, try as if all keys were free. If the owner has some of them, use the entries found.
        """
        names = self._names(keys)
        epoch = self._raise_epoch(lease) if with_fence else []
        found: list[Entry | None] = [None] * len(keys)
        for _ in range(_TRIES):
            before = dict(zip(names, found, strict=True))
            is_new = None in found
            puts = [
                put(name, str(owner), lease.id)
                for name, entry in before.items()
                if entry is None or entry.lease != lease.id
            ]
            answer = self._change(
                several(
                    when=[is_at(name, entry) for name, entry in before.items()],
                    then=[*puts, *epoch] if is_new else puts,
                    otherwise=map(read, names),
                )
            )
            if answer.get("succeeded"):
                self._leave_others(owner, keys, lease)
                if not with_fence:
                    return Granted(0, lease.ttl_s)
                token = _new_token(answer) if is_new else self._token_again(found, lease)
                return Granted(token, lease.ttl_s)
            found = entries(answer["responses"])
            if any(entry is not None and not entry.is_of(owner) for entry in found):
                return found
        raise self._restless(keys)

    def _lease(self, owner: Owner, keys: tuple[str, ...], ttl_s: float) -> _Lease:
        """Return a lease for these keys that lasts for `ttl_s` from now."""
        for _ in range(_TRIES):
            # An etcd lease keeps its ttl. A longer ttl needs another lease.
            for id_ in (lease_of(owner, keys), lease_of(owner, keys, _whole(ttl_s))):
                try:
                    return self._grant(id_, ttl_s)
                except _ExistsError:
                    # The lease exists: a reply was lost, or this is a renewal.
                    (answer,) = self._keep_alive([id_])
                kept_s = float(answer.get("TTL", 0))
                if kept_s >= ttl_s:
                    revision = int(answer["header"]["revision"])
                    return _Lease(id_, kept_s, fresh=False, revision=revision, clock_s=None)
                if not kept_s:
                    break  # it has just ended
        raise self._restless(keys)

    def _leave_others(self, owner: Owner, keys: tuple[str, ...], lease: _Lease) -> None:
        """End the former lease of moved keys, because a release would end that one first."""
        before = lease_of(owner, keys)
        if lease.id != before:
            self._revoke(before)

    def _held(self, keys: tuple[str, ...], found: list[Entry | None], owner: Owner) -> Held | None:
        """Return the other holder of the first key that is taken. None: no key is taken."""
        for key, entry in zip(keys, found, strict=True):
            if entry is not None and not entry.is_of(owner):
                remaining_s = self._remaining_s(entry.lease)
                self._remember(key, remaining_s)
                return Held(key=key, owner=entry.owner, remaining_s=remaining_s)
        return None

    def _remaining_s(self, lease: str) -> float:
        if lease == "0":
            return _NO_EXPIRY_S
        answer = self._link.call("/v3/lease/timetolive", {"ID": lease})
        left_s, granted_s = int(answer.get("TTL", 0)), int(answer.get("grantedTTL", 0))
        # TTL is rounded down to whole seconds. It is -1 once the lease has ended.
        return float(min(left_s + 1, granted_s))

    def _look(self, keys: tuple[str, ...]) -> list[Entry | None]:
        answer = self._link.call("/v3/kv/txn", several(then=map(read, self._names(keys))))
        return entries(answer["responses"])

    # -- renewing -----------------------------------------------------------------------------

    def _renew(self, holds: list[Hold]) -> list[str]:
        leases = [lease_of(hold.owner, hold.keys) for hold in holds]
        kept = self._keep_alive(leases)
        operations = [
            nested(when=[has_lease(name, lease)], otherwise=[read(name)])
            for hold, lease in zip(holds, leases, strict=True)
            for name in self._names(hold.keys)
        ]
        answer = self._link.call("/v3/kv/txn", spread(operations, width=_WIDTH))
        looked = iter(
            [
                each["response_txn"]
                for row in answer["responses"]
                for each in row["response_txn"]["responses"]
            ]
        )
        answers = []
        for hold, keep in zip(holds, kept, strict=True):
            seen = [next(looked) for _ in hold.keys]
            # True if all keys are still under the renewed lease. Then no key was read.
            sound = float(keep.get("TTL", 0)) >= hold.ttl_s and all(
                each.get("succeeded") for each in seen
            )
            answers.append(Renewal.RENEWED if sound else self._renew_one(hold))
        return answers

    def _renew_one(self, hold: Hold) -> str:
        """Renew a hold whose keys are under another lease than the one of their grant."""
        for _ in range(_TRIES):
            found = self._look(hold.keys)
            if any(each is not None and not each.is_of(hold.owner) for each in found):
                return Renewal.TAKEN
            leases = {each.lease for each in found if each is not None}
            if None in found:
                return Renewal.GONE
            kept = self._keep_alive(sorted(leases))
            if all(float(each.get("TTL", 0)) >= hold.ttl_s for each in kept):
                return Renewal.RENEWED
            # The owner has the keys, but for a shorter time: move them to a longer lease.
            lease = self._lease(hold.owner, hold.keys, hold.ttl_s)
            names = self._names(hold.keys)
            conditions = [is_at(n, each) for n, each in zip(names, found, strict=True)]
            puts = [put(name, str(hold.owner), lease.id) for name in names]
            with contextlib.suppress(_EndedError):
                if self._change(several(when=conditions, then=puts)).get("succeeded"):
                    self._leave_others(hold.owner, hold.keys, lease)
        raise self._restless(hold.keys)

    # -- tokens -------------------------------------------------------------------------------

    def _raise_epoch(self, lease: _Lease) -> list[dict[str, Any]]:
        """Return the operations that raise the epoch to the server's clock, and read it.

        The epoch is never lowered. So tokens follow the clock, and still grow if the clock goes
        back. Tokens of another kind of lock server are lower if it was used before, and higher if
        it is used later.
        """
        now_s, clock_s = time.time(), lease.clock_s
        if clock_s is not None:
            # The server's clock is known to the second. Within that, use our own clock.
            now_s = min(max(now_s, clock_s), clock_s + 1.0)
        now = int(now_s * 1_000_000) - lease.revision
        raised = [put(self._epoch, _digits(now))]
        older = nested(when=[is_less(self._epoch, _digits(now))], then=raised)
        return [
            nested(when=[is_absent(self._epoch)], then=raised, otherwise=[older]),
            read(self._epoch),
        ]

    def _token_again(self, found: list[Entry | None], lease: _Lease) -> int:
        """Return the token of these keys' grant, from the epoch at that time."""
        created = max(entry.created for entry in found if entry is not None)
        epoch = self._epoch_at(created)
        if epoch is None:  # unknown, or granted without a token: use a higher token
            answer = self._change(several(then=self._raise_epoch(lease)))
            (epoch,) = entries(answer["responses"][-1:])
        assert epoch is not None  # noqa: S101  # it was just made
        return int(epoch.value) + created

    def _epoch_at(self, revision: int) -> Entry | None:
        """Return the epoch at a revision, or None if there was none or etcd has compacted it."""
        question = read(self._epoch)["requestRange"] | {"revision": str(revision)}
        with contextlib.suppress(RefusedError):
            (epoch,) = entries([{"response_range": self._link.call("/v3/kv/range", question)}])
            return epoch
        return None

    # -- requests -----------------------------------------------------------------------------

    def _grant(self, id_: str, ttl_s: float) -> _Lease:
        asked_s = _whole(ttl_s)
        try:
            answer = self._link.call("/v3/lease/grant", {"ID": id_, "TTL": str(asked_s)})
        except RefusedError as error:
            if _EXISTS in error.said:
                raise _ExistsError from error
            raise
        granted_s = float(answer["TTL"])
        if granted_s > asked_s:
            self._min_ttl_s = max(self._min_ttl_s, granted_s)
        revision = int(answer["header"]["revision"])
        return _Lease(id_, granted_s, fresh=True, revision=revision, clock_s=answer["clock_s"])

    def _change(self, transaction: dict[str, Any]) -> dict[str, Any]:
        """Run a transaction. Raises _EndedError if it names a lease that does not exist."""
        try:
            return self._link.call("/v3/kv/txn", transaction)
        except RefusedError as error:
            if _NOT_FOUND in error.said:
                raise _EndedError from error
            raise

    def _keep_alive(self, leases: Sequence[str]) -> list[dict[str, Any]]:
        return self._link.call_each("/v3/lease/keepalive", [{"ID": lease} for lease in leases])

    def _revoke(self, id_: str, *, on_retry: Callable[[], None] = lambda: None) -> bool:
        try:
            self._link.call("/v3/lease/revoke", {"ID": id_}, on_retry=on_retry)
        except RefusedError as error:
            if _NOT_FOUND in error.said:
                return False
            raise
        return True

    def _revoke_unused(self, lease: _Lease, keys: tuple[str, ...]) -> None:
        """End a lease that took nothing, unless it is an older one, which may have keys.

        Raises LockServerUnavailableError if a request got no reply, even if its retry got one. That
        request may arrive late. If the owner asked again and was granted the keys, its new lease
        has the same id, and the late request would end it.
        """
        if not lease.fresh:
            return
        retries: list[None] = []
        self._revoke(lease.id, on_retry=lambda: retries.append(None))
        if retries:
            raise LockServerUnavailableError(
                f"The lock server {self._link.address} gave no answer when taskguard ended an "
                f"unused lease for {', '.join(keys)}, which are held. Try again."
            )

    def _names(self, keys: tuple[str, ...]) -> list[str]:
        return [f"{self.namespace}/lock/{key}" for key in keys]

    # -- recent refusals ----------------------------------------------------------------------

    def _is_taken(self, keys: tuple[str, ...]) -> bool:
        if not self._taken:
            return False
        now_s = time.monotonic()
        return any(self._taken.get(key, 0.0) > now_s for key in keys)

    def _remember(self, key: str, remaining_s: float) -> None:
        if len(self._taken) >= _MOST_REMEMBERED:
            self._taken.clear()
        self._taken[key] = time.monotonic() + remaining_s

    def _forget(self, keys: tuple[str, ...]) -> None:
        if self._taken:
            for key in keys:
                self._taken.pop(key, None)

    def _restless(self, keys: tuple[str, ...]) -> LockServerUnavailableError:
        return LockServerUnavailableError(
            f"The lock server {self._link.address} gave {_TRIES} answers about {', '.join(keys)} "
            "that were outdated when they arrived, so nothing was taken. Try again.",
            key=", ".join(keys),
        )


@dataclass(frozen=True, slots=True)
class _Lease:
    """A lease in etcd, with the server's revision and its clock (None if unknown)."""

    id: str
    ttl_s: float
    fresh: bool
    revision: int
    clock_s: float | None


class _ExistsError(Exception):
    """A lease with this id exists already."""


class _EndedError(Exception):
    """No lease with this id exists."""


def _of(entry: Entry | None, owner: Owner) -> bool:
    return entry is not None and entry.is_of(owner)


def _whole(ttl_s: float) -> int:
    return max(1, math.ceil(ttl_s))


def _new_token(answer: dict[str, Any]) -> int:
    """Return the token of a grant whose transaction read the epoch last."""
    (epoch,) = entries(answer["responses"][-1:])
    assert epoch is not None  # noqa: S101  # the same transaction made it
    return int(epoch.value) + int(answer["header"]["revision"])


def _digits(number: int) -> str:
    """Return a text that sorts like the number."""
    return f"{max(0, number):020d}"
