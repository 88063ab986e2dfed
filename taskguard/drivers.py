"""Optional packages, and the extras that install them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from taskguard.errors import MissingDriverError

__all__ = ["extra_of", "extras_named"]

_DATABASES = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}
_BRINGS = {
    "fakeredis": "pytest",
    "prometheus_client": "prometheus",
    "redis": "redis",
    "rich": "cli",
    "shtab": "cli",
    "sqlalchemy": "postgresql",
}
_ALSO = {"sqlalchemy": " (or with the extra mysql, or sqlite)"}


def extra_of(url: object) -> str | None:
    """Return the extra that brings the driver of a database's URL; None if its kind is unknown."""
    return _DATABASES.get(str(url).partition(":")[0].partition("+")[0])


@contextmanager
def extras_named(what: str, extra: str | None = None) -> Iterator[None]:
    """Raise MissingDriverError if an import in the block does not find a driver.

    Args:
        what: what the driver is needed for; the subject of the message.
        extra: the extra that brings it; by default an extra that brings that package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _BRINGS:
            raise
        also = "" if extra else _ALSO.get(package, "")
        raise MissingDriverError(
            f"{what} needs the package {package}, which is not installed: pip install "
            f"'celery-taskguard[{extra or _BRINGS[package]}]'{also}."
        ) from error
