"""The slots and nodes of a Redis Cluster, found by redis-py's client for clusters.

Guarantees: queries one node, within the connections' timeouts, and sends nothing to any node
afterwards. Does not guarantee that the node knows the last failover.

redis-py's client finds and names the nodes here, and taskguard calls them by its own links. These
are the reasons not to use its `execute_command()` for calls:

* A lost reply makes each thread query all known nodes in turn, each for its full timeout. With
  several dead nodes that takes longer than a renewal may.
* It retries silently, but `release()` must know whether a first attempt got no reply.
* An ASK that names a node without slots ends in an AttributeError.
* Until version 7, threads change the list of nodes while others read it, and a node that is
  queried loses the connections that are in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taskguard.drivers import extras_named

with extras_named("A lock on a Redis Cluster"):
    from redis.cluster import ClusterNode, RedisCluster
    from redis.exceptions import RedisClusterException, ResponseError, SlotNotCoveredError

__all__ = ["Topology", "cause_of"]


class Topology(RedisCluster):
    """The slots and nodes that one node reported. A later report is another `Topology`.

    Args:
        address: host and port of the node.
        kind: the class of connections.
        options: the connections' options.

    Raises redis-py's errors, or IndexError if the node knows of no slots.
    """

    def __init__(
        self, address: tuple[str, int], kind: Callable[..., Any], options: dict[str, Any]
    ) -> None:
        host, port = address
        shown = f"[{host}]" if ":" in host else host
        super().__init__(
            url=f"redis://{shown}:{port}",
            require_full_coverage=False,  # or one lost slot would cost all the others
            # A function rather than a class, because redis-py drops options that it does not know.
            connection_class=lambda **given: kind(
                **given | options | {"host": given["host"], "port": given["port"]}
            ),
            # A node that does not know its own host is at the host that was queried.
            address_remap=lambda at: (at[0] if at[0] not in (None, "", "?") else host, at[1]),
        )

    def node_of(self, name: bytes) -> tuple[str, int] | None:
        """Return the address of the node that serves an entry's slot; None if no node does."""
        try:
            node: ClusterNode = self.get_node_from_key(name)  # type: ignore[no-untyped-call]
        except SlotNotCoveredError:
            return None
        return node.host, node.port

    def masters(self) -> list[tuple[str, int]]:
        """Return the addresses of the nodes that serve slots."""
        return [(node.host, node.port) for node in self.get_primaries()]  # type: ignore[no-untyped-call]

    def replicas(self) -> list[tuple[str, int]]:
        """Return the addresses of their replicas."""
        return [(node.host, node.port) for node in self.get_replicas()]  # type: ignore[no-untyped-call]

    def command(self, **_: Any) -> Any:
        """Return no commands.

        redis-py asks each new client's server for all of its commands, to find the keys in them.
        That takes longer than all the rest, needs a right of its own, and a script names its keys.
        """
        return {}


def cause_of(error: Exception) -> Exception:
    """Return the error of the connection or the server, which redis-py wraps twice."""
    if isinstance(error, RedisClusterException):
        if isinstance(error.__cause__, Exception):
            return cause_of(error.__cause__)
        # redis-py reports every refusal as "Cluster mode is not enabled".
        if isinstance(error.__context__, ResponseError):
            return error.__context__
    return error
