"""TCPStores for process group rendezvous."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented, but not in __all__

from megarl.cluster.network import listen


def open_store(host: str, world_size: int | None, timeout_s: float) -> TCPStore:
    """Open the store for a new process group. It listens only on the interface with this address, whereas torch listens
    on all interfaces by default. `world_size` is the number of processes in the group; None: any number may join."""
    listener = listen(host)
    return TCPStore(
        host,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, world_size: int | None, timeout_s: float) -> TCPStore:
    return TCPStore(
        host, port, world_size, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def is_open(store: TCPStore) -> bool:
    """Return whether the store is still served by the process that opened it."""
    try:
        store.num_keys()
    except RuntimeError:  # the connection is closed
        return False
    return True
