"""Every error that taskguard raises, as one tree.

* TaskguardError
  - ConfigurationError             the program is wrong: correct it and start again
    + KeyTemplateError             a key template does not fit its task
    + MissingDriverError           an extra is not installed
    + CommandTargetError           a command was given the name of an app, or a URL, that is none
    + LedgerSchemaError            the ledger's tables are missing or of another version
  - CallTooLargeError              a call is too large to be stored in the database
  - AlreadyEnqueuedError           enqueue(duplicate=): the same work is waiting or in progress
  - KeyArgumentError               this call's argument cannot be part of a key
  - LineFullError                  `max_waiting` messages wait for the key already
  - KeyBusyError                   another delivery holds the key
  - KeyAlreadyHeldError            a guarded body requested a key that it holds itself
  - LeaseLostError                 the lease expired or was taken over: stop working
  - LockNotOwnedError              release() or extend() of a lock that the caller does not hold
  - StaleTokenError                a commit or a fenced write was refused: a newer holder exists
  - FencedRowMissingError          `guard.fenced()` found no row to write
  - TransactionRetryError          the database ended this transaction: run it again
  - TransactionFailedError         the database ended the body's transaction too often
  - TransactionUsageError          `guard.transaction()` or `checkpoint()` was misused
    + RowChangedError              the body changed its row's state or fence, which taskguard does
    + TransactionAbandonedError    the body caught the error that ended its transaction
  - BodyCancelledError             the body raised asyncio's CancelledError
  - ResultError                    a result or progress value cannot be stored
  - MessageTooOldError             a message older than the record of what was done
  - FingerprintMismatchError       an earlier message for this work had other arguments
  - RowMissingError                the row of `row=` does not exist
  - RowIneligibleError             the row is in a state from which the task does not start
  - StoredCallError                a stored call cannot be read, or no longer fits its task
    + CallWithdrawnError           its message was cancelled or deleted in its queue
  - WorkDeadError                  the holders of this work vanished too often
    + WorkStillDeadError           the work was DEAD before this delivery: no new failure
  - WorkRevokedError               this work was revoked for good
  - SupersededError                a newer message replaced this one, which never runs
  - LockServerUnavailableError     the lock server gave no answer in time
  - LedgerUnavailableError         the ledger's database is not available
    + CommitUnknownError           a COMMIT was sent, and its outcome is unknown

Errors have `key` and `fence` if these are known, chain the driver's exception as their cause, and
say what to do next. They never contain a password or a value marked `|hash`.

All derive from `Exception`, even those that end a body, because a `BaseException` blocks Celery's
thread pool.
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
    "LockNotOwnedError",
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
    "WorkFailedError",
    "WorkRevokedError",
    "WorkStillDeadError",
]


class TaskguardError(Exception):
    """The root of all of taskguard's errors.

    Attributes:
        key: the keys concerned, joined with ", "; None if there are none.
        fence: the fencing token concerned; None if there is none.
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
    """The program or its settings are wrong. Raised as early as possible."""


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
    """A package is missing. The message names the extra that installs it.

    `except ImportError` around `import taskguard_celery` catches it as well.
    """

    __str__ = Exception.__str__  # ImportError.__str__ ignores a change of `args`


class CommandTargetError(ConfigurationError):
    """A command got the name of an app, or a URL, that does not exist."""


class LedgerSchemaError(ConfigurationError):
    """The ledger's tables do not exist, or have another version than this library needs.

    Attributes:
        problem: the problem, without the command that fixes it.
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
    """A call is too large to be stored with its work in the database.

    `enqueue()` raises it. A delivery with `recoverable=True` raises it before it claims anything.
    A retry does not help.
    """


class AlreadyEnqueuedError(TaskguardError):
    """The same work is waiting or in progress. Nothing was written. Raised by `enqueue()`.

    Attributes:
        message_id: the ledger's id of the message that runs it or will run it.
        begun: whether the work is in progress.
    """

    def __init__(
        self, message: str, *, key: str | None = None, message_id: str = "", begun: bool = False
    ) -> None:
        super().__init__(message, key=key)
        self.message_id = message_id
        self.begun = begun


class KeyBusyError(TaskguardError):
    """Another delivery or lock holds the key. Nothing was run. Call again later.

    Attributes:
        retry_after_s: seconds until the holder's lease would end; None if unknown.
        owner: the holder, as `TaskGuard.release(owner=)` takes it; None if unknown.
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
    """`max_waiting` messages wait for the key already, so this message was not stored.

    Nothing was run, and nothing will run later. Send the message again if you need it.
    """


class KeyAlreadyHeldError(TaskguardError):
    """A guarded body requested a key that it holds itself, and would wait forever."""


class LeaseLostError(TaskguardError):
    """The lease can no longer be trusted. Stop: another worker may hold the key."""


class LockNotOwnedError(TaskguardError):
    """`release()` or `extend()` of a lock that the caller does not hold. Nothing was changed."""


class StaleTokenError(TaskguardError):
    """The database refused the commit because the key or the work has a newer holder.

    Nothing of the transaction was written. A fenced write outside of the ledger raises it, too, if
    a newer holder has written before.

    Attributes:
        newer_fence: the newer holder's fence; None if the database did not report it.
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
    """`guard.fenced()` found no row that matches the statement. Nothing was written."""


class TransactionRetryError(TaskguardError):
    """A deadlock, a serialization failure or a COMMIT that was rolled back: run the body again.

    taskguard runs it again a limited number of times, under the same lease.
    """


class TransactionFailedError(TaskguardError):
    """The database ended the body's transaction in four deliveries in a row. The work is FAILED."""


class TransactionUsageError(TaskguardError):
    """`guard.transaction()` or `guard.checkpoint()` was used at a wrong time."""


class RowChangedError(TransactionUsageError):
    """The body changed the state or fence of its own row (`row=`). Nothing was written."""


class TransactionAbandonedError(TransactionUsageError):
    """The body caught the error that ended its transaction, and returned as if it had committed."""


class BodyCancelledError(TaskguardError):
    """The body raised asyncio's CancelledError, which is the cause. The work is FAILED.

    taskguard raises this error instead, because a CancelledError is no Exception and would end the
    queue's worker.
    """


class ResultError(TaskguardError, TypeError):
    """A result or progress value is not JSON or exceeds the size limit."""


class MessageTooOldError(TaskguardError):
    """The message is older than `retention_s`, and its work has no record. The work is not run.

    It may have been done before, and its record purged. This error is also raised if an RQ job
    waited for its key for longer than its `ttl`, and a worker without taskguard got it.
    """


class FingerprintMismatchError(TaskguardError):
    """Another message for this work had other arguments. Nothing was run or answered."""


class RowMissingError(TaskguardError):
    """The row that `row=` names does not exist. Nothing was run."""


class RowIneligibleError(TaskguardError):
    """The row is in a state from which this task does not start. Nothing was run.

    Attributes:
        state: the row's state.
    """

    def __init__(self, message: str, *, key: str | None = None, state: Any = None) -> None:
        super().__init__(message, key=key)
        self.state = state


class StoredCallError(TaskguardError):
    """A stored call cannot be sent: it cannot be read, or no longer fits its task."""


class CallWithdrawnError(StoredCallError):
    """A stored call must not be sent: its message was cancelled or deleted in its queue."""


class WorkDeadError(TaskguardError):
    """This work's holders vanished `max_crashes` times. It does not run again.

    Attributes:
        crashes: how many holders vanished.
    """

    def __init__(self, message: str, *, key: str | None = None, crashes: int = 0) -> None:
        super().__init__(message, key=key)
        self.crashes = crashes


class WorkStillDeadError(WorkDeadError):
    """The work was DEAD before this delivery. This is no new failure."""


class WorkFailedError(TaskguardError):
    """The run of this message failed, and has no retry left (`once_per="run"`). Nothing was run.

    No queue retries it. A new message begins the next run.
    """


class WorkRevokedError(TaskguardError):
    """This work was revoked. It does not run again."""


class SupersededError(TaskguardError):
    """A newer message of its task and key replaced this one (`busy="latest"`, `"supersede"`).

    Nothing of it was committed, and it never runs. Celery's callers see REVOKED instead. Callers
    of RQ see CANCELED if the worker is taskguard's.
    """


class LockServerUnavailableError(TaskguardError):
    """The lock server gave no answer in time. With a ledger, tasks run without it."""


class LedgerUnavailableError(TaskguardError):
    """The ledger's database is not available. Nothing runs without it."""


class CommitUnknownError(LedgerUnavailableError):
    """A COMMIT was sent, the connection broke, and the outcome is unknown."""
