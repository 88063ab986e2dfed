"""Django's admin pages for keys, work and workers: view, requeue, release.

Guarantees: no user can add, edit or delete rows. The two actions, requeue and release, are those of
`tg.operations`, with the user as their actor. They need the permission to change the model, and the
admin's log records each of them. An action on a whole list skips rows that have changed since the
list was confirmed. Its form does not grow with the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import PermissionDenied
from django.db.models import Max, Q, QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import NoReverseMatch, reverse
from django.utils.timezone import template_localtime

from taskguard import TaskGuard, connect, errors
from taskguard_django import conf
from taskguard_django.models import Key, Work, Worker, time_of

__all__ = ["KeyAdmin", "WorkAdmin", "WorkerAdmin"]

_LIST = "admin/taskguard/confirm.html"
_SHOWN = 100
_NAMED = 10
_NOTED = 50
# An action ends before a web server's timeout. The user repeats it for the rows that are left.
_LONGEST_S = 20.0


def _on_page(path: str, **query: str) -> str | None:
    """Return an address of the web page (`taskguard_dashboard`), or None without that page."""
    try:
        page = reverse("taskguard_dashboard", kwargs={"path": path})
    except NoReverseMatch:
        return None
    return f"{page}?{urlencode(query)}"


def _runtime() -> TaskGuard:
    return connect(locks=conf.locks(), ledger=conf.ledger())


def _time(field: str, title: str) -> Any:
    """Return a column that shows a field of µs as a time in the current time zone."""

    @admin.display(description=title, ordering=field)
    def shown(_admin: Any, row: Any) -> str:
        time = time_of(getattr(row, field))
        return "-" if time is None else f"{template_localtime(time):%Y-%m-%d %H:%M:%S}"

    return shown


class _ToLookAt(admin.ModelAdmin):
    """Admin pages without adding, editing and deleting. Actions ask for confirmation."""

    actions_on_bottom = True

    def has_add_permission(self, request: HttpRequest, *_: Any) -> bool:
        """Return False: no user may add a row."""
        del request
        return False

    def has_delete_permission(self, request: HttpRequest, *_: Any) -> bool:
        """Return False: no user may delete a row. `taskguard purge` deletes old records."""
        del request
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields: they are read-only."""
        del request, obj
        return [name for _, options in self.fieldsets for name in options["fields"]]

    def change_view(self, request: HttpRequest, object_id: str, *args: Any, **kwargs: Any) -> Any:
        """Show the form without buttons. Refuse to save it."""
        if request.method == "POST":
            raise PermissionDenied
        extra = {"show_save": False, "show_save_and_continue": False, "show_close": True}
        kwargs["extra_context"] = {**(kwargs.get("extra_context") or {}), **extra}
        return super().change_view(request, object_id, *args, **kwargs)

    def _confirm(
        self, request: HttpRequest, rows: QuerySet, *, latest_by: str, **context: Any
    ) -> Any:
        """Show the rows and ask for confirmation. For a whole list, show only the first rows."""
        across = _is_across(request)
        shown = list(rows[:_SHOWN] if across else rows)
        context = {
            **self.admin_site.each_context(request),
            "opts": self.model._meta,  # noqa: SLF001  # the admin's templates want it
            "rows": shown,
            "more": rows.count() - len(shown) if across else 0,
            "until": rows.aggregate(until=Max(latest_by))["until"] if across else None,
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
            **context,
        }
        return TemplateResponse(request, _LIST, context)

    def _act(
        self,
        request: HttpRequest,
        rows: Iterable[Any],
        act: Callable[[Any], str | None],
        *,
        what: str,
    ) -> None:
        """Call `act` for each row while there is time. It returns what it did, or None."""
        done: list[str] = []
        left: list[str] = []
        waiting = list(rows)  # read before anything is written
        until_s = time.monotonic() + _LONGEST_S
        for batch in (waiting[at : at + _NOTED] for at in range(0, len(waiting), _NOTED)):
            if time.monotonic() > until_s:
                rest = len(waiting) - len(done) - len(left)
                messages.warning(
                    request, f"The time limit was reached with {rest:,} rows left. Run it again."
                )
                break
            notes: list[Any] = []
            try:
                for row in batch:
                    said = act(row)
                    (left if said is None else done).append(row.pk)
                    if said is not None:
                        notes.append(self._entry(request, row, said))
            finally:
                LogEntry.objects.bulk_create(notes)
        if done:
            messages.success(request, f"{what}: {_listed(done)}")
        if left:
            messages.warning(request, f"Skipped, because it has changed: {_listed(left)}")

    def _entry(self, request: HttpRequest, row: Any, text: str) -> LogEntry:
        """Return an entry for the admin's log, which is written together with others."""
        return LogEntry(
            user_id=request.user.pk,
            content_type_id=get_content_type_for_model(row).pk,
            object_id=row.pk,
            object_repr=str(row)[:200],
            action_flag=CHANGE,
            change_message=text,
        )


def _is_across(request: HttpRequest) -> bool:
    """Return True if the action is for a whole list, over all its pages."""
    return request.POST.get("select_across", "0") not in ("", "0")


def _until(request: HttpRequest) -> int:
    """Return the time up to which a whole list was confirmed, in µs, or 0 if it is malformed."""
    text = request.POST.get("until", "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0  # 64 bits


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")


@admin.register(Work)
class WorkAdmin(_ToLookAt):
    """Work, ordered by start, newest first."""

    list_display = ("id", "task", "state", "attempts", "crashes", "began", "ended", "problem")
    list_filter = ("state",)
    search_fields = ("id__startswith", "key", "message")
    ordering = ("-started", "id")
    show_full_result_count = False
    actions = ("requeue",)
    began = _time("started", "started")
    ended = _time("finished", "finished")
    made = _time("created", "created")
    leased = _time("lease_until", "leased until")
    overdue = _time("due", "message overdue from")
    fieldsets = (
        (None, {"fields": ("id", "task", "key", "state", "final", "error")}),
        ("Holder", {"fields": ("fence", "process", "owner", "leased", "attempts", "crashes")}),
        ("Message", {"fields": ("message", "retries", "call", "overdue")}),
        ("Times", {"fields": ("made", "began", "ended")}),
        ("Stored", {"fields": ("fingerprint", "progress", "result")}),
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the work of tasks, without the records of leaders."""
        return super().get_queryset(request).exclude(task="leader", key__contains="leader:")

    def view_on_site(self, work: Work) -> str | None:
        """Return the address of the work's web page, which has its history and all changes."""
        return _on_page("item", work=work.pk)

    @admin.display(description="error")
    def problem(self, work: Work) -> str:
        """Return the first line of the error."""
        return (work.error or "").split("\n")[0][:100]

    @admin.action(description="Requeue: DEAD or FAILED becomes NEW", permissions=["change"])
    def requeue(self, request: HttpRequest, rows: QuerySet) -> Any:
        """Requeue the selected work, after asking for the reason."""
        reason = request.POST.get("reason", "").strip()
        ended = rows.filter(state__in=("DEAD", "FAILED"))
        if not reason:
            return self._confirm(
                request,
                ended,
                latest_by="finished",
                title="Requeue work",
                action="requeue",
                asks_reason=True,
                missing="confirmed" in request.POST,
                text="The next delivery of each work runs it. If the call is stored, the next "
                "sweep sends its message. Otherwise send the message again yourself.",
            )
        operations = connect(locks=None, ledger=conf.ledger()).operations

        def act(work: Any) -> str | None:
            [found] = operations.requeue(work.pk, reason=reason, actor=str(request.user))
            return f"requeued: {reason}" if found.changed else None

        across = _is_across(request)
        chosen = ended.filter(finished__lte=_until(request)) if across else rows
        self._act(request, chosen.only("id"), act, what="Requeued")
        return None


class HeldFilter(admin.SimpleListFilter):
    """Filters keys by whether they are held."""

    title = "holder"
    parameter_name = "held"

    def lookups(self, *_: Any) -> Any:
        """Return the choices: held, and free."""
        return (("yes", "held"), ("no", "free"))

    def queryset(self, request: HttpRequest, queryset: QuerySet) -> Any:
        """Filter the rows: a key without an owner, or whose lease has expired, is free."""
        del request
        if self.value() not in ("yes", "no"):
            return queryset
        held = ~Q(owner="") & Q(lease_until__gt=int(time.time() * 1e6))
        return queryset.filter(held if self.value() == "yes" else ~held)


@admin.register(Key)
class KeyAdmin(_ToLookAt):
    """Keys with their holders."""

    list_display = ("key", "fence", "process", "owner", "leased")
    list_filter = (HeldFilter,)
    search_fields = ("key__startswith",)
    ordering = ("key",)
    show_full_result_count = False
    actions = ("release",)
    leased = _time("lease_until", "leased until")
    fieldsets = ((None, {"fields": ("key", "fence", "process", "owner", "leased")}),)

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the keys, without the ledger's own row, which identifies the database."""
        return super().get_queryset(request).exclude(key="the database")

    def view_on_site(self, key: Key) -> str | None:
        """Return the address of the key's web page, which has its past and its line."""
        return _on_page("key", key=key.pk)

    @admin.action(description="Release from a holder that is gone", permissions=["change"])
    def release(self, request: HttpRequest, rows: QuerySet) -> Any:
        """Release the selected keys from the holders that the confirmation page showed."""
        held = rows.exclude(owner="")
        if "confirmed" not in request.POST:
            return self._confirm(
                request,
                held,
                latest_by="fence",
                title="Release keys",
                action="release",
                text="Release a key only if you know that its holder is gone. If the holder is "
                "alive, its late commit is refused. The next delivery takes the work over, which "
                "counts as a crash.",
            )
        across = _is_across(request)
        chosen = held.filter(fence__lte=_until(request)) if across else rows
        runtime = _runtime()

        def act(key: Any) -> str | None:
            shown = request.POST.get(f"holder:{key.pk}", "")
            fence, _, owner = (f"{key.fence} {key.owner}" if across else shown).partition(" ")
            try:
                if fence.isdecimal() and runtime.operations.release(
                    key.pk,
                    reason=request.POST.get("reason", "").strip() or "released in the admin",
                    actor=str(request.user),
                    fence=int(fence),
                    owner=owner,
                ):
                    return f"released from {owner} with fence {fence}"
            except errors.TaskguardError as error:
                messages.error(request, str(error))
            return None

        try:
            self._act(request, chosen, act, what="Released")
        finally:
            if runtime.runner.locks is not None:
                runtime.runner.locks.close()
        return None


@admin.register(Worker)
class WorkerAdmin(_ToLookAt):
    """Workers, the last seen first."""

    list_display = ("name", "kind", "host", "pid", "queues", "version", "began", "last_seen")
    list_filter = ("kind",)
    search_fields = ("number__startswith", "name", "host")
    ordering = ("-seen", "number")
    show_full_result_count = False
    began = _time("started", "started")
    last_seen = _time("seen", "last seen")
    fieldsets = (
        (None, {"fields": ("number", "kind", "name", "host", "pid", "queues", "version")}),
        ("Times", {"fields": ("began", "last_seen")}),
    )
