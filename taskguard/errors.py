"""Every error that taskguard raises, as one tree.

* TaskguardError
  - ConfigurationError             the program is wrong: correct it and start again
    + KeyTemplateError             a key template does not fit its task
    + MissingDriverError           an extra is not installed
    + CommandTargetError           a command was given the name of an app, or a URL, that is none
    + LedgerSchemaError            the ledger's tables are missing or of another version
  - CallTooLargeError              the call is to be stored, and its database cannot take it
  - AlreadyEnqueuedError           enqueue(duplicate=): the same work is waiting or in progress
  - KeyArgumentError               this call's argument cannot be part of a key
  - LineFullError                  as many wait for the key as `max_waiting` allows
  - KeyBusyError                   another delivery holds the key, and waiting was not asked for
  - KeyAlreadyHeldError            a guarded body asked for a key that it holds itself
  - LeaseLostError                 the lease ran out or was taken over: stop working
  - StaleTokenError                a commit or a fenced write was refused: a newer holder exists
  - FencedRowMissingError          `guard.fenced()` found no row to write
  - TransactionRetryError          the database asked for this transaction to be run again
  - TransactionFailedError         the body's transaction was ended by the database, too often
  - TransactionUsageError          `guard.transaction()` or `checkpoint()` used out of turn
    + RowChangedError              the body moved its own row, which taskguard does
    + TransactionAbandonedError    the body caught what ended its transaction, and ended well
  - BodyCancelledError             the body raised asyncio's CancelledError, which no queue takes
  - ResultError                    a result or progress value cannot be stored
  - MessageTooOldError             a message older than the record of what was done
  - FingerprintMismatchError       the work was first asked for with other arguments
  - RowMissingError                the row that the task is to move does not exist
  - RowIneligibleError             the row is in a state that is not this task's
  - StoredCallError                a stored call cannot be read, or does not fit its task any more
    + CallWithdrawnError           its message was cancelled, or deleted, in its queue
  - WorkDeadError                  this work has killed its workers too often
    + WorkStillDeadError           it was DEAD before this delivery: no new failure
  - WorkRevokedError               this work was revoked for good
  - SupersededError                a newer message took this one's place, which never runs
  - LockServerUnavailableError     the lock server gave no answer in time
  - LedgerUnavailableError         the database is away, nothing is known to have happened
    + CommitUnknownError           a COMMIT was sent and its outcome could not be learned yet

Errors carry `key` and `fence` where they are known, chain the driver's exception as their
cause, and say what to do next. They never carry a password or a value marked `|hash`.

All derive from `Exception`, also those that end a body: a `BaseException` wedges Celery's
threads pool.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AlreadyEnqueuedError",
    "BodyCancelledError",
    "CallTooLargeError",
    "CallWithdrawnError",
    "CommandTargetError",
    "CommitUnknownError",
    "ConfigurationError",
    "FencedRowMissingError",
    "FingerprintMismatchError",
    "KeyAlreadyHeldError",
    "KeyArgumentError",
    "KeyBusyError",
    "KeyTemplateError",
    "LeaseLostError",
    "LedgerSchemaError",
    "LedgerUnavailableError",
    "LineFullError",
    "LockServerUnavailableError",
    "MessageTooOldError",
    "MissingDriverError",
    "ResultError",
    "RowChangedError",
    "RowIneligibleError",
    "RowMissingError",
    "StaleTokenError",
    "StoredCallError",
    "SupersededError",
    "TaskguardError",
    "TransactionAbandonedError",
    "TransactionFailedError",
    "TransactionRetryError",
    "TransactionUsageError",
    "WorkDeadError",
    "WorkRevokedError",
    "WorkStillDeadError",
]


class TaskguardError(Exception):
    """The root of all of taskguard's errors.

    Attributes:
        key: the keys concerned, joined with ", " where there are several; else None.
        fence: the fencing token concerned; else None.
    """

    def __init__(self, message: str, *, key: str | None = None, fence: int | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.fence = fence

    def __reduce__(self) -> tuple[Any, ...]:
        # Result backends and process pools pickle exceptions; keyword-only fields would be lost.
        return (_restore, (type(self), self.args, self.__dict__))


def _restore(
    kind: type[TaskguardError], args: tuple[Any, ...], fields: dict[str, Any]
) -> TaskguardError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigurationError(TaskguardError):
    """The program or its settings are wrong; raised as early as it can be known."""


class KeyTemplateError(ConfigurationError):
    """A key template does not fit its task's signature. Raised at decoration.

    Attributes:
        task: the task's name.
        template: the template as written.
    """

    def __init__(self, message: str, *, task: str | None = None, template: str | None = None):
        super().__init__(message)
        self.task = task
        self.template = template


class MissingDriverError(ConfigurationError, ImportError):
    """A package is missing; the message names the extra that brings it.

    `except ImportError` around `import taskguard_celery` catches it as well.
    """

    __str__ = Exception.__str__  # ImportError's shows its first message, whatever is in `args`


class CommandTargetError(ConfigurationError):
    """A command was told to look where there is nothing: no such app, no such URL."""


class LedgerSchemaError(ConfigurationError):
    """The ledger's tables do not exist, or are of another version than this library's.

    Attributes:
        problem: what is wrong, without the command that fixes it.
    """

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".rstrip())
        self.problem = problem


class KeyArgumentError(TaskguardError, ValueError):
    """An argument of this call cannot be part of a key. Nothing was run.

    Attributes:
        task: the task's name.
        placeholder: the placeholder concerned, as written.
    """

    def __init__(self, message: str, *, task: str | None = None, placeholder: str | None = None):
        super().__init__(message)
        self.task = task
        self.placeholder = placeholder


class CallTooLargeError(TaskguardError):
    """A call that is to be stored with its work is larger than the database takes.

    `enqueue()` raises it where it is called. A delivery (`recoverable=True`) raises it before it
    has claimed anything; trying again does not help.
    """


class AlreadyEnqueuedError(TaskguardError):
    """The same work is waiting or in progress; nothing was written. Raised by `enqueue()`.

    Attributes:
        message_id: the message that runs it, or that is to, as the ledger names it.
        begun: somebody is at work on it.
    """

    def __init__(
        self, message: str, *, key: str | None = None, message_id: str = "", begun: bool = False
    ) -> None:
        super().__init__(message, key=key)
        self.message_id = message_id
        self.begun = begun


class KeyBusyError(TaskguardError):
    """Another delivery or lock holds the key. Nothing was run; call again later.

    Attributes:
        retry_after_s: seconds until the present lease would end; None where unknown.
        owner: the holder, as `TaskGuard.release(owner=)` takes it; None where unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        retry_after_s: float | None = None,
        owner: str | None = None,
    ) -> None:
        super().__init__(message, key=key)
        self.retry_after_s = retry_after_s
        self.owner = owner


class LineFullError(TaskguardError):
    """As many messages wait for the key as `max_waiting` allows: this one was not stored.

    Nothing was run. Nothing of it is left that would run later: send it again, if it is wanted.
    """


class KeyAlreadyHeldError(TaskguardError):
    """A guarded body asked for a key that it holds itself: waiting would never end."""


class LeaseLostError(TaskguardError):
    """The lease can no longer be trusted. Stop: another worker may hold the key."""


class StaleTokenError(TaskguardError):
    """The database refused the commit: the key or the work has a newer holder.

    Nothing of the transaction was written. Raised for fenced writes elsewhere, too, if what they
    would write over is a newer holder's.

    Attributes:
        newer_fence: the newer holder's fence; None where the database did not tell it.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        fence: int | None = None,
        newer_fence: int | None = None,
    ) -> None:
        super().__init__(message, key=key, fence=fence)
        self.newer_fence = newer_fence


class FencedRowMissingError(TaskguardError):
    """`guard.fenced()` found no row that fits the statement; nothing was written."""


class TransactionRetryError(TaskguardError):
    """Deadlock, serialization failure or an undone COMMIT: run the body again.

    The runner does that by itself, under the same lease, a bounded number of times.
    """


class TransactionFailedError(TaskguardError):
    """The database ended the body's transaction in several deliveries in a row: work is FAILED."""


class TransactionUsageError(TaskguardError):
    """`guard.transaction()` or `guard.checkpoint()` was used out of turn."""


class RowChangedError(TransactionUsageError):
    """The body changed state or fence of its own row (`row=`). Nothing was written."""


class TransactionAbandonedError(TransactionUsageError):
    """The body caught what ended its transaction, and ended as if its writes were there."""


class BodyCancelledError(TaskguardError):
    """The body raised asyncio's CancelledError, which is the cause: the work is FAILED.

    Queues are told this in its place: a CancelledError is no Exception, and would end their worker.
    """


class ResultError(TaskguardError, TypeError):
    """A result or progress value is not JSON or is over the size limit."""


class MessageTooOldError(TaskguardError):
    """The message is older than `retention_s` and its work has no record: it may have been done.

    Or a job of RQ waited for its key until its `ttl` was over, and a stock worker got it. Its
    work is not run.
    """


class FingerprintMismatchError(TaskguardError):
    """Another message asked for this work with other arguments. Nothing was run or answered."""


class RowMissingError(TaskguardError):
    """The row that `row=` names does not exist. Nothing was run."""


class RowIneligibleError(TaskguardError):
    """The row is in a state that is not this task's. Nothing was run.

    Attributes:
        state: the state it was found in.
    """

    def __init__(self, message: str, *, key: str | None = None, state: Any = None) -> None:
        super().__init__(message, key=key)
        self.state = state


class StoredCallError(TaskguardError):
    """A stored call that nobody can send: it cannot be read, or does not fit its task any more."""


class CallWithdrawnError(StoredCallError):
    """A stored call that nobody is to send: its message was cancelled, or deleted, in its queue."""


class WorkDeadError(TaskguardError):
    """This work's holders vanished `max_crashes` times; it is not run any more.

    Attributes:
        crashes: how many holders vanished.
    """

    def __init__(self, message: str, *, key: str | None = None, crashes: int = 0) -> None:
        super().__init__(message, key=key)
        self.crashes = crashes


class WorkStillDeadError(WorkDeadError):
    """The work was DEAD before this delivery, which has been said: no new failure."""


class WorkRevokedError(TaskguardError):
    """This work was revoked; it is not run any more."""


class SupersededError(TaskguardError):
    """A newer message of its task and key took this one's place (`busy="latest"`, `"supersede"`).

    Nothing of it is committed, and it never runs. Celery's callers see REVOKED instead, and RQ's
    CANCELED, where the worker is of this package.
    """


class LockServerUnavailableError(TaskguardError):
    """The lock server gave no answer in time. With a ledger, work goes on without it."""


class LedgerUnavailableError(TaskguardError):
    """The ledger's database is not available. Nothing runs without it."""


class CommitUnknownError(LedgerUnavailableError):
    """A COMMIT was sent, the connection broke, and the outcome could not be learned yet."""
