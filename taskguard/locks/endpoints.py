"""URLs of lock servers that have several endpoints.

Guarantees: a URL that cannot be read is a ConfigurationError, which shows no part of the URL
except its scheme, because any other part may be the password.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from urllib.parse import parse_qsl, unquote

from taskguard.errors import ConfigurationError
from taskguard.locks.tls import FILES, Tls
from taskguard.values import value

__all__ = ["Endpoint", "ServerUrl", "parse_url"]

_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s/]+)(?::(?P<port>\d{1,5}))?")


@value
class Endpoint:
    """Host and port of one server."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@value
class ServerUrl:
    """A parsed URL.

    Attributes:
        endpoints: the servers, in the URL's order.
        user: "" if the URL names none.
        password: "" if the URL has none.
        tls: None without TLS.
    """

    endpoints: tuple[Endpoint, ...]
    user: str
    password: str = field(repr=False)
    tls: Tls | None

    @property
    def hosts(self) -> str:
        """The endpoints, separated by commas, for messages."""
        return ",".join(map(str, self.endpoints))


def parse_url(url: str, *, plain: str, tls: str, port: int) -> ServerUrl:
    """Parse `plain://[user:password@]host[:port],…`, or `tls://…?ca=…&cert=…&key=…`.

    Args:
        url: the URL; its scheme is one of the next two.
        plain: the scheme without TLS, which takes no options.
        tls: the scheme with TLS.
        port: the port of an endpoint that names none.

    Raises ConfigurationError.
    """
    scheme, _, rest = url.partition("://")
    where, _, query = rest.partition("?")
    credentials, at, hosts = where.rpartition("@")
    user, _, password = credentials.partition(":")
    options = dict(parse_qsl(query, keep_blank_values=True))
    found = [_HOST.fullmatch(each) for each in hosts.rstrip("/").split(",")]
    if not all(found) or (at and not user and not password) or "#" in rest:
        raise ConfigurationError(
            f"The lock server's URL {scheme}://… cannot be read. It reads "
            f"{scheme}://[user:password@]host[:port],host[:port]; characters such as / # ? @ : , "
            "in a password are percent-encoded (urllib.parse.quote)."
        )
    endpoints = tuple(
        Endpoint(match["host"].strip("[]"), int(match["port"] or port)) for match in found if match
    )
    if scheme == plain and options:
        raise ConfigurationError(
            f"The lock server's URL {plain}://… takes no options after '?'. For TLS write {tls}://."
        )
    return ServerUrl(
        endpoints, unquote(user), unquote(password), _tls(tls, options) if scheme == tls else None
    )


def _tls(scheme: str, options: Mapping[str, str]) -> Tls:
    if set(options) - set(FILES) or ("key" in options and "cert" not in options):
        raise ConfigurationError(
            f"The lock server's URL {scheme}://… takes the options ca=, cert= and key= (of cert), "
            "each the path of a PEM file."
        )
    return Tls(options)
