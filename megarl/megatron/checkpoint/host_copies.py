"""Copies of a rank's training state in its node's shared memory. They outlive the process, and a new process with the
same rank resumes from them.

A copy is as exact as a checkpoint: it holds the rank's own range of the trained parameters and their optimizer state,
router biases, mutable weight snapshots, counters and RNG states. Everything else is loaded from the model folder.
Copies omit the scales of fp8=delayed; a new process starts with initial scales.
Unlike a checkpoint, a copy can be restored only with the same layout, and writing it needs neither disk nor peers.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.core import device
from megarl.core.copy_files import SLOTS, copy_file, discard_after, read_record, slot_of
from megarl.core.errors import InfrastructureFailure
from megarl.core.files import DISK_FULL
from megarl.megatron import random_state
from megarl.megatron.checkpoint.optimizer_state import (
    WEIGHT,
    OnDevice,
    initialize,
    owned_ranges,
    set_count,
)
from megarl.megatron.model.build import named_tensors
from megarl.megatron.weight_snapshots import WeightSnapshots

ALIGNMENT = 64


class Spec(NamedTuple):
    """Dtype and shape of a tensor in a copy."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes, rounded up to the alignment."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


class HostCopies:
    """One rank's last two copies, each in a slot. A slot's record is deleted before its tensors are written, and is
    written afterwards. A rank that is killed while it copies thus leaves the other slot's copy intact."""

    def __init__(self, folder: Path, rank: str):
        """`folder` is a private folder in shared memory, and `rank` names the rank's files in it."""
        self._folder, self._rank = folder, rank
        self._memory: dict[int, torch.Tensor] = {}
        """Slot -> memory mapping of its file, uint8."""

    @contextmanager
    def write(
        self, step: int, specs: Mapping[str, Spec], values: Mapping[str, Any]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of a new copy by name. The body fills them. `values` is stored as JSON. See
        `write_memory`."""
        record = json.dumps({"step": step, "values": values})
        with self.write_memory(step, record, _total_bytes(specs)) as memory:
            yield _tensors(memory, specs)

    @contextmanager
    def write_memory(self, step: int, record: str, num_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the memory of a new copy, which the body fills. The copy exists once the body has finished. It replaces
        a copy of the same or a later step, left by an interrupted attempt, or else the older copy. Raise
        InfrastructureFailure if the shared memory is full."""
        records = {slot: read_record(self._folder, self._rank, slot) for slot in SLOTS}
        steps = {slot: -1 if found is None else found["step"] for slot, found in records.items()}
        slot = min(SLOTS, key=lambda slot: -1 if steps[slot] >= step else steps[slot])
        path, hidden = (copy_file(self._folder, self._rank, slot, kind) for kind in ("json", "new"))
        path.unlink(missing_ok=True)
        yield self._mapped(slot, num_bytes)
        try:
            hidden.write_text(record)
        except OSError as error:
            _raise_if_full(error, hidden, len(record))
            raise
        hidden.rename(path)

    def has(self, step: int) -> bool:
        """Return whether there is a copy of the state at the end of `step`."""
        return self._slot(step) is not None

    def read(self, step: int, specs: Mapping[str, Spec]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors and values of the state at the end of `step`."""
        record, memory = self.read_memory(step)
        return _tensors(memory, specs), json.loads(record)["values"]

    def discard_after(self, step: int) -> None:
        """Discard the copies of states at the end of steps later than `step`."""
        discard_after(self._folder, self._rank, step)

    def read_memory(self, step: int) -> tuple[str, torch.Tensor]:
        """Return the record and the memory of the copy of the state at the end of `step`."""
        slot = self._slot(step)
        assert slot is not None, f"{self._folder}: no copy of {self._rank} after step {step}"
        record, tensors = (copy_file(self._folder, self._rank, slot, kind) for kind in ("json", "tensors"))
        return record.read_text(), self._mapped(slot, tensors.stat().st_size)

    def _slot(self, step: int) -> int | None:
        return slot_of(self._folder, self._rank, step)

    def _mapped(self, slot: int, num_bytes: int) -> torch.Tensor:
        if slot not in self._memory:
            path = copy_file(self._folder, self._rank, slot, "tensors")
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                # Reserve the memory, because writing to full shared memory would kill the process (SIGBUS).
                os.posix_fallocate(file, 0, max(num_bytes, ALIGNMENT))
            except OSError as error:
                path.unlink()
                _raise_if_full(error, path, num_bytes)
                raise
            finally:
                os.close(file)
            storage = torch.UntypedStorage.from_file(str(path), True, max(num_bytes, ALIGNMENT))
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]
            device.lock_pages(memory)
            self._memory[slot] = memory
        return self._memory[slot]


def _raise_if_full(error: OSError, path: Path, num_bytes: int) -> None:
    """Raise InfrastructureFailure if the error means that shared memory has no room for the file."""
    if error.errno in DISK_FULL:
        raise InfrastructureFailure(
            f"{path}: no room for {num_bytes / 2**30:.2f} GiB. Fix: enlarge /dev/shm, or set "
            "cluster.replace_ranks=false"
        ) from error


def _tensors(memory: torch.Tensor, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    tensors, start = {}, 0
    for name, spec in specs.items():
        size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        tensors[name] = memory[start : start + size].view(spec.dtype).view(spec.shape)
        start += spec.num_bytes
    return tensors


def _total_bytes(specs: Mapping[str, Spec]) -> int:
    return sum(spec.num_bytes for spec in specs.values())


def num_bytes(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, weight_snapshots: WeightSnapshots
) -> int:
    """Return the size in bytes of both copies of this rank."""
    specs = _specs(optimizer, _others(chunks, weight_snapshots))
    return len(SLOTS) * _total_bytes(specs)


def begin(
    copies: HostCopies,
    step: int,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    counters: Mapping[str, float],
    on_device: OnDevice,
) -> Callable[[], None]:
    """Reserve the memory for a copy of this rank's state after `step`, and record its counters and RNG states. Return a
    function that copies the tensors; any thread may call it, once. The copy is complete when the function returns.
    Until then, the state must neither change nor move. For the arguments, see `sharded.save`."""
    others = _others(chunks, weight_snapshots)
    values = {"counters": dict(counters), "random": _encoded(random_state.capture())}
    stack = ExitStack()
    tensors = stack.enter_context(copies.write(step, _specs(optimizer, others), values))
    device.synchronize()  # the copies run on a stream that does not wait for updates

    @torch.no_grad()  # applies to the calling thread
    def copy() -> None:
        with stack, device.own_stream():
            for number, owned in enumerate(owned_ranges(optimizer)):
                with on_device(owned.state()):
                    state = {WEIGHT: owned.weight()} | dict(owned.values())
                    for key in (WEIGHT, *owned.keys):
                        tensors[f"{number}.{key}"].copy_(state[key].view(-1), non_blocking=True)
            for name, tensor in others.items():
                tensors[name].copy_(tensor, non_blocking=True)

    return copy


@torch.no_grad()
def restore(
    copies: HostCopies,
    step: int,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
) -> dict[str, float]:
    """Restore this rank's state after `step` in place, and return its counters. Collective over all ranks, because the
    ranges of other data-parallel ranks are gathered."""
    initialize(optimizer)
    others = _others(chunks, weight_snapshots)
    tensors, values = copies.read(step, _specs(optimizer, others))
    counters = values["counters"]
    num_updates = int(counters["num_updates"])
    for number, owned in enumerate(owned_ranges(optimizer)):
        owned.set_values({key: tensors[f"{number}.{key}"] for key in (WEIGHT, *owned.keys)}, num_updates)
    set_count(optimizer, num_updates)
    named, snapshots = named_tensors(chunks), weight_snapshots.state()
    for name in others.keys() & named.keys():
        named[name].copy_(tensors[name])
    weight_snapshots.restore(
        {name: {key: tensors[f"{name}:{key}"] for key in weights} for name, weights in snapshots.items()}
    )
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    random_state.restore(_decoded(values["random"]))
    return counters


def _others(chunks: Sequence[DistributedDataParallel], weight_snapshots: WeightSnapshots) -> dict[str, torch.Tensor]:
    """Return the tensors that change during training without an optimizer: router biases and mutable snapshots."""
    biases = {
        name: tensor for name, tensor in named_tensors(chunks).items() if not isinstance(tensor, torch.nn.Parameter)
    }
    snapshots = {
        f"{name}:{key}": tensor for name, weights in weight_snapshots.state().items() for key, tensor in weights.items()
    }
    return biases | snapshots


def _specs(optimizer: MegatronOptimizer, others: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for number, owned in enumerate(owned_ranges(optimizer)):
        shape = (owned.stop - owned.start,)
        specs[f"{number}.{WEIGHT}"] = Spec(owned.parameter.dtype, shape)
        specs |= {f"{number}.{key}": Spec(torch.float32, shape) for key in owned.keys}
    return specs | {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in others.items()}


def _encoded(state: Any) -> str:
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> Any:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
