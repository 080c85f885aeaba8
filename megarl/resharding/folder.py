"""Write a model as a transformers or diffusers folder, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megarl.core.files import Progress, new_folder, no_progress
from megarl.models.denoiser import is_denoiser
from megarl.models.huggingface import without_untrained_part
from megarl.models.multimodal import TEXT
from megarl.models.vision import vision_of
from megarl.models.weight_files import DIFFUSERS_INDEX, DIFFUSERS_SINGLE, INDEX, SINGLE, Stack, stacks, stored_name
from megarl.resharding.execute import execute, planned_shapes
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.piece import num_bytes, whole
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.checksum import checksum
from megarl.resharding.transports.checksum import verify as verify_written
from megarl.resharding.transports.reused_memory import ReusedMemory
from megarl.resharding.transports.safetensors import SafetensorsFolder, write_file
from megarl.resharding.transports.transport import Transport

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
SHARD_BYTES = 5 * 10**9


def write_folder(
    plan: Plan,
    transport: Transport,
    hf_config: Mapping[str, Any],
    source_folder: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
    progress: Progress = no_progress,
) -> int:
    """Write the folder, holding one tensor in memory at a time. Return the size of the weights in bytes.

    Args:
        plan: a plan whose only destination is a Hugging Face holder; the holder also determines the dtypes.
        source_folder: folder from which the tokenizer and all other non-weight files are copied.
        out: folder to create. It must not exist, and becomes visible only when it is complete.
        shard_bytes: maximum size of a weights file; a larger tensor gets its own file.
        verify: whether to read the files back and compare checksums.
    """
    writes = plan.into(*plan.destinations)
    shapes = planned_shapes(writes)
    dtypes = {copy.move.destination.parameter: copy.move.destination_dtype for copy in writes.copies}
    parts = writes.grouped_by(str)
    copies = canonical_of(hf_config).copies()
    for copy, original in copies.items():
        shapes[copy], dtypes[copy] = shapes[original], dtypes[original]
    largest = max(num_bytes(shape, dtypes[name]) for name, shape in shapes.items())
    vision = vision_of(hf_config)
    stacked = stacks(shapes, vision)
    named = str if vision is None else stored_name
    stored_shapes, stored_dtypes = _stored(shapes, dtypes, stacked)
    sizes = {name: num_bytes(shape, stored_dtypes[name]) for name, shape in stored_shapes.items()}
    total, memory = sum(sizes.values()), ReusedMemory(largest)
    checksums: dict[str, int] = {}

    def tensor(name: str) -> torch.Tensor:
        values = memory.tensor(shapes[name], dtypes[name])
        source = copies.get(name, name)
        progress("written", execute(parts[source], {source: values}, transport), total)
        if verify:
            checksums[name] = checksum(values)
        return values

    with new_folder(out, total) as folder:
        # Report the dtype of the first tensor, the embedding, because a few small tensors may have a higher precision.
        write_description(hf_config, next(iter(dtypes.values())), source_folder, folder)
        shards = _shards(sizes, shard_bytes)
        count = len(shards)
        index, single = (DIFFUSERS_INDEX, DIFFUSERS_SINGLE) if is_denoiser(hf_config) else (INDEX, SINGLE)
        stem = single.removesuffix(".safetensors")
        files = [f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [single]
        for file, shard in zip(files, shards, strict=True):
            in_file = {name: stored_shapes[name] for name in shard}
            write_file(folder / file, in_file, stored_dtypes, tensor, stacked, named)
        if count > 1:
            file_of = {named(name): file for file, shard in zip(files, shards, strict=True) for name in shard}
            content = {"metadata": {"total_size": total}, "weight_map": file_of}
            (folder / index).write_text(json.dumps(content, indent=2), encoding="utf-8")
        if verify:
            with SafetensorsFolder(folder) as written:
                verify_written(
                    checksums, lambda name: written.read("", name, whole(shapes[name])), out, progress, total
                )
    return total


def write_description(hf_config: Mapping[str, Any], dtype: str, source: Path, folder: Path) -> None:
    """Write config.json, with the dtype of the weights unless it is a diffusers config, and copy all other non-weight
    files from `source`."""
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copy(path, folder / path.name)
    config = without_untrained_part(hf_config)
    if not is_denoiser(hf_config):
        # transformers < 5 calls the key torch_dtype.
        key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
        for section in (config, config.get(TEXT)):
            if section is not None:
                section[key] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _stored(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], stacked: Mapping[str, Stack]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes and dtypes of the stored tensors. Each stack takes the place of its first member."""
    stack_of = {name: (stored, stack) for stored, stack in stacked.items() for names in stack.experts for name in names}
    stored_shapes: dict[str, tuple[int, ...]] = {}
    stored_dtypes: dict[str, str] = {}
    for name, shape in shapes.items():
        stored, stack = stack_of.get(name, (name, None))
        stored_shapes[stored] = shape if stack is None else stack.shape
        assert stored_dtypes.setdefault(stored, dtypes[name]) == dtypes[name], f"{stored} has several dtypes"
    return stored_shapes, stored_dtypes


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Assign tensors (name -> bytes) to consecutive files of at most `limit` bytes. Return the tensor names in each
    file."""
    shards: list[list[str]] = []
    remaining = 0
    for name, size in sizes.items():
        if not shards or size > remaining:
            shards.append([])
            remaining = limit
        shards[-1].append(name)
        remaining -= size
    return shards
