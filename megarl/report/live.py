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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from megarl.core.errors import UserError
from megarl.report.evaluations import render_evaluations
from megarl.report.history import History
from megarl.report.page import ContentsReader, other_charts, render, text_sections
from megarl.report.plots import MAX_POINTS, report_figures
from megarl.report.viewer import StepRollouts
from megarl.run.folder import RunFolder

HOST = "127.0.0.1"
TIMEOUT_S = 30
"""Seconds after which a silent connection is closed. Otherwise, other users of the machine could exhaust threads."""

HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


OTHERS = "other-charts"
"""Id of the element with charts that are drawn only while they are visible."""


class LiveReport:
    """The current report on a run. When the run's files change, only the changes are read and drawn."""

    def __init__(self, folder: Path):
        """Raise a UserError if `folder` is not a run folder."""
        self._folder = RunFolder(Path(folder))
        self._lock = threading.Lock()
        self._reader = ContentsReader(self._folder.path)
        self._state: str | None = None
        self._drawn: dict[str, tuple[str, str]] = {}
        """Maps the id of each element with charts to the hash of its data and its HTML."""
        self._steps: dict[int, tuple[StepRollouts, str]] = {}
        """Maps the `id()` of each step in the rollout viewer to the step and its hash."""
        self.page()

    def page(self) -> str:
        """Return the complete page, without the charts that are initially hidden."""
        with self._lock:
            sections = self._sections()
            return render(self._contents, {**sections, OTHERS: ""}, self._hashes(sections))

    def changes(self, hashes: Mapping[str, str]) -> dict[str, Any]:
        """Return the changes since the page received elements and steps with these hashes. The element OTHERS is
        included only if `hashes` contains it, possibly with an empty hash."""
        with self._lock:
            sections = self._sections(OTHERS in hashes)
            new = self._hashes(sections)
            steps = self._contents.rollouts.steps
            return {
                "hashes": new,
                "sections": {name: html for name, html in sections.items() if hashes.get(name) != new[name]},
                "order": [step.step for step in steps],
                "steps": [asdict(step) for step in steps if hashes.get(str(step.step)) != new[str(step.step)]],
            }

    def _sections(self, draws_others: bool = False) -> dict[str, str]:
        """Read new data. Return the HTML of the page's changing elements, keyed by id."""
        if (state := self._fingerprint()) != self._state:
            self._contents, self._state = self._reader.read(), state
        run, history = self._contents, _whole_bins(self._contents.history)
        values = _hash(history.steps, *(part for item in history.columns.items() for part in item))
        sections = text_sections(run) | {"charts": self._draw("charts", values, lambda: report_figures(history))}
        evaluated = _hash(values, json.dumps([asdict(item) for item in run.evaluations]))
        sections["evaluation-part"] = self._draw(
            "evaluation-part", evaluated, lambda: render_evaluations(history, run.evaluations)
        )
        if draws_others:
            sections[OTHERS] = self._draw(OTHERS, values, lambda: other_charts(history))
        return sections

    def _draw(self, name: str, shown: str, draw: Callable[[], str]) -> str:
        if self._drawn.get(name, ("", ""))[0] != shown:
            self._drawn[name] = shown, draw()
        return self._drawn[name][1]

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


def _whole_bins(history: History) -> History:
    """Return the history without its last steps if they are too few for a point on the charts. Otherwise each new step
    would change all points."""
    num_steps = len(history.steps)
    width = -(-num_steps // MAX_POINTS)
    shown = num_steps // width * width if num_steps else 0
    columns = {name: values[:shown] for name, values in history.columns.items()}
    return replace(history, steps=history.steps[:shown], columns=columns)


def _hash(*parts: str | np.ndarray) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part.tobytes())
    return digest.hexdigest()


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
