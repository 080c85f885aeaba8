"""Weights on a GPU: who publishes what for whom, and who opens and closes it, with host memory in the place of a
GPU's."""

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
OWN = {"any": torch.empty(1)}
"""Tells the reader's device."""


ARGUMENTS = list(inspect.signature(rebuild_cuda_tensor).parameters)
"""The names of rebuild_cuda_tensor's arguments in the installed torch."""


class FakeIpc:
    """Handles of storages, each of which may be opened once."""

    def __init__(self) -> None:
        self._published: dict[int, torch.Tensor] = {}
        self.readers: dict[tuple[bytes, int], int] = {}
        """The readers as torch counts them: an owner's storage is kept while its counter, which has no sign, is not
        zero."""
        self.opened: dict[int, int] = {}
        """Handle -> the device that it was opened on."""
        self._open: list[weakref.ref] = []

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple:
        number = len(self._published)
        self._published[number] = tensor
        self.readers[b"/torch_of_owner", number] = 1
        own = {"storage_device": "the owner's number", "storage_handle": number}
        own |= {"ref_counter_handle": b"/torch_of_owner", "ref_counter_offset": number}
        return None, tuple(own.get(name) for name in ARGUMENTS)

    def rebuild(self, *arguments) -> torch.Tensor:
        given = dict(zip(ARGUMENTS, arguments, strict=True))
        number = given["storage_handle"]
        assert number not in self.opened
        self.opened[number] = given["storage_device"]
        memory = self._published[number].numpy()[:]  # the storage of a tensor made from it keeps it
        self._open.append(weakref.ref(memory))
        weakref.finalize(memory, self.release, given["ref_counter_handle"], given["ref_counter_offset"])
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
    """The owner's GPU is the reader's second."""
    fake = FakeIpc()
    monkeypatch.setattr(cuda_memory, "reduce_tensor", fake.reduce_tensor)
    monkeypatch.setattr(cuda_memory, "rebuild_cuda_tensor", fake.rebuild)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", staticmethod(fake.release))
    monkeypatch.setattr(device, "uuid", lambda index: {None: "GPU-b", 0: "GPU-a", 1: "GPU-b"}[index])
    monkeypatch.setattr(device, "num_gpus", lambda: 2)
    return fake


def live_weights() -> dict[str, torch.Tensor]:
    """Half of them views of one buffer, as the trainer has them, some of these transposed."""
    weights = random_checkpoint(CONFIG)
    together = list(weights)[::2]
    buffer, offset = torch.zeros(3 + sum(weights[name].numel() for name in together)), 3
    for name in together:
        shape = weights[name].shape
        view = buffer[offset : offset + shape.numel()].view(shape[::-1]).permute(*reversed(range(len(shape))))
        weights[name] = view.copy_(weights[name])
        offset += shape.numel()
    return weights


def channel(weights: dict[str, torch.Tensor], moving: bool) -> CudaMemory:
    """Returns a channel on which the weights are published for all targets."""
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
def test_reading_has_ended_on_every_device_when_it_is_said(
    ipc: FakeIpc, moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the owners, and the reader's own, which is not the process's current one. Until then all is open."""
    weights, [target, _] = live_weights(), TARGETS
    open_then: dict[torch.device, int] = {}
    reader = channel(weights, moving).open(target.name, {"any": torch.empty(1, device="meta")}, PLAN)
    monkeypatch.setattr(device, "synchronize", lambda which: open_then.update({which: ipc.num_open}))
    written(reader, target)
    assert open_then == dict.fromkeys(map(torch.device, ("meta", "cpu")), len(ipc.opened))


@pytest.mark.parametrize("moving", [False, True])
def test_every_storage_is_opened_once_by_each_reader(ipc: FakeIpc, moving: bool) -> None:
    weights = live_weights()
    num_storages = len({tensor.untyped_storage().data_ptr() for tensor in weights.values()})
    assert 1 < num_storages < len(weights)
    shared = channel(weights, moving)
    readers = [shared.open(target.name, OWN, PLAN) for target in TARGETS]
    for reader, target in zip(readers, TARGETS, strict=True):
        check(reader, target, weights)
    assert ipc.unopened == set()
    assert list(ipc.opened.values()) == [1] * num_storages * len(TARGETS)
    assert ipc.num_open == (0 if moving else num_storages * len(TARGETS))


def test_what_stays_in_its_place_is_read_again(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    reader = channel(weights, moving=False).open(target.name, OWN, PLAN)
    for _ in range(2):
        check(reader, target, weights)
        for tensor in weights.values():
            tensor.mul_(2)
    del reader
    assert ipc.num_open == 0


def test_what_has_moved_is_published_anew(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    for _ in range(2):
        check(channel(weights, moving=True).open(target.name, OWN, PLAN), target, weights)
        assert ipc.num_open == 0
        weights = {name: tensor.clone() + 1 for name, tensor in weights.items()}


@pytest.mark.parametrize("moving", [False, True])
def test_an_owner_can_free_its_storages_whatever_becomes_of_their_readers(ipc: FakeIpc, moving: bool) -> None:
    """One reads and closes, the other dies before."""
    weights, [target, _] = live_weights(), TARGETS
    reader = channel(weights, moving).open(target.name, OWN, PLAN)
    assert not any(ipc.readers.values()), "nobody has opened anything"
    check(reader, target, weights)
    del reader
    assert (len(ipc.opened), ipc.num_open) == (len(ipc.readers) // 2, 0)
    assert not any(ipc.readers.values())


def test_a_refit_that_fails_leaves_nothing_open(ipc: FakeIpc) -> None:
    weights, [target, _] = live_weights(), TARGETS
    copies = channel(weights, moving=True).open(target.name, OWN, PLAN).deliver(PLAN.into(target.name).copies)
    next(copies)
    assert ipc.num_open == 1
    copies.close()
    assert ipc.num_open == 0


def test_a_gpu_that_the_reader_does_not_see_is_named(ipc: FakeIpc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_gpus", lambda: 1)
    reader = channel(live_weights(), moving=False).open(TARGETS[0].name, OWN, PLAN)
    message = r"^huggingface has its weights on GPU GPU-b, and this process sees GPU-a only$"
    with pytest.raises(ValueError, match=message):
        written(reader, TARGETS[0])
    with pytest.raises(ValueError, match="huggingface has published no parameter other"):
        reader.dtype(SOURCE.name, "other")
