"""`python -m taskguard_rq cron CONFIG`: `rq cron`, of which several processes elect one leader."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `rq cron` with LeaderCronScheduler. Exit for any other command."""
    if sys.argv[1:2] != ["cron"]:
        sys.exit("usage: python -m taskguard_rq cron [options of `rq cron`] CONFIG")
    from rq.cli import cli_cron
    from rq.cli.cli import main as rq_main

    from taskguard_rq.cron import LeaderCronScheduler

    cli_cron.CronScheduler = LeaderCronScheduler  # type: ignore[attr-defined]  # RQ has no option for it
    rq_main(prog_name="rq")


if __name__ == "__main__":
    main()
