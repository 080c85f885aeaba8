"""Page-locked host memory and error counters of a GPU, with fakes of NVIDIA's libraries."""

from __future__ import annotations

import mmap
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.core import device

SIZES = (1, 1000, 5 * 2**20 + 3)
"""Numbers of elements: one, and two that are not powers of two."""


class Cudart:
    """A fake CUDA runtime that records locked memory."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        """Address -> size in bytes."""
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert not self._pages(address, size) & {page for item in self.locked.items() for page in self._pages(*item)}
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock memory, which must still be mapped."""
        ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)
        del self.locked[address]
        return 0

    def _pages(self, address: int, size: int) -> set[int]:
        return set(range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1))


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_host_empty_like_locks_exactly_its_bytes(cudart: Cudart, dtype: torch.dtype) -> None:
    sources = [torch.arange(size).to(dtype).view(1, -1) for size in SIZES]
    hosts = [device.host_empty_like(source).copy_(source) for source in sources]
    assert cudart.locked == {host.data_ptr(): source.nbytes for host, source in zip(hosts, sources, strict=True)}
    for host, source in zip(hosts, sources, strict=True):
        assert torch.equal(host, source)


def test_host_memory_is_unlocked_with_its_tensor(cudart: Cudart) -> None:
    first, second = (device.host_empty_like(torch.zeros(1000)) for _ in range(2))
    view = first[10:].fill_(7)
    del first
    assert list(cudart.locked) == [second.data_ptr()]
    assert view.sum() == 7 * 990, "a view keeps the memory mapped"


def test_nothing_is_locked_if_empty_or_on_cpu(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.host_empty_like(torch.zeros(0, 3)).shape == (0, 3)
    monkeypatch.setattr(device, "on_cuda", lambda: False)
    assert device.host_empty_like(torch.zeros(2, 3)).shape == (2, 3)
    assert not cudart.locked


def test_failure_to_lock_memory_raises(cudart: Cudart) -> None:
    cudart.error = 2
    with pytest.raises(
        RuntimeError, match=r"^CUDA error 2: could not page-lock 0.50 GiB of host memory\. Fix: free memory "
    ):
        device.host_empty_like(torch.empty(2**29, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_on_gpu_unless_the_environment_decides(monkeypatch, on_gpu: bool, variable: str | None):
    settings: list[str] = []
    monkeypatch.setattr(device, "on_cuda", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    device.use_expandable_segments()
    assert settings == (["expandable_segments:True"] if on_gpu and variable is None else [])


def test_helper_thread_computes_on_one_core() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with device.helper_thread("helper") as helper:
            assert helper.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class Nvml(ModuleType):
    """A fake of NVIDIA's management library for one device, which lacks the counters in `unsupported`."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED = 0, 3
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_GPU_RECOVERY_ACTION_NONE = 230, 0

    class NVMLError(Exception):
        pass

    def __init__(self, *unsupported: str, action: int = 0):
        """action: the action that the driver requires, such as 1 for a reset."""
        super().__init__("pynvml")
        self._action = action
        self.__spec__ = ModuleSpec("pynvml", None)
        self._unsupported, self._is_initialized = unsupported, False

    def nvmlInit(self) -> None:
        self._is_initialized = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self._is_initialized
        return self._unless_unsupported("handle", uuid)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert (handle, kind, counter) == ("GPU-1234", 1, 0)
        return self._unless_unsupported("errors", 5)

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        assert handle == "GPU-1234"
        return self._unless_unsupported("rows", (7, 8, 1, 0))

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        """Return a status for each field. For unknown fields, the driver also returns a status instead of raising an
        error."""
        assert (handle, fields) == ("GPU-1234", [230])
        self._unless_unsupported("fields", None)
        status = self.NVML_ERROR_NOT_SUPPORTED if "action" in self._unsupported else self.NVML_SUCCESS
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=self._action))]

    def _unless_unsupported(self, name: str, value: Any) -> Any:
        if name in self._unsupported:
            raise self.NVMLError
        return value


ERRORS, ROWS = {"uncorrected memory errors": 5}, {"pending row remaps": 1, "failed row remaps": 0}
RESET = "errors that require a reset or reboot"


@pytest.mark.parametrize(
    ("unsupported", "counts"),
    [
        ((), ERRORS | ROWS | {RESET: 0}),
        (("errors",), ROWS | {RESET: 0}),
        (("rows",), ERRORS | {RESET: 0}),
        (("action",), ERRORS | ROWS),
        (("fields",), ERRORS | ROWS),
        (("handle",), {}),
    ],
    ids=["all", "no errors", "no rows", "old driver", "no fields", "no device"],
)
def test_supported_error_counters_are_read(monkeypatch, unsupported: tuple[str, ...], counts: dict[str, int]) -> None:
    assert counts_of(monkeypatch, Nvml(*unsupported)) == counts


def counts_of(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> dict[str, int]:
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(device, "uuid", lambda gpu: "1234")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return device.error_counts()


@pytest.mark.parametrize(("action", "required"), [(0, 0), (1, 1), (2, 1), (4, 1)])
def test_required_reset_is_an_error(monkeypatch: pytest.MonkeyPatch, action: int, required: int) -> None:
    assert counts_of(monkeypatch, Nvml(action=action))[RESET] == required


def test_old_library_lacks_the_required_action(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    assert counts_of(monkeypatch, Nvml()) == ERRORS | ROWS


def test_cpu_has_no_error_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_cuda", lambda: False)
    assert device.error_counts() == {} and device.probe_seconds() > 0


def test_speed_probe_measures_its_fastest_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials take 3, 1, 4, 1 and 5 s. Each multiplies the given number of matrices."""
    products: list[torch.Size] = []
    times = iter([0, 3, 10, 11, 20, 24, 30, 31, 40, 45])
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(a.shape) or multiply(a, b, out=out))
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert device.product_seconds(torch.device("cpu"), "float32", size=4, count=2) == 1
    assert products == [(4, 4)] * 2 * device.NUM_PROBES
