"""The rendezvous of the ranks."""

import socket

import pytest

from megarl.megatron.parallel import join_store, open_store


def test_a_store_listens_on_its_own_interface_only():
    store = open_store("127.0.0.1", world_size=1, timeout_s=10)
    joined = join_store("127.0.0.1", store.port, 1, timeout_s=10)
    joined.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
