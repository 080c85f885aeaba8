"""Serves the report on a run in progress on localhost, and updates it as the run progresses.

The server never writes to the run folder. Its URL contains a secret token, so that other users of the machine cannot
access the report. The Host header is checked, so that pages from other sites cannot send requests to the server (DNS
rebinding).
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from megarl.core.errors import UserError
from megarl.report.page import read_contents, render
from megarl.run.folder import RunFolder

HOST = "127.0.0.1"
TIMEOUT_S = 30
"""Maximum seconds without data from a client. Other users of the machine could otherwise keep connections open."""

HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class LiveReport:
    """The current report page for a run. The page is rendered again when the run's files change."""

    def __init__(self, folder: Path):
        """Raise a UserError if `folder` is not a run folder."""
        self._folder = RunFolder(Path(folder))
        self._lock = threading.Lock()
        self._state, self._page = "", ""
        self.page()

    def state(self) -> str:
        """Return a fingerprint of the page, based on the sizes and modification times of its source files."""
        rollouts = list(self._folder.rollout_files().values())[-2:]
        files = (self._folder.metrics, self._folder.manifest, *rollouts)
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)

    def page(self) -> str:
        with self._lock:
            state = self.state()
            if state != self._state or not self._page:
                self._page, self._state = render(read_contents(self._folder.path), state), state
            return self._page


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the report's URL and a function that serves requests until it is interrupted. Raise a UserError if `folder`
    is not a run folder. port: port number, or 0 for any free port."""
    report, token = LiveReport(folder), secrets.token_urlsafe(16)
    with ThreadingHTTPServer((HOST, port), _handler(report, token)) as server:
        yield f"http://{HOST}:{server.server_address[1]}/{token}/", server.serve_forever
        # The `with` statement closes the socket.


def _handler(report: LiveReport, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            _, request_token, *rest = f"{self.path}/".split("/")
            if host not in (HOST, "localhost") or not hmac.compare_digest(request_token.encode(), token.encode()):
                return self._reply(404, "text/plain", "not found\n")
            try:
                if rest[:1] == ["state"]:
                    return self._reply(200, "text/plain", report.state())
                if rest[:1] == [""]:
                    return self._reply(200, "text/html", report.page())
            except (UserError, OSError) as error:
                return self._reply(500, "text/plain", f"{error}\n")
            return self._reply(404, "text/plain", "not found\n")

        def _reply(self, status: int, content_type: str, text: str) -> None:
            body = text.encode(errors="replace")
            self.send_response(status)
            for name, value in {"Content-Type": f"{content_type}; charset=utf-8", **HEADERS}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
