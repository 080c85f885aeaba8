"""Network addresses and ports on a run's nodes."""

from __future__ import annotations

import errno
import os
import platform
import random
import socket
from pathlib import Path

import psutil

from megarl.core.errors import UserError

LOWEST_PORT = 20_000
"""Lowest port that a run listens on, unless the kernel's ephemeral ports start below it. Lower ports may collide with
services on fixed ports and with Ray's workers, whose ports (10,002 and above) Ray does not reserve."""

LOOPBACK = "127.0.0.1"
"""Address that a run on a single node listens on. Other machines cannot connect to it."""

UNPRIVILEGED = 1024
"""Lowest unprivileged port."""

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the kernel's first and last ephemeral ports."""

ANY_PORT = 9
"""Port for connecting a UDP socket to find the route to a host. Connecting sends no packet."""


def own_name() -> str:
    """Return this node's name: in a Slurm job, the one that Slurm assigned, otherwise the host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def own_address(interface: str | None) -> str:
    """Return this node's IPv4 address that other nodes can reach. It belongs to the given interface or, without an
    interface, to the host name or the default route. Raises UserError if this node has no such address."""
    addresses = interface_addresses()
    available = ", ".join(f"{name} ({each[0]})" for name, each in sorted(addresses.items()) if not _is_local(each[0]))
    remedy = f"set cluster.interface to one of {available}" if available else "give this node a network address"
    if interface is not None:
        if interface not in addresses:
            raise UserError(
                f"cluster.interface={interface}: this node has no interface of that name with an IPv4 address. Fix: "
                f"{remedy}"
            )
        return addresses[interface][0]
    known = {address for each in addresses.values() for address in each}
    for address in (_address_of_name(), _address_of_route("8.8.8.8")):
        if address in known and not _is_local(address):
            return address
    raise UserError(
        "cluster.interface=null: neither the host name nor the default route of this node gives an address that other "
        f"nodes can reach. Fix: {remedy}"
    )


def address_towards(host: str) -> str:
    """Return this node's address on the route to the host. Raises UserError if there is no route."""
    address = _address_of_route(host)
    if address is None:
        raise UserError(
            f"{host}: this node has no route to the run's first node. Fix: check the output of ip route get {host}"
        )
    return address


def interface_of(address: str) -> str:
    """Return the name of the interface with this address."""
    return next(name for name, addresses in interface_addresses().items() if address in addresses)


def listen(host: str) -> socket.socket:
    """Return a socket that listens at this address on a free port. The port is below the kernel's ephemeral ports, so
    no outgoing connection can take it, even after the socket is closed. Raises UserError if all ports are in use."""
    highest = int(EPHEMERAL.read_text().split()[0])
    ports = range(LOWEST_PORT, highest) or range(UNPRIVILEGED, highest)
    for port in random.SystemRandom().sample(ports, len(ports)):
        try:
            return socket.create_server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise UserError(
        f"{EPHEMERAL}: all ports below the ephemeral range ({ports.start} to {highest - 1}) are in use. Fix: stop "
        "processes that listen on them, or raise the first ephemeral port in this file"
    )


def socket_environment(address: str) -> dict[str, str]:
    """Return the variables that make Gloo and NCCL use this address's interface. The user's values take precedence."""
    interface = interface_of(address)
    defaults = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface that has one."""
    interfaces = psutil.net_if_addrs().items()
    addresses = {name: [a.address for a in entries if a.family == socket.AF_INET] for name, entries in interfaces}
    return {name: entries for name, entries in addresses.items() if entries}


def _is_local(address: str) -> bool:
    return address.startswith("127.")


def _address_of_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # the name does not resolve
        return None


def _address_of_route(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as prober:
        try:
            prober.connect((host, ANY_PORT))
        except OSError:  # no route
            return None
        return prober.getsockname()[0]
