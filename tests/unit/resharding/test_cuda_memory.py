"""Publishing, opening and closing of weights over CUDA IPC, simulated with host memory."""

from __future__ import annotations

import inspect
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megarl.core import device
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, vllm_holders
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports import cuda_memory
from megarl.resharding.transports.cuda_memory import CudaMemory, publish
from megarl.resharding.transports.local import LocalMemory
from tests.unit.resharding.cases import config_of, random_checkpoint

CONFIG = config_of()
SOURCE, TARGETS = huggingface_holder(CONFIG, "float32"), vllm_holders(CONFIG, 1, 2, "float32")
PLAN = make_plan([SOURCE], TARGETS)
READER_PARAMETERS = {"any": torch.empty(1)}
"""A parameter that determines the reader's device."""


ARGUMENTS = list(inspect.signature(rebuild_cuda_tensor).parameters)
"""Names of the arguments of rebuild_cuda_tensor in the installed torch."""


class FakeIpc:
    """Fake CUDA IPC: handles of storages, each of which may be opened once."""

    def __init__(self) -> None:
        self._published: dict[int, torch.Tensor] = {}
        self.readers: dict[tuple[bytes, int], int] = {}
        """torch's reference counters (unsigned): an owner's storage is kept while its counter is not zero."""
        self.opened: dict[int, int] = {}
        """handle -> device on which it was opened."""
        self._open: list[weakref.ref] = []

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple:
        number = len(self._published)
        self._published[number] = tensor
        self.readers[b"/torch_of_owner", number] = 1
        arguments = {"storage_device": "the owner's index", "storage_handle": number}
        arguments |= {"ref_counter_handle": b"/torch_of_owner", "ref_counter_offset": number}
        return None, tuple(arguments.get(name) for name in ARGUMENTS)

    def rebuild(self, *values) -> torch.Tensor:
        arguments = dict(zip(ARGUMENTS, values, strict=True))
        number = arguments["storage_handle"]
        assert number not in self.opened
        self.opened[number] = arguments["storage_device"]
        memory = self._published[number].numpy()[:]  # stays alive as long as the storage of the new tensor
        self._open.append(weakref.ref(memory))
        weakref.finalize(memory, self.release, arguments["ref_counter_handle"], arguments["ref_counter_offset"])
        return torch.from_numpy(memory)

    def release(self, handle: bytes, offset: int) -> None:
        if (handle, offset) in self.readers:
            self.readers[handle, offset] = (self.readers[handle, offset] - 1) % 2**64

    @property
    def unopened(self) -> set[int]:
        return self._published.keys() - self.opened

    @property
    def num_open(self) -> int:
        return sum(reference() is not None for reference in self._open)


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    """Fake IPC in which the owner's GPU has index 1 in the reader."""
    fake = FakeIpc()
    monkeypatch.setattr(cuda_memory, "reduce_tensor", fake.reduce_tensor)
    monkeypatch.setattr(cuda_memory, "rebuild_cuda_tensor", fake.rebuild)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", staticmethod(fake.release))
    monkeypatch.setattr(device, "uuid", lambda index: {None: "GPU-b", 0: "GPU-a", 1: "GPU-b"}[index])
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    return fake


def live_weights() -> dict[str, torch.Tensor]:
    """Return weights of which half are views of one buffer, as in a trainer, and some of these transposed."""
    weights = random_checkpoint(CONFIG)
    buffered = list(weights)[::2]
    buffer, offset = torch.zeros(3 + sum(weights[name].numel() for name in buffered)), 3
    for name in buffered:
        shape = weights[name].shape
        view = buffer[offset : offset + shape.numel()].view(shape[::-1]).permute(*reversed(range(len(shape))))
        weights[name] = view.copy_(weights[name])
        offset += shape.numel()
    return weights


def channel(weights: dict[str, torch.Tensor], moving: bool) -> CudaMemory:
    """Return a channel with the weights published for all targets."""
    return CudaMemory({SOURCE.name: {target.name: publish(weights) for target in TARGETS}}, moving)


def written(transport, target) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(shape, torch.nan) for name, shape in target.shapes.items()}
    execute(PLAN.into(target.name), parameters, transport)
    return parameters


def check(transport, target, weights: dict[str, torch.Tensor]) -> None:
    expected = written(LocalMemory({SOURCE.name: weights}), target)
    for name, parameter in written(transport, target).items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("moving", [False, True])
def test_delivery_ends_after_synchronizing_all_devices(
    ipc: FakeIpc, moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Synchronizes the owners' devices and the reader's, which is not the current device, before closing handles."""
    weights, [target, _] = live_weights(), TARGETS
    num_open: dict[torch.device, int] = {}
    reader = channel(weights, moving).open(target.name, {"any": torch.empty(1, device="meta")}, PLAN)
    monkeypatch.setattr(device, "synchronize", lambda which: num_open.update({which: ipc.num_open}))
    written(reader, target)
    assert num_open == dict.fromkeys(map(torch.device, ("meta", "cpu")), len(ipc.opened))


@pytest.mark.parametrize("moving", [False, True])
def test_each_reader_opens_each_storage_once(ipc: FakeIpc, moving: bool) -> None:
    weights = live_weights()
    num_storages = len({tensor.untyped_storage().data_ptr() for tensor in weights.values()})
    assert 1 < num_storages < len(weights)
    shared = channel(weights, moving)
    readers = [shared.open(target.name, READER_PARAMETERS, PLAN) for target in TARGETS]
    for reader, target in zip(readers, TARGETS, strict=True):
        check(reader, target, weights)
    assert ipc.unopened == set()
    assert list(ipc.opened.values()) == [1] * num_storages * len(TARGETS)
    assert ipc.num_open == (0 if moving else num_storages * len(TARGETS))


def test_unmoved_weights_are_read_again(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    reader = channel(weights, moving=False).open(target.name, READER_PARAMETERS, PLAN)
    for _ in range(2):
        check(reader, target, weights)
        for tensor in weights.values():
            tensor.mul_(2)
    del reader
    assert ipc.num_open == 0


def test_moved_weights_are_published_again(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    for _ in range(2):
        check(channel(weights, moving=True).open(target.name, READER_PARAMETERS, PLAN), target, weights)
        assert ipc.num_open == 0
        weights = {name: tensor.clone() + 1 for name, tensor in weights.items()}


@pytest.mark.parametrize("moving", [False, True])
def test_owner_can_free_storages_after_a_reader_died(ipc: FakeIpc, moving: bool) -> None:
    """One reader reads and closes, the other dies before reading."""
    weights, [target, _] = live_weights(), TARGETS
    reader = channel(weights, moving).open(target.name, READER_PARAMETERS, PLAN)
    assert not any(ipc.readers.values()), "no storage has been opened yet"
    check(reader, target, weights)
    del reader
    assert (len(ipc.opened), ipc.num_open) == (len(ipc.readers) // 2, 0)
    assert not any(ipc.readers.values())


def test_failed_refit_closes_all_handles(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    copies = (
        channel(weights, moving=True).open(target.name, READER_PARAMETERS, PLAN).deliver(PLAN.into(target.name).copies)
    )
    next(copies)
    assert ipc.num_open == 1
    copies.close()
    assert ipc.num_open == 0


def test_error_names_an_invisible_gpu(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    reader = channel(live_weights(), moving=False).open(TARGETS[0].name, READER_PARAMETERS, PLAN)
    message = r"^huggingface: its weights are on GPU GPU-b, but this process can only access GPU-a\. Fix: add"
    with pytest.raises(ValueError, match=message):
        written(reader, TARGETS[0])
    with pytest.raises(ValueError, match="huggingface has not published parameter other"):
        reader.dtype(SOURCE.name, "other")
