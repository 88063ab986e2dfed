"""A first claim in one message on MariaDB: races, errors within it, and texts of every kind.

The contract suite checks that it decides as `states.decide()` does. `test_mariadb.py` counts its
statements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote_plus

import pymysql
import pytest
import sqlalchemy as sa
from contract.ledger.test_concurrency import at_once

from support.claims import request
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.errors import StaleTokenError, TransactionRetryError
from taskguard.ledger.connections.errors import CannotWriteError
from taskguard.ledger.connections.executed import Executed
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.statements import Statements, claims, mariadb
from taskguard.ledger.statements.mariadb import MariaDBStatements
from taskguard.ledger.tables import KEYS, MESSAGES, WORK
from taskguard.model.claims import Answer, Busy, Claimed, MessageRef
from taskguard.model.lease import Owner
from taskguard.model.states import Decision
from taskguard_sandbox.servers import MariaDB

pytestmark = pytest.mark.debian
WAITING = sa.text(
    "select cast(variable_value as int) from information_schema.global_status "
    "where variable_name = 'innodb_row_lock_current_waits'"
)
OPEN = sa.text("select count(*) from information_schema.innodb_trx")


@pytest.fixture
def ledger(mariadb_url: str) -> Iterator[SqlLedger]:
    made = SqlLedger(mariadb_url, lock_timeout_s=30.0)
    made.create_schema()
    yield made
    made.close()


@pytest.fixture
def engine(mariadb_url: str) -> Iterator[sa.Engine]:
    """Return an Engine of another process."""
    made = sa.create_engine(mariadb_url)
    yield made
    made.dispose()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the answers of the one message; None means that more are needed."""
    answers: list[Any] = []
    claim = MariaDBStatements._claim_first

    def recorded(*args: Any) -> Any:
        answers.append(claim(*args))
        return answers[-1]

    monkeypatch.setattr(MariaDBStatements, "_claim_first", recorded)
    return answers


@contextmanager
def waiting_for_the_key(
    ledger: SqlLedger, engine: sa.Engine, answers: list[Any], **values: Any
) -> Iterator[sa.Connection]:
    """Let a claim wait for the row of `order:1`. Changes within the block are committed at
    its end."""
    assert ledger.give_back(ledger.claim(request(work="before")).claim)  # type: ignore[union-attr]
    waiter = threading.Thread(target=lambda: answers.append(ledger.claim(request(**values))))
    with engine.begin() as db:
        db.execute(sa.update(KEYS).values(fence=KEYS.c.fence))
        waiter.start()
        wait_until(lambda: db.execute(WAITING).scalar() == 1, message="the claim waits")
        yield db
    waiter.join()


# -- races ------------------------------------------------------------------------------------


def test_many_claim_one_new_work_and_one_gets_it(ledger: SqlLedger, engine: sa.Engine) -> None:
    """With one key, or each with its own, one claim is granted, and the others learn the winner's
    name."""
    for number, own_keys in enumerate([False, True, False, True]):
        answers: list[Any] = []

        def claim(thread: int, n: int = number, own: bool = own_keys, a: Any = answers) -> None:
            key = f"order:{n}:{thread if own else 0}"
            a.append(ledger.claim(request(n, keys=(key,))))

        at_once(16, claim)
        [winner] = [answer for answer in answers if isinstance(answer, Claimed)]
        others = [answer for answer in answers if isinstance(answer, Busy)]
        assert len(others) == 15
        assert {(answer.owner, answer.same_work) for answer in others} == {
            (winner.claim.owner, True)
        }
        view = ledger.view(f"ship order:{number}")
        assert view is not None
        assert (view.attempts, view.fence) == (1, winner.claim.fence)
    with engine.connect() as db:
        held = db.execute(sa.select(KEYS.c.key).where(KEYS.c.owner != "")).all()
    assert len(held) == 4


def test_many_new_works_claim_one_key_and_one_gets_it(ledger: SqlLedger) -> None:
    """The refused claims learn the holder, and write nothing."""
    answers: dict[int, Any] = {}

    def claim(number: int) -> None:
        answers[number] = ledger.claim(request(work=f"work {number}"))

    at_once(16, claim)
    [(first, winner)] = [each for each in answers.items() if isinstance(each[1], Claimed)]
    for number, answer in answers.items():
        if number != first:
            assert (answer.owner, answer.same_work) == (winner.claim.owner, False)
            assert 0 < answer.retry_after_s <= 30
            assert ledger.view(f"work {number}") is None


def test_a_claim_that_waited_for_a_key_has_its_whole_lease(
    ledger: SqlLedger, engine: sa.Engine, blocks: list[Any]
) -> None:
    """A claim that waited for a key has its whole lease: each statement of a compound statement has
    its own clock."""
    answers: list[Any] = []
    with waiting_for_the_key(ledger, engine, answers) as db:
        db.execute(sa.text("select sleep(0.5)"))
        now_us = db.execute(sa.select(ledger._database.now())).scalar_one()
    [claimed] = answers
    assert isinstance(claimed, Claimed)
    assert blocks[-1] == claimed
    assert claimed.claim.fence >= now_us
    with engine.connect() as db:
        for table in (KEYS, WORK):
            until_us = sa.select(sa.func.max(table.c.lease_until))
            assert db.execute(until_us).scalar_one() >= now_us + 30_000_000


def done_meanwhile(db: sa.Connection) -> None:
    """Complete the same work under another key meanwhile."""
    texts = {"task": "ship", "key": "k", "message": "m", "state": "DONE", "owner": "n/x"}
    numbers = dict.fromkeys(("retries", "final", "lease_until", "crashes", "created"), 0)
    values = {"id": "ship order:1", "fence": 1, "attempts": 1, "crashed_owner": "", "result": "7"}
    db.execute(sa.insert(WORK).values(**texts, **numbers, **values))


def superseded_meanwhile(db: sa.Connection) -> None:
    values = {"message": "m", "work": "ship order:1", "retries": 0, "deferrals": 1, "updated": 1}
    db.execute(sa.insert(MESSAGES).values(**values))


def taken_meanwhile(db: sa.Connection) -> None:
    db.execute(sa.update(KEYS).values(owner="n/x", lease_until=2**62))


@pytest.mark.parametrize(
    ("meanwhile", "expected"),
    [
        (
            done_meanwhile,
            lambda answer: answer.decision is Decision.DONE and answer.result_json == "7",
        ),
        (superseded_meanwhile, lambda answer: answer.decision is Decision.SUPERSEDED),
        (taken_meanwhile, lambda answer: answer.owner == Owner.parse("n/x")),
    ],
    ids=["done", "superseded", "taken"],
)
def test_what_changed_while_a_claim_waited_counts(
    ledger: SqlLedger,
    engine: sa.Engine,
    meanwhile: Callable[[sa.Connection], None],
    expected: Callable[[Any], bool],
) -> None:
    """A claim that waited for the key's row reads its data again under the lock."""
    answers: list[Any] = []
    with waiting_for_the_key(ledger, engine, answers) as db:
        meanwhile(db)
    [answer] = answers
    assert isinstance(answer, Answer | Busy)
    assert expected(answer), answer


@pytest.mark.parametrize(
    ("meanwhile", "check"),
    [
        (done_meanwhile, "known or mine"),
        (
            superseded_meanwhile,
            "(%(retries)s, %(deferrals)s) < (recorded_retries, recorded_deferrals)",
        ),
        (taken_meanwhile, "held_until <= now_us"),
    ],
)
def test_without_a_check_under_the_lock_that_would_be_seen(
    ledger: SqlLedger,
    engine: sa.Engine,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[sa.Connection], None],
    check: str,
) -> None:
    """The test above fails on a claim.sql that does not read again."""
    assert mariadb._CLAIM.count(check) == 1
    without = {"known or mine": "mine", "held_until <= now_us": "true"}.get(check, "false")
    monkeypatch.setattr(mariadb, "_CLAIM", mariadb._CLAIM.replace(check, without))
    answers: list[Any] = []
    with waiting_for_the_key(ledger, engine, answers) as db:
        meanwhile(db)
    # The primary key still refuses existing work.
    assert isinstance(answers[0], Claimed) or meanwhile is done_meanwhile


# -- what is left open ------------------------------------------------------------------------


def open_transactions(engine: sa.Engine) -> int:
    with engine.connect() as db:
        return int(db.execute(OPEN).scalar_one())


def test_no_way_through_leaves_a_transaction_open(
    ledger: SqlLedger, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer of the message leaves no transaction open: granted, answered, busy, superseded,
    too old, done, stale, or an error.

    The server says so right after the message, without a ROLLBACK of the pool's.
    """
    seen: list[int] = []
    ask = Executed.ask

    def then_look(self: Executed, connection: Any, *asked: Any) -> Any:
        try:
            return ask(self, connection, *asked)
        finally:
            seen.append(driver_status(connection))
            seen.append(open_transactions(engine))

    mine = request()
    ledger.complete_alone(ledger.claim(request(8)).claim, None)  # type: ignore[union-attr]
    monkeypatch.setattr(Executed, "ask", then_look)
    ledger.claim(mine)
    ledger.claim(mine)
    assert isinstance(ledger.claim(request()), Busy)
    assert isinstance(ledger.claim(request(work="other")), Busy)
    assert ledger.defer(request(2), lambda deferrals: None)
    assert ledger.claim(request(2)) == Answer(Decision.SUPERSEDED)
    assert ledger.claim(request(3, message=MessageRef("o"), may_create=False)) == Answer(
        Decision.TOO_OLD
    )
    claimed = ledger.claim(request(5, message=MessageRef("q")))
    assert isinstance(claimed, Claimed)
    ledger.complete_alone(claimed.claim, None)
    with pytest.raises(StaleTokenError):
        ledger.complete_alone(claimed.claim, None)
    assert len(seen) == 18
    with pytest.raises(sa.exc.DBAPIError, match="too long"):
        ledger.claim(request(4, work="w" * 769, message=MessageRef("p")))
    assert len(seen) == 20
    assert set(seen) == {0}
    with engine.connect() as db:
        keys = set(db.execute(sa.select(KEYS.c.key)).scalars())
    assert "order:4" not in keys


def driver_status(connection: Any) -> int:
    """Return whether the server's last reply says that a transaction is open."""
    return int(connection.server_status & 1)


def test_what_a_killed_claim_wrote_is_rolled_back(
    ledger: SqlLedger, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If KILL QUERY or max_statement_time ends it, the server runs none of its handlers, and rolls
    it back."""
    ask, kills = Executed.ask, []

    def killed(self: Executed, connection: Any, *asked: Any) -> Any:
        monkeypatch.setattr(Executed, "ask", ask)
        with connection.cursor() as cursor:
            cursor.execute(
                "insert into taskguard_keys (`key`, fence, owner, lease_until) "
                "values ('left', 1, 'nobody', 1)"
            )
        kills.append(1)
        raise pymysql.err.OperationalError(1317, "Query execution was interrupted")

    monkeypatch.setattr(Executed, "ask", killed)
    assert isinstance(ledger.claim(request()), Claimed)  # by the portable statements
    assert kills
    with engine.connect() as db:
        assert set(db.execute(sa.select(KEYS.c.key)).scalars()) == {"order:1"}


def test_a_lock_that_is_not_given_is_busy_and_leaves_nothing(
    mariadb_url: str, engine: sa.Engine
) -> None:
    """If the claim gets no lock, it is busy, and its new row of the key is rolled back."""
    ledger = SqlLedger(mariadb_url, lock_timeout_s=0.1)
    ledger.create_schema()
    with engine.begin() as db:
        done_meanwhile(db)  # uncommitted, and its row is locked
        assert ledger.claim(request()) == Busy(None, None, same_work=False, started=True)
        with engine.connect() as other:
            uncommitted = other.execution_options(isolation_level="READ UNCOMMITTED")
            assert uncommitted.execute(sa.select(KEYS)).all() == []
    ledger.close()


def test_a_deadlock_within_is_busy(ledger: SqlLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock within the message is busy, like any lost race."""
    deadlock = "begin not atomic signal sqlstate '40001' set mysql_errno = 1213; end"
    monkeypatch.setattr(mariadb, "_CLAIM", deadlock)
    assert ledger.claim(request()) == Busy(None, None, same_work=False, started=True)
    assert ledger.view("ship order:1") is None


def test_a_lock_that_a_completion_is_not_given_runs_the_body_again(
    ledger: SqlLedger, engine: sa.Engine
) -> None:
    """If a completion gets no lock, the body runs again. A broken connection is a different
    error."""
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    with engine.begin() as db:
        db.execute(sa.select(WORK).with_for_update())
        with pytest.raises(TransactionRetryError, match="too long for a row lock"):
            with ledger.transaction(claimed.claim, look_first=False) as tx:
                tx.db.execute(sa.text("set innodb_lock_wait_timeout = 1"))
                tx.complete_in_block(claimed.claim, None)
    ledger.complete_alone(claimed.claim, None)


def test_a_server_that_became_read_only_cannot_write(ledger: SqlLedger, mariadb_url: str) -> None:
    """On a server that became read-only, deliveries are deferred, and ended work is still
    answered."""
    done = ledger.claim(request(2))
    assert isinstance(done, Claimed)
    ledger.complete_alone(done.claim, None)
    read_only = SqlLedger(f"{mariadb_url}?init_command=set+tx_read_only=1")
    answer = read_only.claim(request(2))
    assert isinstance(answer, Answer)
    with pytest.raises(CannotWriteError):
        read_only.claim(request())
    read_only.close()


SESSIONS = [
    "set sql_mode = 'ORACLE'",
    "set sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'",
    "set collation_connection = 'utf8mb4_german2_ci'",
]


@pytest.mark.parametrize("session", SESSIONS)
def test_a_session_that_reads_statements_in_another_way_claims_and_completes(
    ledger: SqlLedger, mariadb_url: str, session: str
) -> None:
    """Claims work whether the server's settings or a body's change how statements are read."""
    strange = SqlLedger(f"{mariadb_url}?init_command={quote_plus(session)}")
    claimed = strange.claim(request())
    assert isinstance(claimed, Claimed)
    strange.complete_alone(claimed.claim, "'7'")
    found = ledger.claim(request(2))
    assert isinstance(found, Claimed)
    with ledger.transaction(found.claim) as tx:
        tx.db.exec_driver_sql(session)
        tx.complete_in_block(found.claim, "'7'")
    for number in (1, 2):
        answer = ledger.claim(request(number))
        assert isinstance(answer, Answer)
        assert answer.result_json == "'7'"
    strange.close()


def test_a_claim_whose_reply_is_lost_is_asked_again(mariadb: MariaDB, mariadb_url: str) -> None:
    """If the reply is lost, the repeated claim is the same grant, and counts no attempt or
    crash."""
    with Proxy(mariadb.port) as proxy:
        ledger = SqlLedger(mariadb_url.replace(f":{mariadb.port}/", f":{proxy.port}/"))
        ledger.create_schema()
        assert isinstance(ledger.claim(request(2)), Claimed)
        proxy.lose_reply_to(b"begin not atomic", then=Mode.CUT)
        claimed = ledger.claim(request())
        assert not proxy.armed
        assert isinstance(claimed, Claimed)
        view = ledger.view("ship order:1")
        assert view is not None
        assert (view.fence, view.attempts, claimed.attempt, claimed.crashes) == (
            claimed.claim.fence, 1, 1, 0,
        )  # fmt: skip
        ledger.complete_alone(claimed.claim, None)
        ledger.close()


def test_claims_wait_and_lock_as_their_own_sessions_say(
    mariadb_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims use their own lock timeout and isolation level, not the server's or a body's."""
    ledger = SqlLedger(mariadb_url, lock_timeout_s=1.5)
    ledger.create_schema()
    settings = "select @@tx_isolation, @@innodb_lock_wait_timeout, connection_id()"
    found: list[Any] = []
    ask = Executed.ask

    def and_look(self: Executed, connection: Any, *asked: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(settings)
            found.extend(cursor.fetchall())
        return ask(self, connection, *asked)

    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    with ledger.transaction(claimed.claim) as tx:
        tx.db.exec_driver_sql("set session innodb_lock_wait_timeout = 7")
        bodies = tx.db.exec_driver_sql("select connection_id()").scalar_one()
        tx.complete_in_block(claimed.claim, None)
    monkeypatch.setattr(Executed, "ask", and_look)
    ledger.claim(request(2))
    [[isolation, limit_s, session]] = found
    assert (isolation, limit_s) == ("READ-COMMITTED", 2)
    assert session != bodies
    ledger.close()


# -- texts ------------------------------------------------------------------------------------

ODD = ["a'b\"c", "100% %s %(key)s %%", "\\", "\\' or 1=1 -- ", "🙂 ü", "; end", "x\ny", "`k`"]


@pytest.mark.parametrize("odd", ODD)
def test_texts_of_every_kind_are_stored_as_they_are(
    ledger: SqlLedger, engine: sa.Engine, blocks: list[Any], odd: str
) -> None:
    """In key, work, task, owner, message, fingerprint, call and result."""
    asked = request(
        keys=(odd,),
        work=odd,
        task=odd,
        owner=Owner("n", odd),
        message=MessageRef(odd),
        fingerprint=odd,
        call=odd,
    )
    claimed = ledger.claim(asked)
    assert isinstance(claimed, Claimed)
    assert blocks == [claimed]
    with engine.connect() as db:
        row = db.execute(sa.select(WORK)).one()
        assert db.execute(sa.select(KEYS.c.key)).scalars().all() == [odd]
    assert {row.id, row.key, row.task, row.message, row.fingerprint, row.call} == {odd}
    assert row.due == row.lease_until
    again = ledger.claim(asked)
    assert isinstance(again, Claimed)
    assert again.claim == claimed.claim
    ledger.complete_alone(claimed.claim, odd)
    answer = ledger.claim(request(keys=(odd,), work=odd, fingerprint=odd))
    assert isinstance(answer, Answer)
    assert (answer.decision, answer.result_json) == (Decision.DONE, odd)


def test_keys_and_works_compare_byte_by_byte(ledger: SqlLedger, blocks: list[Any]) -> None:
    """Keys, work ids and message ids that differ in case, accents or trailing blanks are
    different."""
    names = ["order", "Order", "order ", "örder", "order  "]
    for name in names:
        found = ledger.claim(request(keys=(name,), work=name, message=MessageRef(name)))
        assert isinstance(found, Claimed), name
    assert [type(block) for block in blocks] == [Claimed] * len(names)
    assert ledger.defer(request(2, message=MessageRef("m ")), lambda deferrals: None)
    assert isinstance(ledger.claim(request(2, message=MessageRef("M "))), Claimed)
    assert isinstance(ledger.claim(request(3, message=MessageRef("m"))), Claimed)


# -- when it is taken -------------------------------------------------------------------------


def test_it_is_taken_on_the_ledgers_own_connections_to_mariadb(mariadb_url: str) -> None:
    """The message is used on the ledger's own connections to MariaDB, with either spelling of the
    URL. A user's Engine claims in steps, because its sessions have other settings."""
    as_mysql = SqlLedger(mariadb_url.replace("mariadb+", "mysql+"))
    as_mysql.create_schema()
    engine = sa.create_engine(mariadb_url)
    theirs, in_steps = SqlLedger(engine), SqlLedger(mariadb_url, one_statement=False)
    found = {
        ledger: type(ledger._transactions.statements) for ledger in (as_mysql, theirs, in_steps)
    }
    assert found == {as_mysql: MariaDBStatements, theirs: Statements, in_steps: Statements}
    for ledger in found:
        ledger.close()


def test_first_claims_take_no_steps(ledger: SqlLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    """First claims take no steps, even if the answer is done or held."""
    monkeypatch.setattr(claims, "claim", None)
    claimed = ledger.claim(request())
    assert isinstance(claimed, Claimed)
    assert isinstance(ledger.claim(request()), Busy)
    assert isinstance(ledger.claim(request(work="other")), Busy)
    ledger.complete_alone(claimed.claim, "7")
    answer = ledger.claim(request())
    assert isinstance(answer, Answer)
    assert answer.result_json == "7"
