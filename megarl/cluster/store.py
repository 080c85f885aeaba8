"""The TCPStores where the ranks of a process group meet."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megarl.cluster.network import listen


def open_store(host: str, world_size: int | None, timeout_s: float) -> dist.TCPStore:
    """Opens the store of a new process group, which the ranks of several join. It listens on the interface that has
    this address, not on all, as torch would by itself. world_size: None where it may be joined by any number."""
    listener = listen(host)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, world_size: int | None, timeout_s: float) -> dist.TCPStore:
    return dist.TCPStore(
        host, port, world_size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def is_open(store: dist.TCPStore) -> bool:
    """Returns whether the process that has opened the store still has it."""
    try:
        store.num_keys()
    except RuntimeError:  # the connection is at its end
        return False
    return True
