"""Addresses and interfaces of this machine."""

from __future__ import annotations

import socket

import pytest

from megarl.cluster import network
from megarl.cluster.network import address_towards, interface_addresses, interface_of, own_address
from megarl.core.errors import UserError


def test_loopback_address_has_the_loopback_interface() -> None:
    assert interface_addresses()["lo"] == ["127.0.0.1"]
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == own_interface("lo")


def own_interface(name: str) -> str:
    assert name in dict(socket.if_nameindex()).values()
    return name


def test_interface_may_be_configured() -> None:
    assert own_address("lo") == "127.0.0.1"
    with pytest.raises(UserError, match=r"^cluster.interface=ib7: this node has no interface of that name"):
        own_address("ib7")


@pytest.mark.parametrize(("by_name", "found"), [("10.1.1.1", "ib0"), ("127.0.1.1", "e0"), (None, "e0")])
def test_address_defaults_to_host_name_then_default_route(monkeypatch, by_name, found) -> None:
    there = {"lo": ["127.0.0.1"], "ib0": ["10.1.1.1"], "e0": ["10.2.2.2"]}
    monkeypatch.setattr(network, "interface_addresses", lambda: there)
    monkeypatch.setattr(network, "_address_of_name", lambda: by_name)
    monkeypatch.setattr(network, "_address_of_route", lambda host: "10.2.2.2")
    assert [own_address(None)] == there[found]


def test_missing_address_error_names_the_key(monkeypatch) -> None:
    monkeypatch.setattr(network, "interface_addresses", lambda: {"lo": ["127.0.0.1"]})
    monkeypatch.setattr(network, "_address_of_route", lambda host: None)
    with pytest.raises(UserError, match=r"^cluster.interface=null: .* Fix: give this node a network address"):
        own_address(None)
