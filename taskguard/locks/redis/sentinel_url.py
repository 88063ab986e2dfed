"""Parses the URL of a group of Sentinels into options for connections to them and to servers.

    sentinel://[user:password@]h1,h2:port,h3/name[/database][?option=…]
    sentinels://…   TLS to Sentinels and servers

User and password are for the servers. For the Sentinels, set the options `sentinel_username` and
`sentinel_password`. Other options are redis-py's, such as `ssl_certfile=…`, and apply to both.
Timeouts are separate: `socket_timeout` for the servers, `sentinel_timeout` for the Sentinels.

Guarantees: an unusable URL is refused at once. No message contains a part of the URL that may be a
password.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from taskguard.locks.redis.address import apart, from_url, take_options, unreadable
from taskguard.model.policy import DAY_S
from taskguard.values import value

__all__ = ["SCHEMES", "SentinelUrl", "is_sentinel_url"]

SCHEMES = {"sentinel": "redis", "sentinels": "rediss"}
_PORT = 26_379
# Options for the servers only: a Sentinel has no databases, and other users and timeouts.
_OF_SERVERS = ("username", "password", "db", "socket_timeout", "socket_connect_timeout")
_TIMEOUT_S = 0.3


def is_sentinel_url(server: object) -> bool:
    """Return whether this is the URL of a group of Sentinels."""
    return isinstance(server, str) and server.partition("://")[0].lower() in SCHEMES


@value
class SentinelUrl:
    """A parsed URL.

    Attributes:
        name: the master's name at the Sentinels.
        sentinels: host and port of each Sentinel.
        kind: the class of connections.
        server_options: options of a connection to a server, without host and port.
        sentinel_options: options of a connection to a Sentinel, without host and port.
        timeout_s: timeout of a connection to a Sentinel, and of its answer.
    """

    name: str
    sentinels: tuple[tuple[str, int], ...]
    kind: Callable[..., Any]
    server_options: dict[str, Any]
    sentinel_options: dict[str, Any]
    timeout_s: float = _TIMEOUT_S

    @classmethod
    def parse(cls, url: str, driver: Any) -> SentinelUrl:
        """Parse a URL. Raises ConfigurationError."""
        url, own = take_options(url, "sentinel_username", "sentinel_password", "sentinel_timeout")
        scheme, credentials, hosts, tail = apart(url)
        scheme = scheme.lower()
        try:
            parts = urlsplit(f"//localhost{tail}")
            sentinels = tuple(map(_host_and_port, hosts.split(",")))
            timeout_s = float(own.pop("sentinel_timeout", _TIMEOUT_S))
            name, slash, database = parts.path.strip("/").partition("/")
            if not name or "@" in parts.path or not 0 < timeout_s < DAY_S:
                raise ValueError
        except ValueError:
            # Not chained: the message may quote a piece of the password.
            raise unreadable(scheme) from None
        query = f"?{parts.query}" if parts.query else ""
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        # Parse the rest as the URL of one server, with the same checks.
        one = f"{SCHEMES[scheme]}://{credentials}localhost{slash}{database}{query}{fragment}"
        kind, options = from_url(one, driver, called=scheme)
        for option in ("host", "port"):
            options.pop(option, None)
        common = {each: value for each, value in options.items() if each not in _OF_SERVERS}
        credentials_of_sentinels = {
            option.removeprefix("sentinel_"): value for option, value in own.items()
        }
        return cls(
            name=unquote(name),
            sentinels=sentinels,
            kind=kind,
            server_options=options,
            sentinel_options=common | credentials_of_sentinels,
            timeout_s=timeout_s,
        )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname or "%" in text:
        raise ValueError
    return parts.hostname, parts.port or _PORT
