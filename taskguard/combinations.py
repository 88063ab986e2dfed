"""Which options go together, and what a delivery does if its key is taken: as data.

Guarantees: each combination of `DIMENSIONS` has a rule. Either a rule of `REFUSALS` refuses it, for
its reason. Or a rule of `DELIVERIES` and one of `ENQUEUES` say what happens. The first rule that
fits holds. A rule that names `duplicate` refuses a call of `enqueue()`. Each other rule of
`REFUSALS` refuses the decoration of the function. Tests walk all combinations. The pages
`docs/reference/combinations.md` and `taken-keys.md` are made of these tables.

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
    "once_per": ("key", "template", "run", "message", "tick"),
    "order": ("best_effort", "strict", "priority"),
    "max_waiting": ("none", "given"),
    "limit": ("one", "several"),
    "rate": ("none", "given"),
    "row": ("none", "given"),
    "formerly": ("none", "same key", "other key"),
    "duplicate": ("answer", "attach", "skip", "replace", "raise"),
}
"""The values of each option, as far as the rules tell them apart."""


@value
class Rule:
    """A rule for the combinations that it fits.

    Attributes:
        says: why they are refused, and what to write instead; or what happens.
        fits: values by option. An option that is not named may have any value.
    """

    says: str
    fits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_for(self, chosen: Mapping[str, str]) -> bool:
        """Whether the rule fits. It does not if it names an option that is not chosen yet."""
        return all(chosen.get(name) in values for name, values in self.fits.items())


_NOT_PARKED = ("retry", "wait", "skip", "raise")
_NEWEST = ("latest", "supersede")
_BY_WORK = ("key", "template", "run")
_BY_MESSAGE = ("message", "tick")
_BOUNDS = {"limit": ("several",), "rate": ("given",)}
_OF_MANY: dict[str, dict[str, tuple[str, ...]]] = {
    "there are not several for order= to arrange": {"order": ("strict", "priority")},
    "there are not several for max_waiting= to count": {"max_waiting": ("given",)},
    "limit= would have to name the one of several holders that a newer message replaces": {
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
            'while it waits for the rest. Use busy="retry", or one key.',
            {"keys": ("several",), "busy": (busy,)},
        )
        for busy in ("park", *_NEWEST)
    ),
    *(
        Rule(
            f'busy="{busy}" needs once_per="message". To let the newest call of a run win, enqueue '
            f'it with duplicate="replace", and set busy="park" or "retry".',
            {"busy": (busy,), "once_per": ("run",)},
        )
        for busy in _NEWEST
    ),
    *(
        Rule(
            f'busy="{busy}" needs once_per="message": a newer message can supersede an older one '
            "only if each message is work of its own. Otherwise both are the same work, and the "
            'first message does it. Set once_per="message".',
            {"busy": (busy,), "once_per": ("key", "template", "tick")},
        )
        for busy in _NEWEST
    ),
    *(
        Rule(
            f'busy="{busy}" lets only the newest message of a key wait, so {name}. Remove one of '
            "the two options.",
            {"busy": (busy,), **fits},
        )
        for busy in _NEWEST
        for name, fits in _OF_MANY.items()
    ),
    *(
        Rule(
            f'busy="{busy}" lets a newer message end the work of an older one, and your own row '
            '(row=) has no column for the message that moves it. Remove row=, or use busy="park".',
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
        'order= is the order of a line, and only busy="park" has a line: deferred messages come '
        'back in any order. Add busy="park", or remove order=.',
        {"order": ("strict", "priority"), "busy": _NOT_PARKED},
    ),
    Rule(
        'max_waiting= counts the messages of a line, and only busy="park" has a line. Add '
        'busy="park", or remove max_waiting=.',
        {"max_waiting": ("given",), "busy": _NOT_PARKED},
    ),
    *(
        Rule(
            f"{name}= is for one key: a delivery that had a share of several keys would block "
            "others while it waits for the rest. Use one key.",
            {"keys": ("several",), name: bound},
        )
        for name, bound in _BOUNDS.items()
    ),
    Rule(
        "each run ends before the next one of its key begins, so a second slot of limit= would "
        'never be used. Set once_per="message" or a template.',
        {"once_per": ("run",), "limit": ("several",)},
    ),
    Rule(
        "workers with the former guard (formerly=) do not know which run a message belongs to, and "
        "would run it again. Let the open runs end, then deploy without formerly=.",
        {"once_per": ("run",), "formerly": ("same key", "other key")},
    ),
    *(
        Rule(
            f"the work of a key is done once, so {name}= never has a second one to hold back. "
            'Set once_per="message" or a template.',
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
        "each message, or tick, is work of its own (once_per=), so no two are the same. Set "
        'once_per="key" or a template.',
        {"once_per": _BY_MESSAGE, "duplicate": ("attach", "skip", "replace", "raise")},
    ),
)

DELIVERIES: tuple[Rule, ...] = (
    Rule(
        "Waits in the ledger as without `max_waiting`. If `max_waiting` messages wait, a message "
        "that has not begun fails with `LineFullError`.",
        {"busy": ("park",), "max_waiting": ("given",)},
    ),
    Rule(
        "Waits in the ledger. The message that was sent first begins when the message before it is "
        "DONE, DEAD, revoked, or has no retries left, and when the rate allows a start.",
        {"busy": ("park",), "order": ("strict",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger. The message that was sent first goes first. The next one waits until "
        "the message before it is DONE, DEAD, revoked, or has no retries left.",
        {"busy": ("park",), "order": ("strict",)},
    ),
    Rule(
        "Waits in the ledger until one of the key's slots is free, and its rate allows a start. "
        "Messages begin in the order of their line, and end in any order.",
        {"busy": ("park",), "limit": ("several",)},
    ),
    Rule(
        "Waits in the ledger, in the order of its line, until its rate allows the next start.",
        {"busy": ("park",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger. The message with the highest priority goes first. Messages of equal "
        "priority go in the order of sending. A retry goes behind the messages of its priority.",
        {"busy": ("park",), "order": ("priority",)},
    ),
    Rule(
        "Waits in the ledger. Messages go about in the order of sending. A retry goes to the end.",
        {"busy": ("park",), "order": ("best_effort",)},
    ),
    Rule(
        "Waits in the ledger until the key is free and the rate allows a start. If an older "
        "message of its task waits, it takes that message's position, and the older message never "
        "runs. If a newer message waits or has begun, this message never runs.",
        {"busy": ("latest",), "rate": ("given",)},
    ),
    Rule(
        "If the rate allows a start, takes the key from an older message of its task. That "
        "message's commit is refused, and it never runs again. Otherwise the holder goes on, and "
        'this message waits as with `busy="latest"`.',
        {"busy": ("supersede",), "rate": ("given",)},
    ),
    Rule(
        "Waits in the ledger. If an older message of its task waits, it takes that message's "
        "position, and the older message never runs. If a newer message waits or has begun, this "
        "message never runs.",
        {"busy": ("latest",)},
    ),
    Rule(
        "Takes the key from an older message of its task. That message's commit is refused, and it "
        "never runs again. If another task or a plain lock holds the key, this message waits as "
        'with `busy="latest"`. If a newer message waits or has begun, this message never runs.',
        {"busy": ("supersede",)},
    ),
    Rule("Is deferred, and comes back in any order.", {"busy": ("retry",)}),
    Rule("Waits in its worker for up to `wait_s`; then it is deferred.", {"busy": ("wait",)}),
    Rule("Is dropped. If its work has begun, it is deferred.", {"busy": ("skip",)}),
    Rule("Fails with `KeyBusyError`. If its work has begun, it is deferred.", {"busy": ("raise",)}),
)
"""Rules for a delivery whose key is taken by other work."""

ENQUEUES: tuple[Rule, ...] = (
    Rule(
        "Each message is sent. An older one does not run, unless it has begun.",
        {"busy": ("latest",)},
    ),
    Rule(
        "Each message is sent. The newest runs. An older one can commit only before the newest one "
        "begins.",
        {"busy": ("supersede",)},
    ),
    Rule("Each message is sent, and runs.", {"once_per": _BY_MESSAGE}),
    Rule(
        "Each message is sent. If its work waits or is in progress, it is deferred, and then gets "
        "that work's result.",
        {"once_per": _BY_WORK, "duplicate": ("answer",)},
    ),
    Rule(
        "Nothing is sent. The caller gets the first message's result.",
        {"once_per": _BY_WORK, "duplicate": ("attach",)},
    ),
    Rule("Nothing is sent.", {"once_per": _BY_WORK, "duplicate": ("skip",)}),
    Rule("Fails with `AlreadyEnqueuedError`.", {"once_per": _BY_WORK, "duplicate": ("raise",)}),
    Rule(
        "Replaces the stored message. If that has begun, this message is sent for the run that "
        "follows. A later call replaces that one.",
        {"once_per": ("run",), "duplicate": ("replace",)},
    ),
    Rule(
        "Replaces the stored message. If that has begun, fails with `AlreadyEnqueuedError`. If the "
        "stored message waited in line, it leaves the line. The new message gets a position by its "
        "own time of sending.",
        {"busy": ("park",), "once_per": _BY_WORK, "duplicate": ("replace",)},
    ),
    Rule(
        "Replaces the stored message. If that has begun, fails with `AlreadyEnqueuedError`.",
        {"once_per": _BY_WORK, "duplicate": ("replace",)},
    ),
)
"""Rules for an `enqueue()` whose work is waiting or in progress."""


def rule_for(rules: tuple[Rule, ...], chosen: Mapping[str, str]) -> Rule | None:
    """Return the first rule that fits, or None."""
    return next((rule for rule in rules if rule.is_for(chosen)), None)


def refusal(**chosen: str) -> str | None:
    """Return why these values are refused, or None if they go together."""
    found = rule_for(REFUSALS, chosen)
    return None if found is None else found.says
