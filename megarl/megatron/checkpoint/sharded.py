"""Sharded checkpoints of a model and its optimizer in Megatron's format, which load under any layout."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from megarl.core import device
from megarl.core.checkpoint import FileRecord, seal, write_note
from megarl.core.errors import UserError
from megarl.core.files import DISK_FULL, DISK_S, full_disk, is_full, is_plain, retry_when_full, shown
from megarl.core.outage import pauses
from megarl.megatron import parallel, random_state
from megarl.megatron.checkpoint import optimizer_state
from megarl.megatron.checkpoint.extents import CanonicalShard, Shard
from megarl.megatron.checkpoint.optimizer_state import OnDevice
from megarl.megatron.checkpoint.untrusted import without_code
from megarl.megatron.model.build import named_tensors
from megarl.megatron.routes import model_of
from megarl.megatron.weight_snapshots import WeightSnapshots

# Save each layer under its own name. If layers were slices of one tensor, frozen layers would leave holes in the
# optimizer state.
FORMAT = {"non_homogeneous_layers": True}
BACKEND = ("torch_dist", 1)
"""Megatron's name and version of the file format."""

ShardedAdapters = Mapping[torch.Tensor, CanonicalShard]
"""Adapter factor -> sharding description, for one rank."""

SNAPSHOTS = "weight_snapshots"
RANDOM = "random"
"""Key of the ranks' RNG states, which can be restored only under the same layout."""


class Saving:
    """A save in progress whose copy to host memory is complete. A thread writes the files and reads them back while
    training continues. Finally it writes a note that lists the files, which signals to other processes that the rank's
    files are complete."""

    def __init__(self, folder: Path, request: AsyncRequest):
        self._folder = folder
        self._thread = device.helper_thread("checkpoint")
        write = request.async_fn  # holds the only references to the copies
        assert write is not None, "the request writes nothing"
        self._written: Future[list[FileRecord]] = self._thread.submit(_write, folder, write, dist.get_rank())

    @property
    def written(self) -> bool:
        """Whether the thread has finished, successfully or not."""
        return self._written.done()

    def finish(self, checkpoint: Path) -> list[FileRecord]:
        """Wait for the thread and return this rank's files, which are then on disk. Re-raise the thread's error, if
        any. The files' paths are relative to the folder `checkpoint`."""
        try:
            records = self._written.result()
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            free = shutil.disk_usage(self._folder).free / 1e9
            raise RuntimeError(
                f"{self._folder}: writing failed with {free:.2f} GB of free disk space: {reason}. Fix: free disk space "
                "or repair the disk, then resume with resume=auto"
            ) from error
        self._thread.shutdown()
        # Return the freed copies' memory to the system. Otherwise, glibc would keep more of it after every save.
        ctypes.CDLL(None).malloc_trim(0)
        return [replace(record, path=str((self._folder / record.path).relative_to(checkpoint))) for record in records]


def _write(folder: Path, write: Callable[[], None], rank: int) -> list[FileRecord]:
    """Write this rank's part of the model and a note that lists its files. Return the files with paths relative to the
    folder. Rank 0 also writes the small files shared by all ranks. While the disk is full, wait as in
    `retry_when_full`."""
    _write_parts(folder, write, rank)
    files = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        retry_when_full(lambda: save_config(CheckpointingConfig(*BACKEND), str(folder)), folder / "config")
        # List the folder only once, because other ranks rename their completion notes concurrently.
        files += sorted(file for file in folder.iterdir() if not file.name.startswith("__"))
    records = [retry_when_full(lambda file=file: seal(file, folder), file) for file in files]
    write_note(folder, rank, records)
    return records


def _write_parts(folder: Path, write: Callable[[], None], rank: int) -> None:
    """Call `write`, a collective, and retry on all ranks while the disk is full on any of them. All ranks receive the
    same errors and use the same pauses, so they make the same number of calls."""
    for pause in (*pauses(DISK_S), None):
        try:
            return write()
        except CheckpointException as error:
            reasons = [reason for reason, _ in error.failures.values()]
            if not any(isinstance(reason, OSError) and reason.errno in DISK_FULL for reason in reasons):
                raise
            for file in folder.glob(f"__{rank}_*"):
                file.unlink()  # free the space for the run's other files during the pause
            if pause is None:
                raise full_disk(folder) from error
            print(f"{folder}: the disk is full; waiting {pause:g} s", flush=True)
            time.sleep(pause)


class _Writer(FileSystemWriter):
    """A writer that reports a full disk as an OSError, because torch's own error does not mention disk space."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if is_full(error, Path(self.path) / "data"):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {self.path}") from error
            raise


def save(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    counters: Mapping[str, float],
    folder: Path,
    on_device: OnDevice,
    adapters: ShardedAdapters | None = None,
) -> Saving:
    """Start saving into an empty folder. Collective over all ranks. Returns once all state is copied to host memory.
    `counters` are values that `load` returns, the same on all ranks; they include num_updates. For on_device, see
    optimizer_state.sharded. If adapters are given, no other weights are saved."""
    models = _sharded_models(chunks) if adapters is None else {}
    # This call copies the optimizer state. It looks up parameters by identity, so copy the model's tensors only
    # afterwards.
    optimized = optimizer_state.sharded(optimizer, adapters or _by_parameter(models), on_device)
    snapshots = _sharded_snapshots(weight_snapshots, chunks, models)
    untrained = _untrained(models, optimizer)
    for shard in _shards([untrained, snapshots]):
        if is_main_replica(shard.replica_id) and shard.data is not None:
            shard.data = shard.data.detach().to("cpu", copy=True)
    state = {**untrained, SNAPSHOTS: snapshots, "own": optimized, "counters": dict(counters), RANDOM: _sharded_random()}
    strategy = ThreadStrategy(*BACKEND)
    request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True)
    assert request is not None, "the asynchronous save returned no request"
    return Saving(folder, request)


def load(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    weight_snapshots: WeightSnapshots,
    folder: Path,
    same_layout: bool,
    adapters: ShardedAdapters | None = None,
) -> dict[str, float]:
    """Load a checkpoint written under any layout, in place, and return its counters. Collective over all ranks.

    Each data-parallel rank reads its own range of the trained parameters and receives the remaining ranges from its
    peers. If the checkpoint was written under this layout (same_layout), each rank restores its RNG state. For
    `adapters`, see `save`.
    """
    models = _sharded_models(chunks) if adapters is None else {}
    shards = adapters or _by_parameter(models)
    untrained = _untrained(models, optimizer)
    state = {**untrained, SNAPSHOTS: _sharded_snapshots(weight_snapshots, chunks, models)}
    if same_layout:
        state[RANDOM] = _sharded_random()
    with without_code(folder):
        result: Any = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    loaded, missing, unexpected = result
    if unexpected:
        raise UserError(
            f"{folder}: checkpoint of a different model: only one of the two models has {sorted(unexpected)[0]}. Fix: "
            "resume from a checkpoint of this model"
        )
    for index, chunk in enumerate(chunks):
        # strict=False, because trained parameters are loaded below. The keys were checked above.
        model_of(chunk).load_state_dict(loaded.get(f"model{index}", {}), strict=False)
    weight_snapshots.restore(loaded.get(SNAPSHOTS, {}))
    trained_keys = {key for key in missing if not key.startswith(RANDOM)}
    counters = _checked_counters(loaded.get("counters"), folder)
    optimizer_state.restore(optimizer, shards, int(counters["num_updates"]), folder, trained_keys)
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    if same_layout:
        try:
            random_state.restore(loaded[RANDOM])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f"{folder}: the RNG state is malformed ({error}). Fix: resume from another checkpoint"
            ) from None
    return counters


def _checked_counters(counters: Any, folder: Path) -> dict[str, float]:
    """Return a checkpoint's counters. Raise UserError if one is malformed."""
    fix = "Fix: resume from another checkpoint"
    if not isinstance(counters, dict) or "num_updates" not in counters:
        raise UserError(f"{folder}: counters={shown(counters)} has no num_updates. {fix}")
    for name, value in counters.items():
        if not is_plain(value, float) or value < 0:
            raise UserError(f"{folder}: counters.{name}={shown(value)} is not a nonnegative number. {fix}")
    return counters


class ThreadStrategy(TorchDistSaveShardedStrategy):
    """A save strategy that writes from a thread. Megatron's own strategy forks, which is unsafe in a process with torch
    and Ray threads, and it keeps one manager process per rank."""

    def async_save(self, sharded_state_dict, checkpoint_dir, async_strategy="mcore") -> AsyncRequest:
        """Return a request that writes the tensors. They are in host memory and do not change."""
        keyed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, keep_only_main_replica=True)
        state = mcore_to_pyt_state_dict(keyed)

        def write() -> None:
            writer, planner = (
                _Writer(checkpoint_dir, sync_files=True),
                MCoreSavePlanner(flatten_state_dict=False),
            )
            save_state(state, storage_writer=writer, planner=planner, process_group=parallel.host_group())

        # Skip Megatron's finalization callbacks: they are collectives over process groups that training is using.
        return AsyncRequest(write, (), [])


def _sharded_models(chunks: Sequence[DistributedDataParallel]) -> dict[str, Any]:
    """Return each chunk's sharded state. Layers are numbered across the whole model, regardless of the layout."""
    return {f"model{i}": model_of(chunk).sharded_state_dict(metadata=FORMAT) for i, chunk in enumerate(chunks)}


def _untrained(models: Mapping[str, Any], optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return the sharded state without the trained parameters; `optimizer_state` writes and reads those by range."""
    trained = optimizer_state.trained_parameters(optimizer)
    return {
        name: {key: entry for key, entry in entries.items() if entry.data not in trained}
        for name, entries in models.items()
    }


def _sharded_snapshots(
    weight_snapshots: WeightSnapshots, chunks: Sequence[DistributedDataParallel], models: Mapping[str, Any]
) -> dict[str, dict[str, Shard]]:
    """Return the sharded state of the mutable snapshots, sharded like the model's weights."""
    live, shards = named_tensors(chunks), _by_parameter(models)
    return {
        name: {key: _sharded_like(shards[live[key]], f"{SNAPSHOTS}.{name}", weight) for key, weight in weights.items()}
        for name, weights in weight_snapshots.state().items()
    }


def _sharded_like(model: Shard, prefix: str, tensor: torch.Tensor) -> Shard:
    """Return a sharded tensor with a parameter's sharding, stored under the parameter's key with this prefix."""
    changes: dict[str, Any] = {"key": f"{prefix}.{model.key}", "data": tensor}
    if isinstance(model, ShardedTensor):  # factories have no dtype
        changes["dtype"] = tensor.dtype
    return replace(model, **changes)


def _by_parameter(models: Mapping[str, Any]) -> dict[torch.Tensor, Shard]:
    return {shard.data: shard for shard in _shards(models) if shard.data is not None}


def _shards(state: Any) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    return (shard for shard in nested_values(state) if isinstance(shard, ShardedTensor | ShardedTensorFactory))


def _sharded_random() -> ShardedObject:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return ShardedObject(RANDOM, random_state.capture(), (world_size,), (rank,), replica_id=0)
