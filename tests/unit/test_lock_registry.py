"""How a URL finds its lock provider: the built-in table, entry points, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from support.drivers import run_without
from taskguard import connect
from taskguard.errors import ConfigurationError
from taskguard.locks import MemoryLocks
from taskguard.settings import make_locks

PROVIDER = """
from taskguard.locks import MemoryLocks

class Locks(MemoryLocks):
    pass

def open_locks(url, *, ledger):
    locks = Locks()
    locks.url, locks.ledger = url, ledger
    return locks

def wrong(url, *, ledger):
    return url
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """Install a distribution with one entry point, as pip would."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, scheme: str, factory: str) -> None:
        module = factory.partition(":")[0]
        (tmp_path / f"{module}.py").write_text(PROVIDER)
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0")
        (info / "entry_points.txt").write_text(f"[taskguard.locks]\n{scheme} = {factory}\n")

    return install


Install = Callable[[str, str, str], None]


def test_another_distribution_provides_a_lock_server(install: Install) -> None:
    """Its factory gets the URL and the ledger, and its locks are used like any others."""
    install("shop-locks", "shop+v2", "shop_locks:open_locks")
    ledger = object()
    locks = make_locks("shop+v2://host/1", ledger=ledger)
    assert type(locks).__name__ == "Locks"
    assert (locks.url, locks.ledger) == ("shop+v2://host/1", ledger)  # type: ignore[union-attr]
    with connect(locks="shop+v2://host", ledger=None).lock("order:42") as lease:
        assert lease.fence


def test_two_distributions_with_the_same_scheme_are_refused(install: Install) -> None:
    """The error names both, because only one of them can be meant."""
    install("locks-a", "shop", "locks_a:open_locks")
    install("locks-b", "shop", "locks_b:open_locks")
    with pytest.raises(ConfigurationError, match=r"shop://: locks-a, locks-b\. Uninstall"):
        make_locks("shop://host")


def test_a_factory_that_returns_no_provider_is_refused(install: Install) -> None:
    """The error names the entry point."""
    install("locks-w", "wrong", "locks_w:wrong")
    with pytest.raises(ConfigurationError, match=r"wrong = locks_w:wrong returned str"):
        make_locks("wrong://host")


def test_a_built_in_scheme_reads_no_metadata(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the metadata of all distributions takes time, and `memory://` cannot be replaced."""
    install("locks-m", "memory", "locks_m:open_locks")
    install("locks-r", "redis", "locks_r:open_locks")
    monkeypatch.setattr(metadata, "entry_points", None)
    assert type(make_locks("memory://")) is MemoryLocks
    assert type(make_locks("redis://localhost/1")).__name__ == "RedisLocks"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://x", r"starts with http://, which no installed distribution provides\. Known"),
        ("s3cret", r"has no scheme\. Known schemes: redis, .*, etcd, .*, ledger and memory"),
        ("user:s3cret@host", "has no scheme"),
        ("user:s3cret@redis://host", "has no scheme"),
    ],
)
def test_an_unknown_scheme_is_refused(url: str, said: str) -> None:
    """The error lists the known schemes, and shows no password."""
    with pytest.raises(ConfigurationError, match=said) as caught:
        make_locks(url)
    assert "s3cret" not in str(caught.value)


WITHOUT_METADATA = """
from importlib import metadata
metadata.Distribution.discover = classmethod(lambda *_, **__: iter(()))
import taskguard
for scheme, provider, extra in {cases!r}:
    try:
        taskguard.connect(locks=f"{{scheme}}://u:s3cret@h", ledger=None)
    except taskguard.errors.ConfigurationError as error:
        said = str(error)
        assert f"pip install 'celery-taskguard[{{extra}}]'" in said, said
        assert f"locks={{provider}}(url)" in said, said
        assert "s3cret" not in said
    else:
        raise AssertionError(scheme)
"""


def test_an_integration_without_metadata_says_what_to_do() -> None:
    """With PYTHONPATH alone no distribution is installed, and the error says what to do."""
    cases = [
        ("etcd", "taskguard_etcd.EtcdLocks", "etcd"),
        ("etcds", "taskguard_etcd.EtcdLocks", "etcd"),
        ("consuls", "taskguard_consul.ConsulLocks", "consul"),
        ("zookeeper", "taskguard_zookeeper.ZooKeeperLocks", "zookeeper"),
    ]
    run_without(set(), WITHOUT_METADATA.format(cases=cases))
