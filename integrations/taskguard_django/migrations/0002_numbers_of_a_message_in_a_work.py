"""The numbers of a message belong to its work: an id may be used twice, for two of them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

import taskguard_django.operations


class Migration(migrations.Migration):
    """To version 2 of the tables."""

    dependencies: ClassVar[list[Any]] = [("taskguard", "0001_initial")]
    operations: ClassVar[list[Any]] = [taskguard_django.operations.UpgradeLedger()]
