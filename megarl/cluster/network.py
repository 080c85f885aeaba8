"""The addresses by which the nodes of a run reach each other."""

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
"""The lowest port that a run listens on, where the kernel's begin above: below, Ray gives its workers those from 10,002
on without holding them, and many services have fixed ones."""

UNPRIVILEGED = 1024
"""The lowest port that anybody may listen on."""

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The file with the first and the last of the ports that the kernel gives to whoever asks for any."""

ANY_PORT = 9
"""The port of a datagram socket that sends nothing."""


def own_name() -> str:
    """Returns the name of this node: Slurm's in a job, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def own_address(interface: str | None) -> str:
    """Returns the IPv4 address at which other nodes reach this one: that of the interface, or (None) the one that its
    host name, else its default route gives. Raises UserError where there is none."""
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
    """Returns the address of this node from which it reaches another. Raises UserError where no route leads there."""
    address = _address_of_route(host)
    if address is None:
        raise UserError(f"no route leads from this node to {host}, the first node of the run")
    return address


def interface_of(address: str) -> str:
    """Returns the name of the interface that has this address."""
    return next(name for name, addresses in interface_addresses().items() if address in addresses)


def listen(host: str) -> socket.socket:
    """Returns a socket that listens at this address of the node, on a free port below those that the kernel gives out
    by itself: another process's connection cannot have it by chance, not even after this socket is closed. Raises
    UserError where all are taken."""
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
    """Returns the variables by which libraries use the interface of this address, where the user's own do not say
    another."""
    interface = interface_of(address)
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def interface_addresses() -> dict[str, list[str]]:
    """Returns the IPv4 addresses of each interface of this node that has one."""
    found = psutil.net_if_addrs().items()
    addresses = {name: [a.address for a in entries if a.family == socket.AF_INET] for name, entries in found}
    return {name: entries for name, entries in addresses.items() if entries}


def _is_local(address: str) -> bool:
    return address.startswith("127.")


def _address_of_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # nobody knows the name
        return None


def _address_of_route(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as prober:
        try:
            prober.connect((host, ANY_PORT))
        except OSError:  # no route
            return None
        return prober.getsockname()[0]
