"""How a claim is taken, completed and renewed, for each kind of database.

`portable.py` is complete. PostgreSQL and MariaDB override what they do in one message, and fall
back to it. Which of them a database gets is decided here, and nowhere else.
"""

from __future__ import annotations

from typing import Any

from taskguard.ledger.connections.database import Database
from taskguard.ledger.statements.portable import Statements

__all__ = ["Statements", "statements_for"]


def statements_for(database: Database, *, one_statement: bool) -> Statements:
    """The statements for this database. A `mysql://` may be a MariaDB, so the server is asked.

    Args:
        database: the database and its Engine.
        one_statement: False: the portable statements, on every database.
    """
    dialect: Any = database.engine.dialect
    by = dialect.name, dialect.driver
    if one_statement and by == ("postgresql", "psycopg"):
        from taskguard.ledger.statements.postgresql import PostgreSQLStatements  # of it alone

        return PostgreSQLStatements(database)
    own_pymysql = dialect.driver == "pymysql" and database.dialect.own
    if one_statement and own_pymysql and database.is_mariadb():
        from taskguard.ledger.statements.mariadb import MariaDBStatements  # of it alone

        return MariaDBStatements(database)
    return Statements(database)
