"""Tests of `megarl watch`, the live report behind a secret token on localhost."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.report.live import serve
from tests.timing import WAIT_S


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "watched"}))
    add_step(tmp_path, 1)
    return tmp_path


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with serve(run) as (url, serve_requests):
        threading.Thread(target=serve_requests, daemon=True).start()
        yield url


def add_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def get(address: str, host: str | None = None, method: str = "GET") -> tuple[int, str, dict]:
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=WAIT_S) as response:
            return response.status, response.read().decode(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def test_page_and_state_follow_the_run_without_writing(address: str, run: Path) -> None:
    status, page, headers = get(address)
    before = get(f"{address}state")[1]
    assert status == 200 and "<h1>watched</h1>" in page and f'data-state="{before}"' in page
    assert headers["Cache-Control"] == "no-store" and "connect-src 'self'" in page
    add_step(run, 2)
    assert get(f"{address}state")[1] != before and "0.100 → 0.150" in get(address)[1]
    assert sorted(path.name for path in run.iterdir()) == ["manifest.json", "metrics.jsonl", "rollouts"]


def test_requests_without_the_token_are_rejected(address: str) -> None:
    root = address.rsplit("/", 2)[0]
    for path in ("/", "/state", "/guess/", "/guess/state", "//state", address.removeprefix(root) + "../../etc/passwd"):
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
