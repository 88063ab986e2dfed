"""Each combination of options is refused for a reason, or it is said what happens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from taskguard import Former, GuardedRow
from taskguard.combinations import DELIVERIES, DIMENSIONS, ENQUEUES, REFUSALS, Rule, rule_for
from taskguard.errors import ConfigurationError
from taskguard.guarded import GuardedFunction
from taskguard.model.delivery import Delivery, MessageRef
from taskguard.outbox.enqueue import _refuse_duplicates_of_messages


def combinations() -> Iterator[dict[str, str]]:
    for values in itertools.product(*DIMENSIONS.values()):
        yield dict(zip(DIMENSIONS, values, strict=True))


def ship(order: int, line: int = 0) -> None:
    """The function to guard."""


TABLE = sa.Table(
    "orders",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, primary_key=True),
    sa.Column("status", sa.Text),
    sa.Column("fence", sa.BigInteger),
)
# Rows by the argument that names the work.
ROWS = {
    by_line: GuardedRow(
        TABLE,
        id="<line>" if by_line else "<order>",
        state="status",
        fence="fence",
        new="PAID",
        processing="SHIPPING",
        done="SHIPPED",
    )
    for by_line in (False, True)
}
FORMERLY = {
    "none": (),
    "same key": (Former(task="shop.ship"),),
    "other key": (Former(key="former:<order>"),),
}


def decorate(chosen: dict[str, str]) -> GuardedFunction:
    """Decorate a function with these options."""
    once_per = {"template": "<line>"}.get(chosen["once_per"], chosen["once_per"])
    options: dict[str, Any] = {"busy": chosen["busy"], "order": chosen["order"]}
    if chosen["busy"] == "wait":
        options["wait_s"] = 1.0
    if chosen["max_waiting"] == "given":
        options["max_waiting"] = 3
    if chosen["limit"] == "several":
        options["limit"] = 2
    if chosen["rate"] == "given":
        options["rate"] = "100/m"
    key = "order:<order>" if chosen["keys"] == "one" else ["order:<order>", "line:<line>"]
    row = None if chosen["row"] == "none" else ROWS[chosen["once_per"] == "template"]
    formerly = FORMERLY[chosen["formerly"]]
    return GuardedFunction(ship, key=key, once_per=once_per, row=row, formerly=formerly, **options)


def enqueue(compiled: GuardedFunction, duplicate: Any) -> None:
    """Check the options of an enqueue."""
    message = MessageRef("m")
    delivery: Delivery = compiled.delivery((1,), {}, namespace="", message=message)
    _refuse_duplicates_of_messages(delivery, duplicate)


@pytest.mark.parametrize("busy", DIMENSIONS["busy"])
def test_each_is_refused_for_its_reason_or_says_what_happens(busy: str) -> None:
    """Each combination of options is refused with the reason in the table, or does what the table
    says."""
    for chosen in combinations():
        if chosen["busy"] != busy:
            continue
        refused = rule_for(REFUSALS, chosen)
        said = None
        try:
            enqueue(decorate(chosen), chosen["duplicate"])
        except ConfigurationError as error:
            said = str(error)
        if refused is None:
            assert said is None, chosen
            assert rule_for(DELIVERIES, chosen) is not None, chosen
            assert rule_for(ENQUEUES, chosen) is not None, chosen
        else:
            assert said is not None, chosen
            assert said.endswith(refused.says), chosen
            assert "test_combinations.ship" in said


@pytest.mark.parametrize("rule", [*REFUSALS, *DELIVERIES, *ENQUEUES])
def test_each_rule_decides_something(rule: Rule) -> None:
    """Each rule applies to a combination, and names existing options and values."""
    assert all(set(values) <= set(DIMENSIONS[name]) for name, values in rule.fits.items())
    table = next(each for each in (REFUSALS, DELIVERIES, ENQUEUES) if rule in each)
    allowed = (c for c in combinations() if table is REFUSALS or rule_for(REFUSALS, c) is None)
    assert any(rule_for(table, chosen) is rule for chosen in allowed)
