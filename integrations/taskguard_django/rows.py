"""`row()`: a `taskguard.GuardedRow` of a Django model.

    row=taskguard_django.row(Order, id="<order_id>", state="status", fence="fence_token",
                             new="PAID", processing="SHIPPING", done="SHIPPED")

Guarantees: table, columns and types are those of the model. Conditional statements change the
state, so the model's `save()` and signals are not called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict, Unpack

from taskguard import errors

if TYPE_CHECKING:
    from taskguard import GuardedRow

__all__ = ["row"]

# SQLAlchemy's column types by the names of Django's field types.
_TYPES = {
    "AutoField": "Integer",
    "BigAutoField": "BigInteger",
    "BigIntegerField": "BigInteger",
    "CharField": "String",
    "IntegerField": "Integer",
    "PositiveBigIntegerField": "BigInteger",
    "PositiveIntegerField": "Integer",
    "PositiveSmallIntegerField": "SmallInteger",
    "SlugField": "String",
    "SmallAutoField": "SmallInteger",
    "SmallIntegerField": "SmallInteger",
    "TextField": "Text",
    "UUIDField": "Uuid",
}


class StateOptions(TypedDict, total=False):
    """Options of `taskguard.GuardedRow` for the states. That class describes each of them."""

    new: Required[Any]
    processing: Required[Any]
    done: Required[Any]
    dead: Any
    on_missing: Literal["raise", "skip", "defer"]
    on_ineligible: Literal["raise", "skip", "defer"]


def row(
    model: Any,
    *,
    id: str | Mapping[str, str],  # noqa: A002  # as GuardedRow calls it
    state: str,
    fence: str,
    **options: Unpack[StateOptions],
) -> GuardedRow:
    """Return a `GuardedRow` of a model whose table is in the ledger's database.

    Args:
        model: the model's class.
        id: a template for the primary key, or a mapping from names of unique fields to templates.
        state: the name of the state's field. TextChoices and IntegerChoices are possible.
        fence: the name of the field for the fencing token:
            `BigIntegerField(null=True, editable=False)`.
        options: `new`, `processing`, `done` and the other options of `GuardedRow`.

    Raises:
        ConfigurationError: a field is missing or has an unsuitable type. The error says what to do.
    """
    from taskguard import GuardedRow  # imports SQLAlchemy, which few commands of Django need

    fields = {field.name: field for field in model._meta.local_concrete_fields}  # noqa: SLF001
    ids = list(id) if isinstance(id, Mapping) else [model._meta.pk.name]  # noqa: SLF001
    for name in (*ids, state, fence):
        if name not in fields:
            known = ", ".join(fields)
            raise errors.ConfigurationError(
                f"row({model.__name__}): {name!r} is not a field of the model's own table. Use one "
                f"of: {known}."
            )
    table = _table(model, [fields[name] for name in dict.fromkeys((*ids, state, fence))])
    columns: Any = id
    if isinstance(id, Mapping):
        columns = {fields[name].column: text for name, text in id.items()}
    return GuardedRow(
        table, id=columns, state=fields[state].column, fence=fields[fence].column, **options
    )


def _table(model: Any, fields: list[Any]) -> Any:
    import sqlalchemy as sa

    table = sa.Table(model._meta.db_table.strip('"'), sa.MetaData())  # noqa: SLF001
    for field in fields:
        unique = field.unique and not field.primary_key
        key = field.primary_key
        table.append_column(sa.Column(field.column, _type(field), primary_key=key, unique=unique))
    for names in _unique_together(model):
        if names <= {field.name for field in fields}:
            columns = [field.column for field in fields if field.name in names]
            table.append_constraint(sa.UniqueConstraint(*columns))
    return table


def _unique_together(model: Any) -> list[set[str]]:
    from django.db.models import UniqueConstraint

    meta = model._meta  # noqa: SLF001
    constraints = [
        set(each.fields)
        for each in meta.constraints
        if isinstance(each, UniqueConstraint) and each.fields and each.condition is None
    ]
    return [*constraints, *map(set, meta.unique_together)]


def _type(field: Any) -> Any:
    import sqlalchemy as sa

    # A ForeignKey has the type of the column that it refers to.
    kind = _TYPES.get(_name(field.target_field if field.is_relation else field))
    if kind is None:
        raise errors.ConfigurationError(
            f"row({field.model.__name__}): {field.name!r} is a {_name(field)}, which a GuardedRow "
            "cannot use. Use a field for an integer, a text or a UUID."
        )
    if kind == "String":
        return sa.String(field.max_length)
    return getattr(sa, kind)()


def _name(field: Any) -> str:
    return str(field.get_internal_type())
