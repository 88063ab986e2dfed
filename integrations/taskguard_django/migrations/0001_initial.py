"""Create the ledger's tables, of version 5.

Until 0.1.0 is published, this migration is edited in place.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations

import taskguard_django.operations


class Migration(migrations.Migration):
    """The first."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        taskguard_django.operations.CreateLedger(),
        # Without columns: the tables are not Django's to manage.
        migrations.CreateModel("Key", [], {"db_table": "taskguard_keys", "managed": False}),
        migrations.CreateModel("Work", [], {"db_table": "taskguard_work", "managed": False}),
        migrations.CreateModel("Worker", [], {"db_table": "taskguard_workers", "managed": False}),
    ]
