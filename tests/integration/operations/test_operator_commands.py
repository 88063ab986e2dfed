"""What an operator types: `explain`, `keys`, `work`, `waiting`, `workers`, `actions` and `top`."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import sqlalchemy as sa

from support import claims
from support.guarded_shop import GuardedShop
from taskguard.cli import main, work
from taskguard.cli.output import age, as_data, table
from taskguard.errors import LedgerUnavailableError
from taskguard.ledger.operations import changes
from taskguard.ledger.sql import SqlLedger
from taskguard.ledger.tables import WORK
from taskguard.model.bounds import Bounds, slots_of
from taskguard.model.claims import Claimed, MessageRef
from taskguard.model.history import Flag
from taskguard.operations import advice

CALL = '{"queue": "test", "message": "m"}'


@pytest.fixture(params=["pg_url", "sqlite_url"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


class Terminal:
    """Runs the command on a ledger."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._capsys = url, capsys
        self.err = ""

    def __call__(self, line: str, *, status: int = 0) -> str:
        """Return the output of a command that has to exit with a status."""
        found = main([*shlex.split(line), "--url", self._url])
        said = self._capsys.readouterr()
        self.err = said.err
        assert found == status, (line, said)
        return said.out

    def json(self, line: str) -> Any:
        return json.loads(self(f"{line} --json"))


@pytest.fixture
def terminal(shop: GuardedShop, url: str, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(url, capsys)


def claim(shop: GuardedShop, number: int, **values: Any) -> Claimed:
    values.setdefault("message", MessageRef(f"m{number}"))
    claimed = shop.ledger.claim(claims.request(number, **values))
    assert isinstance(claimed, Claimed)
    return claimed


def fail(shop: GuardedShop, *numbers: int) -> None:
    for number in numbers:
        shop.ledger.fail(claim(shop, number).claim, "TimeoutError: bank")


def test_explain_says_what_holds_a_key_and_what_waits(
    shop: GuardedShop, terminal: Terminal
) -> None:
    """A held key names its holder, its lease, the line, and what happened before."""
    shop.tg.runner.names.register()
    claim(shop, 1)
    for number in (11, 12):
        assert shop.ledger.park(claims.request(number, keys=("order:1",), call=CALL))
    said = terminal("explain order:1")
    assert re.match(r"order:1  HELD since .*Z \(.*s\); its lease ends in [23]\ds", said)
    assert "by     ship, message m1, attempt 1, fence " in said
    assert re.search(r"at     .*, pid \d+ \(up ", said)
    assert "line   2 wait, because the key is held; the first one since " in said
    found = terminal.json("explain order:1")
    assert found["key"]["holders"][0]["work"] == "ship order:1"
    assert found["key"]["line"]["waiting"] == 2
    assert found["work"] is None


def test_explain_finds_work_messages_and_beginnings(shop: GuardedShop, terminal: Terminal) -> None:
    """Nothing found is status 3, and several things are status 2 with their names."""
    fail(shop, 1, 2)
    said = terminal("explain 'ship order:1'")
    assert said.startswith("ship order:1  FAILED since ")
    assert "TimeoutError: bank" in said
    assert "taskguard work requeue 'ship order:1' --reason" in said
    assert terminal("explain --message m2").startswith("ship order:2  FAILED")
    terminal("explain 'ship order'", status=2)
    assert "ship order:1" in terminal.err
    assert "ship order:2" in terminal.err
    terminal("explain nothing:1", status=3)
    terminal("explain --message nothing", status=3)
    terminal("explain", status=2)


def test_explain_takes_a_name_as_people_write_it(shop: GuardedShop, terminal: Terminal) -> None:
    """Keys have escapes for blanks and other signs. The text without them finds the same record."""
    claim(shop, 1, keys=("order:a%20b",), work="ship order:a%20b")
    claim(shop, 2, keys=("order:c%2Cd",), work="ship message:m2 order:c%2Cd")
    for asked in ("order:a b", "order:a%20b"):
        assert terminal(f"explain '{asked}'").startswith("order:a%20b  HELD")
        for command in ("explain", "work show"):
            assert terminal(f"{command} 'ship {asked}'").startswith("ship order:a%20b  PROCESSING")
    assert terminal("explain order:c,d").startswith("order:c%2Cd  HELD")
    assert terminal("explain 'ship message:m2 order:c,d'").startswith("ship message:m2 order:c%2Cd")
    terminal("explain 'order:b a'", status=3)


def test_a_paused_key_is_listed_explained_and_resumed(
    shop: GuardedShop, terminal: Terminal
) -> None:
    """Everything that shows the key says who paused it, and why. Each change is recorded."""
    terminal("keys pause order:1 --reason 'manual correction' --as ann")
    assert re.match(r"order:1\t.*Z\tann\tmanual correction\n", terminal("keys --paused"))
    said = terminal("explain order:1")
    assert said.startswith("order:1  PAUSED by ann since ")
    assert "taskguard keys resume order:1 --reason" in said
    terminal("keys pause order:1 --reason again", status=1)
    assert "paused by ann" in terminal.err
    terminal("keys resume order:1 --reason corrected --as ann")
    terminal("keys resume order:1 --reason corrected --as bob", status=1)
    paused = terminal.json("keys pause order:2 --reason audit --as ann")
    assert paused == terminal.json("keys resume order:2 --reason audit")
    assert (paused["key"], paused["actor"], paused["reason"]) == ("order:2", "ann", "audit")
    assert terminal("keys --paused") == ""
    found = terminal.json("actions --since 1h --key order:1")
    assert [(each["action"], each["actor"], each["reason"]) for each in found] == [
        ("resume", "bob", "corrected"),  # a pause that still waited would have ended
        ("resume", "ann", "corrected"),
        ("pause", "ann", "manual correction"),
    ]


def test_a_pause_of_a_key_without_a_record_says_so(shop: GuardedShop, terminal: Terminal) -> None:
    """Its name may be misspelled. Then the operator believes that another key is paused."""
    fail(shop, 1)
    terminal("keys pause order:1 --reason audit")
    assert terminal.err == ""
    terminal("keys pause orderr:1 --reason audit")
    assert "no delivery has had it" in terminal.err


def test_held_keys_are_listed_the_longest_first(shop: GuardedShop, terminal: Terminal) -> None:
    """A key is listed once its lease was renewed. Its holder may be released."""
    first, second = claim(shop, 1), claim(shop, 2)
    assert terminal("keys --held") == ""
    assert shop.ledger.renew([first.claim, second.claim]) == ["renewed", "renewed"]
    rows = [line.split("\t") for line in terminal("keys").splitlines()]
    assert [row[0] for row in rows] == ["order:1", "order:2"]
    assert rows[0][3:5] == ["ship", "1"]
    assert terminal("keys --longer 1h") == ""
    said = terminal("keys release order:1 --reason 'web-3 is gone'")
    assert said.startswith("order:1: released from ")
    assert [line.split("\t")[0] for line in terminal("keys").splitlines()] == ["order:2"]
    [released] = terminal.json("keys release order:2 --reason 'web-3 is gone'")
    assert (released["key"], released["fence"]) == ("order:2", second.claim.fence)


def test_the_advice_on_a_slot_leaves_the_others(
    shop: GuardedShop, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two holders hangs. The advice is to release its slot, and not the whole key."""
    monkeypatch.setattr(advice, "_LONG_S", 0.0)
    slots = slots_of("order:1", 2)
    bounds = Bounds("order:1", 2, None, slots)
    for number in (1, 2):
        claim(shop, number, keys=slots[:1], bounds=bounds)
    released = re.findall("keys release (\\S+)", terminal("explain order:1"))
    assert released == ["'order:1#0'", "'order:1#1'"]
    terminal(f"keys release {released[1]} --reason 'web-3 is gone'")
    assert [each.key for each in shop.ledger.holders("order:1")] == ["order:1#0"]
    assert " release by " in terminal("explain order:1")
    [released] = terminal.json("actions --key order:1")
    assert released["key"] == "order:1#1"


def test_work_is_changed_in_bulk_only_on_purpose(shop: GuardedShop, terminal: Terminal) -> None:
    """A filter needs --yes. --dry-run shows what would be changed. The limit holds."""
    fail(shop, 1, 2, 3)
    said = terminal("work requeue --state FAILED --task ship --reason fixed", status=2)
    assert said.splitlines() == [f"ship order:{number}\tFAILED" for number in (3, 2, 1)]
    assert "3 work items would be requeued. Pass --yes" in terminal.err
    terminal("work requeue --state FAILED --reason fixed --dry-run")
    assert shop.states == ["FAILED"] * 3
    terminal("work requeue --state FAILED --reason fixed --limit 2 --yes")
    assert shop.states == ["FAILED", "NEW", "NEW"]
    terminal("work drop --state FAILED --reason cancelled --yes")
    terminal("work done 'ship order:3' --reason 'shipped by hand'")
    assert shop.states == ["DONE", "FAILED", "NEW"]
    assert " for good" in terminal("explain 'ship order:1'")
    terminal("work drop 'ship order:3' --reason late", status=1)
    assert "refused: ship order:3: it is DONE" in terminal.err
    terminal("work drop nothing --reason x", status=3)
    terminal("work drop --reason x --yes", status=2)
    assert len(terminal.json("actions")) == 4


def test_work_that_is_missing_is_named_and_nothing_changes(
    shop: GuardedShop, terminal: Terminal
) -> None:
    """Even if another id is given twice."""
    fail(shop, 1)
    twice = "'ship order:1' 'ship order:1'"
    terminal(f"work drop {twice} 'ship order:7' --reason x", status=3)
    assert "There is no work 'ship order:7'." in terminal.err
    assert len(terminal(f"work drop {twice} --reason x").splitlines()) == 1


@pytest.mark.parametrize("json_too", ["", " --json"])
def test_changes_before_an_error_are_printed(
    shop: GuardedShop, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, json_too: str
) -> None:
    """The database goes down in the middle of a bulk change."""
    fail(shop, 1, 2, 3)
    change, works = SqlLedger.change, []

    def until_it_is_down(self: SqlLedger, name: str, *args: Any, **options: Any) -> Any:
        works.append(name)
        if len(works) == 3:
            raise LedgerUnavailableError("the database is down")
        return change(self, name, *args, **options)

    monkeypatch.setattr(SqlLedger, "change", until_it_is_down)
    said = terminal(f"work drop --state FAILED --reason x --yes{json_too}", status=1)
    assert "the database is down" in terminal.err
    assert [name in said for name in works] == [True, True, False]


@pytest.mark.parametrize("url", ["pg_url"], indirect=True)
def test_work_that_another_transaction_has_locked_is_refused(
    shop: GuardedShop, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a bulk change is made."""
    monkeypatch.setattr(changes, "WRITE_LOCK_S", 0.1)
    fail(shop, 1, 2, 3)
    with shop.engine.begin() as db:
        db.execute(sa.select(WORK).where(WORK.c.id == "ship order:2").with_for_update())
        said = terminal("work drop --state FAILED --reason x --yes", status=1)
    assert [f"ship order:{number}" in said for number in (1, 2, 3)] == [True, False, True]
    assert "refused: ship order:2: " in terminal.err


def test_changes_go_on_if_nobody_reads_the_output(
    shop: GuardedShop, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `work drop … | head -1`: all that the filter found changes."""
    fail(shop, 1, 2, 3)

    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(work, "_print_outcome", closed)
    terminal("work drop --state FAILED --reason x --yes", status=141)
    monkeypatch.undo()
    assert len(terminal.json("actions")) == 3


def test_left_work_is_overdue_and_may_be_requeued(shop: GuardedShop, terminal: Terminal) -> None:
    """Work whose worker is gone is listed as overdue. A requeue counts a crash."""
    claimed = claim(shop, 1)
    shop.ledger.renew([claimed.claim])
    assert terminal("work list --overdue") == ""
    claims.end_leases(shop.engine)
    assert "\tPROCESSING (left)\t1\t0\tship order:1\t" in terminal("work list --overdue")
    assert "no worker runs it" in terminal("explain 'ship order:1'")
    terminal("work requeue --overdue --reason 'web-3 is gone' --yes")
    [row] = terminal.json("work list --prefix 'ship order:1'")
    assert (row["state"], row["crashes"], row["flag"]) == ("NEW", 1, None)


def test_work_that_runs_again_has_not_ended(shop: GuardedShop, terminal: Terminal) -> None:
    """The end of its failed attempt is an hour ago, and it was claimed again just now."""
    fail(shop, 1)
    with shop.engine.begin() as db:
        db.execute(sa.update(WORK).values(finished=WORK.c.finished - 3_600_000_000))
    claim(shop, 1, message=MessageRef("m1", 1))
    [found] = terminal.json("work list --state PROCESSING --prefix ship --since 1m")
    assert found["finished_s"] is None


def test_show_takes_a_key_or_a_beginning(shop: GuardedShop, terminal: Terminal) -> None:
    """It prints arguments and results only if asked to."""
    done = claim(shop, 1, call=CALL)
    shop.ledger.complete_alone(done.claim, '"secret result"')
    for named in ("'ship order:1'", "order:1", "'ship ord'"):
        said = terminal(f"work show {named}")
        assert said.startswith("ship order:1  DONE since ")
        assert "secret" not in said
    assert "secret result" in terminal("work show 'ship order:1' --arguments")
    terminal("work show nothing", status=3)


def test_lines_and_workers_are_listed(shop: GuardedShop, terminal: Terminal) -> None:
    """The longest line comes first. A page names the next one."""
    shop.tg.runner.names.register()
    claim(shop, 1)
    for number in range(11, 16):
        key = "order:1" if number < 15 else "order:2"
        assert shop.ledger.park(claims.request(number, keys=(key,), call=CALL))
    rows = [line.split("\t") for line in terminal("waiting --by-line").splitlines()]
    assert [(row[0], row[1]) for row in rows] == [("order:1", "4"), ("order:2", "1")]
    first = terminal("waiting --limit 3")
    cursor = re.search(r"--after (\S+)", terminal.err)
    assert cursor is not None
    rest = terminal(f"waiting --limit 3 --after {cursor[1]}")
    assert [line.split("\t")[3] for line in (first + rest).splitlines()] == [
        f"ship order:{number}" for number in range(11, 16)
    ]
    assert len(terminal("waiting --key order:2").splitlines()) == 1
    assert terminal("waiting --older 1h") == ""
    [worker] = terminal.json("workers")
    assert worker["kind"] == "plain"
    terminal("waiting --after ?", status=1)


def test_top_prints_once_into_a_pipe(shop: GuardedShop, terminal: Terminal) -> None:
    """Without a terminal, `top` prints one view and ends."""
    claimed = claim(shop, 1)
    shop.ledger.renew([claimed.claim])
    said = terminal("top")
    assert said.startswith("taskguard  20")
    assert re.search(r"^order:1 +\d\.\ds", said, re.MULTILINE)
    assert {"held", "lines", "counts", "work"} <= set(terminal.json("top"))


def test_names_do_nothing_to_a_terminal(shop: GuardedShop, terminal: Terminal) -> None:
    """Escapes in keys, tasks, errors and reasons are shown and not obeyed."""
    hostile = "\x1b[2J\u202e\r"
    claimed = claim(
        shop, 1, keys=(f"order:{hostile}",), task=f"ship{hostile}", work=f"ship{hostile} order:1"
    )
    shop.ledger.renew([claimed.claim])
    outputs = [terminal("keys"), terminal("top"), terminal(f"explain 'order:{hostile}'")]
    shop.ledger.fail(claimed.claim, hostile)
    outputs += [terminal("work list --state FAILED"), terminal("work show ship")]
    failed = claim(shop, 2, message=MessageRef(hostile)).claim
    shop.ledger.fail(failed, "boom")
    outputs.append(terminal("work requeue 'ship order:2' --reason x"))
    for said in outputs:
        assert re.sub("[\n\t]", "", said).isprintable(), ascii(said)
        assert "\\x1b[2J\\u202e" in said


def test_tables_fit_and_ages_are_short() -> None:
    """Columns are as wide as their widest cell, and long cells are cut."""
    lines = table(("KEY", "HELD"), [["a", "1s"], ["k" * 60, "2s"]])
    assert lines[0].startswith("KEY ")
    assert len(lines[2]) == 48 + 2 + 2
    titles = ("SINCE", "WORK", "MESSAGE", "STATE", "ERROR")
    lines = table(titles, [["now", "w" * 70, "m" * 50, "waiting", "e" * 300]], width=80)
    assert {len(line) for line in lines} == {80 - 20 + len("ERROR"), 80}
    assert "  waiting  e" in lines[1]
    [_, line] = table(("AT", "ON"), [["2026-11-28 20:30:55Z", "shop.ship order:1"]], width=30)
    assert line.startswith("…")
    assert " 20:30:55Z  shop." in line
    shown = [age(lasts_s) for lasts_s in (0.84, 31, 751, 21_730, 273_600)]
    assert shown == ["0.8s", "31s", "12m31s", "6h02m", "3d04h"]
    assert as_data((Flag.DEAD, WORK.name)) == ["dead", "taskguard_work"]
