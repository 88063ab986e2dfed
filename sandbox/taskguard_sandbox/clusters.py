"""A private Redis Cluster of Valkey nodes for tests and benchmarks.

    with Cluster(masters=3, replicas=1) as cluster:
        taskguard.connect(locks=cluster.url, ledger=None)

Guaranteed: what `servers.py` guarantees of each node; the cluster's bus has free ports, too;
`start()` returns when all nodes know all others, and every replica its master's data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskguard_sandbox.process import READY_TIMEOUT_S, ServerError, free_port
from taskguard_sandbox.servers import Valkey

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Cluster", "ClusterNode"]

SLOTS = 16_384


class ClusterNode(Valkey):
    """One node. It has a port for the others as well."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cluster_enabled="yes", **options)
        self.bus_port = 0

    def _choose_ports(self) -> None:
        super()._choose_ports()
        self.bus_port = free_port()
        self.options["cluster-port"] = self.bus_port


class Cluster:
    """Masters with the slots in equal shares, and replicas of the first so many of them.

    Options are lines of every node's configuration, as of `Valkey`.

    Attributes:
        nodes: the masters, then the replicas, as they began.
    """

    def __init__(
        self,
        *,
        masters: int = 3,
        replicas: int = 0,
        node_timeout_ms: int = 2_000,
        **options: str | int | list[str],
    ) -> None:
        self._masters = masters
        settings: dict[str, str | int | list[str]] = {
            "cluster_node_timeout": node_timeout_ms,
            "repl_diskless_sync_delay": 0,
            "cluster_replica_validity_factor": 0,  # promote a replica after any silence
            **options,
        }
        self.nodes = [ClusterNode(**settings) for _ in range(masters + replicas)]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The cluster's URL, with the address of every node."""
        return self.url_of()

    def url_of(self, *nodes: Valkey, user: str = "", password: str = "") -> str:
        """Return the cluster's URL with the addresses of these nodes, or of all nodes."""
        credentials = f"{user}:{password}@" if user or password else ""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes or self.nodes)
        return f"redis+cluster://{credentials}{hosts}"

    def start(self) -> Self:
        """Starts and joins the nodes, and waits until they are one cluster."""
        try:
            for node in self.nodes:
                self._stack.enter_context(node)
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends all nodes. May be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def ask(self, node: Valkey, *words: object) -> Any:
        """A command of one node, on a connection of its own."""
        import redis

        with redis.Redis(port=node.port, decode_responses=True, socket_timeout=10.0) as client:
            return client.execute_command(*words)

    def id_of(self, node: Valkey) -> str:
        """Return the node's id in the cluster."""
        return str(self.ask(node, "CLUSTER", "MYID"))

    def config(self, node: Valkey, name: str) -> str:
        """A setting of the node."""
        said = self.ask(node, "CONFIG", "GET", name)
        return str(said[name] if isinstance(said, dict) else said[1])

    def is_master(self, node: Valkey) -> bool:
        """Whether the node itself says so just now."""
        return str(self.ask(node, "ROLE")[0]) == "master"

    def is_ok(self, node: Valkey) -> bool:
        """Whether the node sees a master for each slot just now."""
        info = self.ask(node, "CLUSTER", "INFO")
        state = info if isinstance(info, dict) else dict(_pairs(str(info)))
        return bool(state["cluster_state"] == "ok")

    def master_of(self, name: str, *, by: Valkey | None = None) -> ClusterNode:
        """The node that has this entry's slot, as `by` says, or the first node that runs."""
        asked = by or next(node for node in self.nodes if node.running)
        slot = int(self.ask(asked, "CLUSTER", "KEYSLOT", name))
        for first, last, (_, port, *_), *_ in self.ask(asked, "CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise ServerError(f"nobody has the slot {slot}")

    def replica_of(self, master: Valkey) -> ClusterNode:
        """A replica of this master, as it says itself."""
        for node in self.nodes:
            role = self.ask(node, "ROLE") if node is not master and node.running else [""]
            if role[0] == "slave" and role[2] == master.port:
                return node
        raise ServerError(f"the node at {master.port} has no replica")

    @contextmanager
    def announcing(self, ports: Mapping[ClusterNode, int]) -> Iterator[None]:
        """Make the cluster announce these ports for these nodes in the block, as for proxies."""
        try:
            for node, port in ports.items():
                self.announce(node, port)
            self._all_list(ports)
            yield
        finally:
            for node in ports:
                self.announce(node, 0)
            self._all_list({})

    def announce(self, node: ClusterNode, port: int) -> None:
        """Make the node announce this port, or its own port if this is 0."""
        self.ask(node, "CONFIG", "SET", "cluster-announce-port", port)

    def _all_list(self, ports: Mapping[ClusterNode, int]) -> None:
        listed = {ports.get(node, node.port) for node in self.nodes if node.running}
        self._wait(
            lambda: all(self._is_ready(node, listed) for node in self.nodes if node.running),
            "all list the same ports",
        )

    def _join(self) -> None:
        first, *others = self.nodes
        masters = self.nodes[: self._masters]
        for number, node in enumerate(masters):
            share = (SLOTS * number // len(masters), SLOTS * (number + 1) // len(masters) - 1)
            self.ask(node, "CLUSTER", "ADDSLOTSRANGE", *share)
            # Otherwise the first two may begin with the same epoch, and argue.
            self.ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in others:
            self.ask(first, "CLUSTER", "MEET", "127.0.0.1", node.port, node.bus_port)
        self._wait(lambda: all(map(self._knows_all, self.nodes)), "every node knows all others")
        for number, node in enumerate(self.nodes[self._masters :]):
            self.ask(node, "CLUSTER", "REPLICATE", self.id_of(masters[number % len(masters)]))
        self._wait(
            lambda: all(map(self._follows, self.nodes[self._masters :])),
            "every replica has its master's data",
        )
        self._all_list({})

    def _knows_all(self, node: Valkey) -> bool:
        lines = self.ask(node, "CLUSTER", "NODES")
        text = str(lines)
        return len(self.nodes) == text.count("connected") and "handshake" not in text

    def _follows(self, node: Valkey) -> bool:
        return bool(self.ask(node, "INFO", "replication")["master_link_status"] == "up")

    def _is_ready(self, node: Valkey, ports: set[int]) -> bool:
        """It is "ok", knows each slot's master, and each replica by its master."""
        rows = self.ask(node, "CLUSTER", "SLOTS")
        listed = {each[1] for row in rows for each in row[2:]}
        return self.is_ok(node) and listed == ports

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            if time.monotonic() > until_s:
                raise ServerError(f"not within {READY_TIMEOUT_S:g} s: {what}")
            time.sleep(0.05)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (line.partition(":") for line in text.split())]
