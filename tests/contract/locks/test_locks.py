"""What every lock provider does, on its real server: the suite that users have, too."""

from __future__ import annotations

from pytest_taskguard.lock_contract import *  # noqa: F403  # as users write it
