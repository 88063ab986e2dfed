"""What a lock server has to offer. The way it is used stands in `runner.py` and `watchdog.py`.

A provider guarantees that, while its server keeps its memory, a key has one owner at a time (or as
many as `SharingLocks` says), and that only its owner renews or releases it. It does not guarantee
that across a loss of the server's memory; the ledger does.

Every call may be asked twice with the same owner: the answer is the same grant, and nothing is
counted twice. Every call ends within the provider's own time-outs and raises
LockServerUnavailableError when the server did not answer. An acquire that raised leaves at most a
lease that ends within its ttl, or that the provider frees by itself: nobody else will.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from taskguard.findings import Finding
from taskguard.model.lease import Owner
from taskguard.values import value

__all__ = [
    "CALLED",
    "KEPT_S",
    "NOBODY",
    "NO_LIMIT",
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

# Of a key that is taken, where nothing says by whom: see `Traits.owners`.
NOBODY = Owner("", "")
# Whoever was called to a key by the ledger: a `HintingLocks` keeps it for so long, in seconds, from
# those who come meanwhile, who would be refused by the ledger only.
CALLED = Owner("0" * 24, "")
KEPT_S = 0.5
# Of who may come in beside anybody who shares the key: a reader.
NO_LIMIT = 1_000_000_000


@value
class Traits:
    """What kind of locks a provider has.

    Attributes:
        session: leases end with the provider's session: `close()` and a lost session free them.
            False: they outlive connections, and end by their ttl.
        tokens: it issues fencing tokens. False: it needs a ledger, whose fences these then are.
        owners: it knows who holds a key, and for how long. False: who is refused may be told
            NOBODY, which counts as a live lease, `hand_over()` frees the keys, and an owner that
            asks twice gets the same grant by the same provider only.
        min_ttl_s: the shortest lease that it can keep; a shorter one is made that long.
        failover_s: for how long it may give no answer while another server takes its place, as far
            as its last `check()` was told; 0.0: nobody has said.
        fair: who waits for a key gets it in the order in which they came, and nobody comes in
            between. False: whoever asks first when it is free.
        shares: several may hold one key at once: it is a `SharingLocks`.
        hints: it tells whoever releases a key that somebody waits for it in the ledger: it is a
            `HintingLocks`. False: the ledger is asked after each body of a task that parks.
        in_database: each question is a transaction of a database, also while a caller waits.
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
        fence: the token; 0 unless one was asked for.
        ttl_s: for how long the server keeps the lease, which may be longer than was asked for;
            of a session's locks, for how long it keeps a session that it hears nothing of.
    """

    fence: int
    ttl_s: float


@value
class Held:
    """Another owner holds at least one of the keys; none was taken.

    Attributes:
        key: the key that is taken.
        owner: who holds it; NOBODY where that is not known.
        remaining_s: for how long that lease still stands, at most; of NOBODY's that is not known,
            either, and this is the ttl that was asked for.
        shared: whether it is one of those who share the key, of whom a ledger knows nothing.
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
        owner: the holder; NOBODY where `Traits.owners` is False and another session holds the key.
        fence: the token of its grant; 0 where no token was asked for.
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
    """One lease to renew; `limit`: as it was acquired."""

    keys: tuple[str, ...]
    owner: Owner
    ttl_s: float
    limit: int = 1


class Renewal:
    """What became of a renewal (constants, not an enum: ten thousand are compared per tick)."""

    RENEWED = "renewed"
    GONE = "gone"  # no owner at all: the server forgot, or the lease ran out
    TAKEN = "taken"  # another owner holds at least one of the keys
    UNANSWERED = "unanswered"  # this one's part of the server said nothing; others did
    SKIPPED = "skipped"  # its row is locked by somebody, or completed by this very claim: ask again


def in_batches(holds: Sequence[Hold], *, most_keys: int) -> Iterator[list[Hold]]:
    """Holds for several messages, each with so many keys, or with a single hold of more."""
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
    """A lock server. Keys come sorted, namespaced by the provider itself."""

    @property
    def traits(self) -> Traits:
        """What kind of locks these are."""
        ...

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none, in one round trip.

        With `with_fence`, the grant carries max(last + 1, the server's clock in µs) over all
        keys. `wait_s` > 0 tells the server that this caller is going to `wait()` for so long
        when refused, so that a release wakes it. It asks again by the same owner, every second
        at least, until it is granted the keys or gives up by `release()`: so it has its place
        among those who wait. Of several keys it waits for the one that `Held` names.
        """
        ...

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that are still the owner's and wake waiters; wait for them no longer.

        False if the owner held none of them; True where that cannot be told.
        """
        ...

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that are still `owner`'s over to `to`, their true owner, for `ttl_s`.

        Where `traits.owners` is False they are freed, and it takes them when it renews.

        False if none of them was `owner`'s, and none is `to`'s already.
        """
        ...

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew many leases with few round trips; one `Renewal` constant for each, in order.

        A server of several parts, some of which do not answer, says UNANSWERED for theirs.
        """
        ...

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key, which `Held` named, may be had by the owner, who was refused it.

        At most `timeout_s`.
        """
        ...

    def holders(self, key: str) -> list[Holder]:
        """Return the holders of a key, of which a shared one has several. Changes nothing."""
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
    """A lock server that lets several hold one key at once; `traits.shares` says so.

    Everybody comes in by a limit of its own: while fewer than that hold the key, whatever their
    limits are. So 1, as everywhere else, is to have it alone; NO_LIMIT is to come in beside all
    who share it. Where it is fair, nobody comes in before another who waits, whatever may be had.

    Those who share a key have one token, above all tokens before: it is made for the first of them,
    and rises when nobody is left.
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
        """As of every provider; with a `limit` above 1 of one key only."""
        ...

    def release(self, keys: tuple[str, ...], owner: Owner, *, limit: int = 1) -> bool:
        """As of every provider; `limit`: as it was acquired."""
        ...

    def wait(self, key: str, owner: Owner, *, timeout_s: float, limit: int = 1) -> None:
        """As of every provider; `limit`: as it was refused."""
        ...


@runtime_checkable
class HintingLocks(LockProvider, Protocol):
    """A lock server that keeps a hint for each key: somebody waits for it in the ledger.

    `traits.hints` says so. A hint is left before it is looked whether the key is free, and taken
    after the key was freed: so of the two, who leaves one and who releases, one at least finds the
    other. A server that forgets may forget a hint; it never makes one up for long.

    A key that is released with a hint, and that nobody waits for at the lock server, is CALLED's
    for KEPT_S: whoever releases calls one that waits in the ledger, or releases it as CALLED.
    """

    def leave_hint(self, key: str) -> bool:
        """Leave one for whoever releases the key next by `release_and_take_hint()`.

        Whether the key is free, so that nobody may come to take it.
        """
        ...

    def release_and_take_hint(self, key: str, owner: Owner) -> tuple[bool, bool]:
        """Release, and take the hint, whoever the key belongs to, in one round trip.

        Whether the owner held it, as of `release()`; whether there was a hint, or may have been:
        the key is kept for CALLED then, if nobody else has it.
        """
        ...

    def acquire_called(
        self, key: str, owner: Owner, *, ttl_s: float, wait_s: float
    ) -> Granted | Held:
        """Take a key as `acquire()` does, without a token, also where it is kept for CALLED."""
        ...
