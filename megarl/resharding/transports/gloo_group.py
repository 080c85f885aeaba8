"""Gloo process groups that connect two members when they first exchange a message."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store


def gloo_group(store: Store, timeout: timedelta, rank: int, size: int) -> ProcessGroupGloo:
    """Return this member's end of a process group. Does not wait for the other members."""
    options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # missing in torch's stubs
    options._timeout = timeout
    options._devices = [_network_device()]
    return ProcessGroupGloo(store, rank, size, options)


def _network_device() -> ProcessGroupGloo.Device:
    """Return the gloo device for the first interface in GLOO_SOCKET_IFNAME or, if unset, for the host name's address.

    Connections are established lazily, because most pairs of members never exchange messages.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface, lazy_init=True)
    return ProcessGroupGloo.create_default_device(lazy_init=True)
