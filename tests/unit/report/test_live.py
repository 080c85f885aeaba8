"""Tests of `megarl watch`, the live report behind a secret token on localhost."""

from __future__ import annotations

import base64
import html
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from megarl.report import history, live, viewer
from megarl.report.live import serve
from tests.live_report import serving
from tests.timing import WAIT_S


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "watched"}))
    add_step(tmp_path, 1)
    return tmp_path


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with serving(run) as url:
        yield url


def add_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def write_rollouts(run: Path, step: int, num_samples: int = 2) -> None:
    rows = [{"prompt": "p", "response": "r", "reward": 1.0, "sample_id": f"{step}.{i}"} for i in range(num_samples)]
    (run / "rollouts" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_long_run_is_read_and_sent_incrementally(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new step is parsed, read and sent without the 5,000 steps before it."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in range(2, 5001))
    for step in range(1, 5001, 500):
        write_rollouts(run, step)
    parsed, read = [], []
    read_step = viewer._read_step
    monkeypatch.setattr(viewer, "_read_step", lambda *given: read.append(given) or read_step(*given))
    parse = history.parse_lines

    def parse_lines(lines: Iterable[bytes], first: int) -> Any:
        given = list(lines)
        parsed.extend(given)
        return parse(given, first)

    monkeypatch.setattr(history, "parse_lines", parse_lines)
    report = live.LiveReport(run)
    known = hashes_in(report.page())
    assert len(parsed) == 5000
    del parsed[:], read[:]
    for step in range(5001, 5004):
        add_step(run, step)
        write_rollouts(run, step)
        changed = report.changes(known)
        known = changed["hashes"]
        assert [item["step"] for item in changed["steps"]] == [step]
        assert values_in(changed["points"]) == [np.float32(step / 10)] and "charts" not in changed
    assert (len(parsed), len(read)) == (3, 3)


def values_in(points: dict[str, Any], metric: str = "reward/mean") -> list[float]:
    return np.frombuffer(base64.b64decode(points["metrics"][metric]), "<f4").tolist()


def test_rewritten_steps_and_new_metrics_are_sent_with_all_steps(run: Path) -> None:
    report = live.LiveReport(run)
    add_step(run, 2)
    known = report.changes(hashes_in(report.page()))["hashes"]
    add_step(run, 2)  # as in a resumed run, which repeats the step with the same result
    assert "points" not in report.changes(known)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 7.0}\n')
    changed = report.changes(known)
    assert values_in(changed["points"]) == [np.float32(0.1), 7] and changed["charts"][0]["title"] == "Reward"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean": 8.0, "own/x": 1.0}\n')
    changed = report.changes(changed["hashes"])
    assert len(values_in(changed["points"])) == 3 and changed["charts"][-1]["title"] == "own/x"
    for start in ("", "-1", "x", "9" * 30, "٣"):  # a client may send anything
        assert len(values_in(report.changes(changed["hashes"] | {"points": start})["points"])) == 3


def test_complete_run_is_finished(run: Path) -> None:
    (run / "config.resolved.yaml").write_text("run: {steps: 2}\n")
    report = live.LiveReport(run)
    page = report.page()
    assert 'id="live">live<' in page and report.changes(hashes_in(page))["state"] == "live"
    add_step(run, 2)
    assert report.changes(hashes_in(page))["state"] == "finished" and 'id="live">finished<' in report.page()


def test_history_follows_a_replaced_file_and_torn_lines(tmp_path: Path) -> None:
    """A resumed run replaces the file, and a killed run leaves a truncated line."""
    file = tmp_path / "metrics.jsonl"
    reader = history.HistoryReader(file)
    assert len(reader.read().steps) == 0
    file.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2.0, "nonfinite": ["b"]}\n{"step": 3, "a"')
    read = reader.read()
    assert (read.steps.tolist(), read["a"].tolist(), read.unreadable) == ([1, 2], [1.0, 2.0], [3])
    with file.open("a") as lines:
        lines.write(': 3.0, "c": 5}\n7\n{"step": 2, "a": 4.0}\n')
    read = reader.read()
    assert (read.steps.tolist(), read["a"].tolist(), read.unreadable) == ([1, 2, 3], [1.0, 4.0, 3.0], [4])
    assert read.nonfinite == {} and read.finite("c").tolist() == [5.0]
    whole = history.read_history(file)
    assert whole["a"].tolist() == read["a"].tolist() and whole.unreadable == read.unreadable
    new = tmp_path / "new"
    new.write_text('{"step": 1, "a": 9.0}\n')
    new.replace(file)
    assert reader.read()["a"].tolist() == [9.0]


def get(address: str, host: str | None = None, method: str = "GET") -> tuple[int, str, dict]:
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=WAIT_S) as response:
            return response.status, response.read().decode(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def hashes_in(page: str) -> dict[str, str]:
    return json.loads(html.unescape(re.search(r'data-hashes="([^"]*)"', page)[1]))


def changes(address: str, hashes: Mapping[str, str]) -> dict[str, Any]:
    return json.loads(get(f"{address}changes?{urlencode(hashes)}")[1])


def test_page_and_changes_follow_the_run_without_writing(address: str, run: Path) -> None:
    status, page, headers = get(address)
    assert status == 200 and "<h1>watched</h1>" in page
    assert headers["Cache-Control"] == "no-store" and "connect-src 'self'" in page
    known = hashes_in(page)
    unchanged = {"state": "live", "hashes": known, "sections": {}, "order": [], "steps": [], "thumbnails": {}}
    assert changes(address, known) == unchanged
    add_step(run, 2)
    changed = changes(address, known)
    assert changed["sections"].keys() == {"summary"} and values_in(changed["points"]) == [np.float32(0.2)]
    assert "0.100 → 0.150" in changed["sections"]["summary"]
    assert "0.100 → 0.150" in get(address)[1]
    known |= changed["hashes"]
    write_rollouts(run, 2)
    changed = changes(address, known)
    assert changed["sections"].keys() == {"rollout-note"} and changed["order"] == [2]
    assert [step["step"] for step in changed["steps"]] == [2]
    assert sorted(path.name for path in run.iterdir()) == ["manifest.json", "metrics.jsonl", "rollouts"]


def test_requests_without_the_token_are_rejected(address: str) -> None:
    root = address.rsplit("/", 2)[0]
    outside = address.removeprefix(root) + "../../etc/passwd"
    for path in (
        "/",
        "/changes",
        "/guess/",
        "/guess/changes",
        "//changes",
        outside,
    ):
        assert get(root + path)[:2] == (404, "not found\n")
    assert address.startswith("http://127.0.0.1:") and len(address.split("/")[3]) >= 20


def test_requests_with_a_foreign_host_header_are_rejected(address: str) -> None:
    assert get(address, host="evil.example:80")[0] == 404
    assert get(address, host=f"localhost:{address.split(':')[2].split('/')[0]}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_http_methods_are_not_implemented(address: str, method: str) -> None:
    assert get(address, method=method)[0] == 501


def test_live_report_requires_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass a run folder"), serve(tmp_path / "none"):
        pass
