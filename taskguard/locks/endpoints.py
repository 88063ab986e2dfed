"""Lock servers with several endpoints: their URLs, and which endpoint gets a request.

Guarantees
* A URL that cannot be read is a ConfigurationError, which shows no part of the URL except its
  scheme, because any other part may be the password.
* A request is tried at every endpoint, and at least twice. The endpoint that answered last is tried
  first.
* If no endpoint answers, the LockServerUnavailableError names all of them.

Does not guarantee that a request without an answer had no effect. So every call of a lock provider
may be repeated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks.tls import FILES, Tls
from taskguard.values import value

__all__ = ["Endpoint", "Endpoints", "ServerUrl", "parse_url"]

T = TypeVar("T")

_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s/]+)(?::(?P<port>\d{1,5}))?")


@value
class Endpoint:
    """Host and port of one server."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Endpoints:
    """The endpoints of one server or cluster.

    Attributes:
        all: the endpoints, in the URL's order.
        first: the endpoint that answered last.
        hosts: the endpoints, separated by commas, for messages.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.all = endpoints
        self.first = endpoints[0]
        self.hosts = ",".join(map(str, endpoints))

    def ask(
        self, request: Callable[[Endpoint], T], *, on_retry: Callable[[], None] = lambda: None
    ) -> T:
        """Return what `request` returns for the first endpoint that answers.

        Args:
            request: sends the request to one endpoint. It raises LockServerUnavailableError if that
                endpoint does not answer.
            on_retry: is called before each further try.

        Raises LockServerUnavailableError if no endpoint answers.
        """
        count, start = len(self.all), self.all.index(self.first)
        failure: LockServerUnavailableError | None = None
        for number in range(start, start + max(2, count)):
            endpoint = self.all[number % count]
            if failure is not None:
                on_retry()
            try:
                answer = request(endpoint)
            except LockServerUnavailableError as error:
                failure = error
            else:
                self.first = endpoint
                return answer
        raise LockServerUnavailableError(
            f"The lock server {self.hosts} gave no answer: {failure}"
        ) from failure


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
            f"The lock server's URL {scheme}://… cannot be read. Write "
            f"{scheme}://[user:password@]host[:port],host[:port], and percent-encode characters "
            "such as / # ? @ : , in a password (urllib.parse.quote)."
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
