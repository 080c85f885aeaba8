"""Loading of checkpoints without code that their files contain."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megarl.resharding.transports.torch_dist import load_metadata


@contextmanager
def without_code() -> Iterator[None]:
    """Make torch's checkpoint reader accept only tensors and plain values inside the context. Otherwise it unpickles a
    checkpoint's metadata and objects, which may call any function."""
    original, load_bytes = filesystem.pickle, DefaultLoadPlanner.load_bytes
    filesystem.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)  # pyright: ignore[reportAttributeAccessIssue]
    DefaultLoadPlanner.load_bytes = _load_object
    try:
        yield
    finally:
        filesystem.pickle, DefaultLoadPlanner.load_bytes = original, load_bytes


def _load_object(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    assert not planner.flatten_state_dict, "Megatron's planner does not flatten the state"
    planner.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
