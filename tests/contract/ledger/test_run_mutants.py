"""Ledgers that forget a rule of runs: the tests of runs detect each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from contract.ledger import test_runs as runs_tests
from contract.ledger.conftest import making_books
from contract.ledger.test_mutants import Mutation, catch
from contract.ledger.test_runs import Runs

from taskguard.ledger import runs
from taskguard.ledger.operations import changes
from taskguard.ledger.parts import messages
from taskguard.ledger.parts.endings import SqlEndings
from taskguard.ledger.statements import runs as claiming
from taskguard.model.runs import Resolved, resolve
from taskguard.model.states import State

pytestmark = pytest.mark.once

Mutate = Callable[[Mutation], None]


def unread_memberships(made: Mutation) -> None:
    """Nobody looks up which run a message has joined."""
    made.replace(runs, "_runs_of_message", lambda *_, **__: (None, []))


def unwritten_memberships(made: Mutation) -> None:
    """A message joins no run."""
    made.replace(runs, "join", lambda *_, **__: None)


def members_open_runs(made: Mutation) -> None:
    """A member of an ended run begins the next one."""

    def of_open(new: str, **seen: Any) -> Resolved:
        open_run = seen["open_run"]
        ended = open_run is None or open_run.ended
        found = resolve(new, **seen)
        return Resolved(f"{new}!", opens=True, joins=True) if ended and not found.opens else found

    made.replace(runs, "resolve", of_open)


def followers_do_not_wait(made: Mutation) -> None:
    """The run that follows begins while the open one works."""

    def at_once(new: str, **seen: Any) -> Resolved:
        found = resolve(new, **seen)
        return replace(found, waits=False, opens=True) if found.waits else found

    made.replace(runs, "resolve", at_once)


def followers_are_forgotten(made: Mutation) -> None:
    """A new message opens a run of its own, although a run follows."""
    made.replace(runs, "resolve", lambda new, **seen: resolve(new, **{**seen, "follows": None}))


def runs_never_end(made: Mutation) -> None:
    """An ended run is taken for an open one."""
    made.replace(runs, "_has_ended", lambda row: False)


def runs_never_lapse(made: Mutation) -> None:
    """A run that nothing continues keeps the one that follows waiting."""
    known = runs._open_run

    def lasting(*args: Any) -> Any:
        found = known(*args)
        return None if found is None else replace(found, lapsed=False)

    made.replace(runs, "_open_run", lasting)


def failures_end_runs(made: Mutation) -> None:
    """A failure ends the run, although its retry is promised."""
    made.replace(SqlEndings, "_awaited", lambda self, claim, again_in_s: (2, 0))


def failures_end_no_runs(made: Mutation) -> None:
    """A failure without a retry leaves the run open."""
    made.replace(SqlEndings, "_awaited", lambda self, claim, again_in_s: (0, 0))


def any_message_runs_a_stored_call(made: Mutation) -> None:
    """A message with older arguments runs in the place of the newest call."""
    made.replace(claiming, "awaits_another", lambda *_: False)


def a_call_that_was_given_up_is_awaited(made: Mutation) -> None:
    """A run waits for a message that nothing sends."""
    made.replace(claiming, "will_be_sent", lambda row: row.call is not None)


def any_member_revokes(made: Mutation) -> None:
    """Each member ends the run if it is revoked."""
    made.replace(messages, "_may_end", lambda *_: True)


def a_requeue_looks_at_no_later_run(made: Mutation) -> None:
    """A failed run is resumed while a later one is open."""
    made.replace(changes.runs, "later_run", lambda *_: None)


def purged_runs_run_again(made: Mutation) -> None:
    """A member of a purged run opens it anew."""
    made.replace(runs, "_of_member", lambda *_: None)


def former_records_are_unread(made: Mutation) -> None:
    """A record from before runs answers no message."""
    made.replace(runs, "_names", lambda *_: False)


def the_message_that_resumes_is_not_named(made: Mutation) -> None:
    """The stored call goes on to name the older message."""
    made.replace(runs.Run, "name_in_call", lambda *_: None)


def expired_retries_end_no_runs(made: Mutation) -> None:
    """A run goes on although its message has expired."""
    known = messages.waits_for

    def waits_for(row: Any, *args: Any) -> bool:
        return row.state != State.FAILED and known(row, *args)

    made.replace(messages, "waits_for", waits_for)


def the_sweep_is_not_put_off(made: Mutation) -> None:
    """A sweep sends copies of a message that waits for its run."""
    made.replace(runs.Run, "put_off", lambda *_, **__: None)


MUTANTS: list[tuple[Mutate, Callable[[Runs], None]]] = [
    (
        unread_memberships,
        runs_tests.test_a_redelivery_of_an_ended_run_is_answered_while_a_later_run_works,
    ),
    (unwritten_memberships, runs_tests.test_a_message_that_is_deferred_joins_the_open_run),
    (unwritten_memberships, runs_tests.test_an_enqueued_message_joins_the_open_run),
    (members_open_runs, runs_tests.test_members_of_a_failed_run_read_its_error),
    (followers_do_not_wait, runs_tests.test_replace_while_a_body_runs_stores_the_run_that_follows),
    (
        followers_are_forgotten,
        runs_tests.test_another_message_does_not_run_with_older_arguments,
    ),
    (
        runs_never_end,
        runs_tests.test_the_first_claim_opens_a_run_and_the_next_message_after_its_end_another,
    ),
    (runs_never_lapse, runs_tests.test_the_run_that_follows_ends_a_lapsed_one),
    (failures_end_runs, runs_tests.test_a_promised_retry_keeps_the_run_open),
    (failures_end_no_runs, runs_tests.test_members_of_a_failed_run_read_its_error),
    (
        any_message_runs_a_stored_call,
        runs_tests.test_another_message_does_not_run_with_older_arguments,
    ),
    (
        a_call_that_was_given_up_is_awaited,
        runs_tests.test_a_run_whose_call_is_sent_no_more_runs_by_any_message,
    ),
    (any_member_revokes, runs_tests.test_revoking_another_member_ends_that_member_alone),
    (any_member_revokes, runs_tests.test_revoking_a_replaced_message_does_not_end_the_newer_call),
    (
        a_requeue_looks_at_no_later_run,
        runs_tests.test_an_operator_resumes_a_failed_run_unless_a_later_one_is_open,
    ),
    (purged_runs_run_again, runs_tests.test_a_member_of_a_purged_run_is_too_old),
    (
        former_records_are_unread,
        runs_tests.test_a_record_of_the_former_option_answers_the_message_that_it_names,
    ),
    (
        the_message_that_resumes_is_not_named,
        runs_tests.test_an_enqueued_run_that_failed_is_resumed_by_its_id,
    ),
    (expired_retries_end_no_runs, runs_tests.test_a_retry_that_expires_ends_the_run),
    (the_sweep_is_not_put_off, runs_tests.test_a_sweep_leaves_the_message_that_waits_to_its_queue),
]


@pytest.mark.parametrize(("mutate", "test"), MUTANTS)
def test_a_ledger_that_forgets_a_rule_does_not_pass(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Mutate,
    test: Callable[[Runs], None],
) -> None:
    """The test of the rule fails. SQLite is enough: all databases take the same steps."""
    with making_books(request, "sqlite") as make:
        book = make()
        made = Mutation(monkeypatch, book.kind)
        mutate(made)
        catch(book, made, lambda each: test(Runs(each)))


@pytest.mark.parametrize(
    ("home", "name", "test"),
    [
        (
            runs.Run,
            "has_just_ended",
            functools.partial(
                runs_tests.test_a_run_that_ends_within_an_enqueue_takes_no_message,
                ends="open",
                how="replace",
            ),
        ),
        (
            claiming,
            "_ended_meanwhile",
            functools.partial(
                runs_tests.test_a_run_that_ends_within_a_claim_does_not_answer_a_new_message,
                step="claim",
            ),
        ),
    ],
)
def test_an_end_that_is_overlooked_does_not_pass(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    test: Callable[..., None],
) -> None:
    """The open run ends between two statements of one transaction. On SQLite it cannot."""
    with making_books(request, "postgresql") as make:
        book = make()
        made = Mutation(monkeypatch, book.kind)
        made.replace(home, name, lambda *_: False)
        catch(book, made, lambda each: test(Runs(each), monkeypatch))
