"""Who goes first of those that want a key, how many at once, how often, and which is the newest."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations, models

import taskguard_django.operations


class Migration(migrations.Migration):
    """To version 4 of the tables."""

    dependencies: ClassVar[list[Any]] = [("taskguard", "0003_work_in_line_for_its_key")]
    operations: ClassVar[list[Any]] = [
        taskguard_django.operations.UpgradeLedger(to=4),
        # The models' own columns: Django does not manage their tables.
        migrations.AddField("key", "slots", models.IntegerField(null=True)),
        migrations.AddField("key", "next_start", models.BigIntegerField(null=True)),
        migrations.AddField("key", "stamp", models.BigIntegerField(null=True)),
        migrations.AddField("work", "rank", models.IntegerField(null=True)),
        migrations.AddField("work", "strict", models.SmallIntegerField(null=True)),
        migrations.AddField("work", "expires", models.BigIntegerField(null=True)),
    ]
