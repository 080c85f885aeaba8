"""Requests to a run's own servers on a machine whose http_proxy cannot reach them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest

from megarl.core.proxies import LOOPBACK, bypass_proxies

UNREACHABLE = "http://127.0.0.1:9"  # the discard port, on which no server listens
CHILD = "import sys, httpx; print(httpx.get(sys.argv[1]).text)"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"answer")

    def log_message(self, *_) -> None: ...


@pytest.fixture
def url(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, UNREACHABLE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps the proxies of its first call
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_clients_reach_loopback_servers(url):
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    bypass_proxies(*LOOPBACK)

    async def get() -> str:
        async with httpx.AsyncClient() as client:
            return (await client.get(url)).text

    assert httpx.get(url).text == asyncio.run(get()) == urllib.request.urlopen(url).read().decode() == "answer"
    child = subprocess.run([sys.executable, "-c", CHILD, url], capture_output=True, text=True, check=True)
    assert child.stdout == "answer\n"


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
def test_listed_hosts_are_kept(url, monkeypatch, name):
    monkeypatch.setenv(name, "intranet, 10.0.0.1")
    for _ in range(2):
        bypass_proxies("127.0.0.1", "10.0.0.1")
    for both in ("no_proxy", "NO_PROXY"):
        assert os.environ[both] == "intranet,10.0.0.1,127.0.0.1"
