"""`tg.leader("beat")`: one of several processes works, and another continues if it dies.

    leader = tg.leader("beat")
    leader.run(work)  # work(leadership) runs while this process leads

A leader is the holder of a lease, whose key is the leader's name. The other processes wait for it.

Guarantees: the work runs only while this process holds the lease. Once the lease is lost or given
up, the work is notified (`leadership.lost`) and, with `on_lost="interrupt"`, interrupted. After
that `run()` waits for its turn again. If a leader dies, the next one leads within `ttl_s` and a
second. If it steps down, the next one leads at once, because the lease ends after the work has
ended. An error of the work ends its leadership and leaves `run()`. A server that is down for a time
does not.

Does not guarantee that two never work at the same time. A process that was frozen for longer than
its lease goes on until the interrupt arrives (after the C call that it is in), or until it calls
`leadership.check()`. Its fence is lower than that of the next leader, so its writes can be refused.

Read next: `run/locking.py` (`hold()`), `run/watchdog.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from taskguard.errors import (
    KeyBusyError,
    LeaseLostError,
    LedgerSchemaError,
    LedgerUnavailableError,
    LockServerUnavailableError,
    StaleTokenError,
    TransactionRetryError,
)
from taskguard.guarded import prefix_of, work_id
from taskguard.keys import finish_key
from taskguard.model.claims import LEADER_TASK
from taskguard.model.delivery import Delivery, MessageRef
from taskguard.model.policy import MOST_ROWS, make_policy

if TYPE_CHECKING:
    from taskguard.model.lease import Lease
    from taskguard.run.attempt import Attempt
    from taskguard.run.runner import Runner
    from taskguard.run.tracked import TrackedLease

__all__ = ["Leader", "Leadership"]

logger = logging.getLogger("taskguard")

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")

# How often a candidate checks whether it should step down.
_CAMPAIGN_S = 1.0
_PAUSE_S = 0.5
_AWAY = (
    LedgerUnavailableError,
    LedgerSchemaError,
    LockServerUnavailableError,
    TransactionRetryError,
)


class Leadership:
    """One term of a leader. Made by `Leader.run()`. Other threads may use it as well.

    Attributes:
        lost: an Event that is set when the work must stop: the lease is lost, or the leader steps
            down.
    """

    def __init__(
        self,
        name: str,
        attempt: Attempt,
        tracked: TrackedLease,
        *,
        interrupting: bool,
        stepping_down: threading.Event,
    ) -> None:
        self._name = name
        self._attempt = attempt
        self._tracked = tracked
        self._interrupting = interrupting
        self._stepping_down = stepping_down
        self._thread = threading.get_ident()
        self.lost = tracked.lease.lost

    def __repr__(self) -> str:
        return f"<Leadership {self._name} fence={self.fence}>"

    @property
    def _lease(self) -> Lease:
        return self._tracked.lease

    @property
    def fence(self) -> int:
        """The fencing token. Each leader's is higher than those of all leaders before it."""
        return self._lease.fence

    @property
    def remaining_s(self) -> float:
        """Seconds for which no other process leads, unless renewed. If 0.0, the work must stop."""
        return 0.0 if self.lost.is_set() else self._lease.remaining_s

    def check(self) -> None:
        """Raise LeaseLostError if the work must stop."""
        self._lease.check()
        if self.lost.is_set():
            raise self._stepped_down()

    @property
    def memory(self) -> Any:
        """The value that a leader last stored by `remember()`. None if none, or with locks only."""
        return self._attempt.progress.value

    def remember(self, value: Any) -> bool:
        """Store a JSON value in the ledger for the next leader. Returns False with locks only.

        Raises:
            StaleTokenError: another process has led since. Nothing was stored.
            LedgerUnavailableError, TransactionRetryError: the database could not store it now.
            ResultError: the value is not JSON, or too long.
        """
        if self._attempt.claim is None:
            return False
        if not self._attempt.note(value):
            raise StaleTokenError(
                f"Another process has led {self._name} since fence {self.fence}, so nothing was "
                "stored. Stop the work: run() waits for its next turn.",
                key=self._lease.key,
                fence=self.fence,
            )
        return True

    def step_down(self) -> None:
        """End the work, then the lease; `Leader.run()` returns None.

        In the thread of the work itself (also in a handler of a signal) and with
        `on_lost="interrupt"` this raises LeaseLostError, which ends the work.
        """
        self._stepping_down.set()
        self.lost.set()
        if self._thread != threading.get_ident():
            self._tracked.interrupt()
        elif self._interrupting:
            raise self._stepped_down()

    def call(self, function: Callable[[Leadership], _Value]) -> _Value:
        """Run the work here, where it may be interrupted."""
        self._tracked.enter_body()
        try:
            return function(self)
        finally:
            self._tracked.leave_body()

    @property
    def has_ended(self) -> bool:
        """Whether the work was to stop, or is a forked child, whose parent leads."""
        return self.lost.is_set() or self._lease.is_lost

    def _stepped_down(self) -> LeaseLostError:
        return LeaseLostError(
            f"The leader {self._name} has stepped down: its work is to stop here.",
            key=self._lease.key,
            fence=self.fence or None,
        )


class _Term(Generic[_Value]):
    """How a leader's work ended: by a value, by an error of its own, or because it was to stop."""

    def __init__(self) -> None:
        self.value: _Value | None = None
        self.error: Exception | None = None
        self.stopped = True


class Runtime(Protocol):
    """The members of a `TaskGuard` that a leader uses. Tests may replace the runner meanwhile."""

    @property
    def namespace(self) -> str:
        """Return what the application's keys begin with."""
        ...

    @property
    def runner(self) -> Runner:
        """Return the runner that holds the lease."""
        ...


class Leader:
    """A candidate for the lease that makes one process the leader. Made by `TaskGuard.leader()`."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        *,
        ttl_s: float,
        on_lost: str,
        follow: Callable[[threading.Event], None] | None = None,
    ) -> None:
        """As `TaskGuard.leader()`. `follow` waits in place of a campaign, until it is to ask again.

        It is given an event that is set when this candidate steps down.
        """
        options: dict[str, Any] = {"ttl_s": ttl_s, "on_lost": on_lost}
        if follow is None:
            options["wait_s"] = _CAMPAIGN_S
        self._follow = follow
        self._runtime = runtime
        self._name = name
        self._policy = make_policy(
            options,
            task="leader()",
            busy="wait" if follow is None else "raise",
            max_crashes=MOST_ROWS,
        )
        self._stepping_down = threading.Event()
        self._leadership: Leadership | None = None
        self._said_away = False

    def run(self, work: Callable[[Leadership], _Result]) -> _Result | None:
        """Run `work(leadership)` when this process leads, and again after each loss. Blocks.

        Returns what the work returns, or None after `step_down()`. Raises what the work raises. If
        the work returns after its lease was lost, it is run again.
        """
        try:
            while not self._stepping_down.is_set():
                term = self._campaign(work)
                if term.error is not None:
                    raise term.error
                if not term.stopped:
                    return term.value
            return None
        finally:
            self._stepping_down.clear()

    def step_down(self) -> None:
        """Let `run()` end, and another process lead. Any thread may call this."""
        self._stepping_down.set()
        leadership = self._leadership
        if leadership is not None:
            leadership.step_down()

    @property
    def leadership(self) -> Leadership | None:
        """The present term. None if this process does not lead."""
        leadership = self._leadership
        return None if leadership is None or not leadership.remaining_s else leadership

    def _delivery(self) -> Delivery:
        prefix = prefix_of(self._runtime.namespace)
        key = prefix + finish_key(f"leader:{self._name}")
        return Delivery(
            keys=(key,),
            work=work_id(LEADER_TASK, key),
            task=LEADER_TASK,
            message=MessageRef(""),
            policy=self._policy,
            is_lock=True,
        )

    def _campaign(self, work: Callable[[Leadership], _Result]) -> _Term[_Result]:
        """Ask for the lease for a while; if it is granted, lead until the end of the work."""
        runner = self._runtime.runner
        next_s = time.monotonic() + _CAMPAIGN_S
        term: _Term[_Result] = _Term()
        try:
            with runner.locking.hold(self._delivery()) as holding:
                self._said_away = False
                self._lead(term, holding.attempt, holding.tracked, work)
        except KeyBusyError:
            self._said_away = False
            if self._follow is not None:
                self._follow(self._stepping_down)
            # It is said at once where an operator set the record to DONE.
            self._stepping_down.wait(max(0.0, next_s - time.monotonic()))
        except LeaseLostError:
            term.stopped = True  # the event `lost` has said why
        except _AWAY as error:
            if term.error is None:
                self._say_away(error)
                self._stepping_down.wait(_PAUSE_S)
        return term

    def _lead(
        self,
        term: _Term[_Result],
        attempt: Attempt,
        tracked: TrackedLease,
        work: Callable[[Leadership], _Result],
    ) -> None:
        """Run the work for one term; its errors come after the lease has been given back."""
        interrupting = self._policy.interrupts
        leadership = Leadership(
            self._name,
            attempt,
            tracked,
            interrupting=interrupting,
            stepping_down=self._stepping_down,
        )
        self._leadership = leadership
        logger.info("leader %s: this process leads, fence %d", self._name, leadership.fence)
        try:
            # A call of step_down() from here on finds the leadership.
            if self._stepping_down.is_set():
                return
            term.value = leadership.call(work)
            term.stopped = leadership.has_ended
        except LeaseLostError as error:
            if error.key != attempt.key:
                term.error = error  # of a lock or a guarded function that the work called
        except Exception as error:  # noqa: BLE001  # raised by run()
            term.error = error
        finally:
            self._leadership = None
            logger.info("leader %s: this process leads no more", self._name)
        if tracked.lease.is_parents:
            tracked.lease.check()  # raises: a child that the work forked leads nothing

    def _say_away(self, error: Exception) -> None:
        """Once for as long as it lasts: a candidate asks every second."""
        if not self._said_away:
            logger.warning(
                "leader %s: no server answers which process leads: %s", self._name, error
            )
        self._said_away = True
