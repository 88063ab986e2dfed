"""`taskguard exporter`: one scrape target of Prometheus for the whole fleet.

Guarantees: it listens on the loopback interface unless `--host` says otherwise. It changes nothing
but the snapshot's row, if its user may. If the ledger gives no answer, a scrape gets status 503 and
the reason, and the next one asks again.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from taskguard.cli.printing import indented, printable
from taskguard.cli.targets import CommandError, add_url, opened_ledger, port_of
from taskguard.drivers import extras_named
from taskguard.errors import TaskguardError
from taskguard.operations.collector import Collector

if TYPE_CHECKING:
    from taskguard.ledger.ports import DatabaseLedger

__all__ = ["add_exporter", "serving"]

_PORT = 9979


def add_exporter(commands: Any) -> None:
    """Add `exporter`."""
    exporter = commands.add_parser(
        "exporter",
        help="serve metrics of all workers for Prometheus, until stopped",
        description="Serves /metrics with what all processes have counted, and with the state of "
        "the ledger. One exporter is enough for all workers. Several show the same numbers.",
    )
    add_url(exporter)
    exporter.add_argument(
        "--host", default="127.0.0.1", help="the address to listen at; by default 127.0.0.1"
    )
    exporter.add_argument(
        "--port", type=port_of, default=_PORT, help=f"0: any free port; by default {_PORT}"
    )
    exporter.set_defaults(run_alone=_run)


def _run(arguments: argparse.Namespace) -> None:
    from taskguard.ledger.health import version_of_tables
    from taskguard.ledger.schema.upgrades import expect_version

    with contextlib.closing(opened_ledger(arguments.url)) as ledger:
        expect_version(version_of_tables(ledger.database))  # its user may only read them
        with serving(ledger, host=arguments.host, port=arguments.port) as port:
            print(f"http://{printable(arguments.host)}:{port}/metrics", flush=True)
            _until_stopped()


def _until_stopped() -> None:
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()


@contextmanager
def serving(ledger: DatabaseLedger, *, host: str, port: int) -> Iterator[int]:
    """Serve /metrics in the block, from a thread. Yield the port."""
    with extras_named("The exporter", "prometheus"):
        from prometheus_client import CollectorRegistry, make_wsgi_app
        from prometheus_client.exposition import ThreadingWSGIServer
    from wsgiref.simple_server import WSGIRequestHandler, make_server

    from taskguard.ledger.tables import SCHEMA_VERSION

    class Quiet(WSGIRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log no scrape."""

    registry = CollectorRegistry()
    collector = Collector(ledger, version=version("celery-taskguard"), schema=SCHEMA_VERSION)
    registry.register(collector)
    application = _answering(make_wsgi_app(registry))
    kind: Any = ThreadingWSGIServer
    if ":" in host:
        import socket

        kind = type("ServerOnIPv6", (kind,), {"address_family": socket.AF_INET6})
    try:
        server = make_server(host, port, application, server_class=kind, handler_class=Quiet)
    except (OSError, OverflowError) as error:
        raise CommandError(f"Cannot listen at {host}, port {port}: {error}.") from error
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answering(metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Return the application: /metrics alone, and 503 if the ledger gives no answer."""

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        text = "text/plain; charset=utf-8"
        if environ["PATH_INFO"] not in ("/metrics", "/"):
            start("404 Not Found", [("Content-Type", text)])
            return [b"Metrics are at /metrics.\n"]
        try:
            return metrics(environ, start)
        except TaskguardError as error:
            print(f"taskguard: {indented(error, by=11)}", file=sys.stderr, flush=True)
            start("503 Service Unavailable", [("Content-Type", text)])
            return [f"{printable(error)}\n".encode()]

    return application
