"""Addresses and ports of the nodes of a run."""

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
"""Lowest port that a run listens on, unless the kernel's ephemeral ports start below it. Below, Ray assigns ports from
10,002 on to its workers without reserving them, and many services have fixed ports."""

UNPRIVILEGED = 1024
"""Lowest unprivileged port."""

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the first and last ephemeral port of the kernel."""

ANY_PORT = 9
"""Port of a datagram socket that sends nothing."""


def own_name() -> str:
    """Return the name of this node: Slurm's in a job, otherwise its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def own_address(interface: str | None) -> str:
    """Return the IPv4 address at which other nodes reach this one: the interface's or, for None, that of its host name
    or its default route. Raises UserError if there is none."""
    addresses = interface_addresses()
    there = ", ".join(f"{name} ({each[0]})" for name, each in sorted(addresses.items()) if not _is_local(each[0]))
    if interface is not None:
        if interface not in addresses:
            raise UserError(
                f"cluster.interface={interface}: this node has none of this name with an address, but {there}"
            )
        return addresses[interface][0]
    known = {address for each in addresses.values() for address in each}
    for address in (_address_of_name(), _address_of_route("8.8.8.8")):
        if address in known and not _is_local(address):
            return address
    raise UserError(
        "cluster.interface=null: neither host name nor default route of this node gives an address that others reach; "
        f"set it to one of these: {there or 'there is none'}"
    )


def address_towards(host: str) -> str:
    """Return the address from which this node reaches another. Raises UserError without a route."""
    address = _address_of_route(host)
    if address is None:
        raise UserError(f"no route leads from this node to {host}, the first node of the run")
    return address


def interface_of(address: str) -> str:
    """Return the name of the interface with this address."""
    return next(name for name, addresses in interface_addresses().items() if address in addresses)


def listen(host: str) -> socket.socket:
    """Return a socket that listens at this address, on a free port below the kernel's ephemeral ports: no connection of
    another process can take it by chance, even after this socket is closed. Raises UserError if all are in use."""
    highest = int(EPHEMERAL.read_text().split()[0])
    ports = range(LOWEST_PORT, highest) or range(UNPRIVILEGED, highest)
    for port in random.SystemRandom().sample(ports, len(ports)):
        try:
            return socket.create_server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise UserError(
        f"{EPHEMERAL}: the ports from {ports.start} to {highest - 1}, below those that the kernel gives out, are all "
        "taken; end what listens on them, or let it begin later"
    )


def socket_environment(address: str) -> dict[str, str]:
    """Return the variables that make libraries use the interface of this address, unless the user has set them."""
    interface = interface_of(address)
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface that has one."""
    found = psutil.net_if_addrs().items()
    addresses = {name: [a.address for a in entries if a.family == socket.AF_INET] for name, entries in found}
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
