"""Parses the URL of a lock server, or a redis-py client, into a connection class and its options.

Guarantees: an unusable URL or client is refused at once, with advice. No message contains a
password, or a part of a URL that may be one.
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
# Prefixes of options in redis-py's pools that are for RESP3 and client-side caches.
_POOL_OPTIONS = ("maint", "oss_cluster", "orig_", "event_dispatcher", "himport", "cache")


def from_url(
    url: str, driver: Any, *, called: str | None = None
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the class of connections and its options. Raises ConfigurationError.

    `called`: the scheme in the user's URL, if taskguard made this URL from another one.
    """
    scheme, separator, rest = url.partition("://")
    known = _SCHEMES.get(scheme.lower()) if separator else None
    if known is None:
        # The scheme is shown only if it looks like one: a wrong URL may begin with the password.
        named = f"{scheme}:// is not known" if scheme.isalpha() and separator else "no scheme"
        raise ConfigurationError(
            f"The lock server's URL cannot be used ({named}). Write "
            "redis://[user:password@]host[:port][/database], rediss://… for TLS, "
            "unix:///path, sentinel://[user:password@]h1,h2,h3/name/0, or "
            "redis+cluster://host:port,host:port for a Redis Cluster."
        )
    plain = f"{known}://{rest}"
    try:
        parts = urlsplit(plain)
        database = parts.path.strip("/")
        # redis-py would silently misread a password that contains '#' or '?'.
        if parts.fragment or "@" in database + parts.query:
            raise ValueError
        if known != "unix" and database and not database.isdecimal():
            raise ValueError
        options = dict(driver.connection.parse_url(plain))
    except ValueError:
        # Not chained: the driver's message quotes pieces of the URL, perhaps of the password.
        raise unreadable(called or scheme) from None
    options.pop("max_connections", None)
    options.pop("timeout", None)
    kind = options.pop("connection_class", driver.connection.Connection)
    return kind, options


def unreadable(scheme: str) -> ConfigurationError:
    """Return the error for a URL that is wrong after its scheme."""
    hosts, path = "host[:port]", "[/database number]"
    if scheme.startswith("sentinel"):
        hosts, path = "host[:port],host[:port],…", f"/name of the master{path}"
    return ConfigurationError(
        f"The lock server's URL {scheme}://… cannot be read. Write "
        f"{scheme}://[user:password@]{hosts}{path}, and percent-encode characters such as "
        "/ # ? @ : in a password (urllib.parse.quote)."
    )


def take_options(url: str, *names: str) -> tuple[str, dict[str, str]]:
    """Remove these options from a URL. Return the URL and their values."""
    plain, mark, query = url.partition("?")
    query, hash_mark, fragment = query.partition("#")  # `from_url()` refuses a fragment later
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
    """Split a URL with several hosts into scheme, credentials with "@", hosts, and the rest.

    urlsplit() of newer Pythons refuses a URL whose second host is an IPv6 address, because it
    accepts a bracket only at the beginning.
    """
    scheme, _, rest = url.partition("://")
    authority, tail = re.findall(r"^([^/?#]*)(.*)$", rest, re.DOTALL)[0]
    credentials, at, hosts = authority.rpartition("@")
    return scheme, credentials + at, hosts, tail


def cluster_from_url(url: str) -> tuple[str, list[tuple[str, int]]]:
    """Return the URL of the first node, and the addresses of all nodes in the URL.

    User, password and options are the same for every node. Raises ConfigurationError.
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
        # Not chained and not quoted: a piece of the URL may be a piece of the password.
        raise ConfigurationError(
            f"The lock server's URL {scheme}://… cannot be read. Write "
            f"{scheme}://[user:password@]host:port,host:port,… with some nodes of the cluster: "
            "taskguard finds the others. Percent-encode characters such as / # ? @ : in a password "
            "(urllib.parse.quote). A cluster has database 0 only."
        ) from None
    host, port = addresses[0]
    shown = f"[{host}]" if ":" in host else host
    # "valkeys+cluster" is "valkeys" of one server.
    plain = f"{scheme.partition('+')[0]}://{credentials}{shown}:{port}"
    return f"{plain}?{options}" if options else plain, addresses


def from_client(client: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a redis-py client's class of connections and options. Raises ConfigurationError."""
    pool: Any = getattr(client, "connection_pool", None)
    kind = getattr(pool, "connection_class", None)
    if any(base.__module__.partition(".")[0] == "valkey" for base in type(client).__mro__):
        raise ConfigurationError(
            f"The client is a {type(client).__module__.partition('.')[0]}.{type(client).__name__} "
            "of the package valkey, but locks need the package redis, also for Valkey. Pass a URL "
            "(valkey://host/1, valkeys:// for TLS), or a redis.Redis client for its address."
        )
    if kind is None or "asyncio" in type(client).__module__:
        raise ConfigurationError(
            f"A lock server is a URL or a synchronous redis.Redis client, not "
            f"{type(client).__module__}.{type(client).__qualname__}. For a Redis Cluster pass "
            "its URL: redis+cluster://host:port,host:port."
        )
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if not name.startswith(_POOL_OPTIONS)
    }
    # The parser belongs to the protocol, which `quiet_options()` sets.
    options.pop("parser_class", None)
    return kind, options


def refuse_unknown_certificates(options: dict[str, Any], address: str) -> None:
    """Refuse an unknown ssl_cert_reqs. redis-py does so when it connects, and names no option."""
    given = options.get("ssl_cert_reqs")
    if not isinstance(given, str) or given in _CERTIFICATES:
        return
    word = given.lower().removeprefix("ssl.").removeprefix("cert_")
    said = f"ssl_cert_reqs={given}" if word in _CERTIFICATES else "ssl_cert_reqs"
    known = " or ".join(f"ssl_cert_reqs={each}" for each in _CERTIFICATES)
    advice = f"ssl_cert_reqs={word}" if word in _CERTIFICATES else known
    raise ConfigurationError(
        f"The lock server {address}: redis-py does not know {said} of its URL or "
        f"client. Write {advice}, which Celery knows, too."
    )


def address_of(options: dict[str, Any]) -> str:
    """Return host, port and database for messages; a path or a master's name if there is one."""
    if "path" in options:
        where = options["path"]
    elif "connection_pool" in options:
        where = f"sentinel master {getattr(options['connection_pool'], 'service_name', '')}".strip()
    else:
        where = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return f"{where}/{options.get('db') or 0}"
