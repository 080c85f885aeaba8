"""Writes a model as a Hugging Face folder, a shard at a time."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config.huggingface import without_left_out
from megarl.resharding.execute import execute, planned_shapes
from megarl.resharding.piece import ITEM_BYTES
from megarl.resharding.plan import Plan, Writes
from megarl.resharding.transports.safetensors import INDEX
from megarl.resharding.transports.transport import Transport

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
SHARD_BYTES = 512 * 2**20


def write_folder(
    plan: Plan,
    transport: Transport,
    hf_config: Mapping[str, Any],
    source_folder: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Returns the bytes of weights written. Holds one shard of the model in memory at a time.

    plan           into a huggingface holder, whose dtypes the files have, and nowhere else
    source_folder  its tokenizer and other files that are not weights are copied
    out            must not exist; it appears when it is complete
    shard_bytes    of a weights file; a larger tensor gets a file of its own
    """
    if out.exists():
        raise ValueError(f"{out} exists already; give a new folder or remove it")
    writes = plan.into(*plan.destinations)
    dtypes = {copy.move.destination.parameter: copy.move.destination_dtype for copy in writes.copies}
    shards = _shards(planned_shapes(writes), dtypes, shard_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        _carry_over(source_folder, folder)
        # Of the first tensor, the embedding: a few small ones may have more precision.
        _write_config(hf_config, next(iter(dtypes.values())), folder)
        files = {_file_name(i, len(shards)): shard for i, shard in enumerate(shards)}
        file_of = {tensor: name for name, shard in files.items() for tensor in shard}
        parts = writes.grouped_by(file_of.__getitem__)
        written = sum(
            _write_shard(parts[name], transport, shapes, dtypes, folder / name) for name, shapes in files.items()
        )
        if len(files) > 1:
            _write_index(file_of, written, folder)
        folder.rename(out)
    return written


def _shards(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], limit: int
) -> list[dict[str, tuple[int, ...]]]:
    """Tensors in order, cut into runs of at most `limit` bytes."""
    shards: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = prod(shape) * ITEM_BYTES[dtypes[name]]
        if not shards or size > room:
            shards.append({})
            room = limit
        shards[-1][name] = shape
        room -= size
    return shards


def _write_shard(
    writes: Writes,
    transport: Transport,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    path: Path,
) -> int:
    tensors = {name: torch.empty(shape, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()}
    written = execute(writes, tensors, transport)
    save_file(tensors, path, metadata={"format": "pt"})
    return written


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _write_index(file_of: Mapping[str, str], num_bytes: int, folder: Path) -> None:
    index = {"metadata": {"total_size": num_bytes}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_config(hf_config: Mapping[str, Any], dtype: str, folder: Path) -> None:
    # transformers before 5 calls it torch_dtype.
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    config = {**without_left_out(hf_config), key: dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _carry_over(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copy(path, folder / path.name)
