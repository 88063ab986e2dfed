"""Which options go together, and what happens where a delivery finds its key taken: as data.

Guarantees: each combination of `DIMENSIONS` is refused by a rule of `REFUSALS`, for its reason, or
has one of `DELIVERIES`, and one of `ENQUEUES`, which say what happens; of several the first rule
that fits. A refusal that goes by what is known of the task is made where it is decorated, one that
names `duplicate` where it is enqueued. Tests walk all combinations, and compare the page
`docs/reference/combinations.md` with these tables.

A new rule is one entry, and a new option one entry of `DIMENSIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from taskguard.values import value

__all__ = ["DELIVERIES", "DIMENSIONS", "ENQUEUES", "REFUSALS", "Rule", "refusal", "rule_for"]

DIMENSIONS: dict[str, tuple[str, ...]] = {
    "keys": ("one", "several"),
    "busy": ("retry", "park", "latest", "supersede", "wait", "skip", "raise"),
    "once_per": ("key", "template", "message", "tick"),
    "order": ("best_effort", "strict", "priority"),
    "max_waiting": ("none", "given"),
    "limit": ("one", "several"),
    "rate": ("none", "given"),
    "row": ("none", "given"),
    "formerly": ("none", "same key", "other key"),
    "duplicate": ("answer", "attach", "skip", "replace", "raise"),
}
"""The values that each option may have, as far as they differ here."""


@value
class Rule:
    """What holds for the combinations that it fits.

    Attributes:
        says: why it cannot be, and what to write instead; or what happens.
        fits: values by option; an option that is not named may have any.
    """

    says: str
    fits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_for(self, chosen: Mapping[str, str]) -> bool:
        """Whether it fits; not where an option that it names is not chosen yet."""
        return all(chosen.get(name) in values for name, values in self.fits.items())


_NOT_PARKED = ("retry", "wait", "skip", "raise")
_NEWEST = ("latest", "supersede")
_BY_WORK = ("key", "template")
_BY_MESSAGE = ("message", "tick")
_BOUNDS = {"limit": ("several",), "rate": ("given",)}
_OF_MANY: dict[str, dict[str, tuple[str, ...]]] = {
    "there is no order= of several": {"order": ("strict", "priority")},
    "there are no more that max_waiting= could count": {"max_waiting": ("given",)},
    "limit= would have to say which of several holders a newer one replaces": {
        "limit": ("several",)
    },
}
_FORMER_GUARD = (
    "Let the deliveries of the former guard end, or give the new guard another name (work=)."
)

REFUSALS: tuple[Rule, ...] = (
    *(
        Rule(
            f'busy="{busy}" is for one key: a message that waited for several would hold some '
            'while it waits for the rest. Say busy="retry", or name one key.',
            {"keys": ("several",), "busy": (busy,)},
        )
        for busy in ("park", *_NEWEST)
    ),
    *(
        Rule(
            f'busy="{busy}" is for once_per="message": a newer message can take the place of an '
            "older one only where each is work of its own; else several are the same work, of "
            'which the first is done. Say once_per="message".',
            {"busy": (busy,), "once_per": ("key", "template", "tick")},
        )
        for busy in _NEWEST
    ),
    *(
        Rule(
            f'busy="{busy}" lets one message of a key wait, the newest, so {name}. Leave one of '
            "them away.",
            {"busy": (busy,), **fits},
        )
        for busy in _NEWEST
        for name, fits in _OF_MANY.items()
    ),
    *(
        Rule(
            f'busy="{busy}" lets a newer message end the work of an older one, and your own row '
            '(row=) does not tell which message moves it. Remove row=, or use busy="park".',
            {"busy": (busy,), "row": ("given",)},
        )
        for busy in _NEWEST
    ),
    *(
        Rule(
            f'busy="{busy}" compares the messages of one key, and a changed guard (formerly=) '
            "holds several keys. Let the queue run empty, then deploy without formerly=.",
            {"busy": (busy,), "formerly": ("same key", "other key")},
        )
        for busy in _NEWEST
    ),
    Rule(
        'order= is that of a line, and only busy="park" has one: what is put off comes again in '
        "any order. Say it, too, or leave order= away.",
        {"order": ("strict", "priority"), "busy": _NOT_PARKED},
    ),
    Rule(
        'max_waiting= counts who waits in line, and only busy="park" has one. Say it, too, or '
        "leave max_waiting= away.",
        {"max_waiting": ("given",), "busy": _NOT_PARKED},
    ),
    *(
        Rule(
            f"{name}= is of one key: a delivery that had a part of several would keep others out "
            "while it waits for the rest. Name one key.",
            {"keys": ("several",), name: bound},
        )
        for name, bound in _BOUNDS.items()
    ),
    *(
        Rule(
            f"the work of a key is done once, so there is never a second one for {name}= to bound. "
            'Say once_per="message", or name the work by a template.',
            {"once_per": ("key",), name: bound},
        )
        for name, bound in _BOUNDS.items()
    ),
    Rule(
        'order="strict" starts a message only after the message before it has ended, so a second '
        "slot of limit= would never be used. Remove limit=, or remove order=: then messages start "
        "in order, and run side by side.",
        {"order": ("strict",), "limit": ("several",)},
    ),
    Rule(
        "row= needs one fence that grows over all holders, and with limit= each slot has a fence "
        "of its own. Remove row= or limit=.",
        {"row": ("given",), "limit": ("several",)},
    ),
    Rule(
        "a delivery also holds its former key (formerly=), which has one holder at a time, so "
        f"limit= would not count until formerly= is removed. {_FORMER_GUARD}",
        {"formerly": ("other key",), "limit": ("several",)},
    ),
    Rule(
        "workers with the former guard start bodies under the former key (formerly=), and rate= "
        f"would not count these starts. {_FORMER_GUARD}",
        {"formerly": ("other key",), "rate": ("given",)},
    ),
    Rule(
        "each message, or tick, is work of its own (once_per=), so no two are the same. Name the "
        "work by its key, or by a template.",
        {"once_per": _BY_MESSAGE, "duplicate": ("attach", "skip", "replace", "raise")},
    ),
)

DELIVERIES: tuple[Rule, ...] = (
    Rule(
        "Waits in the ledger. The message that was sent first begins when the message before it is "
        "DONE, DEAD, revoked, or has no retries left, and the rate allows a start. If as many wait "
        "as `max_waiting` allows, a message that has not begun fails with `LineFullError`.",
        {"busy": ("park",), "order": ("strict",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger. Who was sent first goes first; nobody goes before a message that was "
        "called or has begun, until it is DONE, DEAD, revoked, or has no retries left.",
        {"busy": ("park",), "order": ("strict",), "max_waiting": ("none",)},
    ),
    Rule(
        "The same; where as many wait as are allowed, a message that has not begun fails with "
        "`LineFullError`.",
        {"busy": ("park",), "order": ("strict",), "max_waiting": ("given",)},
    ),
    Rule(
        "Waits in the ledger until one of the key's slots is free, and its rate allows a start. "
        "They begin in the order of their line, and end in any.",
        {"busy": ("park",), "limit": ("several",)},
    ),
    Rule(
        "Waits in the ledger, in the order of its line, until its rate allows the next start.",
        {"busy": ("park",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger. The message that its broker would deliver first goes first, of equal "
        "ones who was sent first; a retry stands behind those of its priority.",
        {"busy": ("park",), "order": ("priority",), "max_waiting": ("none",)},
    ),
    Rule(
        "The same; where as many wait as are allowed, a message that has not begun fails with "
        "`LineFullError`.",
        {"busy": ("park",), "order": ("priority",), "max_waiting": ("given",)},
    ),
    Rule(
        "Waits in the ledger. About in the order of sending; a retry goes to the end.",
        {"busy": ("park",), "order": ("best_effort",), "max_waiting": ("none",)},
    ),
    Rule(
        "The same; where as many wait as are allowed, a message that has not begun fails with "
        "`LineFullError`.",
        {"busy": ("park",), "order": ("best_effort",), "max_waiting": ("given",)},
    ),
    Rule(
        "Waits in the ledger until the key is free and the rate allows a start. It takes the "
        "position of an older message of its task that waits, which never runs. A message that is "
        "older than one that waits, or has begun, never runs.",
        {"busy": ("latest",), "rate": ("given",)},
    ),
    Rule(
        "If the rate allows a start, takes the key from an older message of its task, whose commit "
        "is refused, and which never runs again. Otherwise the holder goes on, and this message "
        'waits as with busy="latest".',
        {"busy": ("supersede",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger, and takes the place of an older message of its task that waits, "
        "which never runs. One that is older than what waits, or has begun, never runs itself.",
        {"busy": ("latest",)},
    ),
    Rule(
        "Takes the key from an older message of its task, whose commit is refused, and which never "
        "runs again; behind other holders it waits as with latest. One that is older than what has "
        "begun, or waits, never runs itself.",
        {"busy": ("supersede",)},
    ),
    Rule("Is put off, and comes again later, in any order.", {"busy": ("retry",)}),
    Rule(
        "Waits in its worker for up to `wait_s`; then it is put off.",
        {"busy": ("wait",)},
    ),
    Rule("Is dropped; one whose work has begun is put off.", {"busy": ("skip",)}),
    Rule("Fails with `KeyBusyError`; one whose work has begun is put off.", {"busy": ("raise",)}),
)
"""What a delivery does that finds its key taken by other work."""

ENQUEUES: tuple[Rule, ...] = (
    Rule(
        "Each message is sent; an older one does not run, unless it has begun.",
        {"busy": ("latest",)},
    ),
    Rule(
        "Each message is sent; the newest runs, and an older one commits only before it begins.",
        {"busy": ("supersede",)},
    ),
    Rule("Each message is sent, and runs.", {"once_per": _BY_MESSAGE}),
    Rule(
        "Each message is sent; one of work that waits or runs already is put off, and gets that "
        "work's result.",
        {"once_per": _BY_WORK, "duplicate": ("answer",)},
    ),
    Rule(
        "Nothing is sent; the caller gets the first message's result.",
        {"once_per": _BY_WORK, "duplicate": ("attach",)},
    ),
    Rule("Nothing is sent.", {"once_per": _BY_WORK, "duplicate": ("skip",)}),
    Rule("Fails with `AlreadyEnqueuedError`.", {"once_per": _BY_WORK, "duplicate": ("raise",)}),
    Rule(
        "Takes the call's place, unless it has begun: `AlreadyEnqueuedError`. If that waited in "
        "line, it leaves it: the newer message stands where it was sent.",
        {"busy": ("park",), "once_per": _BY_WORK, "duplicate": ("replace",)},
    ),
    Rule(
        "Takes the call's place, unless it has begun: `AlreadyEnqueuedError`.",
        {"once_per": _BY_WORK, "duplicate": ("replace",)},
    ),
)
"""What `enqueue()` does where the same work is waiting or in progress."""


def rule_for(rules: tuple[Rule, ...], chosen: Mapping[str, str]) -> Rule | None:
    """The first that fits; None: none does."""
    return next((rule for rule in rules if rule.is_for(chosen)), None)


def refusal(**chosen: str) -> str | None:
    """Why these cannot be together; None: they can, as far as they are chosen."""
    found = rule_for(REFUSALS, chosen)
    return None if found is None else found.says
