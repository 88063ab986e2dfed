"""Django's settings for taskguard, and the ledger in a database of `DATABASES`.

    TASKGUARD = {"LOCKS": "redis://localhost/1", "DATABASE": "default"}

| setting | default | value |
| --- | --- | --- |
| LOCKS | $TASKGUARD_LOCKS_URL | redis://…, a redis-py client; None: only the ledger |
| DATABASE | "default" | the alias of the ledger's database |
| NAMESPACE | $TASKGUARD_NAMESPACE | the prefix of this project's keys and work |
| FORMERLY_NAMESPACES | none | a list of former namespaces of this project |

They are this process's defaults: Celery apps, RQ workers and `taskguard.connect()` use them unless
they have settings of their own. The ledger has its own connections to the database, in addition to
Django's, so that claims and renewals commit independently of a body's transaction.

In a test run, the ledger is in the test database. It keeps no connection open between calls, so
that Django can drop the database. It claims nothing in a test that may not use the database.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from taskguard import errors
from taskguard.integration import UNSET, Finding
from taskguard_django import findings

if TYPE_CHECKING:
    from taskguard import SqlLedger

__all__ = [
    "alias",
    "formerly_namespaces",
    "ledger",
    "locks",
    "namespace",
    "tenant_tables",
    "testing",
    "url_of",
]

_NAMES = {"LOCKS", "DATABASE", "NAMESPACE", "FORMERLY_NAMESPACES"}
# Names in Django's OPTIONS that are not for libpq.
_DJANGOS = {
    "assume_role",
    "context",
    "cursor_factory",
    "isolation_level",
    "pool",
    "prepare_threshold",
    "row_factory",
    "server_side_binding",
}
_ENTRANCES = frozenset({"claim", "enqueue", "peek"})
_made: dict[tuple[str, bool], SqlLedger] = {}
_prepared: WeakSet[SqlLedger] = WeakSet()
_making = threading.Lock()


def _settings() -> Mapping[str, Any]:
    from django.conf import settings

    given = getattr(settings, "TASKGUARD", {})
    if not isinstance(given, Mapping) or not given.keys() <= _NAMES:
        # The error does not show values, because a URL may contain a password.
        names = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise errors.ConfigurationError(
            f"settings.TASKGUARD is wrong: it has {names}. Make it a dict with LOCKS, DATABASE, "
            "NAMESPACE and FORMERLY_NAMESPACES only."
        )
    return given


def locks() -> Any:
    """Return TASKGUARD["LOCKS"], or UNSET if it is missing."""
    return _settings().get("LOCKS", UNSET)


def namespace() -> Any:
    """Return TASKGUARD["NAMESPACE"], or UNSET if it is missing."""
    return _settings().get("NAMESPACE", UNSET)


def formerly_namespaces() -> Any:
    """Return TASKGUARD["FORMERLY_NAMESPACES"], or UNSET if it is missing."""
    return _settings().get("FORMERLY_NAMESPACES", UNSET)


def alias() -> str:
    """Return the alias of the ledger's database. Raises ConfigurationError for an unknown alias."""
    from django.db import connections

    name = _settings().get("DATABASE", "default")
    if name not in connections:
        raise errors.ConfigurationError(
            f"settings.TASKGUARD['DATABASE'] is {name!r}, which is not in DATABASES. Use one of: "
            f"{', '.join(connections)}."
        )
    return str(name)


class _FollowingLedger:
    """The ledger in Django's database. In a test run, each call finds the current database.

    A program may connect during its import, before a test run creates its databases.
    """

    def __init__(self) -> None:
        self.settled: SqlLedger | None = None  # outside of tests the database does not change
        self._tested = False

    def __getattr__(self, name: str) -> Any:
        if not testing():
            return getattr(self.settled or _ledger_now(), name)
        self._tested = True
        ledger = _ledger_now()
        if name in _ENTRANCES:
            _ask_djangos_tests()
            if ledger not in _prepared:
                ledger.create_schema()  # tests may run without migrations
                _prepared.add(ledger)
        return getattr(ledger, name)

    def add_counts(self, *args: Any, **kwargs: Any) -> None:
        """Add counts, except those of tests: at the end of a test run, they would go elsewhere."""
        if not (testing() or self._tested):
            self.__getattr__("add_counts")(*args, **kwargs)

    def begin_counts(self, *args: Any, **kwargs: Any) -> None:
        """Write zeros, except for tests."""
        if not (testing() or self._tested):
            self.__getattr__("begin_counts")(*args, **kwargs)

    def check(self, *args: Any, **kwargs: Any) -> list[Finding]:
        """Return the ledger's findings, and those about tenants in Django's settings."""
        found: list[Finding] = self.__getattr__("check")(*args, **kwargs)
        return [*found, *tenant_tables()]

    def check_schema(self, *args: Any, **kwargs: Any) -> None:
        """Check the tables. For tenants without tables, the error names the setting to change."""
        try:
            self.__getattr__("check_schema")(*args, **kwargs)
        except errors.LedgerSchemaError as error:
            tenants = tenant_tables()
            if not tenants:
                raise
            remedy = f"{tenants[0].where}: {tenants[0].what} {tenants[0].fix}"
            raise errors.LedgerSchemaError(error.problem, remedy=remedy) from error

    def __repr__(self) -> str:
        return repr(_ledger_now())


def tenant_tables() -> list[Finding]:
    """Return findings if each tenant has its own tables (django-tenants or a similar package)."""
    from django.conf import settings

    public = getattr(settings, "PUBLIC_SCHEMA_NAME", "public")
    own = {"TENANT_APPS": getattr(settings, "TENANT_APPS", ())}
    for name, kind in getattr(settings, "TENANT_TYPES", {}).items():
        if name != public:
            own[f"TENANT_TYPES[{name!r}]"] = kind.get("APPS", ())
    return [
        findings.TENANT_TABLES.at(f"the setting {name}")
        for name, apps in own.items()
        if any(str(app).partition(".")[0] == "taskguard_django" for app in apps)
    ]


_FOLLOWING = _FollowingLedger()


def ledger() -> SqlLedger:
    """Return the ledger in the database of TASKGUARD["DATABASE"].

    In a test run, it is in the test database.

    Raises:
        ConfigurationError: that database cannot have a ledger, or a setting is wrong.
    """
    found = _ledger_now()
    if not testing():
        _FOLLOWING.settled = found
    return cast("SqlLedger", _FOLLOWING)


def _ledger_now() -> SqlLedger:
    from django.db import connections

    url = url_of(connections[alias()])
    from taskguard import SqlLedger  # imports SQLAlchemy, which few commands of Django need

    name = url.render_as_string(hide_password=False), not testing()
    with _making:
        if name not in _made:
            _made[name] = SqlLedger(url, pooled=name[1])
        return _made[name]


def testing() -> bool:
    """Return True if `manage.py test` or pytest-django has set up Django's test environment."""
    utils = sys.modules.get("django.test.utils")
    return utils is not None and hasattr(utils._TestState, "saved_data")  # noqa: SLF001  # Django has no public sign


def _ask_djangos_tests() -> None:
    """Raise Django's error if the current test may not use the ledger's database.

    Without this check, it could be the real database, if Django created no test database for it.
    """
    from django.db import connections

    wrapper = connections[alias()]
    opened = wrapper.connection is None
    wrapper.cursor().close()
    if opened:  # in a thread where Django does not refuse it
        wrapper.close()


def url_of(connection: Any) -> Any:
    """Return the SQLAlchemy URL of a Django connection. In a test run: of the test database.

    Raises ConfigurationError if that database cannot have a ledger.
    """
    try:
        import sqlalchemy as sa
    except ModuleNotFoundError as error:
        raise errors.MissingDriverError(
            "A ledger in Django's database needs the package sqlalchemy, which is not installed: "
            "pip install 'celery-taskguard[django]'."
        ) from error

    given = connection.settings_dict
    if connection.vendor == "sqlite":
        name = str(given["NAME"])
        if name == ":memory:" or "mode=memory" in name:
            raise errors.ConfigurationError(
                f"The database {connection.alias!r} cannot have a ledger: it is in memory, where "
                "the ledger's own connections would not find it. Give it a file. For tests, set "
                'DATABASES[…]["TEST"] = {"NAME": …}.'
            )
        return sa.URL.create("sqlite", database=name)
    if connection.vendor != "postgresql":
        raise errors.ConfigurationError(
            f"The database {connection.alias!r} cannot have a ledger: it is {connection.vendor}. "
            "Use PostgreSQL (with psycopg 3) or SQLite."
        )
    driver = connection.Database.__name__
    if driver != "psycopg":
        raise errors.ConfigurationError(
            f"The database {connection.alias!r} cannot have a ledger: Django connects with "
            f"{driver}, and the ledger needs psycopg 3. Run pip install 'psycopg[binary]'."
        )
    return _postgresql_url(given)


def _postgresql_url(given: Mapping[str, Any]) -> Any:
    import sqlalchemy as sa

    options = given.get("OPTIONS") or {}
    query = {name: str(value) for name, value in options.items() if name not in _DJANGOS}
    if options.get("assume_role"):
        query["options"] = f"{query.get('options', '')} -c role={options['assume_role']}".strip()
    return sa.URL.create(
        "postgresql+psycopg",
        username=given.get("USER") or None,
        password=given.get("PASSWORD") or None,
        host=given.get("HOST") or None,
        port=int(given["PORT"]) if given.get("PORT") else None,
        database=given.get("NAME") or None,
        query=query,
    )
