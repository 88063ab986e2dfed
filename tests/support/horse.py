"""A job that loads nothing by itself and says what its work horse has loaded."""

from __future__ import annotations

import sys


def loaded(*names: str) -> list[str]:
    """Those of the modules `names` that were loaded before the job began."""
    return [name for name in names if name in sys.modules]
