"""etcd with users and TLS, and the findings of `check()`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from support.certificates import Certificates
from support.etcd import ask, forget
from support.needs import need
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.findings import Finding, Level
from taskguard.locks.base import Granted, Hold, Renewal
from taskguard.model.lease import new_owner
from taskguard_etcd import EtcdLocks
from taskguard_sandbox.servers import Etcd

pytestmark = pytest.mark.debian
KEY = ("order:42",)
PASSWORD = "p/a:s@s,w#o?r d%ü"


def cycle(locks: EtcdLocks) -> None:
    """Taken, renewed, waited for, freed."""
    owner = new_owner("m")
    answer = locks.acquire(KEY, owner, ttl_s=30.0, with_fence=True, wait_s=0.0)
    assert isinstance(answer, Granted)
    assert locks.renew([Hold(KEY, owner, 30.0)] * 40) == [Renewal.RENEWED] * 40
    locks.wait(KEY[0], new_owner(), timeout_s=0.05)
    assert locks.release(KEY, owner) is True


def packed(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """Start an etcd with root, the user `locks` with the rights of the page, and a user without
    rights."""
    need(Etcd)
    with Etcd() as server:
        for user in ("root", "locks", "nobody"):
            ask(server.url, "/v3/auth/user/add", {"name": user, "password": PASSWORD})
        for role in ("root", "locks"):
            ask(server.url, "/v3/auth/role/add", {"name": role})
            ask(server.url, "/v3/auth/user/grant", {"user": role, "role": role})
        own = {
            "permType": "READWRITE",
            "key": packed("taskguard/"),
            "range_end": packed("taskguard0"),
        }
        ask(server.url, "/v3/auth/role/grant", {"name": "locks", "perm": own})
        ask(server.url, "/v3/auth/enable", {})
        yield server


def url_for(server: Etcd, user: str, password: str = PASSWORD) -> str:
    return f"etcd://{user}:{quote(password, safe='')}@127.0.0.1:{server.port}"


class TestUsers:
    def test_the_least_rights(self, guarded: Etcd) -> None:
        """A user with the rights of the page takes, renews, waits for and frees locks; nothing is
        found wrong."""
        locks = EtcdLocks(url_for(guarded, "locks"))
        cycle(locks)
        assert locks.check() == []

    def test_a_token_that_is_forgotten(self, guarded: Etcd) -> None:
        """If a restart ended its authentication token, the provider gets another one without an
        error."""
        locks = EtcdLocks(url_for(guarded, "locks"))
        owner = new_owner("m")
        locks.acquire(KEY, owner, ttl_s=30.0, with_fence=False, wait_s=0.0)
        guarded.restart()
        assert locks.renew([Hold(KEY, owner, 30.0)]) == [Renewal.RENEWED]
        guarded.restart()
        assert locks.release(KEY, owner) is True

    @pytest.mark.parametrize(
        ("user", "password", "said"),
        [
            ("locks", "wrong-secret", "refuses user or password"),
            ("stranger", "wrong-secret", "refuses user or password"),
            ("nobody", PASSWORD, "forbids what locks need"),
            ("", "", "forbids what locks need"),
        ],
    )
    def test_who_may_not(self, guarded: Etcd, user: str, password: str, said: str) -> None:
        """The error and the finding say what is wrong, and do not show the password."""
        url = url_for(guarded, user, password) if user else guarded.url
        locks = EtcdLocks(url)
        with pytest.raises(LockServerUnavailableError, match=said) as caught:
            cycle(locks)
        (finding,) = locks.check()
        assert (finding.name, finding.level) == ("lock_server_rights", Level.ERROR)
        for text in (str(caught.value), str(finding), repr(locks)):
            assert "secret" not in text
            assert PASSWORD not in text

    def test_an_etcd_that_knows_no_users(self, etcd: Etcd) -> None:
        """An etcd without users accepts every user name."""
        forget(etcd.url)
        cycle(EtcdLocks(url_for(etcd, "locks")))


@pytest.fixture(scope="module")
def secure(made_certificates: Certificates) -> Iterator[Etcd]:
    """Start an etcd with TLS only, which requires a client's certificate."""
    need(Etcd)
    folder = made_certificates.folder
    with Etcd(
        cert_file=str(folder / "server.crt"),
        key_file=str(folder / "server.key"),
        trusted_ca_file=str(made_certificates.authority),
        client_cert_auth="true",
    ) as server:
        yield server


class TestTLS:
    def test_cycle(self, secure: Etcd, made_certificates: Certificates) -> None:
        """With certificates of server and client, locks work over TLS."""
        folder = made_certificates.folder
        options = f"cert={folder / 'client.crt'}&key={folder / 'client.key'}"
        locks = EtcdLocks(
            f"etcds://127.0.0.1:{secure.port}?ca={made_certificates.authority}&{options}"
        )
        cycle(locks)
        assert locks.check() == []

    @pytest.mark.parametrize("options", ["", "?ca={ca}"])
    def test_strangers(self, secure: Etcd, made_certificates: Certificates, options: str) -> None:
        """A server with an unknown certificate is refused, and so is a client without a
        certificate."""
        where = options.format(ca=made_certificates.authority)
        with pytest.raises(LockServerUnavailableError, match="gave no answer"):
            cycle(EtcdLocks(f"etcds://127.0.0.1:{secure.port}{where}"))

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        """A file that is no certificate raises at once, with its name."""
        (tmp_path / "ca.crt").write_text("no certificate")
        with pytest.raises(ConfigurationError, match=r"ca\.crt"):
            EtcdLocks(f"etcds://h?ca={tmp_path / 'ca.crt'}")


def found(locks: EtcdLocks) -> Finding:
    (finding,) = locks.check()
    return finding


class TestFindings:
    def test_nothing(self, etcd: Etcd) -> None:
        """etcd as Debian starts it has no findings."""
        assert EtcdLocks(etcd.url).check() == []

    def test_no_gateway(self) -> None:
        """Without the gRPC gateway, a lock and `check()` raise an error that names etcd's
        option."""
        with Etcd(enable_grpc_gateway="false") as server:
            locks = EtcdLocks(server.url)
            for call in (lambda: cycle(locks), locks.check):
                with pytest.raises(LockServerUnavailableError, match="--enable-grpc-gateway"):
                    call()

    def test_full(self) -> None:
        """A full etcd grants no more locks, which the alarm reports."""
        with Etcd(quota_backend_bytes=1_000_000) as server:
            locks = EtcdLocks(server.url)
            cycle(locks)
            with pytest.raises(LockServerUnavailableError):
                for number in range(100):
                    value = packed("x" * 100_000)
                    ask(server.url, "/v3/kv/put", {"key": packed(str(number)), "value": value})
            with pytest.raises(LockServerUnavailableError, match="is full"):
                cycle(locks)
            finding = found(locks)
            assert (finding.name, finding.level) == ("etcd_alarm", Level.ERROR)
            assert "NOSPACE" in finding.what

    def test_away(self, etcd: Etcd) -> None:
        """If no server answers, check() raises. If one of several is down, it is a finding."""
        with Etcd() as server:
            url = server.url
        with pytest.raises(LockServerUnavailableError):
            EtcdLocks(url).check()
        (finding,) = EtcdLocks(f"{url},127.0.0.1:{etcd.port}").check()
        assert (finding.name, finding.level) == ("lock_server_member", Level.WARNING)
