"""Behaviour of locks on etcd: requests, whole seconds, tokens, changes by other programs."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from urllib3 import HTTPConnectionPool

from support.etcd import ask, cluster, forget, keys_in, url_of, write
from support.lock_servers import KEY, take, token
from support.proxy import Mode, Proxy
from support.waiting import wait_until
from taskguard.errors import ConfigurationError, LockServerUnavailableError
from taskguard.locks.base import Granted, Held, Hold, LockProvider, Renewal
from taskguard.model.lease import Owner, new_owner
from taskguard.settings import make_locks
from taskguard_etcd import EtcdLocks
from taskguard_sandbox.servers import Etcd

pytestmark = pytest.mark.debian


@pytest.fixture
def locks(etcd: Etcd) -> EtcdLocks:
    """A provider on an empty server."""
    forget(etcd.url)
    return EtcdLocks(etcd.url, socket_timeout_s=5.0)


def renewed(locks: LockProvider, owner: Owner, keys: tuple[str, ...] = KEY) -> str:
    (answer,) = locks.renew([Hold(keys, owner, 30.0)])
    return answer


@contextmanager
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the paths of requests, retries included."""
    asked: list[str] = []
    urlopen = HTTPConnectionPool.urlopen

    def counted(self: HTTPConnectionPool, method: str, url: str, *rest: Any, **options: Any) -> Any:
        asked.append(url.rpartition("/")[2])
        return urlopen(self, method, url, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(HTTPConnectionPool, "urlopen", counted)
        yield asked


class TestRequests:
    """How many requests each step takes."""

    def test_free_keys(self, locks: EtcdLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two requests take any number of keys, with or without a token. One releases them."""
        for with_fence in (False, True):
            owner, keys = new_owner("m"), tuple(f"order:{number:03}" for number in range(100))
            with requests(monkeypatch) as asked:
                assert isinstance(take(locks, keys, owner, with_fence=with_fence), Granted)
            assert asked == ["grant", "txn"]
            with requests(monkeypatch) as asked:
                assert locks.release(keys, owner)
            assert asked == ["revoke"]
            assert [key for key in keys_in(make_url(locks)) if "lock/" in key] == []

    def test_taken_key(self, locks: EtcdLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """A refused acquire takes four requests. While the key is taken, the next one reads it
        first, and takes two."""
        holder = new_owner("m")
        take(locks, owner=holder)
        with requests(monkeypatch) as asked:
            assert isinstance(take(locks), Held)
        assert asked == ["grant", "txn", "revoke", "timetolive"]
        with requests(monkeypatch) as asked:
            assert isinstance(take(locks), Held)
        assert asked == ["txn", "timetolive"]
        locks.release(KEY, holder)
        assert isinstance(take(locks, owner=holder), Granted)
        locks.release(KEY, holder)
        with requests(monkeypatch) as asked:
            assert isinstance(take(locks), Granted)
        assert asked == ["grant", "txn"]

    def test_renewals(self, locks: EtcdLocks, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two requests renew 1,000 leases."""
        holds = [Hold((f"order:{number}",), new_owner("m"), 30.0) for number in range(1000)]
        for hold in holds:
            take(locks, hold.keys, hold.owner)
        with requests(monkeypatch) as asked:
            assert set(locks.renew(holds)) == {Renewal.RENEWED}
        assert asked == ["keepalive", "txn"]


class TestLeases:
    def test_nothing_is_left_of_a_refusal(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """The lease of a refused request is ended."""
        take(locks)
        before = ask(etcd.url, "/v3/lease/leases", {})["leases"]
        assert isinstance(take(locks), Held)
        assert ask(etcd.url, "/v3/lease/leases", {})["leases"] == before

    def test_whole_seconds(self, locks: EtcdLocks) -> None:
        """A lease has whole seconds, rounded up, and at least two. The grant says so."""
        for asked_s, granted_s in [(0.1, 2.0), (1.0, 2.0), (2.5, 3.0), (30.0, 30.0)]:
            answer = take(locks, (f"order:{asked_s}",), ttl_s=asked_s)
            assert isinstance(answer, Granted)
            assert answer.ttl_s == granted_s
        assert locks.traits.min_ttl_s == 2.0

    def test_a_cluster_of_long_leases(self) -> None:
        """If the cluster's shortest lease is longer than the requested one, the grant says so."""
        with Etcd(election_timeout=5000, heartbeat_interval=500) as server:
            locks = EtcdLocks(server.url)
            answer = take(locks, ttl_s=1.0)
            assert isinstance(answer, Granted)
            assert answer.ttl_s == locks.traits.min_ttl_s == 8.0
            assert locks.check() == []

    def test_a_longer_lease(self, locks: EtcdLocks) -> None:
        """For a longer ttl, the keys move to a longer lease, and are still released together."""
        owner, keys = new_owner("m"), ("a", "b")
        first = take(locks, keys, owner, ttl_s=20.0, with_fence=True)
        second = take(locks, keys, owner, ttl_s=60.0, with_fence=True)
        assert isinstance(first, Granted)
        assert isinstance(second, Granted)
        assert second.fence == first.fence
        (answer,) = locks.renew([Hold(keys, owner, 90.0)])
        assert answer == Renewal.RENEWED
        held = take(locks, keys)
        assert isinstance(held, Held)
        assert held.remaining_s > 80.0
        assert locks.release(keys, owner) is True
        assert isinstance(take(locks, keys), Granted)

    def test_one_key_of_several(self, locks: EtcdLocks) -> None:
        """One key of several can be released or renewed by itself."""
        owner = new_owner("m")
        take(locks, ("a", "b", "c"), owner)
        assert renewed(locks, owner, ("b",)) == Renewal.RENEWED
        assert locks.release(("a",), owner) is True
        assert isinstance(take(locks, ("a",)), Granted)
        assert isinstance(take(locks, ("b",)), Held)
        assert renewed(locks, owner, ("b", "c")) == Renewal.RENEWED


class TestStrangers:
    """Changes that other programs make to the keys."""

    def test_deleted(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """If another program deletes a key, it is gone for the holder, although its lease
        is valid."""
        owner = new_owner("m")
        take(locks, owner=owner)
        # Its lease remains valid.
        ask(etcd.url, "/v3/kv/deleterange", {"key": "AA==", "range_end": "AA=="})
        assert renewed(locks, owner) == Renewal.GONE

    def test_overwritten(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """If another program overwrites a key, it is taken as long as that value exists."""
        owner = new_owner("m")
        take(locks, owner=owner)
        write(etcd.url, "taskguard/lock/order:42", "somebody")
        assert renewed(locks, owner) == Renewal.TAKEN
        assert locks.release(KEY, owner) is True  # its lease was there
        answer = take(locks)
        assert isinstance(answer, Held)
        assert answer.owner == Owner("somebody", "")
        assert answer.remaining_s == 86_400.0
        assert not answer.owner.is_ours

    def test_written_over_and_asked_again(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """The owner of several keys that lost one is refused, and keeps the others."""
        owner, keys = new_owner("m"), ("a", "b")
        take(locks, keys, owner)
        write(etcd.url, "taskguard/lock/b", "somebody")
        answer = take(locks, keys, owner)
        assert isinstance(answer, Held)
        assert answer.key == "b"
        assert renewed(locks, owner, ("a",)) == Renewal.RENEWED

    def test_other_namespaces(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """Two namespaces share no key."""
        other = EtcdLocks(etcd.url, namespace="other")
        owner = new_owner("m")
        assert isinstance(take(locks, owner=owner, with_fence=True), Granted)
        assert isinstance(take(other, owner=new_owner("n"), with_fence=True), Granted)
        assert keys_in(etcd.url) == [
            "other/epoch",
            "other/lock/order:42",
            "taskguard/epoch",
            "taskguard/lock/order:42",
        ]


class TestTokens:
    def test_asked_again_much_later(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """A much later repeated request gets the same token, or a higher one if etcd has compacted
        the first grant."""
        owner = new_owner("m")
        first = take(locks, owner=owner, with_fence=True)
        epoch = epoch_of(etcd)
        take(locks, ("another",), with_fence=True)
        assert epoch_of(etcd) > epoch
        assert take(locks, owner=owner, with_fence=True) == first
        assert isinstance(first, Granted)
        answer = ask(etcd.url, "/v3/kv/range", {"key": "AA=="})
        ask(etcd.url, "/v3/kv/compaction", {"revision": answer["header"]["revision"]})
        again = take(locks, owner=owner, with_fence=True)
        assert isinstance(again, Granted)
        assert again.fence >= first.fence

    def test_asked_for_later(self, locks: EtcdLocks) -> None:
        """A key that was granted without a token gets one on request, at the level of the clock."""
        owner = new_owner("m")
        take(locks, owner=owner)
        answer = take(locks, owner=owner, with_fence=True)
        assert isinstance(answer, Granted)
        assert answer.fence == pytest.approx(time.time() * 1e6, abs=60e6)

    def test_an_old_epoch(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """The next grant raises an old epoch to the clock."""
        write(etcd.url, "taskguard/epoch", f"{1_000_000:020d}")
        assert token(locks) == pytest.approx(time.time() * 1e6, abs=60e6)

    def test_an_epoch_ahead(self, locks: EtcdLocks, etcd: Etcd) -> None:
        """An epoch that is ahead of the clock is not lowered. Tokens grow from it."""
        ahead = int((time.time() + 86_400) * 1e6)
        write(etcd.url, "taskguard/epoch", f"{ahead:020d}")
        tokens = [token(locks) for _ in range(3)]
        assert tokens == sorted(set(tokens))
        assert tokens[0] > ahead

    def test_a_clock_that_is_wrong_here(
        self, locks: EtcdLocks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Tokens follow the server's clock, even if the provider's clock is wrong."""
        now_s = time.time()
        monkeypatch.setattr("taskguard_etcd.provider.time.time", lambda: now_s + 1e6)
        assert token(locks) == pytest.approx(now_s * 1e6, abs=60e6)

    def test_emptied(self) -> None:
        """A server that lost its data, and counts its revisions from the beginning, gives higher
        tokens than before."""
        with Etcd() as server:
            locks = EtcdLocks(server.url)
            before = [token(locks) for _ in range(3)][-1]
            server.kill()
            server.forget()
            server.start()
            assert token(locks) > before


def epoch_of(etcd: Etcd) -> int:
    (entry,) = ask(etcd.url, "/v3/kv/range", {"key": "dGFza2d1YXJkL2Vwb2No"})["kvs"]
    return int(base64.b64decode(entry["value"]))


class TestConnections:
    def test_a_restart(self) -> None:
        """After a restart of the server, the provider connects again without an error."""
        with Etcd() as server:
            locks, owner = EtcdLocks(server.url), new_owner("m")
            take(locks, owner=owner)
            server.restart()
            assert renewed(locks, owner) == Renewal.RENEWED
            assert locks.release(KEY, owner) is True

    def test_a_member_that_is_away(self, etcd: Etcd) -> None:
        """If one endpoint is down, the provider uses the next one, and later calls it first."""
        forget(etcd.url)
        with Proxy(etcd.port) as proxy:
            proxy.mode = Mode.CUT
            locks = EtcdLocks(f"etcd://127.0.0.1:{proxy.port},127.0.0.1:{etcd.port}")
            owner = new_owner("m")
            assert isinstance(take(locks, owner=owner), Granted)
            tried = proxy.connections
            assert locks.release(KEY, owner) is True
            assert proxy.connections == tried

    def test_a_lost_reply(self, etcd: Etcd) -> None:
        """A step whose reply was lost is repeated, and has the same result."""
        forget(etcd.url)
        with Proxy(etcd.port) as proxy:
            locks = EtcdLocks(f"etcd://127.0.0.1:{proxy.port}", socket_timeout_s=5.0)
            owner = new_owner("m")
            for pattern in (b"/v3/lease/grant", b"/v3/kv/txn"):
                proxy.lose_reply_to(pattern, then=Mode.CUT)
                answer = take(locks, owner=owner, with_fence=True)
                assert isinstance(answer, Granted)
                assert not proxy.armed
            assert answer == take(locks, owner=owner, with_fence=True)
            proxy.lose_reply_to(b"/v3/lease/keepalive", then=Mode.CUT)
            assert renewed(locks, owner) == Renewal.RENEWED
            proxy.lose_reply_to(b"/v3/lease/revoke", then=Mode.CUT)
            assert locks.release(KEY, owner) is True
            assert locks.release(KEY, owner) is False

    def test_an_end_of_a_lease_that_may_arrive_late(self, etcd: Etcd) -> None:
        """If the end of an unused lease gets no reply, the error does not tell the owner to ask
        again: the lost request could end a later grant."""
        forget(etcd.url)
        with Proxy(etcd.port) as proxy:
            locks = EtcdLocks(f"etcd://127.0.0.1:{proxy.port}", socket_timeout_s=5.0)
            take(EtcdLocks(etcd.url), owner=new_owner("n"))
            proxy.lose_reply_to(b"/v3/lease/revoke", then=Mode.CUT)
            with pytest.raises(LockServerUnavailableError, match="unused lease"):
                take(locks, owner=new_owner("m"))

    def test_a_leader_that_is_killed(self) -> None:
        """If the leader is killed, granted locks remain, and the other members grant further
        ones."""
        with cluster() as members:
            locks, owner = EtcdLocks(url_of(members), socket_timeout_s=1.0), new_owner("m")
            patient = EtcdLocks(url_of(members), socket_timeout_s=10.0)
            assert isinstance(take(patient, owner=owner), Granted)
            leader = leader_of(members)
            leader.kill()
            # An election takes one to two seconds; the rest is for a machine that is busy.
            assert wait_until(lambda: answer_of(locks, owner)) == Renewal.RENEWED
            held = take(patient)
            assert isinstance(held, Held)
            assert held.owner == owner
            (finding,) = patient.check()
            assert finding.name == "lock_server_member"
            assert str(leader.port) in finding.where

    def test_no_majority(self) -> None:
        """Without a majority no lock is granted. The call raises in time, and a finding says
        why."""
        with cluster() as members:
            locks = EtcdLocks(url_of(members[:1]), socket_timeout_s=2.0)
            patient = EtcdLocks(url_of(members[:1]), socket_timeout_s=10.0)
            assert isinstance(take(patient), Granted)
            for member in members[1:]:
                member.kill()
            wait_until(lambda: not has_leader(members[0]))
            with pytest.raises(LockServerUnavailableError, match="gave no answer"):
                take(locks)
            (finding,) = locks.check()
            assert finding.name == "lock_server_quorum"

    def test_a_wait_that_is_cut(self, etcd: Etcd) -> None:
        """If the server of a wait goes down, the wait raises."""
        with Proxy(etcd.port) as proxy:
            locks = EtcdLocks(f"etcd://127.0.0.1:{proxy.port}")
            take(locks, ("waited",), owner := new_owner("m"))
            proxy.mode = Mode.CUT
            with pytest.raises(LockServerUnavailableError):
                locks.wait("waited", new_owner(), timeout_s=5.0)
            proxy.mode = Mode.PASS
            locks.release(("waited",), owner)


def make_url(locks: EtcdLocks) -> str:
    return f"etcd://{locks._link.address}"


def answer_of(locks: EtcdLocks, owner: Owner) -> str | None:
    try:
        return renewed(locks, owner)
    except LockServerUnavailableError:
        return None


def has_leader(member: Etcd) -> bool:
    return "leader" in ask(member.url, "/v3/maintenance/status", {})


def leader_of(members: list[Etcd]) -> Etcd:
    def leads(member: Etcd) -> bool:
        said = ask(member.url, "/v3/maintenance/status", {})
        return bool(said.get("leader") == said["header"]["member_id"])

    # None does while they elect one.
    return wait_until(lambda: [each for each in members if leads(each)])[0]


class TestSettings:
    @pytest.mark.parametrize(
        "url",
        [
            "etcd://",
            "etcd://:2379",
            "etcd://secret@word@h:1:2",
            "etcd://user:sec#ret@h",
            "etcd://h:port",
            "etcd://h,,g",
            "etcd://h?ca=secret",
            "etcds://h?secret=1",
            "etcds://h?key=/secret",
            "etcds://h?ca=/no/such/file",
        ],
    )
    def test_wrong_urls(self, url: str) -> None:
        """A wrong URL raises at once, with an example, and does not show its password."""
        with pytest.raises(ConfigurationError) as caught:
            make_locks(url)
        assert "sec" not in str(caught.value).replace("/secret", "")

    def test_urls(self) -> None:
        """A URL may have hosts without a port, IPv6 addresses, and credentials with special
        characters."""
        for url, address in {
            "etcd://h": "h:2379",
            "etcd://a:1,b,[::1]:3": "a:1,b:2379,[::1]:3",
            "etcd://user:p%40ss%2Fw%2Cord@h:5": "h:5",
            "etcd://user:p/a,ss@h:5": "h:5",
            "etcds://h/": "h:2379",
        }.items():
            locks = make_locks(url)
            assert isinstance(locks, EtcdLocks)
            assert repr(locks) == f"<EtcdLocks {address} namespace='taskguard'>"
