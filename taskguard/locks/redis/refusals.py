"""Classifies errors of redis-py: whether to try again, and the message for the user.

Guarantees: distinguishes a refusal from a missing answer, on every server from 6.2 on. The
message names the server's address and never contains a password.
"""

from __future__ import annotations

import enum
from typing import Any

from taskguard.errors import LockServerUnavailableError

__all__ = ["Refusal", "may_pass", "refusal_of", "unavailable"]

# Words of servers from 6.2 to 9 for a NOPERM within a script.
_FORBIDDEN_IN_SCRIPT = ("ACL failure in script", "The user executing the script can't")


class Refusal(enum.Enum):
    """Why a server refused a call."""

    LOGIN = enum.auto()
    RIGHTS = enum.auto()
    CLUSTER = enum.auto()
    OTHER = enum.auto()


def refusal_of(error: BaseException | None, errors: Any) -> Refusal | None:
    """Return why the server refused. None: it gave no answer.

    Args:
        error: redis-py's error, or the LockServerUnavailableError that it caused.
        errors: redis-py's module of exceptions.
    """
    if isinstance(error, LockServerUnavailableError):
        error = error.__cause__
    said = str(error)
    # A server that requires a password refuses a long script with this word.
    if "unauthenticated" in said or isinstance(
        error, (errors.AuthenticationError, errors.AuthorizationError)
    ):
        return Refusal.LOGIN
    if isinstance(error, errors.NoPermissionError) or any(
        sign in said for sign in _FORBIDDEN_IN_SCRIPT
    ):
        return Refusal.RIGHTS
    if said.startswith(("MOVED ", "ASK ", "CROSSSLOT ")) or isinstance(
        error, (errors.MovedError, errors.AskError, errors.ClusterCrossSlotError)
    ):
        return Refusal.CLUSTER
    return Refusal.OTHER if isinstance(error, errors.ResponseError) else None


def may_pass(error: BaseException | None, errors: Any) -> bool:
    """Return whether a new connection may help. It does not help against a refusal."""
    if isinstance(error, (errors.AuthenticationError, errors.AuthorizationError)):
        return False
    kinds = (errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError, OSError)
    return isinstance(error, kinds)


def unavailable(
    error: Exception, errors: Any, *, address: str, cluster: str
) -> LockServerUnavailableError:
    """Return the error for a user.

    Args:
        error: redis-py's error.
        errors: redis-py's module of exceptions.
        address: the server's.
        cluster: the name of the server's cluster. Empty: it is configured as a single server.
    """
    said = str(error).rstrip(".") or type(error).__name__
    refusal = refusal_of(error, errors)
    if refusal is Refusal.LOGIN:
        rest = (
            f"refuses user or password: {said}. This is a mistake in the settings; correct the URL."
        )
    elif refusal is Refusal.RIGHTS:
        rest = (
            f"forbids what locks need: {said}. This is a mistake in the settings; "
            "the docstring of taskguard.locks.redis lists the rights that its user needs."
        )
    elif refusal is Refusal.CLUSTER and not cluster:
        # Without credentials, which the author of the URL knows.
        where = address.partition("/")[0]
        rest = (
            f"is a Redis Cluster ({said}). Write redis+cluster:// for redis:// and "
            f"rediss+cluster:// for rediss://, and several of its nodes: "
            f"redis+cluster://{where},<another host:port>."
        )
    elif refusal is Refusal.OTHER:
        rest = f"refused: {said}."
    else:
        rest = f"gave no answer: {said}."
    return LockServerUnavailableError(f"The lock server {address} {rest}")
