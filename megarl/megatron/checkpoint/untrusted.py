"""Loads checkpoints without running code that their files contain."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from megarl.core.errors import UserError
from megarl.resharding.transports.torch_dist import load_metadata


@contextmanager
def without_code(folder: Path) -> Iterator[None]:
    """Make torch's checkpoint reader accept only tensors and plain values inside the context. Otherwise it unpickles a
    checkpoint's metadata and objects, which may call any function. Raise UserError on all ranks if a file in `folder`
    contains anything else."""
    module: Any = filesystem  # its attribute `pickle` is private
    original, load_bytes = module.pickle, DefaultLoadPlanner.load_bytes
    module.pickle = SimpleNamespace(load=load_metadata, dump=pickle.dump)
    DefaultLoadPlanner.load_bytes = _load_object
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        # Do not blame the content if the storage failed: torch raises AssertionError for unreadable metadata.
        if any(isinstance(cause, OSError | MemoryError | AssertionError) for cause in causes):
            raise
        # Replace torch's message, which advises loading the file with weights_only=False and thus running its code.
        kinds = " and ".join(sorted({type(cause).__name__ for cause in causes}))
        raise UserError(
            f"{folder}: a file is corrupt: its content cannot be loaded ({kinds}). Fix: use another checkpoint"
        ) from error
    finally:
        module.pickle, DefaultLoadPlanner.load_bytes = original, load_bytes


def _load_object(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
    if self.flatten_state_dict:
        set_element(self.original_state_dict, self.mappings[name], loaded)
    else:
        self.state_dict[name] = loaded
