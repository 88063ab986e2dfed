"""When the newest message of a key that has begun was sent is in a column of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import taskguard_django.operations


class Migration(migrations.Migration):
    """To version 4 of the tables."""

    dependencies: ClassVar[list[Any]] = [("taskguard", "0003_work_in_line_for_its_key")]
    operations: ClassVar[list[Any]] = [
        taskguard_django.operations.UpgradeLedger(to=4),
        # The model's own column: Django does not manage its table.
        migrations.AddField("key", "stamp", models.BigIntegerField(null=True)),
    ]
