"""Calls of scripts, packed once for all servers."""

from __future__ import annotations

from collections.abc import Sequence

from taskguard.errors import ConfigurationError
from taskguard.locks.base import Hold
from taskguard.locks.redis.protocol import Script, pack
from taskguard.model.lease import Owner

__all__ = ["Call", "Commands"]

_WAKE_EXPIRY_MS = b"1000"
_WAITERS_FLAG_S = 3.0
_KEYS_PER_RENEWAL = 250


class Call:
    """A script with its keys and arguments.

    Attributes:
        script: its name.
        frees: True if the call ends a lock. It has to be done even if its reply is discarded.
        packed: the call as it goes over the wire, for a server that knows the script.
    """

    __slots__ = ("_rest", "_script", "frees", "packed", "script")

    def __init__(
        self, script: Script, keys: list[bytes], arguments: list[bytes], *, frees: bool = False
    ) -> None:
        self._script = script
        self.script = script.name
        self.frees = frees
        self._rest = (b"%d" % len(keys), *keys, *arguments)
        self.packed = pack(b"EVALSHA", script.sha, *self._rest)

    @property
    def by_source(self) -> bytes:
        """The call for a server that does not know the script. It then remembers the script."""
        return pack(b"EVAL", self._script.source, *self._rest)


class Commands:
    """Makes calls, with names as a single server has them."""

    def __init__(self, namespace: str) -> None:
        if not namespace or set(namespace) & set("{} \r\n*?[]"):
            raise ConfigurationError(
                f"The namespace {namespace!r} cannot begin a key: use letters, digits, '-', '_', "
                "'.' and ':'."
            )
        self._before = f"{namespace}:{{".encode()
        # Without a line of waiters: those of several servers could disagree.
        self._acquire = Script("acquire", package="taskguard.locks.redlock")
        self._release = Script("release", package="taskguard.locks.redlock")
        self._hand_over = Script("hand_over")
        self._renew = Script("renew")
        self._holders = Script("holders")

    def acquire(self, keys: tuple[str, ...], owner: Owner, ttl_s: float, wait_s: float) -> Call:
        flag = _ms(min(wait_s, _WAITERS_FLAG_S)) if wait_s > 0 else b"0"
        words = [_bytes(str(owner)), _ms(ttl_s), flag, _WAKE_EXPIRY_MS]
        return Call(self._acquire, self._names(keys), words)

    def release(self, keys: tuple[str, ...], owner: Owner) -> Call:
        words = [_bytes(str(owner)), _WAKE_EXPIRY_MS]
        return Call(self._release, self._names(keys), words, frees=True)

    def hand_over(self, keys: tuple[str, ...], owner: Owner, to: Owner, ttl_s: float) -> Call:
        words = [_bytes(str(owner)), _bytes(str(to)), _ms(ttl_s)]
        return Call(self._hand_over, self._locks(keys), words, frees=True)

    def renew(self, holds: Sequence[Hold]) -> list[Call]:
        calls: list[Call] = []
        names: list[bytes] = []
        words: list[bytes] = []
        for hold in holds:
            if names and len(names) + len(hold.keys) > _KEYS_PER_RENEWAL:
                calls.append(Call(self._renew, names, words))
                names, words = [], []
            names += self._locks(hold.keys)
            words += [_bytes(str(hold.owner)), _ms(hold.ttl_s), b"%d" % len(hold.keys)]
        if names:
            calls.append(Call(self._renew, names, words))
        return calls

    def holders(self, key: str) -> tuple[Script, list[bytes], list[bytes]]:
        """Return script, keys and arguments, for calls to one server at a time."""
        (lock,) = self._locks((key,))
        return self._holders, [lock, lock + b":fence"], []

    def wait(self, key: str, slice_s: float) -> bytes:
        (lock,) = self._locks((key,))
        return pack(b"BLPOP", lock + b":wake", b"%.3f" % slice_s)

    def _names(self, keys: tuple[str, ...]) -> list[bytes]:
        """Return for each key its lock, its waiters flag and its wake list."""
        return [
            name
            for lock in self._locks(keys)
            for name in (lock, lock + b":waiters", lock + b":wake")
        ]

    def _locks(self, keys: tuple[str, ...]) -> list[bytes]:
        return [b"%b%b}" % (self._before, _bytes(key)) for key in keys]


def _bytes(text: str) -> bytes:
    # Lone surrogates have no UTF-8; they pass, so that a strange message id loses no message.
    return text.encode("utf-8", "surrogatepass")


def _ms(seconds: float) -> bytes:
    return b"%d" % max(1, int(seconds * 1000))
