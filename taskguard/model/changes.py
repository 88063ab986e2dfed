"""Changes of work and keys by an operator, and their outcomes. Values only.

Read next: `operations/changes.py`, which makes them.
"""

from __future__ import annotations

from taskguard.errors import ConfigurationError
from taskguard.model.history import Action
from taskguard.model.lease import Owner
from taskguard.model.pauses import Pause
from taskguard.model.states import State
from taskguard.model.texts import printable
from taskguard.values import value

__all__ = ["Changed", "Expected", "PauseTried", "Said", "said", "this_user"]

_ACTOR_CHARS, _REASON_CHARS = 100, 300


@value
class Said:
    """The actor of a change, and its reason: one line each."""

    actor: str
    reason: str


@value(kw_only=True)
class Expected:
    """The record that a viewer saw. If it has changed since, the change is refused. None: any.

    Attributes:
        state: the state of the work.
        fence: the fencing token of its last claim.
        owner: the owner on record.
    """

    state: State | None = None
    fence: int | None = None
    owner: str | None = None


@value(kw_only=True)
class Changed:
    """The outcome of an operator's change for one work.

    Attributes:
        work: its id.
        changed: whether the work has changed, or an equal call changed it before.
        why: why it has not changed, in one sentence, or "".
        then: what happens next, in one sentence, or "".
        before: its state before. None: there is no such work.
        key: the key in whose line it may wait.
        also: other ids of the same claim that changed with it.
    """

    work: str
    changed: bool
    why: str = ""
    then: str = ""
    before: State | None = None
    key: str = ""
    also: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.changed


@value
class PauseTried:
    """The answer of a ledger that was asked to pause a key.

    Attributes:
        paused: whether the key is paused now.
        holders: who held the key, or its slots. If it is not paused, the pause waits for them.
        by: the pause of another call. None: there is none.
        closed: whether no other holder can get the key or a slot of it, while the pause waits.
        resumed: who resumed the key after this pause had begun, and why. None: nobody did.
    """

    paused: bool
    holders: tuple[Owner, ...] = ()
    by: Pause | None = None
    closed: bool = False
    resumed: Said | None = None


def said(action: Action, actor: str, reason: str) -> Said:
    """Return actor and reason as single lines. Raises ConfigurationError if one is missing."""
    texts = {"actor": (actor, _ACTOR_CHARS), "reason": (reason, _REASON_CHARS)}
    lines = {}
    for name, (text, most) in texts.items():
        line = printable(" ".join(str(text or "").split()))
        if not line:
            raise ConfigurationError(
                f"{action.value}: {name}={text!r}: give a text. It is recorded with the change."
            )
        lines[name] = line[:most]
    return Said(**lines)


def this_user() -> str:
    """Return the user and the host of this process, as "ann@web-3"."""
    import getpass
    from platform import node

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "unknown"
    return f"{user}@{node()}"
