"""A Django project in this process: configured once, on whatever databases a test has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import sqlalchemy as sa

__all__ = ["database_of", "django_on"]


def set_up() -> None:
    """Once for the process; no connection, and nothing in taskguard that stays."""
    import django
    from django.conf import settings

    if settings.configured:
        return
    settings.configure(
        SECRET_KEY="secret",
        USE_TZ=True,
        ALLOWED_HOSTS=["testserver"],
        ROOT_URLCONF="support.django_urls",
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "taskguard_django",
            "support.django_orders",
            *(["django_celery_beat"] if find_spec("django_celery_beat") else []),
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        # Django's own tables as they are now, not step by step.
        MIGRATION_MODULES=dict.fromkeys(
            ("admin", "auth", "contenttypes", "sessions", "django_celery_beat")
        ),
        TASKGUARD={"LOCKS": None},
        LOGGING_CONFIG=None,
    )
    django.setup()


def database_of(url: str) -> dict[str, Any]:
    """An entry of DATABASES for a SQLAlchemy URL."""
    parts = sa.make_url(url)
    if parts.get_backend_name() == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.database}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.database,
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.host or parts.query.get("host", ""),
        "PORT": parts.port or parts.query.get("port", ""),
    }


@contextlib.contextmanager
def django_on(**urls: str) -> Iterator[None]:
    """DATABASES by their aliases, migrated; afterwards nothing of it is left."""
    from taskguard.integration import set_defaults
    from taskguard_django import conf

    set_up()
    from django.core.management import call_command
    from django.db import connections

    set_defaults(locks=conf.locks, ledger=conf.ledger, namespace=conf.namespace)
    databases = {name: database_of(url) for name, url in urls.items()}
    _forget_connections()
    connections.settings = connections.configure_settings(databases)
    try:
        for name in urls:
            call_command("migrate", database=name, run_syncdb=True, verbosity=0)
        yield
    finally:
        _forget_connections()
        set_defaults()
        for ledger in conf._made.values():
            ledger.close()
        conf._made.clear()
        conf._FOLLOWING.settled = None


def _forget_connections() -> None:
    from django.db import connections

    for wrapper in connections.all(initialized_only=True):
        wrapper.close()
        if wrapper.connection is not None:  # one in memory stays open
            wrapper.connection.close()
        del connections[wrapper.alias]
