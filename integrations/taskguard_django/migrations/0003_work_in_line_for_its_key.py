"""Work that waits for its key stands in a line: since when is in a column of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import taskguard_django.operations


class Migration(migrations.Migration):
    """To version 3 of the tables."""

    dependencies: ClassVar[list[Any]] = [("taskguard", "0002_numbers_of_a_message_in_a_work")]
    operations: ClassVar[list[Any]] = [
        taskguard_django.operations.UpgradeLedger(to=3),
        # The model's own column: Django does not manage its table.
        migrations.AddField("work", "parked", models.BigIntegerField(null=True)),
    ]
