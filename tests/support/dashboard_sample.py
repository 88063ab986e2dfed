"""A ledger that exists only as answers, with some of everything, for the tests of the page.

Its names are hostile if a test wants that. Changes are noted in `changed`, and refused if the state
or the fence is not the expected one.
"""

from __future__ import annotations

from math import sin
from typing import Any

from taskguard.errors import ConfigurationError
from taskguard.model.counts import Count
from taskguard.model.history import Flag
from taskguard.model.line_states import LineState
from taskguard.model.pauses import Pause
from taskguard.model.snapshots import SnapshotView
from taskguard.model.states import State
from taskguard.model.views import (
    ActionView,
    Explained,
    Held,
    KeyView,
    LineView,
    Page,
    Past,
    Process,
    WaitingView,
    WorkerView,
    WorkFilter,
    WorkItem,
)

__all__ = ["NOW_S", "Sample"]

NOW_S = 1_795_701_600.0  # 2026-11-26 14:00 UTC
VANISHED = "worker 0a000002, pid 71, message 91ab77f0-1c6e-4c2a-8c55-3b1f0c8d7e20"


class Sample:
    """A TaskGuard of which the page uses `operations` and `ledger`."""

    def __init__(self, *, hostile: str = "", now_s: float = NOW_S) -> None:
        self.now_s = now_s
        self.hostile = hostile
        self.changed: list[tuple[Any, ...]] = []
        self.operations = self
        self.ledger = self

    @property
    def runner(self) -> Any:
        """The doctor reports it."""
        raise ConfigurationError(self._text("The sample has no servers."))

    def now_us(self) -> int:
        return int(self.now_s * 1e6)

    def _text(self, text: str) -> str:
        return self.hostile or text

    def process(self, number: int = 3, pid: int = 4711) -> Process:
        name = self._text(f"celery@web-{number}")
        return Process(
            owner=f"0a{number:06d}001267{number:010x}/8d3f6a1e",
            label=f"{name}, pid {pid}",
            worker=f"0a{number:06d}",
            pid=pid,
            message=self._text("8d3f6a1e-51c2-4f0e-9a52-0c9c2a6f3d11"),
            kind="celery",
            name=name,
            host=f"web-{number}",
            version="0.1.0",
            started_s=self.now_s - 21_600,
            seen_s=self.now_s - 300,
        )

    def held(self, key: str = "account:42", age_s: float = 751.0, **values: Any) -> Held:
        return Held(
            key=self._text(key),
            process=self.process(),
            fence=1795695247113204,
            since_s=self.now_s - age_s,
            lease_until_s=self.now_s + 21,
            work=self._text(f"shop.rebalance {key}"),
            attempt=2,
            **{"task": self._text("shop.rebalance"), **values},
        )

    def paused_key(self) -> Held:
        paused = Pause("ann", self._text("manual correction"), self.now_s - 300)
        return self.held("tenant:9", 300.0, paused=paused)

    def message(self, position: int) -> WaitingView:
        return WaitingView(
            key=self._text("account:42"),
            work=self._text(f"shop.pay acct:{position}"),
            task=self._text("shop.pay"),
            message=self._text(f"51c2aa0{position}"),
            parked_s=self.now_s - 718 + 3 * position,
            line=LineState.WAITING,
            state=State.NEW,
            position=position,
        )

    def line(self, key: str = "account:42", waiting: int = 312, oldest_s: float = 718) -> LineView:
        return LineView(
            key=self._text(key),
            waiting=waiting,
            more=waiting > 1_000,
            oldest_s=self.now_s - oldest_s,
            promoted=0,
            first=self.message(1),
            holder=self.held(),
        )

    def past(self) -> tuple[Past, ...]:
        error = self._text("TimeoutError: bank.example did not answer within 10 s")
        return (
            Past(self.now_s - 784, "takeover", self.process().owner, self.process(1, 90), 17956950),
            Past(self.now_s - 1_740, "failed", error, self.process(1, 90), 17956940),
            Past(self.now_s - 720, "duplicate", "duplicate: message 51c2aa04", None, None, 3),
            Past(self.now_s - 2_820, "requeue", self._text("bank is back"), actor="ann"),
            Past(self.now_s - 780, "stale", "", self.process(1, 90), 17956950),
        )

    def item(self, name: str = "shop.ship order:7", state: State = State.DEAD) -> WorkItem:
        ended = state in (State.DEAD, State.FAILED, State.DONE)
        flags = {State.DEAD: Flag.DEAD, State.FAILED: Flag.FAILED}
        return WorkItem(
            id=self._text(name),
            task=self._text(name.split(maxsplit=1)[0]),
            key=self._text(name.rsplit(maxsplit=1)[-1]),
            message=self._text("91ab77f0-1c6e-4c2a-8c55-3b1f0c8d7e20"),
            state=state,
            final=False,
            attempts=3,
            crashes=3 if state is State.DEAD else 0,
            retries=0,
            process=self.process(2, 71),
            fence=1795695247000001,
            lease_until_s=self.now_s + 20 if state is State.PROCESSING else None,
            left=False,
            flag=flags.get(state),
            since_s=self.now_s - 2_836 if ended else None,
            error=self._text(f"{VANISHED} vanished") if ended else None,
            stored=True,
            sends=0,
            due_s=None,
            line=None,
            parked_s=None,
            created_s=self.now_s - 3_600,
            started_s=self.now_s - 2_866,
            finished_s=self.now_s - 2_836 if ended else None,
            history=(
                Past(self.now_s - 3_450, "crashed", "after 31 s", self.process(1, 90), 5),
                Past(self.now_s - 3_139, "crashed", "after 30 s", self.process(1, 133), 6),
                Past(self.now_s - 2_836, "dead", f"{VANISHED} vanished", self.process(2, 71), 7),
            ),
        )

    def told(self, text: str) -> str:
        return text.replace("worker 0a000002,", self._text("celery@web-2,"))

    def in_words(self, past: Past) -> str:
        if past.what == "dead":
            return ""
        if past.what == "takeover":
            return f"by {self.process().label}, message {self.process().message}"
        return self.told(past.text.removeprefix(f"{past.what}: "))

    def explain(self, asked: str, *, message: bool = False) -> Explained:
        advice = (
            "Look at web-3: py-spy dump --pid 4711. If you end it, another worker takes over.",
            "taskguard keys release account:42 --reason … takes the key from its holder.",
        )
        work = self.item() if message or " " in asked else None
        key = None if work or asked == "account:" else self.key(asked)
        others = ("account:42", "account:43") if asked == "account:" else ()
        return Explained(asked, self.now_s, key, work, others, advice)

    def key(self, key: str) -> KeyView | None:
        if key == "nothing":
            return None
        works = [self.item(f"shop.pay acct:{n}", State.DONE) for n in (7, 6)]
        works.append(self.item("shop.refund acct:3", State.FAILED))
        paused = key == "tenant:9"
        return KeyView(
            key=self._text(key),
            holders=(self.paused_key() if paused else self.held(key),),
            line=self.line(),
            waiting=tuple(map(self.message, range(1, 6))),
            works=tuple(works),
            past=self.past(),
        )

    def keys(self, *, paused: bool = False, longer_s: float = 0.0, **_: Any) -> Page[Held]:
        leader = self.held("leader:relay", 90_000.0, task="leader")
        held = (leader, self.held(), self.held("report:day", 122.0), self.held("tenant:4", 14.0))
        found = (self.paused_key(),) if paused else held
        return Page(tuple(each for each in found if self.now_s - each.since_s >= longer_s))

    def work(self, work: str, *, arguments: bool = False) -> WorkItem | None:
        if work == "nothing":
            return None
        state = State.NEW if work.startswith("new ") else State.DEAD
        item = self.item(work if " " in work else "shop.ship order:7", state)
        if not arguments:
            return item
        values = {name: getattr(item, name) for name in item.__slots__}
        return WorkItem(**{**values, "call": '{"args": ["secret-argument"]}'})

    def list_work(self, only: WorkFilter, *, limit: int = 100, **_: Any) -> Page[WorkItem]:
        state = only.state or (State.PROCESSING if only.overdue else State.DONE)
        count = {State.DEAD: 2, State.FAILED: 4, State.PROCESSING: 0}.get(state, 12)
        if only.task == "account:":  # it is the beginning of a key
            count = 0
        items = [self.item(f"shop.ship order:{n}", state) for n in range(count)]
        return Page(tuple(items[:limit]), "x" if count > limit else None)

    def waiting(self, *, limit: int = 100, **_: Any) -> Page[WaitingView]:
        return Page(tuple(map(self.message, range(1, 1 + limit))), "51")

    def lines(self, *, limit: int = 50) -> Page[LineView]:
        found = (self.line(), self.line("tenant:9", 88, 64), self.line("mail:eu", 1_001, 31))
        return Page(found[:limit])

    def workers(self, *, limit: int = 1000) -> Page[WorkerView]:
        names = [("celery", f"celery@web-{n}", f"web-{n}", "default,ship") for n in range(1, 5)]
        names.append(("rq", "rq:ab12", "jobs-1", "reports"))
        return Page(
            tuple(
                WorkerView(
                    number=f"0a{at:06d}",
                    kind=kind,
                    name=self._text(name),
                    host=self._text(host),
                    pid=4_000 + at,
                    queues=self._text(queues),
                    version="0.1.0",
                    started_s=self.now_s - 21_600,
                    seen_s=self.now_s - 60 * at,
                    age_s=60.0 * at,
                )
                for at, (kind, name, host, queues) in enumerate(names, start=1)
            )[:limit]
        )

    def actions(self, **_: Any) -> Page[ActionView]:
        reason = self._text("the carrier is back")
        return Page(
            (
                ActionView(self.now_s - 400, "requeue", "ann", reason, work="shop.ship order:3"),
                ActionView(self.now_s - 900, "pause", self._text("ben"), reason, key="tenant:9"),
            )
        )

    def snapshot(self) -> SnapshotView:
        work = [[self._text("shop.ship"), "dead", 2], [self._text("shop.pay"), "failed", 4]]
        waiting = [[self._text("shop.pay"), 312], [self._text("shop.mail"), 1_089]]
        values = {"work": work, "waiting": waiting, "paused_keys": [[1]]}
        return SnapshotView(self.now_s - 3, 3.0, values, {})

    def counts(self, *, since_s: float | None = None) -> list[Count]:
        minute = int(self.now_s // 60)
        ended = {
            "shop.pay": {"done": 8_120, "duplicate": 140, "parked": 312, "failed": 6},
            "shop.ship": {"done": 2_310, "duplicate": 52, "deferred": 41, "dead": 2},
            "jobs.report": {"done": 96, "stale": 1},
        }
        return [
            Count(self._text(task), f"deliveries/{what}", n / 60 * (1 + 0.3 * sin(at / 7)), at)
            for at in range(minute - 59, minute + 1)
            for task, by in ended.items()
            for what, n in by.items()
        ]

    def _change(self, what: str, name: Any, expected: Any, said: dict[str, str]) -> Any:
        self.changed.append((what, name, expected, said))
        return [_Changed()]

    def requeue(self, works: Any, *, expected: Any = None, **said: str) -> Any:
        return self._change("requeue", works, expected, said)

    def requeue_left(self, works: Any, *, expected: Any = None, **said: str) -> Any:
        return self._change("requeue_left", works, expected, said)

    def drop(self, works: Any, *, expected: Any = None, **said: str) -> Any:
        return self._change("drop", works, expected, said)

    def call_now(self, works: Any, *, expected: Any = None, **said: str) -> Any:
        return self._change("call", works, expected, said)

    def release(self, key: str, *, fence: int | None = None, **said: str) -> Any:
        return self._change("release", key, fence, said)

    def pause(self, key: str, *, now: bool, timeout_s: float, **said: str) -> Any:
        return self._change("pause", key, now, said)

    def resume(self, key: str, **said: str) -> Any:
        return self._change("resume", key, None, said)


class _Changed:
    why = ""
