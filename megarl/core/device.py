"""The only place that chooses between CUDA with NCCL and CPU with gloo.

torch, which takes a second to import, is imported by the first function that asks a GPU or makes a tensor: a driver
without GPUs does neither.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

HOST_BACKEND = "gloo"
"""torch.distributed's backend for exchanges between the ranks' host memories, on any device."""


_PORTABLE = 1
"""cudaHostRegisterPortable, which locks memory for all of the process's devices."""


@cache
def _has_driver() -> bool:
    """Whether the library of NVIDIA's driver is here, without which torch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _torch() -> ModuleType:
    import torch

    return torch


def on_cuda() -> bool:
    return _has_driver() and _torch().cuda.is_available()


def device() -> torch.device:
    """Returns the device of this process: the first of the GPUs that it sees, else the CPU."""
    return _torch().device("cuda", 0) if on_cuda() else _torch().device("cpu")


def num_gpus() -> int:
    """Returns the number of this machine's GPUs that this process may use."""
    return _torch().cuda.device_count() if on_cuda() else 0


def memory_bytes(gpu: int) -> int:
    """Returns the memory of a GPU, by its number in this process."""
    return _torch().cuda.get_device_properties(gpu).total_memory


def uuid(gpu: int) -> str:
    """Returns the identity of a GPU, the same in every process. gpu: its number in this process."""
    return str(_torch().cuda.get_device_properties(gpu).uuid)


def memory_transport() -> Literal["shared_memory", "cuda_ipc"]:
    """Returns how a process reads weights of another one on the same machine."""
    return "cuda_ipc" if on_cuda() else "shared_memory"


def backend() -> str:
    """Returns torch.distributed's backend for collectives between trainer ranks."""
    return "nccl" if on_cuda() else "gloo"


def uses_nccl() -> bool:
    """Whether this backend is NCCL: gloo connects, waits and ends its connections in other ways."""
    return backend() == "nccl"


def capability() -> tuple[int, int]:
    """Returns the device's CUDA compute capability, (0, 0) on CPU."""
    return _torch().cuda.get_device_capability(device()) if on_cuda() else (0, 0)


def claim(threads: int | None) -> None:
    """Makes the device the process's current one; on CPU, sets the number of threads of the operators."""
    if on_cuda():
        _torch().cuda.set_device(device())
    elif threads is not None:
        _torch().set_num_threads(threads)


def synchronize(which: torch.device | None = None) -> None:
    """Waits until the device has done what it was asked to. which: None takes the process's current one."""
    if on_cuda():
        _torch().cuda.synchronize(which)


def random_state() -> torch.Tensor | None:
    """Returns the state of the device's generator; None on CPU, whose generator is torch's own."""
    return _torch().cuda.get_rng_state() if on_cuda() else None


def set_random_state(state: torch.Tensor | None) -> None:
    if state is not None:
        _torch().cuda.set_rng_state(state)


def release_cache() -> None:
    """Gives back to the device the memory that torch keeps for reuse, or kept for other processes that read it."""
    if on_cuda():
        _torch().cuda.ipc_collect()
        _torch().cuda.empty_cache()


def host_empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns host memory that the device copies to and from at full speed: page-locked on CUDA, for as long as the
    tensor lives. Raises RuntimeError where it cannot be locked."""
    if not on_cuda() or tensor.nbytes == 0:
        return _torch().empty_like(tensor, device="cpu")
    # torch's own allocator locks the next power of two, and keeps it. Pages are locked as a whole, so these are shared
    # with nothing else.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host = _torch().frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    cudart, address = _torch().cuda.cudart(), host.data_ptr()
    if error := int(cudart.cudaHostRegister(address, host.nbytes, _PORTABLE)):
        raise RuntimeError(f"CUDA does not lock {host.nbytes / 2**30:.2f} GiB of host memory: its error {error}")
    weakref.finalize(host, cudart.cudaHostUnregister, address).atexit = False
    return host
