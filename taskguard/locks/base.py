"""The protocol of a lock provider. `run/admission.py` and `run/watchdog.py` use it.

Guarantees of every provider, while its server keeps its memory
* A key has one owner at a time, or as many as `SharingLocks` allows.
* Only its owner renews or releases it.
* A call may be repeated with the same owner: it gets the same grant, and counts nothing twice.
* A call ends within the provider's own timeouts. It raises LockServerUnavailableError if the server
  gave no answer.
* An acquire that raised leaves at most a lease that ends within its ttl, or that the provider frees
  by itself. No caller frees it.

Does not guarantee exclusion across a loss of the server's memory. The ledger does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from taskguard.findings import Finding
from taskguard.model.lease import Owner
from taskguard.values import value

__all__ = [
    "KEPT_S",
    "NOBODY",
    "NO_LIMIT",
    "PROMOTED",
    "Granted",
    "Held",
    "HintingLocks",
    "Hold",
    "Holder",
    "LockProvider",
    "Renewal",
    "SharingLocks",
    "Traits",
    "in_batches",
]

# Owner of a key whose holder is unknown: see `Traits.owners`.
NOBODY = Owner("", "")
# Owner of a key that a `HintingLocks` reserves for a promoted message, for KEPT_S seconds. Without
# it newcomers would take the key, and the ledger would refuse them.
PROMOTED = Owner("0" * 24, "")
KEPT_S = 0.5
# The limit of a reader, which may share the key with any number of others.
NO_LIMIT = 1_000_000_000


@value
class Traits:
    """The abilities of a provider's locks.

    Attributes:
        session: leases end with the provider's session: `close()` and a lost session free them.
            False: they outlive connections, and end by their ttl.
        tokens: it issues fencing tokens. False: it needs a ledger, which issues them.
        owners: it knows the holder of a key, and its lease. False: `Held` may name NOBODY, which
            counts as a live lease; `hand_over()` frees the keys; and a repeated acquire gets the
            same grant only from the same provider object.
        min_ttl_s: the shortest lease that it can keep. A request for less gets a lease of this
            length.
        failover_s: for how long it may give no answer during a failover, as its last `check()`
            found. 0.0: unknown.
        fair: waiters get a key in the order in which they came. False: the first caller that tries
            while the key is free gets it.
        shares: several owners may hold one key at once: it is a `SharingLocks`.
        hints: a release reports that a message waits for the key in the ledger: it is a
            `HintingLocks`. False: the ledger is queried after each body of a task that parks.
        in_database: each request is a transaction of a database, even while a caller waits.
    """

    session: bool = False
    tokens: bool = True
    owners: bool = True
    min_ttl_s: float = 0.0
    failover_s: float = 0.0
    fair: bool = False
    shares: bool = False
    hints: bool = False
    in_database: bool = False


@value
class Granted:
    """The caller holds the keys.

    Attributes:
        fence: the token; 0 unless one was requested.
        ttl_s: for how long the server keeps the lease, which may be longer than requested. For
            locks of a session: for how long it keeps a silent session.
    """

    fence: int
    ttl_s: float


@value
class Held:
    """Another owner holds at least one of the keys; none was taken.

    Attributes:
        key: the key that is taken.
        owner: its holder; NOBODY if that is unknown.
        remaining_s: how long that lease lasts at most. For NOBODY it is the requested ttl.
        shared: whether the holder shares the key. The ledger does not know such holders.
    """

    key: str
    owner: Owner
    remaining_s: float
    shared: bool = False


@value
class Holder:
    """One holder of a key, for an operator.

    Attributes:
        key: the key that it holds.
        owner: the holder; NOBODY if `Traits.owners` is False and another session holds the key.
        fence: the token of its grant; 0 if no token was requested.
        remaining_s: how long its lease lasts at most.
        shared: whether others may hold the key at the same time.
    """

    key: str
    owner: Owner
    fence: int
    remaining_s: float
    shared: bool = False


@value
class Hold:
    """One lease to renew. `limit`: the limit with which it was acquired."""

    keys: tuple[str, ...]
    owner: Owner
    ttl_s: float
    limit: int = 1


class Renewal:
    """Results of a renewal. Constants, because a watchdog compares ten thousand at a time."""

    RENEWED = "renewed"
    """The lease was renewed."""
    GONE = "gone"
    """The keys have no owner. The server forgot the lease, or it expired."""
    TAKEN = "taken"
    """Another owner holds at least one of the keys."""
    UNANSWERED = "unanswered"
    """The part of the server that has a key gave no answer."""
    SKIPPED = "skipped"
    """Another transaction has locked its row, or this claim was just completed. Try again."""


def in_batches(holds: Sequence[Hold], *, most_keys: int) -> Iterator[list[Hold]]:
    """Yield batches of `most_keys` keys at most. A hold with more keys is a batch by itself."""
    batch: list[Hold] = []
    size = 0
    for hold in holds:
        if batch and size + len(hold.keys) > most_keys:
            yield batch
            batch, size = [], 0
        batch.append(hold)
        size += len(hold.keys)
    if batch:
        yield batch


@runtime_checkable
class LockProvider(Protocol):
    """A lock server. Callers pass keys in sorted order. The provider adds its own namespace."""

    @property
    def traits(self) -> Traits:
        """The abilities of these locks."""
        ...

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none, in one round trip.

        With `with_fence`, the grant has one token for all keys: max(last + 1, the server's clock
        in µs). `wait_s` > 0 tells the server that a refused caller will `wait()` for that time, so
        that a release wakes it. To keep its position among the waiters, the caller acquires again
        with the same owner, every second at least. It stops when it gets the keys, or gives up by
        `release()`. With several keys it waits for the one that `Held` names.
        """
        ...

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that are still the owner's, wake waiters, and stop waiting for the keys.

        Return False if the owner held none of them, and True if that is unknown.
        """
        ...

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Make `to` the owner of the keys that `owner` has, for `ttl_s`.

        Used if the ledger knows another holder than the server, or a newer message supersedes the
        holder. If `traits.owners` is False, free the keys: `to` takes them when it renews.

        Return False if `owner` had none of them, and `to` has none.
        """
        ...

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases in few round trips. Return a `Renewal` constant for each, in order.

        If a part of the server gives no answer, and another part does, the leases of the silent
        part are UNANSWERED.
        """
        ...

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the owner may get the key that `Held` named, for `timeout_s` at most."""
        ...

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key: several if it is shared. Change nothing."""
        ...

    def check(self) -> list[Finding]:
        """Return what is wrong with the server and its settings, as far as it tells them.

        May try each step of a lock on a key of its own, which it releases.

        Raises LockServerUnavailableError if the server gives no answer.
        """
        ...

    def close(self) -> None:
        """Close connections. The provider may be used again and then reconnects."""
        ...


@runtime_checkable
class SharingLocks(LockProvider, Protocol):
    """A lock server that lets several owners hold one key at once; `traits.shares` says so.

    Each owner has a limit of its own. It gets the key while fewer owners than its limit hold it,
    whatever their limits are. So an owner with limit 1 excludes all others, and an owner with
    NO_LIMIT joins any number of owners that share. If the provider is fair, no owner overtakes a
    waiter, even if there is room for it.

    Owners that share a key at the same time have one token, above all earlier tokens. After the
    last of them has left, the next owner gets a new token.
    """

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
        """Acquire as every provider does. A `limit` above 1 needs a single key."""
        ...

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """Release as every provider does. `limit`: the limit with which it was acquired."""
        ...

    def wait(self, key: str, owner: Owner, *, timeout_s: float, limit: int = 1) -> None:
        """Wait as every provider does. `limit`: the limit with which it was refused."""
        ...


@runtime_checkable
class HintingLocks(LockProvider, Protocol):
    """A lock server that can keep a hint for each key: a message waits for the key in the ledger.

    `traits.hints` says so. A parking delivery leaves the hint, and then checks whether the key is
    free. A holder frees the key, and then takes the hint. So at least one of them sees the other.
    A server that loses its memory may lose a hint. A hint may outlive the message that left it.

    If a key is released with a hint, and no waiter of the lock server takes it, the key is reserved
    for PROMOTED for KEPT_S. The former holder then promotes a message of the ledger, or releases
    the key as PROMOTED.
    """

    def leave_hint(self, key: str) -> bool:
        """Leave a hint for the next `release_and_take_hint()` of the key.

        Return whether the key is free. Then there may be no holder that takes the hint.
        """
        ...

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        """Release the key, and take its hint even if another owner has it, in one round trip.

        Return whether the owner held it, as `release()` does, and whether there was a hint, or may
        have been. With a hint the key is reserved for PROMOTED, unless another owner has it.
        """
        ...

    def acquire_promoted(
        self, key: str, owner: Owner, *, ttl_s: float, wait_s: float
    ) -> Granted | Held:
        """Acquire a key without a token, even if it is reserved for PROMOTED."""
        ...
