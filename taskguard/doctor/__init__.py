"""Check an application's lock server, ledger, clocks and queue, and report what is wrong.

    reports = examine(Configuration(lambda: taskguard.connect()))

Guarantees: a part that gives no answer or is misconfigured becomes a finding, and the other parts
are still checked. Closes every connection that it opens. Writes only a key of its own at the
lock server, which it releases, and the id that a starting worker leaves (`namespaces.py`).

Does not guarantee that nothing else is wrong.

Read next: `configuration.py`, what to check; `locks.py`, `ledger.py`, `clocks.py`, `namespaces.py`,
`lines.py`, `queues.py` and `migrations.py`, one part each; `findings.py`, the texts; `logs.py`, for
starting workers. A server's own findings are in the package of its provider (`ledger/health/`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from taskguard.doctor import findings
from taskguard.doctor.clocks import HasClock, check_clocks
from taskguard.doctor.configuration import Configuration, GuardedTask, named
from taskguard.doctor.ledger import check_ledger
from taskguard.doctor.lines import check_lines
from taskguard.doctor.locks import check_locks
from taskguard.doctor.logs import log_findings, log_process
from taskguard.doctor.migrations import check_migrations, environment_of_alembic
from taskguard.doctor.namespaces import check_namespace
from taskguard.doctor.queues import check_queue_server
from taskguard.errors import ConfigurationError
from taskguard.findings import Finding, Level
from taskguard.values import value

__all__ = ["Configuration", "GuardedTask", "Report", "examine", "log_findings"]


@value
class Report:
    """The findings of one part.

    Attributes:
        part: "settings", "locks", "ledger", "clocks", "migrations" or "queue".
        subject: its address or name, without a password.
        findings: what is wrong with it, the worst first.
    """

    part: str
    subject: str
    findings: tuple[Finding, ...]


def examine(configuration: Configuration) -> list[Report]:
    """Check each part of a configuration, and return a report for each.

    If `configuration.starts` is True, also log the number of the starting worker. Raises nothing: a
    server that gives no answer becomes a finding.
    """
    if configuration.starts:
        log_process()
    return list(_reports(configuration))


def _reports(configuration: Configuration) -> Iterator[Report]:
    found = list(configuration.findings)
    try:
        runtime = configuration.runtime()
        runner, ledger = runtime.runner, runtime.ledger
    except ConfigurationError as error:
        misconfigured = findings.MISCONFIGURED.at("the settings", error=error)
        yield _report("settings", configuration.name, [misconfigured, *found])
        return
    tasks, locks = configuration.tasks, runner.locks
    clocks: dict[str, Callable[[], int]] = {}
    with contextlib.closing(runtime):
        of_ledger, ledger_answers = (
            check_ledger(ledger, tasks) if ledger is not None else ([], False)
        )
        if ledger_answers:
            of_ledger += check_lines(runtime, configuration)
        if configuration.name:
            found += configuration.recorded() if ledger_answers else []
            yield _report("settings", configuration.name, found)
        if locks is not None:
            found, answers = check_locks(locks, tasks, has_ledger=ledger is not None)
            if answers and ledger_answers:
                marks = configuration.starts
                found += check_namespace(locks, ledger, runtime.namespace, leaves_mark=marks)
            yield _report("locks", named(locks), found)
            if answers and isinstance(locks, HasClock):
                clocks[named(locks)] = locks.now_us
        if ledger is not None:
            yield _report("ledger", named(ledger), of_ledger)
            if ledger_answers:
                clocks[named(ledger)] = ledger.now_us
        if clocks:
            yield _report("clocks", "this machine's and theirs", check_clocks(clocks))
    folder = configuration.folder
    environment = environment_of_alembic(folder) if folder is not None and ledger else None
    if environment is not None:
        yield _report("migrations", "Alembic", check_migrations(environment))
    queue = configuration.queue_server and check_queue_server(configuration.queue_server)
    if queue:
        yield _report("queue", *queue)


def _report(part: str, subject: str, found: list[Finding]) -> Report:
    levels = list(Level)
    return Report(part, subject, tuple(sorted(found, key=lambda each: levels.index(each.level))))
