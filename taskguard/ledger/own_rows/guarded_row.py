"""`GuardedRow`: a row of the user. A task changes its state and raises its fence.

Guarantees: the constructor checks the columns, the states and the fence's width. The task's
decorator checks the templates of the id. `rows.check()` checks the real table.

The application may write the state, too. The task then follows the new state.
"""

from __future__ import annotations

import enum
import inspect
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import sqlalchemy as sa

from taskguard.errors import ConfigurationError, KeyArgumentError
from taskguard.keys import TextFunction, compile_texts
from taskguard.model.claims import RowRef

__all__ = ["GuardedRow", "RowId", "fits_fence", "fits_state"]

OnUnfit = Literal["raise", "skip", "defer"]
_FENCE_DIGITS = 19  # of a signed 64-bit integer


class GuardedRow:
    """A row of your own that changes its state with a task's claim and with its completion. ::

        row=GuardedRow(
            orders, id="<order_id>", state=orders.c.status, fence=orders.c.fence_token,
            new="PAID", processing="SHIPPING", done="SHIPPED",
        )

    The claim moves the row `new` -> `processing`, with a new fence. The completion moves it
    `processing` -> `done` in the transaction of the effects. If the body raises, the row is `new`
    again. If you set a row that is done back to `new`, the next message does its work again, with
    the same `guard.idempotency_key`.

    Args:
        table: a SQLAlchemy Table in the ledger's database, or an ORM class.
        id: a template for the primary key or another unique column, or a mapping from several
            columns to templates. The columns are integers, texts or UUIDs.
        state: the column of the state, or its name. It is a text, an Enum or an integer.
        fence: the column of the fence, or its name. It is a 64-bit integer that may be NULL.
        new: the state from which the task starts.
        processing: the state while the task works on the row.
        done: the state that it ends in.
        dead: the state in which it is left after `max_crashes`. By default `processing`.
        on_missing: what to do if there is no such row. "raise" (the default): RowMissingError.
            "skip": acknowledge the message, with an event. "defer": defer it for `retention_s` at
            most, for a message that is sent before its row is committed.
        on_ineligible: what to do if the row is in another state, for example `CANCELLED`. "raise"
            (the default): RowIneligibleError. "skip", or "defer" for a step whose message may come
            before the previous step is done.

    Raises:
        ConfigurationError: a column or a state does not fit, with what to do.
    """

    def __init__(
        self,
        table: Any,
        *,
        id: str | Mapping[Any, str],  # noqa: A002  # the word for it
        state: Any,
        fence: Any,
        new: Any,
        processing: Any,
        done: Any,
        dead: Any = None,
        on_missing: OnUnfit = "raise",
        on_ineligible: OnUnfit = "raise",
    ) -> None:
        self.table = _table(table)
        self.state = self._column("state", state)
        self.fence = self._column("fence", fence)
        self._templates = self._id_templates(id)
        self.id = tuple(self.table.c[name] for name in self._templates)
        self._readers = tuple(self._reader(column) for column in self.id)
        self.states = self._states(new=new, processing=processing, done=done, dead=dead)
        self.new, self.processing, self.done = self.states[:3]
        self.dead = self.states[3] if dead is not None else None
        if not fits_fence(self.fence.type):
            raise self._wrong(
                f"fence column {self.fence.name!r} is {self.fence.type!r}; a fence has 64 bits: "
                "declare it as sa.BigInteger"
            )
        for name, value in (("on_missing", on_missing), ("on_ineligible", on_ineligible)):
            if value not in ("raise", "skip", "defer"):
                raise self._wrong(f"{name}={value!r} is not one of 'raise', 'skip', 'defer'")
        self.on_missing = on_missing
        self.on_ineligible = on_ineligible

    def __repr__(self) -> str:
        return f"<GuardedRow {self.table.fullname}.{self.state.name}>"

    def compile_id(
        self, signature: inspect.Signature, *, task: str, templates: Sequence[Any] = ()
    ) -> Callable[[Sequence[Any], Mapping[str, Any]], RowRef]:
        """Compile the function that finds a call's row by its arguments, for decorators.

        Args:
            signature: the task's signature.
            task: the task's name, for messages.
            templates: the compiled templates that name the work.

        Raises:
            KeyTemplateError: a template does not fit the task's parameters.
            ConfigurationError: two rows could be one work item.
        """
        texts = compile_texts(self._templates, signature=signature, task=task)
        self._refuse_two_rows_of_one_work(texts, templates, task)

        def ref(args: Sequence[Any], kwargs: Mapping[str, Any]) -> RowRef:
            found = texts(args, kwargs)
            try:
                values = tuple(
                    read(found[name])
                    for name, read in zip(self._templates, self._readers, strict=True)
                )
            except ValueError as error:
                raise KeyArgumentError(
                    f"task {task}: {self._source} is no id of {self.table.fullname}: {error}",
                    task=task,
                    placeholder=self._source,
                ) from None
            return RowRef(self, values)

        return ref

    @property
    def _source(self) -> str:
        return ", ".join(self._templates.values())

    def describe(self, ref: RowRef) -> str:
        """Return the row for messages, for example `orders 42`.

        Texts are hidden, because a text may be an address that must not be in a log.
        """
        shown = ("…" if isinstance(value, str) else str(value) for value in ref.id)
        return f"{self.table.fullname} {', '.join(shown)}"

    def _wrong(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"GuardedRow of {self.table.fullname}: {problem}.")

    def _column(self, what: str, given: Any) -> sa.Column[Any]:
        if isinstance(given, str):
            if given not in self.table.c:
                known = ", ".join(self.table.c.keys())
                raise self._wrong(f"{what} column {given!r} is not among its columns ({known})")
            return self.table.c[given]
        column = getattr(getattr(given, "property", None), "columns", (given,))[0]  # ORM attribute
        if not isinstance(column, sa.Column) or column.table is not self.table:
            raise self._wrong(f"{what}={given!r} is not a column of this table")
        return column

    def _id_templates(self, given: str | Mapping[Any, str]) -> dict[str, str]:
        """Return the templates by the keys of their columns."""
        if isinstance(given, Mapping):
            columns = [self._column("id", column) for column in given]
            templates = list(given.values())
        else:
            columns, templates = list(self.table.primary_key), [given]
            if len(columns) != 1:
                raise self._wrong(
                    f"its primary key has {len(columns)} columns; give id= as a mapping from each "
                    'of them to its template, for example {"tenant": "<tenant>", "no": "<no>"}'
                )
        if not self._is_unique({column.name for column in columns}):
            names = ", ".join(column.name for column in columns)
            raise self._wrong(
                f"id= ({names}) is neither the primary key nor unique, so it could name several "
                "rows"
            )
        return {column.key: text for column, text in zip(columns, templates, strict=True)}

    def _is_unique(self, names: set[str]) -> bool:
        constraints = [
            each
            for each in self.table.constraints
            if isinstance(each, sa.PrimaryKeyConstraint | sa.UniqueConstraint)
        ]
        indexes = [index for index in self.table.indexes if index.unique]
        return any(
            {column.name for column in each.columns} == names for each in (*constraints, *indexes)
        )

    def _reader(self, column: sa.Column[Any]) -> Callable[[str], Any]:
        """Return a function that converts a text to a value of the column, or raises ValueError."""
        try:
            kind = column.type.python_type
        except NotImplementedError:
            kind = object
        if kind not in _READERS:
            raise self._wrong(
                f"id column {column.name!r} is {column.type!r}; ids are integers, texts or UUIDs"
            )
        return _READERS[kind]

    def _states(self, **given: Any) -> tuple[Any, ...]:
        states = tuple(self._state(name, value) for name, value in given.items())
        named = [state for state in states if state is not None]
        if len(set(named)) < len(named):
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise self._wrong(f"the states have to be different, not {shown}")
        return states

    def _state(self, name: str, value: Any) -> Any:
        if value is None and name == "dead":
            return None
        kind = self.state.type
        if isinstance(kind, sa.Enum) and kind.enum_class is not None:
            # The database stores texts for an Enum, by default the names of its members.
            members = dict(zip(kind.enum_class, kind.enums, strict=False))
            value = members.get(value, value) if isinstance(value, enum.Enum) else value
        elif isinstance(value, enum.Enum):
            value = value.value
        problem = fits_state(kind, value)
        if problem is not None:
            raise self._wrong(f"{name}={value!r} does not fit column {self.state.name!r}{problem}")
        return value

    def _refuse_two_rows_of_one_work(
        self, texts: TextFunction, templates: Sequence[Any], task: str
    ) -> None:
        named: set[str] = set()
        for template in templates:
            if template.arguments is None:
                return  # a callable may use any argument
            named |= template.arguments
        missing = ", ".join(f"<{argument}>" for argument in sorted(texts.arguments - named))
        if templates and missing:
            raise ConfigurationError(
                f"{task}: id= names a row of {self.table.fullname} by {missing}, which the work's "
                "id lacks, so two rows could be one work item. Add it to key= or to once_per=."
            )


def fits_fence(kind: Any) -> bool:
    """Return True if a column of this type holds 64 bits."""
    kind = getattr(kind, "impl_instance", kind)  # of a TypeDecorator
    if isinstance(kind, sa.Numeric) and not isinstance(kind, sa.Float):
        return kind.precision is None or kind.precision - (kind.scale or 0) >= _FENCE_DIGITS
    return isinstance(kind, sa.BigInteger)


def fits_state(kind: Any, value: Any) -> str | None:
    """Return why a column of this type cannot hold the state, or None if it can or may."""
    if isinstance(kind, sa.Enum):
        return None if value in kind.enums else f", whose values are {', '.join(kind.enums)}"
    if isinstance(kind, sa.String):
        if not isinstance(value, str) or not value:
            return ", which holds texts"
        too_long = kind.length is not None and len(value) > kind.length
        return f", which holds {kind.length} characters" if too_long else None
    if isinstance(kind, sa.Integer) and (isinstance(value, bool) or not isinstance(value, int)):
        return ", which holds integers"
    return None


def _table(given: Any) -> sa.Table:
    table = getattr(given, "__table__", given)
    if not isinstance(table, sa.Table):
        raise ConfigurationError(
            f"GuardedRow({type(given).__name__}): give it a SQLAlchemy Table or an ORM class."
        )
    return table


def _integer(text: str) -> int:
    # "07" and "7" would be different keys for one row.
    if _is_integer(text) is None or not -(2**63) <= int(text) < 2**63:
        raise ValueError("it is no integer of 64 bits, or has leading zeros")
    return int(text)


_is_integer = re.compile(r"0|-?[1-9][0-9]{0,18}").fullmatch
_READERS: dict[Any, Callable[[str], Any]] = {int: _integer, str: str, uuid.UUID: uuid.UUID}

RowId = Callable[[Sequence[Any], Mapping[str, Any]], RowRef]
