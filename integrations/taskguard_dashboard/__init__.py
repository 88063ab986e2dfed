"""A web page for operators: who holds a key, what waits, what is dead, and the actions on them.

Guarantees:

* Nobody sees or changes anything unless `authorize` grants a role. It gets the framework's own
  request, so it sees the user of your session.
* A page only reads. A change is a POST from the page itself, by an operator, with a reason. It
  names the fence and the state that the operator saw. The ledger records it.
* Texts of users (keys, tasks, errors, names of workers) cannot add markup or scripts. Pages load
  nothing from other hosts. They work without JavaScript.

Does not guarantee that a page is up to date: it shows the snapshot that all viewers share.

Read next: `routes.py`, the table of routes, and `docs/how-to/dashboard.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from taskguard.errors import MissingDriverError

if TYPE_CHECKING:
    from taskguard import TaskGuard

__all__ = ["by_permissions", "django", "flask", "starlette"]


def starlette(
    tg: TaskGuard,
    *,
    authorize: Callable[[Any], Any],
    actor: Callable[[Any], str] | None = None,
    trusted_origins: Iterable[str] = (),
    show_arguments: bool = False,
) -> Any:
    """Return the page as an ASGI app, to mount in an app of Starlette or FastAPI.

    `app.mount("/taskguard", taskguard_dashboard.starlette(tg, authorize=role_of))`

    Args:
        tg: what `taskguard.connect()` returned.
        authorize: gets Starlette's request, and returns None, "viewer" or "operator". It may be a
            coroutine function. If it raises an error, the answer is 403.
        actor: gets the request, and returns the name of the user for the record of actions. By
            default the name that Starlette's AuthenticationMiddleware found.
        trusted_origins: further origins whose forms may change something, for example
            "https://ops.example.com".
        show_arguments: whether operators see stored arguments, results and progress. By default
            no user does.
    """
    with _extra_named():
        from taskguard_dashboard.on_starlette import Adapter
        from taskguard_dashboard.routes import Dashboard

    page = Dashboard(tg, trusted_origins=trusted_origins, show_arguments=show_arguments)
    return Adapter(page, authorize=authorize, actor=actor)


def flask(
    tg: TaskGuard,
    *,
    authorize: Callable[[Any], Any],
    actor: Callable[[Any], str] | None = None,
    trusted_origins: Iterable[str] = (),
    show_arguments: bool = False,
) -> Any:
    """Return the page as a blueprint of Flask.

    `app.register_blueprint(taskguard_dashboard.flask(tg, authorize=role_of), url_prefix="/ops")`

    Args:
        tg: what `taskguard.connect()` returned.
        authorize: gets Flask's request, and returns None, "viewer" or "operator". If it raises an
            error, the answer is 403.
        actor: gets the request, and returns the name of the user for the record of actions. By
            default the name of HTTP's basic authentication.
        trusted_origins: further origins whose forms may change something.
        show_arguments: whether operators see stored arguments, results and progress.
    """
    with _extra_named():
        from taskguard_dashboard.on_flask import blueprint
        from taskguard_dashboard.routes import Dashboard

    page = Dashboard(tg, trusted_origins=trusted_origins, show_arguments=show_arguments)
    return blueprint(page, authorize=authorize, actor=actor)


def django(
    tg: TaskGuard,
    *,
    authorize: Callable[[Any], Any],
    actor: Callable[[Any], str] | None = None,
    trusted_origins: Iterable[str] = (),
    show_arguments: bool = False,
) -> list[Any]:
    """Return the page as URL patterns of Django.

    `path("taskguard/", include(taskguard_dashboard.django(tg, authorize=by_permissions)))`

    Args:
        tg: what `taskguard.connect()` returned.
        authorize: gets Django's request, and returns None, "viewer" or "operator". If it raises an
            error, the answer is 403. `by_permissions` looks at the user's permissions.
        actor: gets the request, and returns the name of the user for the record of actions. By
            default the username.
        trusted_origins: further origins whose forms may change something. Django has its own list,
            `CSRF_TRUSTED_ORIGINS`, which counts, too.
        show_arguments: whether operators see stored arguments, results and progress.
    """
    with _extra_named():
        from taskguard_dashboard.on_django import patterns
        from taskguard_dashboard.routes import Dashboard

    page = Dashboard(tg, trusted_origins=trusted_origins, show_arguments=show_arguments)
    return patterns(page, authorize=authorize, actor=actor)


def by_permissions(request: Any) -> str | None:
    """Return the role of a user of Django, for `django(tg, authorize=by_permissions)`.

    "operator" with the permission `taskguard.change_work`, "viewer" with
    `taskguard.view_work`, otherwise None.
    """
    user = request.user
    if not user.is_active:
        return None
    if user.has_perm("taskguard.change_work"):
        return "operator"
    return "viewer" if user.has_perm("taskguard.view_work") else None


@contextmanager
def _extra_named() -> Iterator[None]:
    """Raise MissingDriverError if a package of the extra `dashboard` is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("jinja2", "markupsafe", "starlette", "uvicorn"):
            raise
        raise MissingDriverError(
            f"The dashboard needs the package {package}, which is not installed: pip install "
            "'celery-taskguard[dashboard]'."
        ) from error
