"""The suite of lock providers that users get, on each real server."""

from __future__ import annotations

from pytest_taskguard.lock_contract import *  # noqa: F403  # as users write it
