"""Statements by libpq itself: a connection prepares each the second time, and has its values only.

psycopg's cursor takes a third longer for it, most of that in finding out what it was told before.

Guarantees: the rows that a cursor would give, of columns that are texts, whole numbers and
booleans; waits as psycopg does, so that an interrupt cancels the statement and other greenlets run.
Says None, and has sent nothing, where that is not so: the caller then asks by a cursor. So it does
on an Engine of the user's own, whose connections are as they were set.

Behind a pooler a session has not what was prepared before: nothing is prepared where that is known,
nor by any connection after a session for the first time did not have it. That once a lone statement
is asked again; a transaction is to be run again.

A transaction's last statement and its COMMIT go in one message, by libpq's pipeline mode.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Generator, Mapping
from hashlib import blake2b
from itertools import repeat
from operator import contains
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from taskguard.ledger.connections.sessions import POOLED, PREPARED

if TYPE_CHECKING:
    from taskguard.ledger.connections.deadlines import Deadline

__all__ = ["FORGOTTEN", "NOT_SENT", "Commit", "Libpq", "Numbered", "numbered"]

# SQLSTATEs of a session that has not what was prepared in it, or has what another prepared:
# invalid_sql_statement_name, duplicate_prepared_statement, and what a pooler says for itself.
FORGOTTEN: Final = frozenset({"26000", "42P05"})

_NAME = re.compile(r"%\((\w+)\)s")
# "cached plan must not change result type": a table has been changed since.
_CHANGED = "0A000"


_ENCODE: dict[type, Callable[[Any], bytes | None]] = {
    str: str.encode,
    int: b"%d".__mod__,
    bool: {True: b"t", False: b"f"}.__getitem__,
    type(None): {None: None}.__getitem__,
}
_NUL = repeat(0)
# By the numbers of types in pg_type; those that are not here are texts.
_LOAD: dict[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 21: int, 23: int}
# psycopg.pq.ExecStatus
_TUPLES_OK, _COMMAND_OK, _PIPELINE_SYNC = 2, 1, 10
_IDLE = 0  # psycopg.pq.TransactionStatus
# An attribute of psycopg's connections: how many `with connection.transaction()` are open.
_BLOCKS = "_num_transactions"


class Numbered(NamedTuple):
    """A statement with PostgreSQL's own placeholders.

    Attributes:
        text: with `$1` for the first value.
        names: the values' names in the order of their numbers.
        sent: the text as it is sent.
        prepared: the name that it is prepared by.
    """

    text: str
    names: tuple[str, ...]
    sent: bytes
    prepared: bytes


class Commit(NamedTuple):
    """What became of a COMMIT that goes with a statement.

    Attributes:
        sent: False: it has to go by itself, as does the statement.
        error: the driver's, by which it failed; None: it did not.
        session: the server's number of its session, where no answer came to either: then nobody
            knows what became of them, and the session may have them before it yet.
    """

    sent: bool
    error: Exception | None = None
    session: int | None = None


NOT_SENT: Final = Commit(sent=False)


@functools.lru_cache(maxsize=1_000)
def numbered(statement: str) -> Numbered:
    """The statement with `$1` for each `%(name)s` of one name; `%%` is one percent sign.

    Read once: psycopg reads one of more than 4,096 bytes whenever it is executed, in 70 µs.
    """
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"${names.setdefault(found[1], len(names) + 1)}"

    text = "%".join(_NAME.sub(number, part) for part in statement.split("%%"))
    # By its text: a session that several processes share must not have another under the name.
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return Numbered(text, tuple(names), text.encode(), f"taskguard_{digest}".encode())


class Libpq:
    """For the connections of one database, made by psycopg."""

    def __init__(self, psycopg: Any) -> None:
        self._execute = psycopg.generators.execute
        self._flush = psycopg.generators.send
        self._fetch = psycopg.generators.fetch_many
        self._error_of = psycopg.errors.error_from_result
        self._error = psycopg.Error
        self._too_late = psycopg.OperationalError
        self._has_pipelines = psycopg.Pipeline.is_supported()
        self._prepares = True

    def ask(
        self,
        connection: Any,
        statement: str,
        values: Mapping[str, Any],
        deadline: Deadline | None = None,
    ) -> list[tuple[Any, ...]] | None:
        """The rows of one statement; None: it is for a cursor. Raises psycopg's errors.

        Where no answer has come by the deadline, the connection is closed.
        """
        sendable = self._sendable(connection, statement, values)
        if sendable is None:
            return None
        (asked, sent), kept, pgconn = sendable, vars(connection), connection.pgconn
        with connection.lock:
            prepared: dict[bytes, bool] | None = kept.setdefault(PREPARED, {})
            if prepared is None or not self._prepares or kept[POOLED]:
                pgconn.send_query_params(asked.sent, sent)
                return self._rows(connection, deadline)
            alone = pgconn.transaction_status == _IDLE
            try:
                if self._is_prepared(connection, asked, prepared, deadline):
                    pgconn.send_query_prepared(asked.prepared, sent)
                else:
                    pgconn.send_query_params(asked.sent, sent)
                return self._rows(connection, deadline)
            except self._error as error:
                if error.sqlstate in FORGOTTEN:
                    self._prepares = False
                elif error.sqlstate != _CHANGED:
                    raise
                prepared.pop(asked.prepared, None)
                if not alone:
                    raise
            pgconn.send_query_params(asked.sent, sent)
            return self._rows(connection, deadline)

    def ask_and_commit(self, connection: Any, statement: str, values: Mapping[str, Any]) -> Commit:
        """A transaction's last statement and its COMMIT, in one message.

        The statement has to fail where nothing is to be committed: psycopg's error is then raised,
        and the COMMIT has done nothing. An error that says that the connection is gone does not
        say what became of either.
        """
        sendable = self._sendable(connection, statement, values)
        if sendable is None or not self._has_pipelines or vars(connection)[POOLED]:
            return NOT_SENT
        if vars(connection).get(_BLOCKS):
            return NOT_SENT  # psycopg says itself that it does not commit then
        (asked, sent), pgconn = sendable, connection.pgconn
        with connection.lock:
            if self._is_closed(pgconn):
                return NOT_SENT  # nothing is unknown, then
            prepared = vars(connection).setdefault(PREPARED, {})
            known = prepared is not None and self._prepares
            try:
                known = known and self._is_prepared(connection, asked, prepared)
            except self._error as error:
                self._note_forgotten(error)
                raise
            pgconn.enter_pipeline_mode()
            try:
                if known:
                    pgconn.send_query_prepared(asked.prepared, sent)
                else:
                    pgconn.send_query_params(asked.sent, sent)
                pgconn.send_query_params(b"COMMIT", [])
                pgconn.pipeline_sync()
                completed, committed = self._both(connection)
            finally:
                # Not where it is broken, or an interrupt left answers on their way.
                with contextlib.suppress(self._error):
                    pgconn.exit_pipeline_mode()
            if completed.status != _TUPLES_OK:
                refused = self._error_of(completed)
                self._note_forgotten(refused)
                raise refused
            failed = committed.status != _COMMAND_OK
            return Commit(sent=True, error=self._error_of(committed) if failed else None)

    def send(self, connection: Any, statements: str) -> None:
        """Send statements without values, in one message; `receive()` waits for their answers.

        In between nothing else may be asked on this connection.
        """
        with connection.lock:
            connection.pgconn.send_query(statements.encode())

    def receive(self, connection: Any, deadline: Deadline) -> None:
        """Wait for the ends of what was sent, which have no rows. Raises as `ask()` does."""
        with connection.lock:
            for result in self._answers(connection, deadline):
                if result.status != _COMMAND_OK:
                    raise self._error_of(result)

    def _sendable(
        self, connection: Any, statement: str, values: Mapping[str, Any]
    ) -> tuple[Numbered, list[bytes | None]] | None:
        """The statement and its values as libpq takes them; None: it is for a cursor."""
        asked, pgconn = numbered(statement), connection.pgconn
        if POOLED not in vars(connection):
            return None
        try:
            sent = [_ENCODE[type(value := values[name])](value) for name in asked.names]
        except KeyError:
            return None
        if any(map(contains, filter(None, sent), _NUL)):
            return None  # the driver refuses it, where libpq would send what is before it
        piped = self._has_pipelines and pgconn.pipeline_status
        if piped or pgconn.parameter_status(b"client_encoding") != b"UTF8":
            return None
        return asked, sent

    def _is_prepared(
        self,
        connection: Any,
        asked: Numbered,
        prepared: dict[bytes, bool],
        deadline: Deadline | None = None,
    ) -> bool:
        """From its second time on: a connection of a process for one job has no second time."""
        known = prepared.get(asked.prepared)
        if known is False:
            connection.pgconn.send_prepare(asked.prepared, asked.sent)
            self._rows(connection, deadline)
        prepared[asked.prepared] = known is not None
        return known is not None

    def _note_forgotten(self, error: Any) -> None:
        if error.sqlstate in FORGOTTEN:
            self._prepares = False

    def _is_closed(self, pgconn: Any) -> bool:
        """Whether the server has closed the connection already, which is known without asking."""
        try:
            pgconn.consume_input()  # its last words
            pgconn.consume_input()  # the end
        except self._error:
            return True
        return False

    def _both(self, connection: Any) -> tuple[Any, Any]:
        """The results of two statements that were sent in one message."""

        pgconn = connection.pgconn

        def fetch() -> Generator[Any, Any, list[Any]]:
            found: list[Any] = []
            yield from self._flush(pgconn)  # all of a long message, and not a part
            while not found or found[-1].status != _PIPELINE_SYNC:
                found += yield from self._fetch(pgconn)
            return found

        completed, committed, _ = connection.wait(fetch())
        return completed, committed

    def _answers(self, connection: Any, deadline: Deadline | None) -> list[Any]:
        waiting = self._execute(connection.pgconn)
        if deadline is not None:
            waiting = self._until(deadline, connection, waiting)
        found: list[Any] = connection.wait(waiting)
        return found

    def _until(
        self, deadline: Deadline, connection: Any, waiting: Generator[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Wait until the deadline: psycopg comes by ten times a second, to look for interrupts."""
        try:
            state = next(waiting)
            while True:
                ready = yield state
                if monotonic() >= deadline.at_s:
                    deadline.passed = True
                    connection.close()
                    raise self._too_late("no answer in time")
                state = waiting.send(ready)
        except StopIteration as done:
            return done.value

    def _rows(self, connection: Any, deadline: Deadline | None) -> list[tuple[Any, ...]]:
        [*_, result] = self._answers(connection, deadline)
        if result.status == _COMMAND_OK:
            return []
        if result.status != _TUPLES_OK:
            raise self._error_of(result)
        get = result.get_value
        load = [_LOAD.get(result.ftype(at), bytes.decode) for at in range(result.nfields)]
        return [
            tuple([
                None if (value := get(row, at)) is None else load[at](value)
                for at in range(len(load))
            ])
            for row in range(result.ntuples)
        ]  # fmt: skip
