"""A Celery app on Django, whose schedule django-celery-beat keeps in the shop's database.

python -m support.django_beat      makes its tables
"""

from __future__ import annotations

import json
import os

import django
from celery import Celery
from django.conf import settings
from django.core.management import call_command
from sqlalchemy import make_url

url = make_url(os.environ["SHOP_DATABASE"])
settings.configure(
    INSTALLED_APPS=["django_celery_beat"],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": url.database,
            "HOST": url.host,
            "PORT": url.port,
            "USER": url.username,
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    SECRET_KEY="for tests",
    USE_TZ=True,
)
django.setup()

app = Celery("shop", broker=os.environ["SHOP_BROKER"])
app.conf.update(
    taskguard_locks_url=os.environ["SHOP_LOCKS"],
    taskguard_ledger_url=os.environ["SHOP_DATABASE"],
    task_default_queue=os.environ.get("SHOP_QUEUE", "shop"),
    **json.loads(os.environ.get("SHOP_SETTINGS", "{}")),
)

if __name__ == "__main__":
    call_command("migrate", verbosity=0)
