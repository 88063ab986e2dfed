"""The page "At three in the morning": twenty questions, with the commands that answer them."""

from __future__ import annotations

from taskguard_sandbox.night.scene import DAY, PAYMENT

__all__ = ["HEAD", "QUESTIONS"]

HEAD = """\
# At three in the morning

Twenty questions of an operator, and the [commands](../reference/cli.md) that answer them.
`python -m taskguard_sandbox.night` makes this page. It runs three Celery workers, kills one,
pauses a key, and lets tasks fail. Then it runs these commands, and copies their output.

A question changes nothing. Each change needs `--reason`, and the ledger records it with your name.
[The web page](dashboard.md) answers most of these questions, too.

The commands use the servers of `TASKGUARD_LEDGER_URL` and `TASKGUARD_LOCKS_URL`, those of a Celery
application (`--app shop:app`), or those of a Django project (`manage.py taskguard …`).
"""

QUESTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Which process holds a key, where, and since when?",
        "Give the key as errors and the log show it. The end of the output says what to do.",
        ("explain account:42",),
    ),
    (
        "What waits behind it, and why does it not run?",
        "Messages wait in the order of their positions.",
        ("waiting --key account:42",),
    ),
    (
        "May I take a key away?",
        "Yes, if its holder is gone. `explain` names its host and its pid: look there first. If "
        "the holder is alive after all, the database refuses its late commit.",
        (f"explain export:{DAY}", f"keys release export:{DAY} --reason 'web-2 is gone'"),
    ),
    (
        "Which keys are held for an unusually long time?",
        "A key is listed once its lease was renewed.",
        ("keys --held --longer 5s",),
    ),
    (
        "What is DEAD, and why?",
        "The history names each process that vanished while it ran the work.",
        ("work list --state DEAD", f"work show 'shop.report report:{DAY}'"),
    ),
    (
        "Requeue all work of a task that failed tonight",
        "First look with `--dry-run`, then repeat the command with `--yes`.",
        (
            "work requeue --state FAILED --task shop.mail --since 8h --reason 'mail is back' "
            "--dry-run",
            "work requeue --state FAILED --task shop.mail --since 8h --reason 'mail is back' --yes",
        ),
    ),
    (
        "What is PROCESSING although no worker is at it?",
        "Its lease has expired, and its message did not come again.",
        ("work list --overdue",),
    ),
    (
        "Did something run twice, or commit late?",
        "The history of a key shows duplicates, takeovers and late commits that were refused "
        "(`stale`). The metric `taskguard_stale_commits_total` counts them.",
        ("explain order:1",),
    ),
    (
        "How many duplicates were there in the last hour?",
        "The first lines count deliveries by their outcome.",
        ("top --once --since 1h",),
    ),
    (
        "What killed the workers: the same work again?",
        "Attempts, crashes and hosts are in the record of the work.",
        (f"explain 'shop.report report:{DAY}'",),
    ),
    (
        "Is the lock server down, and does work go on?",
        "With a ledger, work goes on without the lock server. `doctor` says what does not answer.",
        ("doctor",),
    ),
    (
        "Is the database the bottleneck?",
        "`doctor` reports slow settings and missing indexes. The metric "
        '`taskguard_operation_seconds{server="ledger"}` has its times.',
        ("doctor --json",),
    ),
    (
        "Do the lines drain?",
        "Compare the age of the oldest message with that of some minutes ago, or look at "
        "`taskguard top`.",
        ("waiting --by-line",),
    ),
    (
        "Stop everything on one account",
        "Messages wait, and none fails. `keys resume` ends the pause.",
        ("keys pause account:8 --reason 'wrong balance'", "keys --paused"),
    ),
    (
        "What did operators change tonight, and why?",
        "Each change has its actor and its reason.",
        ("actions --since 12h",),
    ),
    (
        "From a log line to the record",
        "Log lines have `key` and `work`. Pass either of them.",
        ("explain 'shop.ship order:9'",),
    ),
    (
        "From the id of a Celery message or an RQ job to the key",
        "An id that no index has is looked for in the records for at most five seconds.",
        (f"explain --message {PAYMENT}",),
    ),
    (
        "Which workers are there, and is one missing?",
        "Each worker updates SEEN about three times an hour. If there are two versions, a "
        "deployment has not ended.",
        ("workers",),
    ),
    (
        "Why was this message dropped?",
        "Duplicates and deferrals are in the history of the key.",
        ("explain 'shop.ship order:1'",),
    ),
    (
        "Do the tables grow, and does the purge run?",
        "`doctor` warns if nothing purges. A purge may run while workers run.",
        ("purge --older-than 30d",),
    ),
)
