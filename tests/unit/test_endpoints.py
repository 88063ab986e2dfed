"""Which endpoint of a lock server is asked, and what each process keeps for itself."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks import Endpoint, Endpoints, PerProcess

HOSTS = tuple(Endpoint(host, 1) for host in "abc")


def asked(endpoints: Endpoints, *, silent: str = "") -> str:
    """Return the hosts that are asked for one answer, "!" for each retry."""
    seen: list[str] = []

    def request(endpoint: Endpoint) -> str:
        seen.append(endpoint.host)
        if endpoint.host in silent:
            raise LockServerUnavailableError(f"{endpoint}: silent.")
        return endpoint.host

    answer = endpoints.ask(request, on_retry=lambda: seen.append("!"))
    assert answer == seen[-1]
    return "".join(seen)


def test_the_endpoint_that_answered_last_is_asked_first() -> None:
    """The others follow in the URL's order."""
    endpoints = Endpoints(HOSTS)
    assert asked(endpoints) == "a"
    assert asked(endpoints, silent="ab") == "a!b!c"
    assert asked(endpoints) == "c"
    assert asked(endpoints, silent="c") == "c!a"
    assert endpoints.first == HOSTS[0]


@pytest.mark.parametrize(("count", "tries"), [(1, "a!a"), (2, "a!b"), (3, "a!b!c")])
def test_each_endpoint_is_asked_and_twice_in_all(count: int, tries: str) -> None:
    """The error names all endpoints, and the reason of the last one; `first` stays."""
    endpoints = Endpoints(HOSTS[:count])
    seen: list[str] = []

    def request(endpoint: Endpoint) -> None:
        seen.append(endpoint.host)
        raise LockServerUnavailableError(f"{endpoint}: silent.")

    names = ",".join(f"{host}:1" for host in "abc"[:count])
    with pytest.raises(LockServerUnavailableError) as caught:
        endpoints.ask(request, on_retry=lambda: seen.append("!"))
    assert "".join(seen) == tries
    assert str(caught.value) == f"The lock server {names} gave no answer: {tries[-1]}:1: silent."
    assert endpoints.first == HOSTS[0]


def test_other_errors_are_not_retried() -> None:
    """A mistake in the settings reaches the caller at once."""
    seen: list[Endpoint] = []

    def request(endpoint: Endpoint) -> None:
        seen.append(endpoint)
        raise ConfigurationError("wrong")

    with pytest.raises(ConfigurationError):
        Endpoints(HOSTS).ask(request)
    assert len(seen) == 1


def test_a_forked_child_makes_its_own() -> None:
    """The parent keeps its object, and the child gets another one, once."""
    made: PerProcess[object] = PerProcess(object)
    mine = made.get()
    assert in_child(lambda: made.get() is not mine and made.get() is made.get())
    assert made.get() is mine


def in_child(check: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0
