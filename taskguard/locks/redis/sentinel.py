"""The way to the master that a group of Sentinels names, whoever that is at the moment.

Guarantees
* A connection is used only if the server at its other end said, by ROLE, that it is a master, and
  if it is the one that Sentinel named a second ago at the latest: a master that was replaced is
  left within that time by whoever takes, frees or renews, also while it goes on taking locks.
* A connection that breaks, or a master that refuses writes, leads to a survey: Sentinels are asked
  until a majority of them has answered. Where they disagree, the highest configuration epoch wins,
  which is how they agree among themselves.
* A Sentinel has `SentinelUrl.timeout_s` for an answer. One that is silent is asked last from then
  on, so that it costs a process that time once. Where all are silent, locks go on at the master
  that is known, and for some seconds nobody waits for Sentinels again.
* While most Sentinels hold the master for down it is not waited for: calls fail at once.

Not guaranteed: that a master does not grant what another has granted. Replication is asynchronous,
and a master that is cut off goes on for a second here, and for longer with clients that reach it
and no Sentinel.

The Sentinel's user needs +sentinel|get-master-addr-by-name and +sentinel|master, that of the
servers +role beside what locks need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from taskguard.clock import SYSTEM_CLOCK
from taskguard.errors import LockServerUnavailableError
from taskguard.findings import Finding
from taskguard.locks.redis.link import Connections, RedisLink, driver
from taskguard.locks.redis.protocol import pack
from taskguard.locks.redis.sentinel_url import SentinelUrl
from taskguard.values import value

__all__ = ["SentinelLink", "Sentinels", "View"]

# So old may be what is known of the master.
_LOOK_EVERY_S = 1.0
# Where no Sentinel answers, one call waits for them that often; where most of them did not when
# they were asked last, they are asked again that often.
_SILENCE_S = 3.0
_RECOUNT_EVERY_S = 30.0
_ROLE = pack(b"ROLE")


@value
class View:
    """What one Sentinel says.

    Attributes:
        host: the master's.
        port: the master's.
        values: the reply to SENTINEL MASTER, by name.
    """

    host: str
    port: int
    values: dict[str, str]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    @property
    def epoch(self) -> int:
        """Grows with each failover."""
        return int(self.values.get("config-epoch", 0))

    @property
    def is_down(self) -> bool:
        """Whether this master answers neither this Sentinel nor, by hearsay, enough others."""
        about = self.values.get("ip"), self.values.get("port")
        flags = self.values.get("flags", "").split(",")
        # In a failover the address is the new master's already, and the flags are the old one's.
        return about == (self.host, str(self.port)) and not {"s_down", "o_down"}.isdisjoint(flags)


class _OneSentinel(RedisLink):
    what = "Sentinel"


class Sentinels:
    """Who is master, by the Sentinels of one URL. Threads may ask at once."""

    def __init__(self, url: SentinelUrl) -> None:
        self.name = url.name
        self._where = pack(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", url.name.encode())
        self._details = pack(b"SENTINEL", b"MASTER", url.name.encode())
        self.links: list[RedisLink] = [
            _OneSentinel(
                (url.kind, url.sentinel_options | {"host": host, "port": port}),
                socket_timeout_s=url.timeout_s,
                connect_timeout_s=url.timeout_s,
                retries=0,
                longest_block_s=0.0,
                address=f"{host}:{port}",
            )
            for host, port in url.sentinels
        ]
        # Those that may answer, and those that did not when they were asked last; in one piece, so
        # that threads lose none.
        self._order: tuple[list[RedisLink], list[RedisLink]] = (list(self.links), [])
        self._master: tuple[str, int] | None = None
        self._epoch = -1
        self._doubted = True
        self._due_s = 0.0
        self._silence = ""
        self._silent_until_s = 0.0
        self._recount_s = 0.0

    def master(self) -> tuple[str, int]:
        """Host and port, as they were a second ago at the latest.

        Raises LockServerUnavailableError where no Sentinel answers and none ever did, and where
        they wait for another master.
        """
        now_s = SYSTEM_CLOCK.monotonic_s()
        if now_s < self._due_s and self._master is not None:
            return self._master
        if now_s < self._silent_until_s:
            return self._go_on()
        # From here on other threads go on with what is known, until this one knows better.
        self._due_s = now_s + _LOOK_EVERY_S
        known = self._master
        if known is None or self._doubted or self._few(now_s) or not self._stands():
            return self._survey()
        return known

    def doubt(self) -> None:
        """What is known did not hold: ask again before the next connection."""
        self._doubted, self._due_s = True, 0.0

    def close(self) -> None:
        """Close idle connections."""
        for link in self.links:
            link.close()

    def views(self) -> Iterator[tuple[RedisLink, View | LockServerUnavailableError]]:
        """What each Sentinel says, those that answered lately first."""
        answering, silent = self._order
        for link in (*answering, *silent):
            try:
                yield link, self._view(link)
            except LockServerUnavailableError as error:
                yield link, error

    def _few(self, now_s: float) -> bool:
        """Whether it is time to see if those that were silent are back: most of them were."""
        if 2 * len(self._order[0]) > len(self.links) or now_s < self._recount_s:
            return False
        self._recount_s = now_s + _RECOUNT_EVERY_S
        return True

    def _stands(self) -> bool:
        """Whether the next Sentinel in the row names the known master. One round trip."""
        answering, silent = self._order
        if not answering:
            return False
        link, *others = answering
        try:
            reply = link.ask(self._where)
        except LockServerUnavailableError:
            self._order = others, [*silent, link]
            return False
        # Each has its turn: one that is cut off from the others would know of no change.
        self._order = [*others, link], silent
        return reply is not None and _address(reply) == self._master

    def _survey(self) -> tuple[str, int]:
        heard: dict[RedisLink, View] = {}
        silent: dict[RedisLink, LockServerUnavailableError] = {}
        for link, said in self.views():
            if isinstance(said, View):
                heard[link] = said
                # Who has not heard of the last failover yet is no reason to go back behind it, and
                # of the next one the others may have heard.
                newest = _newest(heard)
                stands = newest.epoch >= self._epoch and not newest.is_down
                if stands and 2 * len(heard) > len(self.links):
                    break
            else:
                silent[link] = said
        before, unheard = self._order
        self._order = (
            [*heard, *(link for link in before if link not in heard and link not in silent)],
            [*silent, *(link for link in unheard if link not in heard and link not in silent)],
        )
        if heard:
            return self._believe(list(heard.values()), _newest(heard))
        self._silence = " ".join(map(str, silent.values()))
        self._silent_until_s = SYSTEM_CLOCK.monotonic_s() + _SILENCE_S
        return self._go_on()

    def _go_on(self) -> tuple[str, int]:
        """Their silence is no reason to stop: the master that is known may be well."""
        if self._master is None:
            raise LockServerUnavailableError(self._silence)
        return self._master

    def _believe(self, views: list[View], newest: View) -> tuple[str, int]:
        self._master, self._epoch = newest.address, newest.epoch
        down = [view for view in views if view.is_down]
        if self._doubted and newest in down and 2 * len(down) > len(views):
            self._due_s = 0.0
            raise LockServerUnavailableError(
                f"The lock server {self.name} at {newest.host}:{newest.port} is down, say its "
                "Sentinels, which have not named another master yet."
            )
        self._doubted = False
        return self._master

    def _view(self, link: RedisLink) -> View:
        where, details = link.ask(self._where, behind=self._details)
        if where is None or isinstance(details, Exception):
            why = f": {details}" if where is not None else ""
            raise LockServerUnavailableError(
                f"The Sentinel {link.address} knows no master by the name {self.name!r}{why}. Its "
                "name is what stands after 'sentinel monitor' in sentinel.conf."
            )
        host, port = _address(where)
        return View(host, port, _pairs(details))


class SentinelLink(RedisLink):
    """Calls to the server that a group of Sentinels names."""

    def __init__(self, url: str, **bounds: Any) -> None:
        known = SentinelUrl.parse(url, driver())
        hosts = ",".join(f"{host}:{port}" for host, port in known.sentinels)
        database = known.server_options.get("db") or 0
        # Before the connections, which ask it.
        self.sentinels = Sentinels(known)
        self._url, self._bounds = known, bounds
        super().__init__(
            (known.kind, known.server_options),
            address=f"{known.name}/{database} by the Sentinels {hosts}",
            **bounds,
        )

    def check(self) -> list[Finding]:
        """What is wrong with the Sentinels, the servers, and their settings."""
        from taskguard.locks.redis.sentinel_checks import check_group  # only where asked for

        return check_group(self)

    def to(self, host: str, port: int) -> RedisLink:
        """A link to one of the servers, whatever its role."""
        options = self._url.server_options | {"host": host, "port": port}
        return RedisLink((self._url.kind, options), **self._bounds)

    def close(self) -> None:
        """Close what is idle, to servers and Sentinels."""
        super().close()
        self.sentinels.close()

    def _connections(self, kind: Callable[..., Any], options: dict[str, Any]) -> Connections:
        return _ToTheMaster(
            self.sentinels,
            lambda host, port: kind(**(options | {"host": host, "port": port})),
            self._errors,
        )


class _ToTheMaster(Connections):
    """Idle connections to the present master."""

    def __init__(self, sentinels: Sentinels, make: Callable[[str, int], Any], errors: Any) -> None:
        super().__init__(lambda: make(*sentinels.master()))
        self._sentinels = sentinels
        self._errors = errors

    def take(self) -> Any:
        """An idle connection, or a new one to what is a master by its own word, too."""
        host, port = self._sentinels.master()
        idle = self._lane()
        while idle:
            try:
                connection = idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.port == port and connection.host == host:
                return connection
            connection.disconnect()
        connection = self._make()
        try:
            connection.connect()
            connection.send_packed_command([_ROLE], check_health=False)
            role = connection.read_response(disable_decoding=True)[0].decode()
            if role != "master":
                raise self._errors.ReadOnlyError(
                    f"{connection.host}:{connection.port}, which Sentinel names, is a {role}"
                )
        except BaseException:
            self.drop(connection)
            raise
        return connection

    def drop(self, connection: Any) -> None:
        """Close it, and ask Sentinel again before the next one."""
        connection.disconnect()
        self._sentinels.doubt()


def _newest(views: Mapping[RedisLink, View]) -> View:
    return max(views.values(), key=lambda view: view.epoch)


def _address(reply: list[bytes]) -> tuple[str, int]:
    host, port = reply
    return host.decode(), int(port)


def _pairs(reply: list[bytes]) -> dict[str, str]:
    words = [word.decode("utf-8", "replace") for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
