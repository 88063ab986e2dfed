"""Tables that an earlier version made: they are told from today's, and become those."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from support.claims import request
from support.databases import DATABASES
from support.old_tables import back_to_version_1, shape_of
from taskguard.cli import main
from taskguard.errors import LedgerSchemaError
from taskguard.ledger.schema.upgrades import upgrade_statements
from taskguard.ledger.sql import SqlLedger
from taskguard.model.claims import Answer, Claimed, MessageRef
from taskguard.model.states import Decision


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest) -> str:
    made: str = request.getfixturevalue(request.param)
    return made


def test_tables_of_version_1_become_todays(url: str) -> None:
    """With all that is on record: numbers in their work, work by message is named by key, too.

    Deferrals begin at 0 again: messages that are on their way carry theirs in another header.
    """
    engine = sa.create_engine(url)
    ledger = SqlLedger(url)
    ledger.create_schema()
    shape = shape_of(engine)
    back_to_version_1(engine)
    assert shape_of(engine) != shape
    for ask in (ledger.check_schema, ledger.create_schema):
        with pytest.raises(
            LedgerSchemaError, match=r"version 1, .* wants version 4.*Stop the workers"
        ):
            ask()
    with engine.begin() as db:
        for statement in upgrade_statements(url):
            db.exec_driver_sql(statement.replace("%", "%%"))
    assert shape_of(engine) == shape
    ledger.check_schema()
    ledger.create_schema()
    for work in ("ship order:1", "ship eu:message:m order:1"):
        found = ledger.claim(request(work=work))
        assert isinstance(found, Answer)
        assert (found.decision, found.result_json) == (Decision.DONE, "7")
    with engine.connect() as db:
        columns = "message, work, retries, deferrals"
        numbers = db.exec_driver_sql(f"select {columns} from taskguard_messages")
        assert numbers.all() == [("m", "ship order:1", 0, 0)]
    assert isinstance(ledger.claim(request(2, message=MessageRef("m"))), Claimed)
    ledger.close()
    engine.dispose()


@pytest.mark.parametrize("name", ["mariadb_url", "mysql_url"])
def test_a_step_that_stopped_anywhere_begins_again(
    request: pytest.FixtureRequest, name: str
) -> None:
    """Each statement commits by itself there: `taskguard ledger upgrade` goes on all the same."""
    url = request.getfixturevalue(name)
    engine = sa.create_engine(url)
    ledger = SqlLedger(url)
    ledger.create_schema()
    shape = shape_of(engine)
    statements = upgrade_statements(url)
    # After the others the tables are as before them: a connection's own goes with it.
    own = ("SET ", "PREPARE ", "DEALLOCATE ")
    changes = [at for at, statement in enumerate(statements) if not statement.startswith(own)]
    for last in changes[:-1]:
        back_to_version_1(engine)
        with engine.begin() as db:
            for statement in statements[: last + 1]:
                db.exec_driver_sql(statement.replace("%", "%%"))
        assert main(["ledger", "upgrade", "--url", url]) == 0, statements[last]
        assert shape_of(engine) == shape
        ledger.check_schema()
        with engine.begin() as db:
            assert db.exec_driver_sql("select count(*) from taskguard_messages").scalar() == 1
            db.exec_driver_sql("delete from taskguard_work")
    ledger.close()
    engine.dispose()


def test_the_command_does_not_say_that_it_created_what_is_of_another_version(
    sqlite_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`taskguard ledger create` on tables of version 1, and of a version to come."""
    engine = sa.create_engine(sqlite_url)
    assert main(["ledger", "create", "--url", sqlite_url]) == 0
    back_to_version_1(engine)
    assert main(["ledger", "create", "--url", sqlite_url]) == 1
    with engine.begin() as db:
        db.exec_driver_sql("update taskguard_schema set version = 99")
    assert main(["ledger", "create", "--url", sqlite_url]) == 1
    assert "version 99, this library wants version 4" in capsys.readouterr().err
    engine.dispose()
