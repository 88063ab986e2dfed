"""Where a lock server is: from a URL, or a redis-py client, to what makes connections there.

Guarantees: what cannot be used is refused at once, with what to write instead; no message holds a
password, nor a part of a URL that may be one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from taskguard.errors import ConfigurationError

__all__ = [
    "address_of",
    "apart",
    "cluster_from_url",
    "from_client",
    "from_url",
    "refuse_unknown_certificates",
    "take_options",
    "unreadable",
]

_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "unix": "unix",
    "valkey": "redis",
    "valkeys": "rediss",
}
_PORT = 6379
_CERTIFICATES = ("none", "optional", "required")  # ssl_cert_reqs, as redis-py writes it
# What redis-py's pools keep among their connections' options for RESP3 and client-side caches.
_POOL_OPTIONS = ("maint", "oss_cluster", "orig_", "event_dispatcher", "himport", "cache")


def from_url(
    url: str, driver: Any, *, called: str | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The class of connections and its options; raises ConfigurationError.

    `called`: the scheme as its user knows it, where the URL was made of another.
    """
    scheme, separator, rest = url.partition("://")
    known = _SCHEMES.get(scheme.lower()) if separator else None
    if known is None:
        # Shown only if it looks like one: a URL that is all wrong may begin with the password.
        named = f"{scheme}:// is not known" if scheme.isalpha() and separator else "no scheme"
        raise ConfigurationError(
            f"The lock server's URL cannot be used ({named}). It reads "
            "redis://[user:password@]host[:port][/database], rediss://… for TLS, or "
            "unix:///path, sentinel://[user:password@]h1,h2,h3/name/0, or "
            "redis+cluster://host:port,host:port for a Redis Cluster."
        )
    plain = f"{known}://{rest}"
    try:
        parts = urlsplit(plain)
        database = parts.path.strip("/")
        # redis-py would take what follows '#' or '?' in a password for something else, in silence.
        if parts.fragment or "@" in database + parts.query:
            raise ValueError
        if known != "unix" and database and not database.isdecimal():
            raise ValueError
        options = dict(driver.connection.parse_url(plain))
    except ValueError:
        # Not chained: the driver's message quotes pieces of the URL, the password's among them.
        raise unreadable(called or scheme) from None
    options.pop("max_connections", None)
    options.pop("timeout", None)
    kind = options.pop("connection_class", driver.connection.Connection)
    return kind, options


def unreadable(scheme: str) -> ConfigurationError:
    """What is said of a URL that is wrong after its scheme."""
    hosts, path = "host[:port]", "[/database number]"
    if scheme.startswith("sentinel"):
        hosts, path = "host[:port],host[:port],…", f"/name of the master{path}"
    return ConfigurationError(
        f"The lock server's URL {scheme}://… cannot be read. It reads "
        f"{scheme}://[user:password@]{hosts}{path}; characters such as / # ? @ : in a password "
        "are percent-encoded (urllib.parse.quote)."
    )


def take_options(url: str, *names: str) -> tuple[str, dict[str, str]]:
    """A URL without these options, and what they were."""
    plain, mark, query = url.partition("?")
    query, hash_mark, fragment = query.partition("#")  # which is wrong, and left to be said
    taken: dict[str, str] = {}
    left = []
    for piece in query.split("&"):
        name, _, value = piece.partition("=")
        if name in names:
            taken[name] = unquote(value)
        else:
            left.append(piece)
    if not taken:
        return url, taken
    return (plain + mark + "&".join(left)).rstrip("?") + hash_mark + fragment, taken


def apart(url: str) -> tuple[str, str, str, str]:
    """Scheme, credentials with their "@", hosts, and what comes after them, of a URL with several.

    urlsplit() refuses one whose second host is an IPv6 address: newer Pythons take a bracket at the
    beginning only.
    """
    scheme, _, rest = url.partition("://")
    authority, tail = re.findall(r"^([^/?#]*)(.*)$", rest, re.DOTALL)[0]
    credentials, at, hosts = authority.rpartition("@")
    return scheme, credentials + at, hosts, tail


def cluster_from_url(url: str) -> tuple[str, list[tuple[str, int]]]:
    """A URL of one server, and the addresses at which a cluster may be found; ConfigurationError.

    User, password and options are those of every node: the URL has the first one's address.
    """
    scheme, credentials, hosts, tail = apart(url)
    try:
        parts = [urlsplit(f"//{each.strip()}") for each in hosts.split(",")]
        addresses = [(part.hostname or "", part.port or _PORT) for part in parts]
        strange = any(part.path or part.query or part.fragment for part in parts)
        path, _, options = tail.partition("?")
        if strange or "@" in tail or "#" in tail or path not in ("", "/", "/0"):
            raise ValueError
        if not all(host for host, _ in addresses):
            raise ValueError
    except ValueError:
        # Not chained, and not quoted: a piece of it may be one of the password.
        raise ConfigurationError(
            f"The lock server's URL {scheme}://… cannot be read. It reads "
            f"{scheme}://[user:password@]host:port,host:port,…: some nodes of the cluster, by "
            "which the others are found. Characters such as / # ? @ : in a password are "
            "percent-encoded (urllib.parse.quote); a cluster has no database but 0."
        ) from None
    host, port = addresses[0]
    shown = f"[{host}]" if ":" in host else host
    # "valkeys+cluster" is "valkeys" of one server.
    plain = f"{scheme.partition('+')[0]}://{credentials}{shown}:{port}"
    return f"{plain}?{options}" if options else plain, addresses


def from_client(client: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The same of a redis-py client; raises ConfigurationError."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    if any(base.__module__.partition(".")[0] == "valkey" for base in type(client).__mro__):
        raise ConfigurationError(
            f"The client is a {type(client).__module__.partition('.')[0]}.{type(client).__name__} "
            "of the package valkey, and locks speak to Valkey by the package redis. Give its URL "
            "(valkey://host/1, valkeys:// for TLS), or a redis.Redis client of the same address."
        )
    if kind is None or "asyncio" in type(client).__module__:
        raise ConfigurationError(
            f"A lock server is a URL or a synchronous redis.Redis client, not "
            f"{type(client).__module__}.{type(client).__qualname__}. For a Redis Cluster give "
            "its URL: redis+cluster://host:port,host:port."
        )
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith(_POOL_OPTIONS)
    }
    # From HELLO's time on, parser and protocol go together.
    options.pop("parser_class", None)
    return kind, options


def refuse_unknown_certificates(options: dict[str, Any], address: str) -> None:
    """redis-py says so only once it connects, and names no option."""
    given = options.get("ssl_cert_reqs")
    if not isinstance(given, str) or given in _CERTIFICATES:
        return
    word = given.lower().removeprefix("ssl.").removeprefix("cert_")
    said = f"ssl_cert_reqs={given}" if word in _CERTIFICATES else "ssl_cert_reqs"
    known = " or ".join(f"ssl_cert_reqs={each}" for each in _CERTIFICATES)
    advice = f"ssl_cert_reqs={word}" if word in _CERTIFICATES else known
    raise ConfigurationError(
        f"The lock server {address}: redis-py does not know {said} of its URL or "
        f"client; write {advice}, which Celery knows, too."
    )


def address_of(options: dict[str, Any]) -> str:
    """Host, port and database, or what is known instead, for people."""
    if "path" in options:
        where = options["path"]
    elif "connection_pool" in options:
        where = f"sentinel master {getattr(options['connection_pool'], 'service_name', '')}".strip()
    else:
        where = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{where}/{options.get('db') or 0}"
