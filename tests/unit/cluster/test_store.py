"""Stores for the rendezvous of ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megarl.cluster import network
from megarl.cluster.store import join_store, open_store
from megarl.core.errors import UserError
from tests.timing import WAIT_S


def test_store_listens_on_its_own_interface_only():
    store = open_store("127.0.0.1", world_size=1, timeout_s=WAIT_S)
    joined = join_store("127.0.0.1", store.port, 1, timeout_s=WAIT_S)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=WAIT_S)


def test_ports_are_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as given, network.listen("127.0.0.1") as ours:
        first = int(network.EPHEMERAL.read_text().split()[0])
        port = ours.getsockname()[1]
        assert 1024 <= port < first <= given.getsockname()[1]
    # One of two ports is taken.
    monkeypatch.setattr(network, "EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(network, "LOWEST_PORT", port)
    network.EPHEMERAL.write_text(f"{port + 2}\t60999\n")
    with socket.create_server(("127.0.0.1", port)), network.listen("127.0.0.1") as second:
        assert second.getsockname()[1] == port + 1
        with pytest.raises(UserError, match=rf"all ports .* \({port} to {port + 1}\) are in use"):
            network.listen("127.0.0.1")
