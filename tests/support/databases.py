"""Kinds of database, for the `params` of a fixture: the names of the fixtures that make one."""

from __future__ import annotations

import pytest

__all__ = ["DATABASES"]

DATABASES = [
    "pg_url",
    "sqlite_url",
    pytest.param("mariadb_url", marks=pytest.mark.debian),
    pytest.param("mysql_url", marks=pytest.mark.debian),
]
