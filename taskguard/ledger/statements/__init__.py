"""How a claim is taken, completed and renewed, for each kind of database.

`portable.py` is complete. PostgreSQL and MariaDB override the parts that they do in one message,
and fall back to it. Only this module decides which statements a database gets.
"""

from __future__ import annotations

from typing import Any

from taskguard.ledger.connections.database import Database
from taskguard.ledger.statements.portable import Statements

__all__ = ["Statements", "statements_for"]


def statements_for(database: Database, *, one_statement: bool) -> Statements:
    """Return the statements for this database.

    The server behind `mysql://` may be a MariaDB, so this asks the server.

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
