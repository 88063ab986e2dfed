"""Users of Django: their permissions are their role, and their name is on record."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("jinja2")

from support.dashboard_sample import Sample
from support.django_shop import django_on


def test_permissions_are_roles(sqlite_url: str) -> None:
    """`change_work` is an operator, `view_work` a viewer, and everybody else sees nothing."""
    import taskguard_dashboard

    with django_on(default=sqlite_url):
        from django.contrib.auth.models import Permission, User
        from django.test import Client, override_settings
        from django.urls import include, path

        tg: Any = Sample()
        page = taskguard_dashboard.django(tg, authorize=taskguard_dashboard.by_permissions)
        urls: Any = types.ModuleType("urls")
        urls.urlpatterns = [path("ops/", include(page))]
        allowed = {"eve": (), "vera": ("view_work",), "olga": ("view_work", "change_work")}
        for name, codes in allowed.items():
            user = User.objects.create_user(name)
            user.user_permissions.set(Permission.objects.filter(codename__in=codes))
        User.objects.create_user("ex", is_active=False, is_superuser=True)
        form = {"key": "account:42", "reason": "its host burned"}
        seen = {}
        with override_settings(ROOT_URLCONF=urls):
            for name in ("", *allowed):
                client = Client(headers={"Sec-Fetch-Site": "same-origin"})
                if name:
                    client.force_login(User.objects.get(username=name))
                answers = client.get("/ops/workers"), client.post("/ops/release", form)
                seen[name] = [each.status_code for each in answers]
            client.force_login(User.objects.get(username="ex"))
            assert client.get("/ops/workers").status_code == 403
        none = [403, 403]
        assert seen == {"": none, "eve": none, "vera": [200, 403], "olga": [200, 400]}
        typed = {"content_type": "application/x-www-form-urlencoded"}
        with override_settings(ROOT_URLCONF=urls):
            client.force_login(User.objects.get(username="olga"))
            answer = client.post("/ops/release", "key=account:42&reason=burned", **typed)
        assert answer.status_code == 303
        assert tg.changed[0][3] == {"reason": "burned", "actor": "olga"}
