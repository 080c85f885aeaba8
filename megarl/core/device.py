"""The only module that chooses between CUDA with NCCL and CPU with gloo.

Importing torch takes a second, so only the functions that need torch import it. A driver without GPUs never imports it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

HOST_BACKEND = "gloo"
"""torch.distributed backend for exchanges between the host memories of ranks, regardless of the device."""

_PORTABLE = 1
"""cudaHostRegisterPortable: page-lock the memory for all devices of the process."""

NUM_PROBES = 5
"""Trials of a speed measurement. Other processes barely affect the fastest one: in 300 steps on 2 busy cores, two ranks
that measured at the same time differed by at most 11 %."""


@cache
def _has_driver() -> bool:
    """Return whether NVIDIA's driver library is installed. Without it, torch cannot find a GPU."""
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


def has_context() -> bool:
    """Return whether torch has initialized CUDA in this process and therefore uses GPU memory."""
    return on_cuda() and _torch().cuda.is_initialized()


def device() -> torch.device:
    """Return this process's device: its first visible GPU, or the CPU."""
    return _torch().device("cuda", 0) if on_cuda() else _torch().device("cpu")


def num_gpus() -> int:
    """Return the number of GPUs visible to this process."""
    return _torch().cuda.device_count() if on_cuda() else 0


def memory_bytes(gpu: int) -> int:
    """Return the total memory of a GPU in bytes, given its index in this process."""
    return _torch().cuda.get_device_properties(gpu).total_memory


def uuid(gpu: int) -> str:
    """Return the UUID of a GPU, given its index in this process. The UUID is the same in every process."""
    return str(_torch().cuda.get_device_properties(gpu).uuid)


def memory_transport() -> Literal["shared_memory", "cuda_ipc"]:
    """Return the method for reading the weights of another process on the same machine."""
    return "cuda_ipc" if on_cuda() else "shared_memory"


def backend() -> str:
    """Return the torch.distributed backend for collectives between trainer ranks."""
    return "nccl" if on_cuda() else "gloo"


def uses_nccl() -> bool:
    """Return whether collectives use NCCL. gloo connects, waits and tears down differently."""
    return backend() == "nccl"


def capability() -> tuple[int, int]:
    """Return the device's CUDA compute capability; (0, 0) on CPU."""
    return _torch().cuda.get_device_capability(device()) if on_cuda() else (0, 0)


def claim(threads: int | None) -> None:
    """Make the device current in this thread, and set the number of intra-op threads on the host."""
    if on_cuda():
        _torch().cuda.set_device(device())
    if threads is not None:
        _torch().set_num_threads(threads)


def helper_thread(name: str) -> ThreadPoolExecutor:
    """Return a single-thread executor for work that overlaps with the main thread's computation.

    Its operators run on a single core. With a second pool, there would be more OpenMP threads than cores, and OpenMP
    would put every thread of the process to sleep after each operator instead of letting it spin. An image model's
    update took up to 1.2 times as long.
    """
    return ThreadPoolExecutor(1, name, initializer=claim, initargs=(1,))


@contextmanager
def own_stream() -> Iterator[None]:
    """Queue this thread's work on a separate stream, and wait for it on exit. Work that other threads queue in the
    meantime does not wait for it, but `synchronize` in another thread does. No-op on
    CPU."""
    if not on_cuda():
        yield
        return
    stream = _torch().cuda.Stream()
    with _torch().cuda.stream(stream):
        yield
    stream.synchronize()


def use_expandable_segments() -> None:
    """On GPU, let torch's allocator grow its segments, unless the environment configures the allocator. Call it before
    the process allocates device memory.

    Otherwise, packs of different lengths fragment the memory. On an H200, an update of a model with 2.3B parameters
    reserved 8.3 GB more than its tensors need. With growing segments, it reserved 0.5 GB more, at the same speed.
    """
    if on_cuda() and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.intersection(os.environ):
        _torch().cuda.memory._set_allocator_settings("expandable_segments:True")


def error_counts() -> dict[str, int]:
    """Return the number of uncorrected memory errors, whether row remaps have failed or are pending until the device is
    reset, and whether the driver requires a reset or reboot because of any error (0 or 1). Empty on CPU. Counters that
    the device or its driver does not support are missing.

    The driver derives this requirement from the XID of an error, according to NVIDIA's XID catalog, and logs it as XID
    154 (https://docs.nvidia.com/deploy/xid-errors). XIDs that only end the application, such as 13 and 31, require no
    action."""
    if not on_cuda() or find_spec("pynvml") is None:
        return {}
    import pynvml as nvml  # pyright: ignore[reportMissingImports]

    counts: dict[str, int] = {}
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid(0)}")
        with suppress(nvml.NVMLError):
            kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            counts["uncorrected memory errors"] = nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)
        with suppress(nvml.NVMLError):
            _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
            counts |= {"pending row remaps": is_pending, "failed row remaps": has_failed}
        with suppress(nvml.NVMLError, AttributeError):  # older releases of the library do not name the field
            [field] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                needs_action = field.value.uiVal != nvml.NVML_GPU_RECOVERY_ACTION_NONE
                counts["errors that require a reset or reboot"] = int(needs_action)
    return counts


def probe_seconds() -> float:
    """Return the duration of a fixed amount of matrix products on the device: 4.4 TFLOP on a GPU, 0.13 GFLOP on a
    CPU."""
    dtype, size, count = ("bfloat16", 2048, 256) if on_cuda() else ("float32", 256, 4)
    return product_seconds(device(), dtype, size, count)


def product_seconds(which: torch.device, dtype: str, size: int, count: int) -> float:
    """Return the seconds that `count` products of square matrices take, in the fastest of NUM_PROBES trials."""
    torch = _torch()
    matrix = torch.ones(size, size, dtype=getattr(torch, dtype), device=which)
    product = torch.empty_like(matrix)
    seconds = []
    for _ in range(NUM_PROBES):
        synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            torch.mm(matrix, matrix, out=product)
        synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def synchronize(which: torch.device | None = None) -> None:
    """Wait for all work queued on the device. None selects the current device."""
    if on_cuda():
        _torch().cuda.synchronize(which)


def random_state() -> torch.Tensor | None:
    """Return the device's RNG state; None on CPU, which uses torch's global generator."""
    return _torch().cuda.get_rng_state() if on_cuda() else None


def set_random_state(state: torch.Tensor | None) -> None:
    if state is not None:
        _torch().cuda.set_rng_state(state)


def release_cache() -> None:
    """Release torch's cached device memory, including memory that was shared with other processes."""
    if on_cuda():
        _torch().cuda.ipc_collect()
        _torch().cuda.empty_cache()


def send(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """Copy a small host tensor to a device. On CUDA, the copy goes through page-locked memory, so that the host does
    not wait for work queued on the device."""
    if target.type != "cuda":
        return tensor.to(target)
    return tensor.pin_memory().to(target, non_blocking=True)


def host_empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized host tensor that the device copies to and from at full speed. On CUDA its memory is
    page-locked for as long as the tensor lives. Raise a RuntimeError if the memory cannot be locked."""
    if not on_cuda() or tensor.nbytes == 0:
        return _torch().empty_like(tensor, device="cpu")
    # torch's own pinned allocator rounds up to a power of two and never frees. Locking applies to whole pages, so
    # these pages must not be shared with anything else.
    pages = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    host = _torch().frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    lock_pages(host)
    return host


def lock_pages(host: torch.Tensor) -> None:
    """Page-lock a host tensor's memory for as long as the tensor lives, so that the device copies to and from it at
    full speed. On CPU, do nothing. Raise a RuntimeError if the memory cannot be locked."""
    if not on_cuda():
        return
    cudart, address = _torch().cuda.cudart(), host.data_ptr()
    if error := int(cudart.cudaHostRegister(address, host.nbytes, _PORTABLE)):
        raise RuntimeError(
            f"CUDA error {error}: could not page-lock {host.nbytes / 2**30:.2f} GiB of host memory. Fix: free memory "
            "on this machine, or raise the memory limit of the job or container"
        )
    weakref.finalize(host, cudart.cudaHostUnregister, address).atexit = False
