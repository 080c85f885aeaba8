"""Serves the report on a run in progress on localhost, and updates it as the run progresses.

The server never writes to the run folder. Its URL contains a secret token, so that other users of the machine cannot
access the report. The Host header is checked, so that pages from other sites cannot send requests to the server (DNS
rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from megarl.core.errors import UserError
from megarl.report.charts import axes_of, describe, pack
from megarl.report.page import ContentsReader, page_charts, render, render_sections, state_of
from megarl.report.viewer import StepRollouts, page_data
from megarl.run.folder import RunFolder

HOST = "127.0.0.1"
TIMEOUT_S = 30
"""Seconds after which an idle connection is closed, so that other users of the machine cannot exhaust the threads."""

CHARTS, POINTS = "charts", "points"
"""Keys for the hash of a page's charts and for its number of steps. All other keys are element ids and step numbers."""

HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class LiveReport:
    """The current report on a run. When the run's files change, only the changes are read."""

    def __init__(self, folder: Path):
        """Raise a UserError if `folder` is not a run folder."""
        self._folder = RunFolder(Path(folder))
        self._lock = threading.Lock()
        self._reader = ContentsReader(self._folder.path)
        self._state: str | None = None
        self._steps: dict[int, tuple[StepRollouts, str]] = {}
        """Maps the `id()` of each step in the rollout viewer to the step and its hash."""
        self.page()

    def page(self) -> str:
        """Return the complete page."""
        with self._lock:
            self._refresh()
            return render(self._contents, self._hashes(render_sections(self._contents)) | self._position())

    def changes(self, known: Mapping[str, str]) -> dict[str, Any]:
        """Return the changes since the page's last update. `known` contains the hashes of the page's elements, steps
        and charts, and its number of steps. If the charts are current and no step has been rewritten, the metrics are
        only those of new steps."""
        with self._lock:
            self._refresh()
            run = self._contents
            sections, position = render_sections(run), self._position()
            new, steps = self._hashes(sections), run.rollouts.steps
            return {
                "state": state_of(run),
                "hashes": new | position,
                "sections": {name: html for name, html in sections.items() if known.get(name) != new[name]},
                "order": [step.step for step in steps],
                **page_data([step for step in steps if known.get(str(step.step)) != new[str(step.step)]]),
                **self._new_metrics(known, position),
            }

    def _refresh(self) -> None:
        if (state := self._fingerprint()) != self._state:
            self._contents, self._state = self._reader.read(), state
            self._charts = page_charts(self._contents.history)

    def _position(self) -> dict[str, str]:
        """Return the hash of the charts and the history's revision, and the number of steps in the history."""
        history = self._contents.history
        names = json.dumps([describe(self._charts), [*history.columns], [*axes_of(history)], history.revision])
        return {CHARTS: _hash(names), POINTS: str(len(history.steps))}

    def _new_metrics(self, known: Mapping[str, str], position: Mapping[str, str]) -> dict[str, Any]:
        history, start = self._contents.history, known.get(POINTS, "")
        if known.get(CHARTS) != position[CHARTS] or not (start.isascii() and start.isdigit() and len(start) < 19):
            return {"charts": describe(self._charts), "points": pack(history)}
        return {"points": pack(history, int(start))} if int(start) < len(history.steps) else {}

    def _hashes(self, sections: Mapping[str, str]) -> dict[str, str]:
        """Return the hash of each element and of each step in the rollout viewer."""
        old, self._steps = self._steps, {}
        for step in self._contents.rollouts.steps:
            _, digest = old.get(id(step)) or (step, _hash(json.dumps(asdict(step))))
            self._steps[id(step)] = step, digest
        steps = {str(step.step): digest for step, digest in self._steps.values()}
        return {name: _hash(html) for name, html in sections.items()} | steps

    def _fingerprint(self) -> str:
        """Return a string that changes with the sizes and modification times of the page's source files."""
        rollouts = list(self._folder.rollout_files().values())[-2:]
        evaluations = (file for files in self._folder.evaluation_files().values() for file in list(files.values())[-1:])
        files = (self._folder.metrics, self._folder.manifest, *rollouts, *evaluations)
        stats = [(file.name, file.stat()) for file in files if file.exists()]
        return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[tuple[str, ThreadingHTTPServer]]:
    """Yield the report's URL and its server. serve_forever() must have returned when the context ends. Raise a
    UserError if `folder` is not a run folder. port: port number, or 0 for any free port."""
    report, token = LiveReport(folder), secrets.token_urlsafe(16)
    with ThreadingHTTPServer((HOST, port), _handler(report, token)) as server:
        yield f"http://{HOST}:{server.server_address[1]}/{token}/", server
        # The `with` statement above closes the socket.


def _handler(report: LiveReport, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            _, request_token, *rest = f"{self.path}/".split("/")
            if host not in (HOST, "localhost") or not hmac.compare_digest(request_token.encode(), token.encode()):
                return self._reply(404, "text/plain", "not found\n")
            try:
                name, _, query = rest[0].partition("?") if rest else ("", "", "")
                if name == "changes":
                    hashes = dict(parse_qsl(query, keep_blank_values=True))
                    return self._reply(200, "application/json", json.dumps(report.changes(hashes)))
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
