"""A lock provider on Consul: each change is one transaction that fails if a key has changed.

The package's docstring has the guarantees and the data in the server.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from urllib3 import BaseHTTPResponse

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
    parse_url,
)
from taskguard_consul.link import (
    MOST_OPERATIONS,
    ConsulLink,
    Entry,
    Failed,
    clock_s,
    encoded,
    index_of,
)

__all__ = ["ConsulLocks"]

_MIN_TTL_S = 10
_WAIT_SLICE_S = 1.0
_NO_EXPIRY_S = 86_400.0
_TRIES = 5
# A refusal does not name the holder. If the key is free when we look, we try again.
_TRIES_TO_TAKE = 50
# An acquire renews a session that is older than this share of the ttl. A session's ttl is longer by
# that share, so that each grant lasts for the requested ttl.
_AGE_SHARE = 0.25
_MOST_KEYS = (MOST_OPERATIONS - 1) // 2
_MOST_DOUBTS = 10_000


@dataclass(slots=True)
class _Session:
    """Attributes:
    id: Consul's id of the session.
    ttl_s: how long its keys are granted, in seconds.
    renewed_at_s: when the last successful renewal was requested, by `time.monotonic()`.
    """

    id: str
    ttl_s: int
    renewed_at_s: float


class ConsulLocks:
    """A `LockProvider` on Consul 1.8 or later.

    Args:
        server: consul://[:token@]host[:port],…, or consuls:// for TLS.
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
        self._link = ConsulLink(
            parse_url(server, plain="consul", tls="consuls", port=8500),
            socket_timeout_s=socket_timeout_s,
            connect_timeout_s=connect_timeout_s,
            longest_block_s=_WAIT_SLICE_S,
        )
        self.namespace = namespace
        self._epoch_name = f"{namespace}/epoch"
        self._mutex = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        """Begin without sessions, also in a forked child: the parent's belong to the parent."""
        self._pid = os.getpid()
        self._sessions: dict[int, _Session] = {}
        # The index of each key after its grant, by the owner's nonce. With it, one request frees
        # the key.
        self._indexes: dict[str, dict[str, int]] = {}
        # Keys that may be held after a lost reply. They are freed before a session is renewed.
        self._doubts: deque[tuple[tuple[str, ...], Owner]] = deque(maxlen=_MOST_DOUBTS)
        self._epoch: tuple[int, int] = (0, 0)  # its value, and its index

    @property
    def traits(self) -> Traits:
        """Locks of a session, with tokens. They last whole seconds."""
        return Traits(session=True, min_ttl_s=float(_MIN_TTL_S))

    def __repr__(self) -> str:
        return f"<ConsulLocks {self._link.address} namespace={self.namespace!r}>"

    def acquire(
        self, keys: tuple[str, ...], owner: Owner, *, ttl_s: float, with_fence: bool, wait_s: float
    ) -> Granted | Held:
        """Take all keys or none: one request if they are free, two if one is held."""
        del wait_s
        if len(keys) > _MOST_KEYS:
            raise ConfigurationError(
                f"Consul can lock {_MOST_KEYS} keys at once, and this work has {len(keys)}. Split "
                "the work, or use another lock server."
            )
        found: list[Entry | None] = [None] * len(keys)
        for _ in range(_TRIES_TO_TAKE):
            session = self._session(ttl_s)
            try:
                entries = self._take(keys, found, owner, session)
            except BaseException:
                self._doubts.append((keys, owner))
                raise
            if entries is not None:
                self._indexes[owner.nonce] = {
                    name: each.changed
                    for name, each in zip(self._names(keys), entries, strict=True)
                }
                for doubt in [each for each in self._doubts if each[1] == owner]:
                    with contextlib.suppress(ValueError):  # another thread removed it
                        self._doubts.remove(doubt)
                token = max(map(_token, entries))
                return Granted(token if with_fence else 0, float(session.ttl_s))
            found = self._look(keys)
            for key, entry in zip(keys, found, strict=True):
                if entry is not None and not _is_of(entry, owner):
                    _, lasts_s, holder = _parts(entry)
                    return Held(key=key, owner=holder, remaining_s=lasts_s)
        raise self._restless(keys)

    def release(self, keys: tuple[str, ...], owner: Owner) -> bool:
        """Free the keys that the owner still has, by one request. Return False if it has none.

        Return True if a first attempt got no reply, because it may have freed them.
        """
        self._after_fork()
        try:
            return self._free(keys, owner)
        except BaseException:
            self._doubts.append((keys, owner))  # otherwise the session would keep them
            raise

    def _free(self, keys: tuple[str, ...], owner: Owner) -> bool:
        retries: list[None] = []
        names = self._names(keys)
        known = self._indexes.pop(owner.nonce, {})
        if known.keys() == set(names):
            freed = self._link.change(
                [_delete(name, index) for name, index in known.items()],
                on_retry=lambda: retries.append(None),
            )
            if not isinstance(freed, Failed):
                return True
        freed_one = False
        for name, entry in zip(names, self._look(keys), strict=True):
            if entry is not None and _is_of(entry, owner):
                done = self._link.change([_delete(name, entry.changed)])
                freed_one = freed_one or not isinstance(done, Failed)
        return freed_one or bool(retries)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, *, to: Owner, ttl_s: float) -> bool:
        """Hand the keys that `owner` still has over to the owner `to`.

        They stay in their present session until the next renewal by `to`, and last as long as that
        session.
        """
        del ttl_s
        self._after_fork()
        handed = False
        for name, entry in zip(self._names(keys), self._look(keys), strict=True):
            if entry is not None and _is_of(entry, owner):
                value = _value(f"={_token(entry)}", int(_parts(entry)[1]), to)
                done = self._link.change([_cas(name, value, entry.changed)])
                handed = handed or not isinstance(done, Failed)
            elif entry is not None and _is_of(entry, to):
                handed = True
        return handed

    def renew(self, holds: Sequence[Hold]) -> list[str]:
        """Renew the sessions, one for each ttl, and check their keys, 64 per request."""
        self._after_fork()
        for ttl_s in {_whole(hold.ttl_s) for hold in holds}:
            if (session := self._sessions.get(ttl_s)) is not None:
                self._keep(session)
        wanted = [
            (number, name, self._indexes.get(hold.owner.nonce, {}).get(name, 0))
            for number, hold in enumerate(holds)
            for name in self._names(hold.keys)
        ]
        doubtful = {number for number, _, index in wanted if not index}
        known = [each for each in wanted if each[2]]
        for at in range(0, len(known), MOST_OPERATIONS):
            batch = known[at : at + MOST_OPERATIONS]
            answer = self._link.change(
                [{"Verb": "check-index", "Key": name, "Index": index} for _, name, index in batch]
            )
            if isinstance(answer, Failed):
                doubtful |= {batch[number][0] for number in answer.errors}
        return [
            self._renew_one(hold) if number in doubtful else Renewal.RENEWED
            for number, hold in enumerate(holds)
        ]

    def wait(self, key: str, owner: Owner, *, timeout_s: float) -> None:
        """Block until the key is released, for at most a second. Then the caller tries again."""
        del owner
        if timeout_s <= 0:
            return
        until_s = time.monotonic() + min(timeout_s, _WAIT_SLICE_S)
        (name,) = self._names((key,))
        entry, reply = self._link.look(name)
        while entry is not None and (left_s := until_s - time.monotonic()) > 0:
            self._link.wait(name, index=index_of(reply), timeout_s=left_s)
            entry, reply = self._link.look(name)

    def holders(self, key: str) -> list[Holder]:
        """Return the holder of a key, by one request."""
        (entry,) = self._look((key,))
        if entry is None:
            return []
        _, lasts_s, holder = _parts(entry)
        return [Holder(key, holder, _token(entry), lasts_s)]

    def check(self) -> list[Finding]:
        """Return what is wrong with the agents of the URL and the rights of the token."""
        from taskguard_consul import health  # not for deliveries

        return health.check(self._link, self._epoch_name)

    def close(self) -> None:
        """End the sessions, which frees their keys."""
        self._after_fork()
        with self._mutex:
            sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            with contextlib.suppress(LockServerUnavailableError):  # it ends after its ttl
                self._link.end_session(session.id)
        self._indexes.clear()
        self._doubts.clear()
        self._link.close()

    # -- sessions -----------------------------------------------------------------------------

    def _session(self, ttl_s: float) -> _Session:
        """Return a session whose keys last for this ttl from now."""
        self._after_fork()
        whole_s = _whole(ttl_s)
        with self._mutex:
            session = self._sessions.get(whole_s)
            if session is not None:
                age_s = time.monotonic() - session.renewed_at_s
                if age_s < whole_s * _AGE_SHARE or self._keep(session):
                    return session
            requested_at_s = time.monotonic()
            lasts_s = math.ceil(whole_s * (1 + _AGE_SHARE))
            id_, reply = self._link.open_session(lasts_s)
            session = self._sessions[whole_s] = _Session(id_, whole_s, requested_at_s)
            self._raise_epoch(reply)
            return session

    def _keep(self, session: _Session) -> bool:
        """Free the keys of lost replies, then renew a session. Return False if it has ended."""
        with contextlib.suppress(IndexError):
            while True:
                doubt = self._doubts.popleft()
                try:
                    self._free(*doubt)
                except BaseException:
                    self._doubts.append(doubt)
                    raise
        requested_at_s = time.monotonic()
        if self._link.keep_session(session.id):
            session.renewed_at_s = requested_at_s
            return True
        self._sessions.pop(session.ttl_s, None)
        return False

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._mutex = threading.Lock()
            self._reset()

    # -- keys ---------------------------------------------------------------------------------

    def _take(
        self,
        keys: tuple[str, ...],
        found: list[Entry | None],
        owner: Owner,
        session: _Session,
    ) -> list[Entry] | None:
        """Take the keys and return their entries, or None if a key, session or epoch changed."""
        epoch, index = self._epoch
        operations: list[dict[str, Any]] = [
            {"Verb": "check-index", "Key": self._epoch_name, "Index": index}
        ]
        values = {}
        for name, entry in zip(self._names(keys), found, strict=True):
            if entry is None:
                values[name] = _value(str(epoch), session.ttl_s, owner)
                operations += [
                    {"Verb": "check-not-exists", "Key": name},
                    _lock(name, values[name], session.id),
                ]
            else:
                values[name] = _value(f"={_token(entry)}", session.ttl_s, owner)
                operations += _moved(name, entry, values[name], session.id)
        answer = self._link.change(operations)
        if isinstance(answer, Failed):
            self._heed(answer, session)
            return None
        # The reply to a transaction contains no values.
        return [
            replace(answer[name], value=base64.b64decode(value)) for name, value in values.items()
        ]

    def _heed(self, failed: Failed, session: _Session) -> None:
        """Forget a session that has ended, and read an epoch that has changed."""
        if any("session" in what for what in failed.errors.values()):
            self._sessions.pop(session.ttl_s, None)
        if 0 in failed.errors:
            entry, reply = self._link.look(self._epoch_name)
            if entry is None:
                self._raise_epoch(reply)
            else:
                self._epoch = int(entry.value), entry.changed

    def _renew_one(self, hold: Hold) -> str:
        """Renew a hold of which a key may have changed since its grant."""
        for _ in range(_TRIES):
            found = self._look(hold.keys)
            if any(each is not None and not _is_of(each, hold.owner) for each in found):
                return Renewal.TAKEN
            if None in found:
                return Renewal.GONE
            # The keys were handed over, or taken for another ttl: move them to this session.
            session = self._session(hold.ttl_s)
            operations = []
            for name, entry in zip(self._names(hold.keys), found, strict=True):
                assert entry is not None  # noqa: S101  # none is missing
                value = _value(f"={_token(entry)}", session.ttl_s, hold.owner)
                operations += _moved(name, entry, value, session.id)
            answer = self._link.change(operations)
            if not isinstance(answer, Failed):
                self._indexes[hold.owner.nonce] = {
                    name: answer[name].changed for name in self._names(hold.keys)
                }
                return Renewal.RENEWED
            self._heed(answer, session)
        raise self._restless(hold.keys)

    def _look(self, keys: tuple[str, ...]) -> list[Entry | None]:
        return [self._link.look(name)[0] for name in self._names(keys)]

    def _names(self, keys: tuple[str, ...]) -> list[str]:
        return [f"{self.namespace}/lock/{encoded(key)}" for key in keys]

    # -- tokens -------------------------------------------------------------------------------

    def _raise_epoch(self, reply: BaseHTTPResponse) -> None:
        """Raise the epoch to the server's clock. Never lower it."""
        wanted = 0
        for _ in range(_TRIES):
            entry, seen = self._link.look(self._epoch_name)
            if not wanted:
                now_s, theirs_s = time.time(), clock_s(seen) or clock_s(reply)
                if theirs_s is not None:
                    # The server's clock is known to the second. Within that, use our own clock.
                    now_s = min(max(now_s, theirs_s), theirs_s + 1.0)
                wanted = int(now_s * 1_000_000) - index_of(seen)
            before, index = (0, 0) if entry is None else (int(entry.value), entry.changed)
            if before >= wanted:  # another process has raised it
                self._epoch = before, index
                return
            packed = base64.b64encode(b"%d" % wanted).decode()
            done = self._link.change([_cas(self._epoch_name, packed, index)])
            if not isinstance(done, Failed):
                self._epoch = wanted, done[self._epoch_name].changed
                return
        raise self._restless(())

    def _restless(self, keys: tuple[str, ...]) -> LockServerUnavailableError:
        return LockServerUnavailableError(
            f"The lock server {self._link.address} gave {_TRIES} answers about {', '.join(keys)} "
            "that were outdated when they arrived, so nothing was taken. Try again.",
            key=", ".join(keys),
        )


def _whole(ttl_s: float) -> int:
    return max(_MIN_TTL_S, math.ceil(ttl_s))


def _value(token: str, ttl_s: int, owner: Owner) -> str:
    text = f"{token}:{ttl_s}:{owner}"
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _parts(entry: Entry) -> tuple[str, float, Owner]:
    """Return the epoch (or "=" and the token), the ttl and the owner. A foreign key has no end."""
    text = entry.value.decode("utf-8", "replace")
    token, _, rest = text.partition(":")
    ttl_s, _, owner = rest.partition(":")
    if not (token.removeprefix("=").isdecimal() and ttl_s.isdecimal() and entry.session):
        return "0", _NO_EXPIRY_S, Owner.parse(text)
    return token, float(ttl_s), Owner.parse(owner)


def _token(entry: Entry) -> int:
    """Return the token: epoch plus index of the grant, or the stored token of a moved key."""
    token = _parts(entry)[0]
    return int(token[1:]) if token.startswith("=") else int(token) + entry.created


def _is_of(entry: Entry, owner: Owner) -> bool:
    wanted = str(owner).encode("utf-8", "surrogatepass")
    return entry.value.split(b":", 2)[-1] == wanted


def _lock(name: str, value: str, session: str) -> dict[str, Any]:
    return {"Verb": "lock", "Key": name, "Value": value, "Session": session}


def _cas(name: str, value: str, index: int) -> dict[str, Any]:
    return {"Verb": "cas", "Key": name, "Value": value, "Index": index}


def _moved(name: str, entry: Entry, value: str, session: str) -> list[dict[str, Any]]:
    """Return the operations that move the owner's key to this session."""
    if entry.session == session:
        return [_cas(name, value, entry.changed)]
    return [_delete(name, entry.changed), _lock(name, value, session)]


def _delete(name: str, index: int) -> dict[str, Any]:
    return {"Verb": "delete-cas", "Key": name, "Index": index}
