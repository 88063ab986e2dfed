"""From one version of the ledger's tables to the next: statements for a person, or a migration.

Guarantees: run while no worker runs, by one who may alter the tables, they leave those that
`create_schema` would make, with all works in them; run once more they change nothing. They stand
here as they were written then, whatever the tables become later.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = ["upgrade_statements"]

# To version 2: the numbers of a message belong to its work, for an id may be used for two; and
# works by message are named by message and key.
_MYSQL = (
    "DELETE FROM taskguard_messages WHERE char_length(message) > 255 OR char_length(work) > 512",
    (
        "ALTER TABLE taskguard_messages MODIFY message VARCHAR(255) CHARACTER SET utf8mb4 COLLATE "
        "{collation} NOT NULL, MODIFY work VARCHAR(512) CHARACTER SET utf8mb4 COLLATE {collation} "
        "NOT NULL, DROP PRIMARY KEY, ADD PRIMARY KEY (message, work)"
    ),
    (
        "UPDATE taskguard_works SET id = concat(id, ' ', `key`) "
        "WHERE right(id, char_length(message) + 8) = concat('message:', message)"
    ),
)
_TO_2 = {
    "postgresql": (
        (
            "ALTER TABLE taskguard_messages DROP CONSTRAINT taskguard_messages_pkey, "
            "ADD PRIMARY KEY (message, work)"
        ),
        (
            "UPDATE taskguard_works SET id = id || ' ' || key "
            "WHERE right(id, length(message) + 8) = 'message:' || message"
        ),
    ),
    "mariadb": tuple(each.format(collation="utf8mb4_nopad_bin") for each in _MYSQL),
    "mysql": tuple(each.format(collation="utf8mb4_0900_bin") for each in _MYSQL),
    "sqlite": (
        (
            "CREATE TABLE taskguard_messages_2 (message TEXT NOT NULL, work TEXT NOT NULL, "
            "retries INTEGER NOT NULL, copy INTEGER NOT NULL, updated BIGINT NOT NULL, "
            "PRIMARY KEY (message, work))"
        ),
        (
            "INSERT INTO taskguard_messages_2 (message, work, retries, copy, updated) "
            "SELECT message, work, retries, copy, updated FROM taskguard_messages"
        ),
        "DROP TABLE taskguard_messages",
        "ALTER TABLE taskguard_messages_2 RENAME TO taskguard_messages",
        (
            "UPDATE taskguard_works SET id = id || ' ' || key "
            "WHERE substr(id, -(length(message) + 8)) = 'message:' || message"
        ),
    ),
}


def upgrade_statements(url: str) -> list[str]:
    """What makes tables of version 1 those of version 2, one statement after the other.

    Of the URL only the kind of database matters; of a MariaDB say `mariadb+pymysql://`.
    """
    kind = sa.make_url(url).get_backend_name()
    return [*_TO_2[kind], "UPDATE taskguard_schema SET version = 2"]
