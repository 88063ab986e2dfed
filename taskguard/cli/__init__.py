"""The command `taskguard`.

taskguard ledger create [--url URL] [--sql]     create the ledger's tables, or print their SQL
taskguard ledger upgrade [--url URL] [--sql]    upgrade the ledger's tables, or print the SQL
taskguard locks create [--url URL] [--unlogged] create the lock table, or print its SQL
taskguard purge [--older-than 30d] [--url URL]  delete work that ended before that
taskguard sweep --celery shop:app               send the messages of overdue work again
taskguard relay --celery shop:app               sweep and promote every second, until stopped
taskguard exporter [--port 9979]                serve metrics for Prometheus
taskguard doctor --celery shop:app              check locks, ledger, clocks and queue
taskguard explain KEY|WORK|--message ID         say what is going on, and what to do
taskguard top                                   watch held keys, lines and rates; q quits
taskguard keys [--longer 10s] [--paused]        list held or paused keys
taskguard keys release|pause|resume KEY         change a key; each change needs --reason
taskguard work list [--state DEAD]              list work by state, task, key or overdue
taskguard work show WORK                        print the record of work, with its history
taskguard work requeue|drop|done|call WORK      change work, or all that a filter finds
taskguard waiting [--by-line] [--key KEY]       list the messages in line for their keys
taskguard workers                               list workers
taskguard actions                               list what operators changed, and why
taskguard dashboard                             show the web page on this machine
taskguard completions bash|zsh|fish|tcsh        print a script for tab completion
taskguard --version                             print the installed version

Exit status: 0 on success, 1 if the command failed or was refused, 2 for wrong options, 3 if nothing
was found, 130 if it was interrupted, 141 if its output was closed, for example by `| head`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from taskguard.cli.completions import add_completions
from taskguard.cli.dashboard import add_dashboard
from taskguard.cli.doctor import add_doctor
from taskguard.cli.explain import add_explain
from taskguard.cli.exporter import add_exporter
from taskguard.cli.keys import add_keys
from taskguard.cli.lists import add_lists, count
from taskguard.cli.locks import add_locks, add_unlogged, create_locks, forget_locks, locks_sql
from taskguard.cli.output import NOTHING_FOUND, add_json, as_data, duration_s, print_json
from taskguard.cli.printing import indented, logged_printably
from taskguard.cli.sweep import add_sweep
from taskguard.cli.targets import CommandError, NotFoundError, add_url, opened, opened_ledger
from taskguard.cli.top import add_top
from taskguard.cli.work import add_work
from taskguard.drivers import extras_named
from taskguard.errors import CommandTargetError, TaskguardError
from taskguard.model.policy import LEAST_PURGE_AGE_S
from taskguard.settings import named_source

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["main", "make_parser"]


_FAILED, _WRONG, _INTERRUPTED, _CLOSED = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        with _flushed():
            return _main(argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # from the output: failures of servers are errors of taskguard
        _write_no_more()
        return _CLOSED


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Write all output at the end of the block, so that an error of the output is raised here."""
    try:
        yield
    finally:
        sys.stdout.flush()


def _write_no_more() -> None:
    """Keep the interpreter from writing to a closed output when it ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nothing, stream.fileno())
    os.close(nothing)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="taskguard",
        description="Sets up taskguard, checks it, and answers operators' questions.",
    )
    parser.add_argument(
        "--version", action="version", version=f"taskguard {version('celery-taskguard')}"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    ledger = commands.add_parser("ledger", help="the ledger's tables")
    actions = ledger.add_subparsers(dest="action", required=True)
    create = actions.add_parser("create", help="create the tables that are missing")
    add_url(create)
    create.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    create.add_argument(
        "--locks", action="store_true", help="also create the lock table, for locks=ledger://"
    )
    add_unlogged(create)
    create.set_defaults(run_alone=_create)
    upgrade = actions.add_parser(
        "upgrade",
        help="upgrade tables of an older version",
        description="Stop the workers first. If the tables are up to date, nothing happens.",
    )
    add_url(upgrade)
    upgrade.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
    upgrade.set_defaults(run_alone=_upgrade)
    purge = commands.add_parser(
        "purge",
        help="delete work that ended long ago",
        description="Deletes DONE and FAILED work that ended longer ago than --older-than, its "
        "messages, keys whose lease ended before that, and workers that were last seen before "
        "that. May run while workers run.",
    )
    add_url(purge)
    purge.add_argument(
        "--older-than",
        type=_purge_age_s,
        default="30d",
        metavar="AGE",
        help="60m, 12h or 30d (the default). It must be an hour at least, and at least the "
        "retention_s of each task. Otherwise a message that is younger than its retention_s runs "
        "deleted work again.",
    )
    purge.add_argument(
        "--batch", type=count, default=1000, help="rows in a transaction; by default 1000"
    )
    purge.add_argument("--dead", action="store_true", help="also delete DEAD work")
    purge.add_argument(
        "--history",
        type=duration_s,
        default="7d",
        metavar="AGE",
        help="delete duplicates, deferrals and lost leases in the history of keys that are older; "
        "by default 7d",
    )
    add_json(purge)
    purge.set_defaults(run=_purge)
    add_locks(commands)
    add_sweep(commands, duration_s)
    add_explain(commands)
    add_top(commands)
    add_keys(commands)
    add_work(commands)
    add_lists(commands)
    add_exporter(commands)
    add_doctor(commands)
    add_dashboard(commands)
    add_completions(commands, parser)
    return parser


def _main(argv: Sequence[str] | None) -> int:
    arguments = make_parser().parse_args(argv)
    try:
        with logged_printably(), extras_named("This command"):
            return _run(arguments)
    except (TaskguardError, CommandError) as error:
        print(f"taskguard: {indented(error, by=11)}", file=sys.stderr)
        return _status_of(error, asked=hasattr(arguments, "ask"))


def _status_of(error: Exception, *, asked: bool) -> int:
    if isinstance(error, NotFoundError):
        return NOTHING_FOUND
    return _WRONG if asked and isinstance(error, CommandTargetError) else _FAILED


def _run(arguments: argparse.Namespace) -> int:
    if hasattr(arguments, "ask"):
        with contextlib.closing(opened(arguments)) as tg:
            status: int = arguments.ask(tg.operations, arguments)
        return status
    if hasattr(arguments, "run_alone"):
        return arguments.run_alone(arguments) or 0
    with contextlib.closing(opened_ledger(arguments.url)) as ledger:
        ledger.check_schema()
        arguments.run(ledger, arguments)
    return 0


def _purge_age_s(text: str) -> float:
    age_s = duration_s(text)
    if age_s < LEAST_PURGE_AGE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is less than an hour. A purged key's next fencing token comes from the "
            "database's clock, and must grow even if that clock is set back by up to an hour"
        )
    return age_s


def _create(arguments: argparse.Namespace) -> None:
    if arguments.sql:
        from taskguard.ledger.schema.creation import ddl

        url = arguments.url or "postgresql+psycopg://"
        with named_source("--url"):
            text = ddl(url) + (
                locks_sql(url, unlogged=arguments.unlogged) if arguments.locks else ""
            )
        print(text)
        return
    with contextlib.closing(opened_ledger(arguments.url)) as ledger:
        ledger.create_schema()
        print(f"created: the ledger's tables in {ledger.database.place}")
        if arguments.locks:
            create_locks(ledger.database, unlogged=arguments.unlogged)


def _upgrade(arguments: argparse.Namespace) -> None:
    with contextlib.closing(opened_ledger(arguments.url)) as ledger:
        if arguments.sql:
            for statement in ledger.upgrade_statements():
                print(f"{statement};\n")
            return
        before, after = ledger.upgrade_schema()
        how = f"version {after} already" if before == after else f"version {before} -> {after}"
        print(f"{how}: the ledger's tables in {ledger.database.place}")


def _purge(ledger: DatabaseLedger, arguments: argparse.Namespace) -> None:
    gone = ledger.purge(
        older_than_s=arguments.older_than,
        batch=arguments.batch,
        dead=arguments.dead,
        history_s=arguments.history,
    )
    locks = forget_locks(ledger)
    if arguments.json:
        print_json({**as_data(gone), "locks": locks})
        return
    print(
        f"deleted: {gone.work_items:,} work items, {gone.messages:,} messages, "
        f"{gone.keys:,} keys, {gone.workers:,} workers, "
        f"{gone.happenings:,} happenings, {gone.actions:,} actions, {gone.counts:,} counts"
        + ("" if locks is None else f", {locks:,} locks")
    )
