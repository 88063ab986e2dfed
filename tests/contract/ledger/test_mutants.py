"""Ledgers with a check left out: the contract suite detects each of them, on every database.

A suite that passes shows something only if it fails when it should. A mutant counts as caught only
if an assertion failed and the changed part took part: its function was called, or the server
answered its statement. A mutant that merely breaks a statement is the mutant's own mistake, and
fails here.
"""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa
from contract.ledger import test_claims as claims
from contract.ledger import test_combined as combined
from contract.ledger import test_endings as endings
from contract.ledger import test_expiry as expiry
from contract.ledger import test_formerly as formerly
from contract.ledger import test_lines as in_line
from contract.ledger import test_newest as newest_wins
from contract.ledger import test_unique as uniqueness
from contract.ledger.conftest import making_books

from taskguard.errors import LedgerSchemaError, LineFullError, StaleTokenError
from taskguard.ledger import decisions as answers
from taskguard.ledger import records, retention, unique
from taskguard.ledger.connections.database import Database
from taskguard.ledger.lines import kept, newest, park, room, states, turn
from taskguard.ledger.lines import postgresql as lines
from taskguard.ledger.messages import raise_deferrals
from taskguard.ledger.parts import endings as ending_statements
from taskguard.ledger.parts import messages, outbox
from taskguard.ledger.parts.endings import SqlEndings
from taskguard.ledger.parts.outbox import SqlOutbox
from taskguard.ledger.statements import claims as portable_claims
from taskguard.ledger.statements import gates, mariadb, portable, postgresql, renewals
from taskguard.ledger.tables import KEYS, WORK
from taskguard.ledger.transactions import core as transaction
from taskguard.model.claims import Claim, Claimed
from taskguard.model.states import Decision, State

pytestmark = pytest.mark.once

# Errors by which a test of the suite reports a mutant.
ASSERTIONS = (AssertionError, pytest.fail.Exception)


class Mutation:
    """Changes of functions and statements. `ran` has the names of those that took part."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str) -> None:
        self._patch = patch
        self._kind = kind
        self._statements: dict[str, str] = {}
        self.ran: set[str] = set()
        for name in ("ask", "ask_in", "ask_and_commit", "ask_apart"):
            patch.setattr(Database, name, self._noting(getattr(Database, name)))

    def replace(self, home: Any, name: str, function: Callable[..., Any], **options: Any) -> None:
        """Replace `home.name` by `function`."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.ran.add(name)
            return function(*args, **kwargs)

        self._patch.setattr(home, name, noted, **options)

    def edit(self, home: Any, name: str, *changes: tuple[str, str]) -> None:
        """Change a statement. It must contain each part."""
        text = getattr(home, name)
        for old, new in changes:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        self._patch.setattr(home, name, text)
        self._statements[text] = f"{home.__name__.rpartition('.')[2]}.{name}"

    def must_run(self) -> set[str]:
        """Require that one of these ran, for the mutant to count as caught on this kind of ledger.

        If the kind has one statement for it, which was changed, that one must run. Otherwise the
        failure would come from the steps below.
        """
        own = {name for name in self._statements.values() if name.startswith(f"{self._kind}.")}
        return own or self.ran

    def _noting(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def noted(database: Database, *args: Any, **kwargs: Any) -> Any:
            rows = ask(database, *args, **kwargs)
            # Count it after the call: a statement that the server refuses shows nothing.
            self.ran |= {name for text, name in self._statements.items() if text in args}
            return rows

        return functools.wraps(ask)(noted)


def without_fenced_steps(made: Mutation) -> None:
    """Checkpoints, and completions in steps, compare only the names of key and work."""
    for module in (transaction, ending_statements, renewals):
        made.replace(module, "claimed_by", lambda claim: WORK.c.id == claim.work)
    for module in (transaction, ending_statements):
        made.replace(module, "holding", lambda claim: KEYS.c.key.in_(claim.keys))
    made.replace(portable, "processed", lambda work, fence, owner: WORK.c.id == work)
    made.replace(portable, "of_claim", lambda: WORK.c.id == sa.bindparam("work"))
    made.replace(portable, "held", lambda keys, fence, owner: KEYS.c.key.in_(keys))


def without_fence_checks(made: Mutation) -> None:
    """Completions compare only the names of key and work."""
    without_fenced_steps(made)
    check = "fence = %(fence)s::bigint and {0}owner = %(owner)s::text"
    for name in ("_COMPLETE", "_COMPLETE_OR_FAIL"):
        made.edit(
            postgresql,
            name,
            (" and " + check.format(""), ""),
            (" and w.state = 'PROCESSING'\n        and w." + check.format("w."), ""),
        )
    check = "and fence = %(fence)s and owner = %(owner)s"
    work = f"and state = 'PROCESSING'\n            {check}"
    for name in ("_COMPLETE", "_COMPLETE_ALONE"):
        made.edit(mariadb, name, (work, ""), (check, ""))


def without_an_error(made: Mutation) -> None:
    """A completion that completes nothing is committed by the COMMIT in its message."""
    made.edit(postgresql, "_COMPLETE_OR_FAIL", ("not exists (select from finished)", "false"))


def without_leases_of_locks(made: Mutation) -> None:
    """Every claim of a key alone is granted, as if all leases had expired."""
    now_us = Database.now_us
    ahead_us = itertools.count(10**15, 10**15)
    made.replace(Database, "now_us", lambda self, db: now_us(self, db) + next(ahead_us))
    made.edit(postgresql, "_CLAIM_KEY", ("or k.lease_until <= excluded.fence", "or true"))


def without_leases(made: Mutation) -> None:
    """Every claim gets key and work."""
    without_leases_of_locks(made)
    read, ahead_us = portable_claims._read_one, itertools.count(10**15, 10**15)

    def ahead(*args: Any, **options: Any) -> Any:
        row, recorded, clock_us = read(*args, **options)
        return row, recorded, clock_us + next(ahead_us)

    made.replace(portable_claims, "_read_one", ahead)
    key = ("or k.lease_until <= excluded.fence", "or true")
    work = [(f"w.lease_until <= {now} and", "") for now in ("clock.now_us", "excluded.created")]
    made.edit(postgresql, "_CLAIM", key, *work)
    made.edit(mariadb, "_CLAIM", ("held_until <= now_us", "true"))


def without_growing_fences_in_steps(made: Mutation) -> None:
    """In claims by steps, the next holder of a key gets the last fence again."""

    def first(*values: Any, **options: Any) -> Any:
        of_fences = not options and isinstance(values[0], int)
        return 1 if of_fences else builtins.max(*values, **options)

    made.replace(portable_claims, "max", first, raising=False)


def without_growing_fences_of_locks(made: Mutation) -> None:
    """The next holder of a key alone gets the last fence again."""
    without_growing_fences_in_steps(made)
    made.edit(postgresql, "_CLAIM_KEY", ("greatest(k.fence + 1, excluded.fence)", "k.fence"))


def without_growing_fences(made: Mutation) -> None:
    """The next holder of key and work gets the last fence again."""
    without_growing_fences_of_locks(made)
    made.edit(postgresql, "_CLAIM", ("greatest(k.fence + 1, excluded.fence)", "k.fence"))
    made.edit(mariadb, "_CLAIM", ("greatest(now_us, last_fence + 1)", "1"))


def without_nonces(made: Mutation) -> None:
    """A repeated claim whose answer got lost counts as another owner's."""
    decide = answers.decide

    def other(row: Any, **values: Any) -> Decision:
        return decide(row, **{**values, "owner": "somebody else"})

    made.replace(answers, "decide", other)
    mine = "when w.state = 'PROCESSING' and w.owner = {} then true"
    made.edit(
        postgresql,
        "_CLAIM",
        (mine.format("%(owner)s::text"), "when false then true"),
        (mine.format("excluded.owner"), "when false then true"),
    )


def without_an_end(made: Mutation) -> None:
    """DONE is claimed again."""
    decide = answers.decide

    def again(row: Any, **values: Any) -> Decision:
        decision = decide(row, **values)
        return Decision.CLAIM if decision is Decision.DONE else decision

    made.replace(answers, "decide", again)
    made.edit(postgresql, "_CLAIM", ("w.state in ('DONE', 'DEAD')", "w.state in ('DEAD')"))


def without_numbers(made: Mutation) -> None:
    """A message that a newer one has superseded runs."""
    decide = answers.decide

    def newest(row: Any, **values: Any) -> Decision:
        return decide(row, **{**values, "recorded": (0, 0)})

    made.replace(answers, "decide", newest)
    recorded = "(coalesce(m.retries, 0), coalesce(m.deferrals, 0))"
    made.edit(postgresql, "_CLAIM", (f"< {recorded} then false", "< (0, 0) then false"))
    lower = "(%(retries)s, %(deferrals)s) < (recorded_retries, recorded_deferrals)"
    made.edit(mariadb, "_CLAIM", (lower, "false"))


def without_a_limit(made: Mutation) -> None:
    """Work that kills its workers is taken over without a limit."""
    decide = answers.decide

    def again(row: Any, **values: Any) -> Decision:
        decision = decide(row, **values)
        return Decision.TAKEOVER if decision is Decision.BURY else decision

    made.replace(answers, "decide", again)
    made.edit(postgresql, "_CLAIM", ("and w.crashes + 1 < %(max_crashes)s::integer", ""))


def without_a_holder(made: Mutation) -> None:
    """The first claim of a key gets it, whatever its holder."""
    made.edit(
        postgresql,
        "_CLAIM_FIRST",
        ("where k.owner = '' and k.lease_until <= excluded.fence and", "where"),
    )


def without_a_clock_that_went_back(made: Mutation) -> None:
    """A first claim uses the database's time as its fence, even if the last fence was higher."""
    made.edit(postgresql, "_CLAIM_FIRST", ("and k.fence < excluded.fence", ""))


def without_the_message(made: Mutation) -> None:
    """A first claim does not check whether a newer message is on its way."""
    recorded = "message = %(message)s::text and work = %(work)s::text"
    made.edit(postgresql, "_CLAIM_FIRST", (f"where {recorded}", "where false"))


def without_giving_back_the_key(made: Mutation) -> None:
    """A claim that gets the key but not its work keeps the key."""
    made.replace(postgresql.PostgreSQLStatements, "_free_keys", lambda self, request: None)


def without_former_records(made: Mutation) -> None:
    """Former records of the work are not read."""
    read = portable_claims._read

    def own(*args: Any, **options: Any) -> portable_claims.Records:
        found = read(*args, **options)
        return found._replace(rows=(found.own, *(None for _ in found.rows[1:])))

    made.replace(portable_claims, "_read", own)


def without_former_lines(made: Mutation) -> None:
    """A claim checks the line of its own key only."""
    is_behind = turn.is_behind

    def own(db: Any, request: Any, now_us: int, **how: Any) -> bool:
        return is_behind(db, replace(request, line_key=None, keys=(request.line,)), now_us, **how)

    made.replace(turn, "is_behind", own)


def behind_itself(made: Mutation) -> None:
    """A claim takes its message's record under a former id for another message."""
    is_behind = turn.is_behind

    def own(db: Any, request: Any, now_us: int, **how: Any) -> bool:
        return is_behind(db, replace(request, formerly=("none",)), now_us, **how)

    made.replace(turn, "is_behind", own)


def in_both_lines(made: Mutation) -> None:
    """Work that is parked under its new id stays in its former line."""
    made.replace(park, "_leave_former", lambda *_: None)


def with_any_former_state(made: Mutation) -> None:
    """Work that runs or has ended under its former id is parked."""
    made.replace(park, "may_wait", lambda *_: True)


def purged_by_state_alone(made: Mutation) -> None:
    """All ended work is forgotten, even if its message is still needed."""
    made.replace(retention, "_is_over", lambda *_: sa.true())


def without_copies_of_the_end(made: Mutation) -> None:
    """DONE is not written under the former id."""
    complete = portable.Statements.complete_in_block

    def alone(self: portable.Statements, db: Any, claim: Claim, result_json: str | None) -> bool:
        request = replace(claim.request, formerly=())
        return complete(self, db, replace(claim, request=request), result_json)

    made.replace(portable.Statements, "complete_in_block", alone)


def without_those_before(made: Mutation) -> None:
    """A claim does not check the line of its key."""
    made.replace(turn, "is_behind", lambda *_, **__: False)
    for name in ("_CLAIM_IN_LINE", "_CLAIM_FIRST_IN_LINE"):
        made.edit(postgresql, name, ("where o.key = %(key)s::text", "where false"))


def without_promoted_messages(made: Mutation) -> None:
    """The next message is promoted while an earlier one is on its way."""
    made.replace(states, "expected", lambda *_: sa.false())
    made.edit(lines, "PROMOTE_NEXT", ("and o.due > (select now_us from clock)", "and false"))


def with_promoted_messages_expected_for_ever(made: Mutation) -> None:
    """A promoted message that does not arrive blocks all messages behind it."""
    made.replace(states, "expected", lambda work, now_us: work.c.line.in_(["promoted", "resent"]))
    made.edit(
        lines,
        "PROMOTE_NEXT",
        ("o.line = 'promoted'", "o.line in ('promoted', 'resent')"),
        ("and o.due > (select now_us from clock)", "and o.due is not null"),
    )


def with_any_messages_position(made: Mutation) -> None:
    """Another message of waiting work gets that work's position."""
    is_behind = turn.is_behind

    def as_own(db: Any, request: Any, now_us: int, **how: Any) -> bool:
        own = db.execute(sa.select(WORK.c.message).where(WORK.c.id == request.work)).scalar()
        message = request.message if own is None else replace(request.message, id=own)
        return is_behind(db, replace(request, message=message), now_us, **how)

    made.replace(turn, "is_behind", as_own)
    for name in ("_CLAIM_IN_LINE", "_CLAIM_FIRST_IN_LINE"):
        made.edit(
            postgresql,
            name,
            ("when mine.message = %(message)s::text and mine.line", "when mine.line"),
            (
                "when mine.message = %(message)s::text then mine.parked",
                "when true then mine.parked",
            ),
        )


def with_recalls_of_a_higher_number(made: Mutation) -> None:
    """A message that is sent again supersedes the copy that is on its way."""
    sent = SqlOutbox.sent

    def raising(self: SqlOutbox, items: Any, **how: Any) -> int:
        database = self._database
        with database.transaction() as db:
            for each in items:
                deferrals = each.message.deferrals + 1
                raise_deferrals(database, db, each.message, deferrals, work=each.work, now_us=1)
        return sent(self, items, **how)

    made.replace(SqlOutbox, "sent", raising)


def without_deferrals_of_calls(made: Mutation) -> None:
    """A stored message is sent with its recorded numbers only."""
    made.replace(records, "_deferrals_of", lambda call: 0)


def with_the_former_key(made: Mutation) -> None:
    """Work is parked in the line of the key that its record has."""
    made.edit(lines, "PARK", ("    key = excluded.key,\n", ""))


def with_a_held_key(made: Mutation) -> None:
    """A message is promoted while the key is held."""
    made.replace(room, "of_key", lambda *_: 0)
    made.edit(lines, "PROMOTE_NEXT", ("and k.lease_until > clock.now_us", "and false"))


def with_any_state(made: Mutation) -> None:
    """A message is parked whatever the state of its work."""
    made.edit(lines, "PARK", ("or (w.state = 'FAILED' and w.final = 0 and", "or (true or"))


def with_any_message(made: Mutation) -> None:
    """A message is parked in the position of another message of its work."""
    own = "(w.call is null or w.message = excluded.message)"
    made.edit(lines, "PARK", (own, "true"))


def with_a_new_place(made: Mutation) -> None:
    """A message that arrives again goes to the end of the line."""
    made.edit(lines, "PARK", ("        w.parked,\n", "        null,\n"))


def without_waiting_again(made: Mutation) -> None:
    """A promoted message that finds the key taken still counts as promoted."""
    made.edit(lines, "PARK", ("    due = null,\n    line = excluded.line,\n", ""))


def without_leaving_the_line(made: Mutation) -> None:
    """Work in progress keeps its position in line."""
    for name in ("_CLAIM_IN_LINE", "_CLAIM_FIRST_IN_LINE"):
        left = "line = null, parked = null,"
        if left in getattr(postgresql, name):
            made.edit(postgresql, name, (left, ""))


def with_the_last_first(made: Mutation) -> None:
    """The line is a stack."""
    made.edit(lines, "PROMOTE_NEXT", ("order by w.rank, w.parked", "order by w.parked desc"))


def without_ranks(made: Mutation) -> None:
    """The message that was sent first is promoted first, whatever its rank."""
    made.replace(states, "in_order", lambda: (WORK.c.parked,))
    made.edit(lines, "PROMOTE_NEXT", ("order by w.rank, w.parked", "order by w.parked"))


def without_ranks_of_newcomers(made: Mutation) -> None:
    """A new message counts as the lowest rank, whatever its priority."""
    is_behind = turn.is_behind

    def lowest(db: Any, request: Any, now_us: int, **how: Any) -> bool:
        return is_behind(db, replace(request, rank=-9), now_us, **how)

    made.replace(turn, "is_behind", lowest)
    for name in ("_CLAIM_IN_LINE", "_CLAIM_FIRST_IN_LINE"):
        made.edit(postgresql, name, ("    %(rank)s::integer\n", "    -9\n"))


def without_keeping(made: Mutation) -> None:
    """Strict work that has failed, or was promoted and is late, blocks no other work."""
    made.replace(states, "keeps", lambda *_: sa.false())
    made.edit(
        lines,
        "PROMOTE_NEXT",
        ("case when o.line = 'kept' then 1 end", "case when false then 1 end"),
    )


def without_keeping_in_claims(made: Mutation) -> None:
    """Strict work that has begun does not block claims of tasks that are not strict."""
    made.edit(
        postgresql,
        "_CLAIM_IN_LINE",
        ("when 'kept' then true", "when 'kept' then false"),
    )


def without_taking_a_position(made: Mutation) -> None:
    """Work that never waited has no position to keep."""
    made.replace(
        portable_claims.LockedClaim, "_kept_position", lambda self, known: {"parked": None}
    )
    values = "::bigint), 1", "::bigint) + null, 1"
    made.edit(postgresql, "_CLAIM_STRICT", values)


def without_giving_a_place_up(made: Mutation) -> None:
    """Work that has failed for good keeps its position."""
    made.replace(kept, "leave", lambda *_, **_how: True)


def without_an_end_of_retries(made: Mutation) -> None:
    """A lost retry is never due."""
    made.replace(SqlEndings, "_undecided", lambda *_: None)


def at_the_end(made: Mutation) -> None:
    """A retry that finds the key taken goes to the end of the line."""
    kept = "        w.parked,\n"
    made.edit(lines, "PARK", (kept, "        case when w.state = 'NEW' then w.parked end,\n"))


def with_any_number(made: Mutation) -> None:
    """A line is never full."""
    made.replace(park, "_is_full", lambda *_: False)


def of_any_application(made: Mutation) -> None:
    """Another application's messages are promoted, too."""
    made.edit(
        lines,
        "PROMOTE_NEXT",
        ("coalesce(w.call::json ->> 'app', '') = %(app)s::text", "%(app)s::text is not null"),
    )


def without_a_second_look(made: Mutation) -> None:
    """A claim uses what it read before it waited for a stored message to be replaced."""
    made.edit(
        postgresql,
        "_CLAIM",
        ("when w.message is distinct from (select message from found) then false", ""),
        ("when w.fence >= excluded.fence then false", ""),
    )


def without_a_second_reading(made: Mutation) -> None:
    """A claim in steps uses what it read before it waited."""
    made.replace(portable_claims, "_is_of_another", lambda *_: False)


def without_superseding(made: Mutation) -> None:
    """A message is replaced, and still runs."""
    made.replace(unique, "supersede", lambda *_: None)


def repeated_after_a_replacement(made: Mutation) -> None:
    """A repeated enqueue writes its message, although a newer one replaced it."""
    made.replace(unique, "was_replaced", lambda *_: False)
    made.replace(outbox, "is_replaced", lambda _: sa.false())


def expired_forgotten(made: Mutation) -> None:
    """An expired message runs once another message has claimed its work."""
    made.replace(messages, "raise_deferrals", lambda *_, **__: True)


def full_for_the_replaced(made: Mutation) -> None:
    """A full line refuses a message that was replaced."""
    made.replace(park, "is_replaced", lambda _: sa.false())


def replace_what_is_begun(made: Mutation) -> None:
    """A stored message is replaced although its work has begun."""
    existing = unique.Existing

    def waiting(**values: Any) -> Any:
        return existing(**{**values, "begun": False})

    made.replace(unique, "Existing", waiting)


def by_arrival(made: Mutation) -> None:
    """The message that arrives later counts as newer, whatever its send time."""
    for home in (newest, gates):
        made.replace(home, "is_outdated", lambda *_, **__: False)


def without_a_mark(made: Mutation) -> None:
    """The ledger does not record the newest message that has begun."""
    made.replace(newest.NewestRow, "move", lambda *_, **__: None)


def with_one_mark_for_all_tasks(made: Mutation) -> None:
    """A message of one task supersedes another task's."""
    made.replace(newest, "row_id_of", lambda request: f"{request.keys[0]}#newest")


def without_ending_the_older(made: Mutation) -> None:
    """Work whose key a newer message has taken is not ended."""
    made.replace(gates.Newest, "_end_older", lambda *_, **__: None)


def over_any_holder(made: Mutation) -> None:
    """A newer message supersedes any holder of the key."""
    made.replace(gates.View, "supersedes", lambda self: True)


def past_the_rate(made: Mutation) -> None:
    """A message that finds the key free, or may supersede its holder, begins whatever the rate."""
    made.replace(gates.RateOfStarts, "refuse", lambda self, view: None)


def past_the_turn(made: Mutation) -> None:
    """A message begins whatever the line, if the key is free and a start is allowed."""
    made.replace(gates.Turn, "refuse", lambda self, view: None)


def without_replacing(made: Mutation) -> None:
    """The older message still waits after a newer one was parked."""
    made.replace(newest.Line, "replace", lambda *_, **__: ())


def past_those_who_wait(made: Mutation) -> None:
    """Only messages that have begun count as newer."""
    made.replace(newest.Line, "newest", lambda _: None)


def claim_after_the_former_guard(book: Any) -> None:
    """Work that the former guard has done is not done again."""
    formerly.test_what_is_done_by_one_guard_is_done_for_the_other(book, formerly.old, formerly.new)


def claim_before_the_former_guard(book: Any) -> None:
    """Workers with the former guard find work that the new guard has done."""
    formerly.test_what_is_done_by_one_guard_is_done_for_the_other(book, formerly.new, formerly.old)


def pass_the_message_that_waits(book: Any) -> None:
    """Another message of waiting work is deferred."""
    in_line.TestClaim().test_behind_the_message_that_waits_for_it(book, True)


def claim_behind_a_retry(book: Any) -> None:
    """A task of the same key that is not strict does not claim before a retry."""
    in_line.TestStrict().fail(book)
    for number in (2, 3):
        book.ledger.revoke(f"ship order:{number}", message=f"m{number}")
    found = book.ledger.claim(in_line.delivery(4, redelivered=True))
    assert not isinstance(found, Claimed)


def claim_behind_a_replacement(then: State) -> Callable[[Any], None]:
    test = uniqueness.test_a_claim_that_waited_for_a_replacement_does_not_run_the_older_call
    return functools.partial(test, then=then)


def claim_by_rank(book: Any) -> None:
    in_line.TestRanks().test_who_may_claim(book, redelivered=False)


def claim_what_is_done(book: Any) -> None:
    """Every later claim is answered with DONE."""
    book.ledger.complete_alone(book.claim().claim, None)
    assert not isinstance(book.ledger.claim(book.request(message="x")), Claimed)


def claim_what_is_superseded(book: Any) -> None:
    """A message with fewer deferrals than are recorded is not run."""
    assert book.ledger.defer(book.request(), lambda deferrals: None)
    assert not isinstance(book.ledger.claim(book.request()), Claimed)


def replace_what_has_progress(book: Any) -> None:
    """Work with progress, which belongs to the older arguments, is not replaced."""
    uniqueness.test_a_call_that_was_begun_is_not_replaced(book, "given back after progress")


def repeat_what_was_replaced(book: Any) -> None:
    """A repeated enqueue of a replaced message writes nothing."""
    again = uniqueness.test_a_repeated_enqueue_of_a_replaced_message_writes_nothing
    again(book, "waits", "replace")


def park_what_was_replaced(book: Any) -> None:
    """A full line does not refuse a replaced message."""
    try:
        in_line.TestMaxWaiting().test_a_replaced_message(book, ())
    except LineFullError as error:
        raise AssertionError from error


def lose_the_work_to_another(book: Any) -> None:
    """The key that was taken for work of another claim is free again."""
    claims.test_a_key_that_was_got_without_its_work_is_free_again(lambda **_: book)


def commit_late(book: Any) -> None:
    """Work that was given back cannot be committed, even without another claim."""
    endings.test_a_stale_holder_cannot_commit(book, "nobody")


def complete_late(book: Any) -> None:
    """Work that was given back cannot be completed alone."""
    claimed = book.claim()
    book.ledger.give_back(claimed.claim)
    with pytest.raises(StaleTokenError):
        book.ledger.complete_alone(claimed.claim, None)


OfFormerLines = formerly.TestLines


def park_what_the_former_guard_has_done(book: Any) -> None:
    OfFormerLines().test_what_the_former_guard_has_begun_does_not_wait(book, "done")


MUTANTS: list[tuple[Callable[[Mutation], None], Callable[[Any], None]]] = [
    (without_fence_checks, commit_late),
    (without_fence_checks, complete_late),
    (without_fenced_steps, endings.test_progress_is_fenced_and_met_by_the_next_holder),
    (without_leases, claims.test_a_taken_key_is_busy_until_its_lease_ends),
    (without_leases_of_locks, claims.test_the_plain_lock_claims_a_key_without_a_work),
    (without_growing_fences, claims.test_each_claim_of_a_key_gets_a_higher_fence),
    (without_growing_fences_of_locks, claims.test_the_plain_lock_claims_a_key_without_a_work),
    (without_nonces, claims.test_asked_twice_by_one_owner_it_is_one_grant),
    (without_an_end, claim_what_is_done),
    (without_numbers, claim_what_is_superseded),
    (without_a_limit, endings.test_a_crash_too_many_is_dead),
    (without_superseding, uniqueness.test_a_replaced_call_does_not_run_and_the_newer_one_does),
    (without_superseding, uniqueness.test_a_failed_call_whose_retry_may_come_is_replaced),
    (repeated_after_a_replacement, repeat_what_was_replaced),
    (full_for_the_replaced, park_what_was_replaced),
    (expired_forgotten, expiry.TestTheEnd().test_another_message_of_the_work_runs),
    (replace_what_is_begun, replace_what_has_progress),
    (without_former_records, claim_after_the_former_guard),
    (without_copies_of_the_end, claim_before_the_former_guard),
    (purged_by_state_alone, in_line.TestStrict().test_a_purge_leaves_what_keeps_its_place),
    (
        purged_by_state_alone,
        newest_wins.TestWaiting().test_a_purge_keeps_unnotified_work,
    ),
    (without_former_lines, OfFormerLines().test_no_message_overtakes_the_former_line),
    (behind_itself, OfFormerLines().test_a_message_is_not_behind_itself),
    (in_both_lines, OfFormerLines().test_it_takes_its_place_along),
    (with_any_former_state, park_what_the_former_guard_has_done),
    (without_those_before, in_line.TestClaim().test_behind_the_waiting_messages),
    (without_promoted_messages, in_line.TestCall().test_in_the_order_in_which_they_came),
    (with_promoted_messages_expected_for_ever, in_line.TestCall().test_lost),
    (with_any_messages_position, pass_the_message_that_waits),
    (with_recalls_of_a_higher_number, in_line.TestCall().test_one_that_is_sent_again),
    (without_deferrals_of_calls, in_line.TestCall().test_whose_deferral_is_recorded_later),
    (without_ranks, in_line.TestRanks().test_the_order_of_promotion),
    (without_ranks_of_newcomers, claim_by_rank),
    (with_any_number, in_line.TestMaxWaiting().test_one_too_many),
    (without_keeping, in_line.TestStrict().test_no_message_goes_before_a_retry),
    (without_keeping, in_line.TestStrict().test_one_that_was_called_and_got_lost),
    (without_taking_a_position, in_line.TestStrict().test_whose_holder_died),
    (without_giving_a_place_up, in_line.TestStrict().test_failed_for_good),
    (without_an_end_of_retries, in_line.TestStrict().test_unknown_whether_it_is_retried),
    (with_a_held_key, in_line.TestCall().test_none_while_the_key_is_held),
    (by_arrival, newest_wins.TestLatest().test_an_older_one_that_comes_late),
    (without_a_mark, newest_wins.TestLatest().test_an_older_one_that_comes_late),
    (with_one_mark_for_all_tasks, newest_wins.TestLatest().test_other_tasks_of_the_key),
    (without_ending_the_older, newest_wins.TestSupersede().test_a_living_holder),
    (without_growing_fences_in_steps, newest_wins.TestSupersede().test_a_living_holder),
    (without_fence_checks, newest_wins.TestSupersede().test_a_living_holder),
    (over_any_holder, newest_wins.TestSupersede().test_who_holds_the_key_for_something_else),
    (past_the_rate, combined.TestNewestAtARate().test_no_message_takes_the_key_too_early),
    (past_the_turn, combined.TestStrictLineAtARate().test_a_takeover_is_a_start),
    (without_replacing, newest_wins.TestWaiting().test_one_waits),
    (past_those_who_wait, newest_wins.TestWaiting().test_an_older_one_that_comes_late),
]


def catch(book: Any, made: Mutation, test: Callable[[Any], None]) -> None:
    """Check that the test fails, and that the changed part took part."""
    book.watch.stopped = True  # otherwise the fixture would notice it before the test does
    with pytest.raises(ASSERTIONS):
        test(book)
    assert made.ran & made.must_run(), f"what was changed took no part: {made.ran}"


def park_what_is_done(book: Any) -> None:
    in_line.TestPark().test_not_what_needs_no_turn(book, "done")


def call_in_namespaces(book: Any) -> None:
    TestOfTwo = in_line.TestNamespaces  # noqa: N806
    TestOfTwo.park_each(book)
    TestOfTwo().test_which_message_is_promoted(book)


# Mutants of PostgreSQL's statements for first claims, for ends with their COMMIT, and for lines.
MUTANTS_OF_ONE_MESSAGE: list[tuple[Callable[[Mutation], None], Callable[[Any], None]]] = [
    (without_a_holder, claims.test_a_taken_key_is_busy_until_its_lease_ends),
    (without_a_clock_that_went_back, claims.test_a_fence_beyond_the_clock_still_grows),
    (without_the_message, claim_what_is_superseded),
    (without_giving_back_the_key, lose_the_work_to_another),
    (without_an_error, commit_late),
    (with_any_state, park_what_is_done),
    (with_any_message, in_line.TestPark().test_another_message_of_the_work),
    (with_a_new_place, in_line.TestPark().test_again),
    (with_the_former_key, in_line.TestPark().test_under_another_key),
    (without_waiting_again, in_line.TestPark().test_again),
    (at_the_end, in_line.TestStrict().test_a_retry_that_finds_the_key_taken),
    (without_keeping_in_claims, claim_behind_a_retry),
    (without_leaving_the_line, in_line.TestClaim().test_ends_the_waiting),
    (with_the_last_first, in_line.TestCall().test_in_the_order_in_which_they_came),
    (of_any_application, call_in_namespaces),
    (without_a_second_look, claim_behind_a_replacement(State.NEW)),
    (without_a_second_look, claim_behind_a_replacement(State.FAILED)),
]
MUTANTS_OF_STEPS: list[tuple[Callable[[Mutation], None], Callable[[Any], None]]] = [
    (without_a_second_reading, claim_behind_a_replacement(State.NEW)),
    (without_a_second_reading, claim_behind_a_replacement(State.FAILED)),
]


@pytest.mark.parametrize(
    ("kind", "mutate", "test"),
    [
        *(("postgresql", *each) for each in MUTANTS_OF_ONE_MESSAGE),
        *(
            pytest.param("mariadb in steps", *each, marks=pytest.mark.debian)
            for each in MUTANTS_OF_STEPS
        ),
    ],
)
def test_a_message_without_a_check_does_not_pass(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    mutate: Callable[[Mutation], None],
    test: Callable[[Any], None],
) -> None:
    """The suite's test of the check fails."""
    with making_books(request, kind) as make:
        book = make(lock_timeout_s=30.0)
        made = Mutation(monkeypatch, book.kind)
        mutate(made)
        catch(book, made, test)


@pytest.mark.parametrize(("mutate", "test"), MUTANTS)
def test_a_ledger_without_a_check_does_not_pass(
    book: Any,
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[Mutation], None],
    test: Callable[[Any], None],
) -> None:
    """The suite's test of the check fails."""
    if book.kind == "memory":
        pytest.skip("the simulation has mutants of its own")
    # All claims use the changed statement. The one for first claims has mutants of its own.
    monkeypatch.setattr(postgresql, "_is_first", lambda request: False)
    made = Mutation(monkeypatch, book.kind)
    mutate(made)
    catch(book, made, test)


def promoted_as_resent(made: Mutation) -> None:
    """A message that is promoted counts as one that did not arrive."""
    made.replace(states, "promoted", lambda: sa.literal("resent"))
    made.edit(lines, "PROMOTE_NEXT", ("else 'promoted' end", "else 'resent' end"))


@pytest.mark.parametrize("mutant", ["promoted as resent", "abandoned in its line"])
def test_a_transition_of_a_line_that_is_not_declared_is_found(
    book: Any, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """A transition of a line that is not declared is found by every test."""
    if book.kind == "memory":
        pytest.skip("its table of work refuses such a record")
    if mutant == "promoted as resent":
        promoted_as_resent(Mutation(monkeypatch, book.kind))
    else:
        monkeypatch.setattr(outbox, "NO_POSITION", {})
    in_line.park(book, 1)
    with pytest.raises(AssertionError, match=r"waiting -> resent|promoted, and FAILED"):
        _abandon_what_was_promoted(book)


def _abandon_what_was_promoted(book: Any) -> None:
    promoted = book.ledger.promote_next(in_line.KEY, expected_s=60.0)
    assert book.ledger.abandon(promoted, error="sent in vain")


@pytest.mark.parametrize(
    ("new", "error", "says"),
    [
        ("wiht granted", LedgerSchemaError, "syntax error"),
        ("with  granted", pytest.fail.Exception, "DID NOT RAISE"),
    ],
)
def test_a_mutant_that_is_merely_broken_is_not_caught(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    new: str,
    error: type[BaseException],
    says: str,
) -> None:
    """A mutant counts as caught neither if the server rejects its statement, nor if it changes
    nothing."""
    with making_books(request, "postgresql") as make:
        book = make()
        made = Mutation(monkeypatch, book.kind)
        made.edit(postgresql, "_CLAIM_FIRST", ("with granted", new))
        with pytest.raises(error, match=says):
            catch(book, made, claim_what_is_done)
