"""Enqueue a job as part of the user's transaction, and sweep the outbox.

    with Session(engine) as session, session.begin():
        session.add(invoice)
        enqueue(queue, charge, (invoice.id,), session=session)

Guarantees: taskguard enqueues the job if the transaction commits, and not if it is rolled back. If
the process dies after the COMMIT, a sweep enqueues the job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from redis import Redis
from rq import Queue, get_current_job
from rq.job import Job

from taskguard import errors
from taskguard.integration import (
    NOT_BEFORE,
    Delivery,
    Existing,
    MessageRef,
    Sweeper,
    check_delay,
    enqueue_in,
    not_before_s,
)
from taskguard_rq.calls import NAME, RQSender, call_of, job_in
from taskguard_rq.recognition import guarded_function_of, message_id_of, message_of
from taskguard_rq.runtime import runtime

if TYPE_CHECKING:
    from taskguard import TaskGuard
    from taskguard.integration import Duplicate, OutcomeOfEnqueue, Placed, Swept
    from taskguard_rq.options import JobOptions

__all__ = ["Enqueued", "connection_at", "enqueue", "open_queue", "sweep"]

# RQ's scheduler enqueues a delayed job. If none runs, a sweep does, this long after the due time.
_DELAYED_AGAIN_AFTER_S = 60.0


class Enqueued:
    """A job that taskguard enqueues after its transaction has committed.

    Attributes:
        job: the job. Redis has its record once it is enqueued. With "attached", the first job.
        outcome: "sent": enqueued, or will be as soon as the transaction commits. "stored": waits
            for `send()` or a sweep. "attached" or "replaced": as `duplicate=` says.
    """

    def __init__(self, job: Job, placed: Placed) -> None:
        self.job = job
        self._placed = placed

    @property
    def outcome(self) -> OutcomeOfEnqueue:
        """The current outcome. "stored" becomes "sent" once the job is enqueued."""
        return self._placed.outcome

    def send(self) -> None:
        """Enqueue the job now. With a plain Connection, call this after the COMMIT.

        Does nothing if the job was attached to another one. Does nothing if the transaction was
        rolled back, unless the ledger knew the work before: then it enqueues a harmless duplicate.

        Raises:
            RedisError: Redis did not confirm that it stored the job.
        """
        self._placed()


@overload
def enqueue(
    queue: Queue,
    function: Callable[..., Any],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    session: Any = ...,
    duplicate: Literal["answer", "attach", "replace", "raise"] = ...,
    delay_s: float | None = ...,
    **options: Unpack[JobOptions],
) -> Enqueued: ...


@overload
def enqueue(
    queue: Queue,
    function: Callable[..., Any],
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    session: Any = ...,
    duplicate: Literal["skip"],
    delay_s: float | None = ...,
    **options: Unpack[JobOptions],
) -> Enqueued | None: ...


def enqueue(
    queue: Queue,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    session: Any = None,
    duplicate: Duplicate = "answer",
    delay_s: float | None = None,
    **options: Unpack[JobOptions],
) -> Enqueued | None:
    """Enqueue a guarded job in the transaction of `session`, or in a transaction of its own.

    taskguard writes the work and the job to the ledger as NEW. On an ORM Session, or on `guard.db`
    in a guarded body, it enqueues the job right after the COMMIT. On a Connection of your own, call
    `.send()` on the returned object after the COMMIT, or leave the job to the next sweep.

    Args:
        queue: the RQ queue for the job.
        function: a guarded function.
        args: its positional arguments. Default: none.
        kwargs: its keyword arguments. Default: none.
        session: a Session, Connection or `guard.db` whose transaction the job is part of. Default:
            a transaction of its own.
        duplicate: what to do if the same work (`once_per`) is waiting or in progress. Default:
            "answer".
        delay_s: the delay before the job runs, in seconds. Default: None, no delay.
        options: options of `Queue.create_job()`. docs/reference/options-enqueue.md describes each.

    Returns:
        The enqueued job, or None if `duplicate="skip"` skipped it.

    Raises:
        ConfigurationError: the function is not guarded, there is no ledger, or an option is not
            possible.
        AlreadyEnqueuedError: with `duplicate="raise"`, the work is on record. Nothing is written.
        FingerprintMismatchError: with `duplicate="attach"`, the first job has other arguments.
        KeyArgumentError: an argument cannot be part of a key.
    """
    compiled = guarded_function_of(function)
    if compiled is None:
        raise errors.ConfigurationError(
            f"enqueue() cannot send {function!r}: it is not guarded, so its duplicates would run. "
            "Decorate it with @guarded_job."
        )
    if options.get("depends_on"):
        raise errors.ConfigurationError(
            "enqueue() does not accept depends_on=: it sends the job right after the COMMIT. "
            "Remove depends_on=, or enqueue this job at the end of the job that it depends on."
        )
    if options.get("ttl") is not None:
        raise errors.ConfigurationError(
            "enqueue() does not accept ttl=: taskguard enqueues the job again until a worker runs "
            "it. Remove ttl=, and let the body check how old its work is."
        )
    check_delay(delay_s)
    job = queue.create_job(function, args=tuple(args), kwargs=dict(kwargs or {}), **options)
    job.origin = queue.name
    message = message_of(job, message_id=message_id_of(function))
    call, here = call_of(job), runtime()
    if delay_s:
        call[NOT_BEFORE] = not_before_s(here, delay_s)
    delivery = compiled.delivery(
        tuple(args), kwargs or {}, namespace=here.namespace, message=message, call=call
    )
    sender = RQSender(queue.connection, serializer=queue.serializer, is_async=queue.is_async)
    replacing = _Replacing(sender, delivery)
    again_after_s = _DELAYED_AGAIN_AFTER_S if delay_s else None
    placed = enqueue_in(
        session,
        here,
        delivery,
        replacing,
        duplicate=duplicate,
        replacement_of=replacing.replacement_of,
        again_after_s=again_after_s,
    )
    if placed.outcome == "skipped":
        return None
    if placed.outcome == "attached" and placed.first is not None:
        job = job_in(placed.first, sender)
    return Enqueued(job, placed)


class _Replacing:
    """Sends a job, and then the job that it has replaced, if that one waits for its key.

    The replaced job is delivered, finds that it was replaced, and ends. Nothing else sends it.
    """

    def __init__(self, sender: RQSender, delivery: Delivery) -> None:
        self._sender = sender
        self._delivery = delivery
        self._older: str | None = None

    def replacement_of(self, existing: Existing) -> Delivery:
        self._older = existing.call
        return self._delivery

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._sender.send_first(call, message)
        if self._older is not None:
            self._sender.send_waiting(json.loads(self._older))


def sweep(connection: Redis | None = None, **options: Any) -> Swept:
    """Enqueue overdue jobs of the outbox, once. This can itself be a job of a scheduler.

    Args:
        connection: the Redis of the queues. Default: the connection of the running job.
        options: options of `taskguard.integration.Sweeper`.

    Returns:
        The counts of the sweep.

    Raises:
        KeyBusyError: another sweep is running.
        ConfigurationError: there is no connection, or a setting is wrong.
    """
    if connection is None:
        job = get_current_job()
        if job is None:
            raise errors.ConfigurationError(
                "sweep() needs the queues' Redis: no job is running. Pass connection=."
            )
        connection = job.connection
    return Sweeper(runtime(), {NAME: RQSender(connection)}, **options).sweep()


def open_queue(target: str) -> tuple[TaskGuard, RQSender]:
    """Open what `taskguard sweep --rq redis://…` needs. Locks and ledger: from the environment."""
    opened, sender = runtime(), RQSender(connection_at(target))
    opened.senders[NAME] = sender.hand_off  # for an operator's changes
    return opened, sender


def connection_at(target: str) -> Redis:
    """Return a client of the queues' Redis. Raises CommandTargetError if the URL is malformed."""
    try:
        return Redis.from_url(target)
    except ValueError:
        # Not chained: the original error may quote a part of the password.
        raise errors.CommandTargetError(
            "--rq: the URL of the queues' Redis is malformed. Write "
            "redis://[user:password@]host[:port][/database], and percent-encode characters such as "
            "@ / # ? : in a password."
        ) from None
