"""Show the studies of a storage in a browser, by optuna-dashboard."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ..errors import UsageError
from .storage import open_storage

HOST, PORT = "127.0.0.1", 8080  # for the eyes of this machine alone: whoever reaches it can delete studies


def serve(url: str, ready: Callable[[str], None], port: int = PORT) -> None:
    """Serve until the process is stopped; `ready` is told the address. On any free port if `port` is taken.

    Raises UsageError if optuna-dashboard is not installed, or the storage cannot be opened.
    """
    if find_spec("optuna_dashboard") is None:
        raise UsageError(
            "--dashboard needs optuna-dashboard, which is not installed: pip install 'flashsmith[dashboard]'."
        )
    from optuna_dashboard import wsgi

    pages = wsgi(open_storage(url))
    try:
        server = make_server(HOST, port, pages, _Server, _Quiet)
    except OSError:
        server = make_server(HOST, 0, pages, _Server, _Quiet)
    with server:
        ready(f"http://{HOST}:{server.server_port}/")
        server.serve_forever()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """A page asks every few seconds; nobody wants to read that."""
