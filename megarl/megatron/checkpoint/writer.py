"""Writes Megatron checkpoints for all ranks in a layout, one rank after another and one tensor at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megarl.resharding.checkpoint import Extent
from megarl.resharding.piece import Rectangle, num_bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """An extent to write, and the key prefix and dtype to write it with."""

    extent: Extent
    prefix: str
    dtype: str

    @property
    def name(self) -> str:
        return self.prefix + self.extent.name

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.extent.shape, self.dtype)

    @property
    def place(self) -> tuple[str, Rectangle]:
        """The checkpoint tensor's key, and the entry's rectangle in that tensor."""
        return self.prefix + self.extent.key, self.extent.place

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.prefix + self.extent.key, torch.Size(self.extent.offset))


def write_extents(
    ranks: Sequence[Sequence[Entry]],
    objects: Sequence[Sequence[str]],
    tensor: Callable[[Entry], torch.Tensor],
    folder: Path,
) -> None:
    """Write each rank's entries and empty objects (given by key) into an empty folder, as if the ranks had saved them.
    `tensor` returns an entry's elements and is called right before they are written; the next call may overwrite the
    result."""
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    planner = LazyPlanner({entry.index: entry for rank in ranks for entry in rank}, tensor)
    plans = [_plan(entries, keys) for entries, keys in zip(ranks, objects, strict=True)]
    plans, metadata = planner.create_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class LazyPlanner(DefaultSavePlanner):
    """A save planner that produces each tensor right before it is written."""

    def __init__(self, entries: Mapping[MetadataIndex, Entry], tensor: Callable[[Entry], torch.Tensor]):
        super().__init__(flatten_state_dict=False)
        self._entries, self._tensor = entries, tensor

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.tensor_data is None:
            return _empty_object()
        return self._tensor(self._entries[write_item.index]).view(write_item.tensor_data.chunk.sizes)


def _plan(entries: Sequence[Entry], objects: Sequence[str]) -> SavePlan:
    tensors = [WriteItem(entry.index, WriteItemType.SHARD, tensor_data=_description(entry)) for entry in entries]
    return SavePlan([*(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects), *tensors])


def _description(entry: Entry) -> TensorWriteData:
    extent = entry.extent
    sizes = torch.Size(stop - start for start, stop in extent.place)
    chunk = ChunkStorageMetadata(torch.Size(extent.offset), sizes)
    return TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, entry.dtype)), torch.Size(extent.global_shape))


def _empty_object() -> io.BytesIO:
    """Return the object that Megatron writes for a layer without non-parameter state."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream
