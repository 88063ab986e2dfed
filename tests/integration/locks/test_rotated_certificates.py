"""Certificates are replaced on disk while a worker runs: its next connections use the new ones."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.certificates import Certificates, unavailable
from support.needs import missing, need
from support.waiting import wait_until
from taskguard.errors import LockServerUnavailableError
from taskguard.locks.base import Granted, LockProvider
from taskguard.locks.tls import Tls
from taskguard.model.lease import new_owner
from taskguard.settings import make_locks
from taskguard_sandbox.process import free_port
from taskguard_sandbox.servers import Consul, DebianRedis, Etcd, ZooKeeper

pytestmark = pytest.mark.debian


class Secure(NamedTuple):
    """A server that speaks TLS alone and wants a client's certificate."""

    server: Any
    url: str


def etcd(files: Certificates) -> Secure:
    server = Etcd(
        cert_file=str(files.server),
        key_file=str(files.key),
        trusted_ca_file=str(files.authority),
        client_cert_auth="true",
        port=(port := free_port()),
    )
    return Secure(server, f"etcds://127.0.0.1:{port}?{_options(files)}")


def consul(files: Certificates) -> Secure:
    settings = {
        "cert_file": str(files.server),
        "key_file": str(files.key),
        "ca_file": str(files.authority),
        "verify_incoming_https": True,
    }
    folder = files.folder / "consul"
    folder.mkdir()
    (folder / "tls.json").write_text(json.dumps(settings))
    server = Consul(https_port=(port := free_port()), config_dir=str(folder))
    return Secure(server, f"consuls://127.0.0.1:{port}?{_options(files)}")


def zookeeper(files: Certificates) -> Secure:
    server = ZooKeeper(
        serverCnxnFactory="org.apache.zookeeper.server.NettyServerCnxnFactory",
        secureClientPort=(port := free_port()),
        secureClientPortAddress="127.0.0.1",
        ssl__keyStore__location=str(files.folder / "server.pem"),
        ssl__keyStore__type="PEM",
        ssl__trustStore__location=str(files.authority),
        ssl__trustStore__type="PEM",
        ssl__clientAuth="need",
        ssl__clientHostnameVerification="false",
    )
    return Secure(server, f"zookeepers://127.0.0.1:{port}?{_options(files)}")


def redis(files: Certificates) -> Secure:
    server = DebianRedis(tls_port=(port := free_port()), **files.of_server())
    return Secure(server, f"rediss://127.0.0.1:{port}/0?{files.of_client()}")


def redlock(files: Certificates) -> Secure:
    secure = redis(files)
    return secure._replace(url=secure.url.replace("rediss://", "redlocks://"))


def _options(files: Certificates) -> str:
    folder = files.folder
    return f"ca={files.authority}&cert={folder / 'client.crt'}&key={folder / 'client.key'}"


def renew(files: Certificates) -> None:
    """Write another authority, and new certificates of server and client, to the same paths."""
    Certificates.make(files.folder)
    together = files.server.read_text() + files.key.read_text()
    (files.folder / "server.pem").write_text(together)


@pytest.fixture
def files() -> Iterator[Certificates]:
    missing(unavailable())
    # Not in pytest's folders, which `nobody` may not enter.
    with tempfile.TemporaryDirectory(prefix="taskguard-certificates-") as folder:
        made = Certificates(Path(folder))
        renew(made)
        yield made


def works(locks: LockProvider) -> bool:
    """Return True if a lock can be taken and released, on a server that may be about to start."""
    owner = new_owner("m")
    fenced = locks.traits.tokens
    try:
        found = locks.acquire(("a",), owner, ttl_s=10.0, with_fence=fenced, wait_s=0.0)
        return isinstance(found, Granted) and locks.release(("a",), owner)
    except LockServerUnavailableError:
        return False


@pytest.mark.parametrize("start", [etcd, consul, zookeeper, redis, redlock])
def test_a_server_that_comes_back_with_new_certificates(
    start: Callable[[Certificates], Secure], files: Certificates
) -> None:
    """After a restart of the server with new certificates, the client reads its files again."""
    server, url = start(files)
    need(type(server))
    with server:
        locks = make_locks(url)
        assert locks is not None
        with closing(locks):
            wait_until(lambda: works(locks))
            renew(files)
            server.restart()
            wait_until(lambda: works(locks))


def test_files_that_do_not_fit_each_other_yet(
    files: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    """While new files do not fit each other, the former ones stay in use, and one log line says
    so."""
    names = {"ca": "ca.crt", "cert": "client.crt", "key": "client.key"}
    tls = Tls({name: str(files.folder / each) for name, each in names.items()})
    before = tls.context()
    assert tls.context() is before
    key = (files.folder / "client.key").read_bytes()
    renew(files)
    new_key = (files.folder / "client.key").read_bytes()
    (files.folder / "client.key").write_bytes(key)
    with caplog.at_level(logging.WARNING, logger="taskguard"):
        assert tls.context() is before
        assert tls.context() is before
    [record] = caplog.records
    assert "new certificates of the lock server cannot be used yet" in record.getMessage()
    (files.folder / "client.key").write_bytes(new_key)
    assert tls.context() is not before
