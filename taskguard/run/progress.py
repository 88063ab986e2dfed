"""Progress that a holder stores for the next one: the body's own, and the results of its steps.

Guarantees: one JSON text has both, and is committed whole. It is parsed only on access, so a broken
text fails a body, not a claim.
"""

from __future__ import annotations

from typing import Any

from taskguard.model.delivery import Codec

__all__ = ["Progress"]


class Progress:
    """The progress of one work, as it was last committed."""

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
        """Return the record for a checkpoint to commit."""
        return {**self._record(), "progress": value}

    def with_step(self, name: str, result: Any) -> dict[str, Any]:
        """Return the record to commit after a step."""
        record = self._record()
        record["steps"][name] = result
        return record

    def committed(self, text: str) -> None:
        """Note that this text is the record now."""
        self._text = text

    def _record(self) -> dict[str, Any]:
        # Parsed anew each time: a body may change the value that it gets, but not the record.
        if self._text is None:
            return {"progress": None, "steps": {}}
        record: dict[str, Any] = self._codec.loads(self._text)
        return record
