"""A Sentinel of the system's redis-server: it promotes a replica soon after its master is gone."""

from __future__ import annotations

from pathlib import Path

from taskguard_sandbox.servers import DebianRedis


class SentinelOf(DebianRedis):
    """One Sentinel that watches `master`."""

    def __init__(self, master: int) -> None:
        super().__init__(
            sentinel=[
                f"monitor shop 127.0.0.1 {master} 1",
                "down-after-milliseconds shop 2000",
                "failover-timeout shop 2000",
            ]
        )

    def _command(self) -> list[str]:
        binary, config = super()._command()
        path = Path(config)
        # The options of a store are none of Sentinel's.
        wrong = ("save ", "appendonly ")
        lines = [line for line in path.read_text().splitlines() if not line.startswith(wrong)]
        path.write_text("\n".join([*lines, ""]))
        return [binary, config, "--sentinel"]
