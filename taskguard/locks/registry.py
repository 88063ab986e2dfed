"""Make a lock provider of a URL, a redis-py client, or a provider.

taskguard's own lock servers are in a table. For every other URL scheme an installed distribution
provides a factory by an entry point of the group `taskguard.locks`:

    [project.entry-points."taskguard.locks"]
    etcd = "taskguard_etcd:open_locks"

    def open_locks(url: str, *, ledger: object) -> LockProvider: ...

The entry point's name is the scheme. `ledger` is the application's ledger, or None.

Guarantees: the driver of a lock server is imported when its scheme is asked for. The metadata of
installed distributions are read only for schemes outside the table. No error shows a password.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from taskguard.drivers import extra_of, extras_named
from taskguard.errors import ConfigurationError
from taskguard.locks.base import LockProvider

__all__ = ["BESIDE_LEDGER", "EXAMPLE_URL", "make_provider"]

# Locks in the ledger's database.
BESIDE_LEDGER = "ledger://"
EXAMPLE_URL = "redis://localhost/1"

_GROUP = "taskguard.locks"
_REDIS = ("taskguard.locks.redis", "RedisLocks")
_CLUSTER = ("taskguard.locks.redis.cluster", "RedisClusterLocks")
_REDLOCK = ("taskguard.locks.redlock", "RedlockLocks")
_TABLE = ("taskguard.lock_table", "TableLocks")
_ADVISORY = ("taskguard.advisory_locks", "AdvisoryLocks")
# Module and class for each scheme; the class takes the URL.
_BUILT_IN = {
    "redis": _REDIS,
    "rediss": _REDIS,
    "valkey": _REDIS,
    "valkeys": _REDIS,
    "unix": _REDIS,
    "sentinel": _REDIS,
    "sentinels": _REDIS,
    "redis+cluster": _CLUSTER,
    "rediss+cluster": _CLUSTER,
    "valkey+cluster": _CLUSTER,
    "valkeys+cluster": _CLUSTER,
    "redlock": _REDLOCK,
    "redlocks": _REDLOCK,
    "postgresql+psycopg": _TABLE,
    "mariadb+pymysql": _TABLE,
    "mysql+pymysql": _TABLE,
    "postgresql+advisory": _ADVISORY,
    "mariadb+advisory": _ADVISORY,
    "mysql+advisory": _ADVISORY,
}
# Schemes of taskguard's own distribution that are entry points: package, provider and extra.
_OURS = {
    "etcd": ("taskguard_etcd", "EtcdLocks", "etcd"),
    "etcds": ("taskguard_etcd", "EtcdLocks", "etcd"),
    "consul": ("taskguard_consul", "ConsulLocks", "consul"),
    "consuls": ("taskguard_consul", "ConsulLocks", "consul"),
    "zookeeper": ("taskguard_zookeeper", "ZooKeeperLocks", "zookeeper"),
    "zookeepers": ("taskguard_zookeeper", "ZooKeeperLocks", "zookeeper"),
}


def make_provider(chosen: Any, *, ledger: Any) -> LockProvider:
    """Return the lock provider for a URL, a redis-py client or a provider.

    Raises:
        ConfigurationError: `chosen` is no lock server.
        MissingDriverError: the driver's package is not installed.
    """
    if isinstance(chosen, str):
        return _provider_for_url(chosen, ledger)
    if isinstance(chosen, LockProvider):
        return chosen
    if hasattr(chosen, "execute_command"):
        return _made(_REDIS, chosen, "A lock on Redis")
    raise ConfigurationError(
        f"locks={type(chosen).__name__} is neither a URL, a redis-py client nor a lock provider."
    )


def _provider_for_url(url: str, ledger: Any) -> LockProvider:
    scheme, separator, _ = url.partition("://")
    if url == BESIDE_LEDGER:
        with extras_named("Locks in a database"):
            kind = importlib.import_module(_TABLE[0])
        beside: LockProvider = kind.TableLocks.beside(ledger)
        return beside
    if scheme == "memory":
        from taskguard.locks.memory import MemoryLocks  # few processes lock in memory

        return MemoryLocks()
    home = _BUILT_IN.get(scheme)
    if home is not None:
        return _made(home, url, f"The lock server {scheme}://", extra_of(scheme))
    # The scheme is shown only if it looks like one: a wrong URL may begin with the password.
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        raise ConfigurationError(f"The lock server's URL has no scheme. {_known()}")
    return _provider_of_others(scheme, url, ledger)


def _made(home: tuple[str, str], server: Any, what: str, extra: str | None = None) -> LockProvider:
    with extras_named(what, extra):
        kind = getattr(importlib.import_module(home[0]), home[1])
        provider: LockProvider = kind(server)  # some import a driver only for some URLs
    return provider


def _provider_of_others(scheme: str, url: str, ledger: Any) -> LockProvider:
    """Return the provider of the one distribution whose entry point has this scheme."""
    from importlib import metadata  # slow to load, and built-in lock servers do not need it

    found = list(metadata.entry_points(group=_GROUP, name=scheme))
    if not found:
        raise _unknown(scheme)
    if len(found) > 1:
        names = sorted(each.dist.name if each.dist else each.value for each in found)
        raise ConfigurationError(
            f"Several distributions provide the lock server {scheme}://: {', '.join(names)}. "
            "Uninstall all but one of them."
        )
    provider = found[0].load()(url, ledger=ledger)
    if not isinstance(provider, LockProvider):
        raise ConfigurationError(
            f"The entry point {_GROUP}: {scheme} = {found[0].value} returned "
            f"{type(provider).__name__}, which is no taskguard.locks.LockProvider. Update the "
            "distribution that provides it."
        )
    return provider


def _unknown(scheme: str) -> ConfigurationError:
    if scheme in _OURS:
        package, provider, extra = _OURS[scheme]
        return ConfigurationError(
            f"The lock server {scheme}:// is not registered: the metadata of the distribution "
            f"celery-taskguard are missing. Install it: pip install 'celery-taskguard[{extra}]'. "
            f"Or pass the provider: locks={package}.{provider}(url)."
        )
    return ConfigurationError(
        f"The lock server's URL starts with {scheme}://, which no installed distribution provides. "
        f"{_known()}"
    )


def _known() -> str:
    return (
        f"Known schemes: {', '.join([*_BUILT_IN, *_OURS])}, ledger and memory, for example "
        f"{EXAMPLE_URL}."
    )
