"""What a holder leaves for the next one: the body's own progress, and the results of its steps.

Guarantees: both stand in one JSON text, which is committed whole. Read only when it is asked for,
so that a text that cannot be read fails a body, not a claim.
"""

from __future__ import annotations

from typing import Any

from taskguard.model.delivery import Codec

__all__ = ["Progress"]


class Progress:
    """The record of one work, as it was last committed."""

    def __init__(self, text: str | None, codec: Codec) -> None:
        self._text = text
        self._codec = codec

    @property
    def value(self) -> Any:
        """The body's own progress, as JSON gives it; None if there is none."""
        return self._record()["progress"]

    @property
    def steps(self) -> dict[str, Any]:
        """The result of each step by its name."""
        steps: dict[str, Any] = self._record()["steps"]
        return steps

    def with_value(self, value: Any) -> dict[str, Any]:
        """What is to be committed with a checkpoint."""
        return {**self._record(), "progress": value}

    def with_step(self, name: str, result: Any) -> dict[str, Any]:
        """What is to be committed after a step."""
        record = self._record()
        record["steps"][name] = result
        return record

    def committed(self, text: str) -> None:
        """Note that this text is the record now."""
        self._text = text

    def _record(self) -> dict[str, Any]:
        # Read anew each time, so that a body that changes a value it got does not change the
        # record.
        if self._text is None:
            return {"progress": None, "steps": {}}
        record: dict[str, Any] = self._codec.loads(self._text)
        return record
