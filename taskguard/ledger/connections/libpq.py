"""Run statements with libpq, below psycopg's cursors.

A connection prepares a statement at its second use, and then sends only the values. psycopg's
cursor takes a third longer.

Guarantees: the rows are those of a cursor, for columns with texts, integers and booleans. It waits
as psycopg does, so that an interrupt cancels the statement, and other greenlets run. If it cannot
do that, it returns None before it sends anything, and the caller uses a cursor. On an Engine of the
user it always returns None, because its connections have the user's settings.

A pooler may give a connection another session, which does not have the prepared statements. Behind
a known pooler, nothing is prepared. At the first missing statement, all connections stop preparing.
A lone statement is then sent again, and a transaction has to run again.

In libpq's pipeline mode, one message contains a transaction's last statement and its COMMIT.
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

# SQLSTATEs of a session that lost its prepared statements, or has those of another client:
# invalid_sql_statement_name and duplicate_prepared_statement. Poolers report these, too.
FORGOTTEN: Final = frozenset({"26000", "42P05"})

_NAME = re.compile(r"%\((\w+)\)s")
# "cached plan must not change result type": a table has changed in the meantime.
_CHANGED = "0A000"


_ENCODE: dict[type, Callable[[Any], bytes | None]] = {
    str: str.encode,
    int: b"%d".__mod__,
    bool: {True: b"t", False: b"f"}.__getitem__,
    type(None): {None: None}.__getitem__,
}
_NUL = repeat(0)
# Functions by the oid of a type in pg_type. Other types are read as texts.
_LOAD: dict[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 21: int, 23: int}
# psycopg.pq.ExecStatus
_TUPLES_OK, _COMMAND_OK, _PIPELINE_SYNC = 2, 1, 10
_IDLE = 0  # psycopg.pq.TransactionStatus
# An attribute of psycopg's connections: how many `with connection.transaction()` are open.
_BLOCKS = "_num_transactions"


class Numbered(NamedTuple):
    """A statement with PostgreSQL's own placeholders.

    Attributes:
        text: the statement, with `$1` for the first value.
        names: the values' names in the order of their numbers.
        sent: the encoded text.
        prepared: the name of the prepared statement.
    """

    text: str
    names: tuple[str, ...]
    sent: bytes
    prepared: bytes


class Commit(NamedTuple):
    """The outcome of a COMMIT that is in the same message as a statement.

    Attributes:
        sent: False: nothing was sent, so the caller has to send the statement and the COMMIT.
        error: the driver's error, if the COMMIT failed.
        session: the server's number of the session, if no answer came. Then both outcomes are
            unknown, and the session may still execute them.
    """

    sent: bool
    error: Exception | None = None
    session: int | None = None


NOT_SENT: Final = Commit(sent=False)


@functools.lru_cache(maxsize=1_000)
def numbered(statement: str) -> Numbered:
    """Return the statement with `$1` for each `%(name)s` of one name, and `%` for `%%`.

    The result is cached. psycopg would parse a statement above 4,096 bytes at each execution, which
    takes 70 µs.
    """
    names: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        return f"${names.setdefault(found[1], len(names) + 1)}"

    text = "%".join(_NAME.sub(number, part) for part in statement.split("%%"))
    # The name depends on the text, because several processes may share a session.
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return Numbered(text, tuple(names), text.encode(), f"taskguard_{digest}".encode())


class Libpq:
    """Runs statements on psycopg's connections of one database."""

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
        """Return the rows of one statement, or None if it needs a cursor. Raises psycopg's errors.

        If no answer comes before the deadline, the connection is closed.
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
        """Send a transaction's last statement and its COMMIT in one message.

        The statement must fail if nothing may be committed. Then the COMMIT does nothing, and this
        raises psycopg's error. If the error is a lost connection, both outcomes are unknown.
        """
        sendable = self._sendable(connection, statement, values)
        if sendable is None or not self._has_pipelines or vars(connection)[POOLED]:
            return NOT_SENT
        if vars(connection).get(_BLOCKS):
            return NOT_SENT  # psycopg refuses the commit then, with its own error
        (asked, sent), pgconn = sendable, connection.pgconn
        with connection.lock:
            if self._is_closed(pgconn):
                return NOT_SENT  # nothing was sent, so no outcome is unknown
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
                # This fails if the connection is broken, or if an interrupt left unread answers.
                with contextlib.suppress(self._error):
                    pgconn.exit_pipeline_mode()
            if completed.status != _TUPLES_OK:
                refused = self._error_of(completed)
                self._note_forgotten(refused)
                raise refused
            failed = committed.status != _COMMAND_OK
            return Commit(sent=True, error=self._error_of(committed) if failed else None)

    def send(self, connection: Any, statements: str) -> None:
        """Send statements without values, in one message. `receive()` waits for their answers.

        Send nothing else on this connection in between.
        """
        with connection.lock:
            connection.pgconn.send_query(statements.encode())

    def receive(self, connection: Any, deadline: Deadline) -> None:
        """Wait until the sent statements end. They return no rows. Raises as `ask()` does."""
        with connection.lock:
            for result in self._answers(connection, deadline):
                if result.status != _COMMAND_OK:
                    raise self._error_of(result)

    def _sendable(
        self, connection: Any, statement: str, values: Mapping[str, Any]
    ) -> tuple[Numbered, list[bytes | None]] | None:
        """Return the statement and its encoded values, or None if it needs a cursor."""
        asked, pgconn = numbered(statement), connection.pgconn
        if POOLED not in vars(connection):
            return None
        try:
            sent = [_ENCODE[type(value := values[name])](value) for name in asked.names]
        except KeyError:
            return None
        if any(map(contains, filter(None, sent), _NUL)):
            return None  # libpq would cut the value at the NUL; a cursor raises an error
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
        """Return True if the statement is prepared. Prepare it at its second use.

        A process for a single job often has no second use.
        """
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
        """Return True if the server has already closed the connection. Sends nothing."""
        try:
            pgconn.consume_input()  # the server's last message
            pgconn.consume_input()  # the end of the stream
        except self._error:
            return True
        return False

    def _both(self, connection: Any) -> tuple[Any, Any]:
        """Return the results of two statements that were sent in one message."""

        pgconn = connection.pgconn

        def fetch() -> Generator[Any, Any, list[Any]]:
            found: list[Any] = []
            yield from self._flush(pgconn)  # the whole message, even if it is long
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
        """Wait until the deadline. psycopg resumes this ten times a second to check interrupts."""
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
