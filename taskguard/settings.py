"""Makes a lock provider and a ledger from URLs, clients and environment variables.

Guarantees: a missing or wrong setting raises an error before anything runs. No error contains a
password. A driver is imported when a setting needs it. If it is missing, the error names its extra.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from taskguard.drivers import extra_of, extras_named
from taskguard.errors import ConfigurationError
from taskguard.locks.base import LockProvider
from taskguard.locks.registry import EXAMPLE_URL, make_provider
from taskguard.model.policy import check_namespace

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = [
    "FORMERLY_VARIABLE",
    "LEDGER_VARIABLE",
    "LOCKS_VARIABLE",
    "NAMESPACE_VARIABLE",
    "UNSET",
    "is_set",
    "make_formerly_namespaces",
    "make_ledger",
    "make_locks",
    "make_namespace",
    "named_source",
    "set_defaults",
]

LOCKS_VARIABLE = "TASKGUARD_LOCKS_URL"
LEDGER_VARIABLE = "TASKGUARD_LEDGER_URL"
NAMESPACE_VARIABLE = "TASKGUARD_NAMESPACE"
FORMERLY_VARIABLE = "TASKGUARD_FORMERLY_NAMESPACES"


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()


_defaults: dict[str, Callable[[], Any]] = {}


def set_defaults(
    *,
    locks: Callable[[], Any] | None = None,
    ledger: Callable[[], Any] | None = None,
    namespace: Callable[[], Any] | None = None,
    formerly_namespaces: Callable[[], Any] | None = None,
) -> None:
    """Set this process's defaults, for a framework that has settings of its own.

    These defaults take precedence over the environment. Arguments of `connect()` and `configure()`,
    and settings of a Celery app, take precedence over them. An omitted argument removes its
    default.

    Args:
        locks: returns a value for `connect(locks=…)`, or UNSET. Called when a `TaskGuard` needs it.
        ledger: returns a value for `connect(ledger=…)`, or UNSET.
        namespace: returns a value for `connect(namespace=…)`, or UNSET.
        formerly_namespaces: returns a value for `connect(formerly_namespaces=…)`, or UNSET.
    """
    given = {
        LOCKS_VARIABLE: locks,
        LEDGER_VARIABLE: ledger,
        NAMESPACE_VARIABLE: namespace,
        FORMERLY_VARIABLE: formerly_namespaces,
    }
    _defaults.clear()
    _defaults.update({name: make for name, make in given.items() if make is not None})


@contextlib.contextmanager
def named_source(source: str) -> Iterator[None]:
    """Let the text of a ConfigurationError begin with the name of the option or variable."""
    try:
        yield
    except ConfigurationError as error:
        error.args = (f"{source}: {error}",)
        raise


def _source(given: Any, variable: str) -> contextlib.AbstractContextManager[None]:
    """Name the variable in errors if the value is from the environment."""
    of_environment = given is UNSET and variable not in _defaults
    return named_source(variable) if of_environment else contextlib.nullcontext()


def _from_environment(given: Any, variable: str, environ: Mapping[str, str] | None) -> Any:
    if given is UNSET and variable in _defaults:
        given = _defaults[variable]()
    if given is not UNSET:
        return given
    return (os.environ if environ is None else environ).get(variable) or UNSET


def is_set(variable: str) -> bool:
    """Return whether the environment or this process's defaults have a value for the variable."""
    return _from_environment(UNSET, variable, None) is not UNSET


def make_locks(
    given: Any = UNSET, *, ledger: Any = None, environ: Mapping[str, str] | None = None
) -> LockProvider | None:
    """Return the lock provider for a URL, a redis-py client or a provider; None for None.

    `ledger`: the ledger whose database has the locks of `ledger://`.

    Raises:
        ConfigurationError: no lock server is configured, or the value is no lock server.
        MissingDriverError: the driver's package is not installed.
    """
    chosen = _from_environment(given, LOCKS_VARIABLE, environ)
    if chosen is None:
        return None
    if chosen is UNSET:
        raise ConfigurationError(
            "No lock server is configured. Set taskguard_locks_url (Celery), pass locks=, or set "
            f'{LOCKS_VARIABLE}, for example to "{EXAMPLE_URL}". With locks=None the ledger alone '
            "decides."
        )
    with _source(given, LOCKS_VARIABLE):
        return make_provider(chosen, ledger=ledger)


def make_namespace(given: Any = UNSET, *, environ: Mapping[str, str] | None = None) -> str:
    """Return the namespace with which an application's keys and work begin; "" if none is set.

    Raises ConfigurationError if a key cannot begin with it.
    """
    chosen = _from_environment(given, NAMESPACE_VARIABLE, environ)
    if chosen is UNSET:
        return ""
    with _source(given, NAMESPACE_VARIABLE):
        return check_namespace(chosen)


def make_formerly_namespaces(
    given: Any = UNSET, *, environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the namespaces that an application had before, from a list or a text with commas.

    An empty item means no namespace. Raises ConfigurationError for an invalid one.
    """
    chosen = _from_environment(given, FORMERLY_VARIABLE, environ)
    if chosen is UNSET or chosen is None:
        return ()
    with _source(given, FORMERLY_VARIABLE):
        if isinstance(chosen, str):
            chosen = [each.strip() for each in chosen.split(",")]
        if not isinstance(chosen, list | tuple | set | frozenset):
            raise ConfigurationError(
                f"formerly_namespaces={chosen!r} is no list. Give a list of the namespaces that "
                'this application had before, for example ["shop"], or [""] if it had none.'
            )
        return tuple(check_namespace(each) for each in dict.fromkeys(chosen))


def make_ledger(
    given: Any = UNSET, *, environ: Mapping[str, str] | None = None
) -> DatabaseLedger | None:
    """Return the ledger for a SQLAlchemy URL, an Engine or a ledger; None for None.

    Raises:
        ConfigurationError: no ledger is configured, or the value is no database.
        MissingDriverError: SQLAlchemy or the driver's package is not installed.
    """
    chosen = _from_environment(given, LEDGER_VARIABLE, environ)
    if chosen is None:
        return None
    if chosen is UNSET:
        raise ConfigurationError(
            "No ledger is configured: without one nothing can refuse a second effect. Set "
            f"taskguard_ledger_url (Celery), pass ledger=, or set {LEDGER_VARIABLE}, for example "
            'to "postgresql+psycopg://shop@localhost/shop". If you want locks only, set '
            "ledger=None."
        )
    # Test for the method: a user's stand-in for a ledger need not be of taskguard's class.
    if callable(getattr(chosen, "store_result", None)):
        return cast("DatabaseLedger", chosen)
    if isinstance(chosen, str) or hasattr(chosen, "dialect") or hasattr(chosen, "drivername"):
        with _source(given, LEDGER_VARIABLE):
            with extras_named("The ledger", extra_of(chosen)):
                from taskguard.ledger.sql import SqlLedger

            return SqlLedger(chosen)
    raise ConfigurationError(
        f"ledger={type(chosen).__name__} is neither a URL, a SQLAlchemy Engine nor a ledger."
    )
