"""Checks of a GuardedRow's declaration, without a database."""

from __future__ import annotations

import enum
import uuid
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from taskguard import GuardedRow
from taskguard.errors import ConfigurationError, KeyArgumentError, KeyTemplateError
from taskguard.integration import GuardedFunction, MessageRef
from taskguard.model.claims import RowRef

M1 = MessageRef("m1")


class Status(enum.Enum):
    """States that sa.Enum stores by name."""

    PAID = "paid"
    SHIPPING = "shipping"
    SHIPPED = "shipped"


class Base(DeclarativeBase):
    pass


class Order(Base):
    """An ORM class."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(sa.String(8))
    fence: Mapped[int | None] = mapped_column(sa.BigInteger)


def table(state: Any = None, fence: Any = None, **ids: Any) -> sa.Table:
    """`orders` with these types."""
    return sa.Table(
        "orders",
        sa.MetaData(),
        *[sa.Column(n, kind, primary_key=True) for n, kind in (ids or {"id": sa.Integer}).items()],
        sa.Column("status", state or sa.String(8)),
        sa.Column("fence", fence or sa.BigInteger),
        sa.Column("slip", sa.Text, unique=True),
    )


def row(of: Any = None, **values: Any) -> GuardedRow:
    options: dict[str, Any] = {
        "id": "<order_id>",
        "state": "status",
        "fence": "fence",
        "new": "PAID",
        "processing": "SHIPPING",
        "done": "SHIPPED",
        **values,
    }
    return GuardedRow(table() if of is None else of, **options)


def ship(order_id: Any, tenant: str = "t") -> None:
    """A function to guard."""


def ids(declared: GuardedRow, *args: Any, **options: Any) -> tuple[Any, ...]:
    """The values of the row's id for one call."""
    options = {"key": "order:<order_id>:<tenant>", **options}
    delivery = GuardedFunction(ship, row=declared, **options).delivery(
        args, {}, namespace="", message=M1
    )
    assert delivery.row is not None
    return delivery.row.id


def test_an_orm_class_and_its_attributes_do_too() -> None:
    """A declaration takes an ORM class and its attributes, a Table and its Columns, or their
    names."""
    by_class = row(Order, state=Order.status, fence=Order.fence)
    by_name = row(Order.__table__)
    assert (by_class.state, by_class.fence) == (by_name.state, by_name.fence)


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (sa.Integer(), 7, 7),
        (sa.BigInteger(), "7", 7),
        (sa.Text(), "7 a/ü", "7 a/ü"),
        (sa.Uuid(), str(uuid.UUID(int=5)), uuid.UUID(int=5)),
        (sa.Uuid(), uuid.UUID(int=5), uuid.UUID(int=5)),
    ],
)
def test_an_id_is_what_its_column_holds(kind: Any, given: Any, value: Any) -> None:
    """An id has the type of its column, however the queue sent it."""
    assert ids(row(table(id=kind)), given) == (value,)


def test_an_id_of_several_columns_is_a_mapping() -> None:
    """An id of several columns maps columns, or their names, to templates, which may have literal
    text."""
    of = table(tenant=sa.Text, no=sa.Integer)
    declared = row(of, id={of.c.no: "<order_id>", "tenant": "x-<tenant>"})
    assert [column.name for column in declared.id] == ["no", "tenant"]
    assert ids(declared, "7") == (7, "x-t")


def test_a_unique_column_is_an_id() -> None:
    """An id may be a unique column that is not the primary key."""
    assert ids(row(id={"slip": "<order_id>"}), 7) == ("7",)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such column": ({"state": "state"}, r"'state' is not among its columns \(id, status"),
    "a column of another table": ({"fence": Order.fence}, "not a column of this table"),
    "a narrow fence": ({"of": table(fence=sa.Integer())}, "sa.BigInteger"),
    "a narrow numeric fence": ({"of": table(fence=sa.Numeric(12))}, "sa.BigInteger"),
    "a fence with a fraction": ({"of": table(fence=sa.Float())}, "sa.BigInteger"),
    "a long state": ({"processing": "IN_TRANSIT"}, "holds 8 characters"),
    "a state that is no text": ({"new": 1}, "holds texts"),
    "a state that is no number": ({"of": table(state=sa.Integer())}, "holds integers"),
    "a state of no Enum": ({"of": table(state=sa.Enum("PAID", "SHIPPING"))}, "are PAID, SHIPPING"),
    "two states alike": ({"done": "PAID"}, "have to be different"),
    "dead like another": ({"dead": "SHIPPED"}, "have to be different"),
    "an id that is not unique": ({"id": {"status": "<order_id>"}}, "nor unique"),
    "half of an id": (
        {"of": table(a=sa.Text, b=sa.Text), "id": {"a": "<order_id>"}},
        "nor unique",
    ),
    "one template for two columns": ({"of": table(a=sa.Text, b=sa.Text)}, "2 columns"),
    "an id that is a time": ({"of": table(id=sa.DateTime())}, "integers, texts or UUIDs"),
    "no table": ({"of": "orders"}, "a SQLAlchemy Table or an ORM class"),
    "an unknown way": ({"on_missing": "wait"}, "on_missing='wait' is not one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_refused(case: str) -> None:
    """A wrong declaration is refused with the table, the column, and the columns that exist."""
    options, problem = WRONG[case]
    with pytest.raises(ConfigurationError, match=problem):
        row(**options)


@pytest.mark.parametrize("fence", [sa.BIGINT(), sa.Numeric(20), sa.Numeric(19, 0), sa.Numeric()])
def test_any_column_of_64_bits_is_a_fence(fence: Any) -> None:
    """A fence may be any column of 64 bits, or a NUMERIC."""
    assert row(table(fence=fence)).fence.name == "fence"


def test_an_enum_is_compared_by_what_is_stored() -> None:
    """A state of an enum is compared as the database stores it: by name, or by
    `values_callable`."""
    declared = row(
        table(state=sa.Enum(Status)),
        new=Status.PAID,
        processing="SHIPPING",
        done=Status.SHIPPED,
    )
    assert declared.states == ("PAID", "SHIPPING", "SHIPPED", None)
    stored = sa.Enum(Status, values_callable=lambda kind: [member.value for member in kind])
    declared = row(table(state=stored), new=Status.PAID, processing="shipping", done=Status.SHIPPED)
    assert declared.states == ("paid", "shipping", "shipped", None)
    with pytest.raises(ConfigurationError, match="are paid, shipping, shipped"):
        row(table(state=stored))


@pytest.mark.parametrize("template", ["<order>", "<order_id|hash>", "<order_id", 7])
def test_a_template_of_an_id_is_checked_at_decoration(template: Any) -> None:
    """The template of an id is checked at decoration. A digest is refused."""
    with pytest.raises(KeyTemplateError, match="Parameters: order_id"):
        GuardedFunction(ship, key="order:<order_id>", row=row(id=template))


def test_two_rows_must_not_be_one_work() -> None:
    """The id has to be in the key or in `once_per=`. Otherwise two rows would be one work."""
    with pytest.raises(ConfigurationError, match=r"<order_id>.*once_per="):
        GuardedFunction(ship, key="customer:<tenant>", row=row())
    for once_per in ("message", "order:<order_id>"):
        assert ids(row(), 7, key="customer:<tenant>", once_per=once_per) == (7,)
    assert ids(row(table(id=sa.Text)), "a@b", key="order:<order_id|hash>") == ("a@b",)
    assert ids(row(), 7, key=lambda order_id, **_: f"order:{order_id}") == (7,)


@pytest.mark.parametrize("given", ["07", "+7", " 7", "7.0", "x", "-0", "9223372036854775808", True])
def test_what_is_no_integer_is_no_id_of_one(given: Any) -> None:
    """A text that is not the usual form of an integer is refused, and the error does not
    show it."""
    with pytest.raises(KeyArgumentError, match="no id of orders: it is no integer") as caught:
        ids(row(), given)
    assert str(given) not in str(caught.value).replace("<order_id>", "")


def test_a_text_of_an_id_is_in_no_message() -> None:
    """Messages do not show an id's text, which may be an address. They show numbers and UUIDs."""
    declared = row(table(id=sa.Text, no=sa.Integer), id={"id": "<tenant>", "no": "<order_id>"})
    assert declared.describe(RowRef(declared, ("a@b", 7))) == "orders …, 7"


def test_something_else_than_a_guarded_row_is_refused() -> None:
    """`row=` refuses other objects, and names what it takes."""
    with pytest.raises(ConfigurationError, match=r"taskguard\.GuardedRow"):
        GuardedFunction(ship, key="order:<order_id>", row=table())
