"""Enqueueing as part of the user's transaction, and the sweep as a job.

    with Session(engine) as session, session.begin():
        session.add(invoice)
        enqueue(queue, charge, (invoice.id,), session=session)

Guarantees: the job is put into its queue if the transaction commits, and not if it is rolled back;
what a crash in between left out, a sweep puts in.
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
    MessageRef,
    Standing,
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

# A delayed job is RQ's scheduler's; where none runs, a sweep's, so long after its time.
_DELAYED_AGAIN_AFTER_S = 60.0


class Enqueued:
    """A job that is put into its queue once its transaction has committed.

    Attributes:
        job: the job; its record is in Redis from then on. With "attached" the first one.
        outcome: "sent", which it is as soon as its transaction commits; "stored": it was not sent,
            and waits for `send()` or a sweep; "attached" or "replaced".
    """

    def __init__(self, job: Job, placed: Placed) -> None:
        self.job = job
        self._placed = placed

    @property
    def outcome(self) -> OutcomeOfEnqueue:
        """As the enqueue, and what was sent since, have made it."""
        return self._placed.outcome

    def send(self) -> None:
        """Enqueue the job now. For a plain Connection: call it after the COMMIT.

        Does nothing if the transaction was rolled back, unless the work is known from before; asked
        again, the duplicate is harmless. Does nothing where it was attached to another job.
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
    """Enqueue a guarded job in the transaction of `session`, or in one of its own.

    The work is written to the ledger as NEW, with the job. On an ORM Session, or on `guard.db` in a
    guarded body, the job is enqueued as soon as that has committed; on a Connection of your own, by
    `.send()` on what is returned, or by the next sweep.

    Args:
        queue: the RQ queue that the job goes into.
        function: a function that is guarded.
        args: its positional arguments.
        kwargs: its keyword arguments.
        session: the transaction that the job is part of.
        duplicate: what to do if the same work (`once_per`) is waiting or in progress.
        delay_s: in how many seconds the job runs.
        options: options of `Queue.create_job()`. docs/reference/options.md has each option.

    Raises:
        ConfigurationError: the function is not guarded, there is no ledger, or an option cannot be.
        AlreadyEnqueuedError: as `duplicate` says; nothing is written.
        FingerprintMismatchError: "attach", and the first job has other arguments.
        KeyArgumentError: an argument cannot be part of a key.
    """
    compiled = guarded_function_of(function)
    if compiled is None:
        raise errors.ConfigurationError(
            f"{function!r} is not guarded, so its duplicates would run. Decorate it with "
            "@guarded_job."
        )
    if options.get("depends_on"):
        raise errors.ConfigurationError("enqueue() sends at once: depends_on does not fit.")
    if options.get("ttl") is not None:
        raise errors.ConfigurationError(
            "A ttl does not fit: what is enqueued is put into its queue until somebody runs it. "
            "Let the body look how old its work is."
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
        in_place_of=replacing.in_place_of,
        again_after_s=again_after_s,
    )
    if placed.outcome == "skipped":
        return None
    if placed.outcome == "attached" and placed.first is not None:
        job = job_in(placed.first, sender)
    return Enqueued(job, placed)


class _Replacing:
    """Sends a job, and then the one that it has replaced, if that waits for its key.

    That one comes and ends, as one that stood in its queue does: nobody else would send it.
    """

    def __init__(self, sender: RQSender, delivery: Delivery) -> None:
        self._sender = sender
        self._delivery = delivery
        self._older: str | None = None

    def in_place_of(self, standing: Standing) -> Delivery:
        self._older = standing.call
        return self._delivery

    def __call__(self, call: dict[str, Any], message: MessageRef) -> None:
        self._sender.send_first(call, message)
        if self._older is not None:
            self._sender.send_waiting(json.loads(self._older))


def sweep(connection: Redis | None = None, **options: Any) -> Swept:
    """Enqueue what is overdue, once; can itself be a job, of a scheduler or of `rq cron`.

    Args:
        connection: the Redis of the queues; by default that of the job at hand.
        options: see `taskguard.integration.Sweeper`.

    Raises:
        KeyBusyError: another sweep is running.
        ConfigurationError: there is no connection.
    """
    if connection is None:
        job = get_current_job()
        if job is None:
            raise errors.ConfigurationError("sweep() outside a job needs the queues' Redis.")
        connection = job.connection
    return Sweeper(runtime(), {NAME: RQSender(connection)}, **options).sweep()


def open_queue(target: str) -> tuple[TaskGuard, RQSender]:
    """For `taskguard sweep --rq redis://…`: locks and ledger come from the environment."""
    connection = connection_at(target)
    return runtime(), RQSender(connection)


def connection_at(target: str) -> Redis:
    """A client of the queues' Redis. Raises CommandTargetError for what is no URL of one."""
    try:
        return Redis.from_url(target)
    except ValueError:
        # Not chained: what it quotes may be a piece of the password.
        raise errors.CommandTargetError(
            "--rq: the URL of the queues' Redis cannot be read; it looks like "
            "redis://[user:password@]host[:port][/database]. Characters such as @ / # ? : in a "
            "password are percent-encoded."
        ) from None
