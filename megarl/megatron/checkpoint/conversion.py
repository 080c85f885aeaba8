"""Conversion between Hugging Face folders and Megatron checkpoints, in one process, one tensor at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import torch

from megarl.config.model_schema import Layout
from megarl.config.rules.layout import check_layout
from megarl.core.errors import UserError
from megarl.core.files import Progress, new_folder, no_progress, require_room
from megarl.megatron.checkpoint.blueprint import RankBlueprint, blueprint
from megarl.megatron.checkpoint.sharded import FORMAT
from megarl.megatron.checkpoint.source import COMMON, DESCRIPTION, open_checkpoint, refuse_unexpected
from megarl.megatron.checkpoint.writer import Entry, write_extents
from megarl.models.classifier import score_head_of
from megarl.models.denoiser import is_denoiser
from megarl.models.families import completed
from megarl.models.folder import read_config, resolve
from megarl.models.huggingface import untrained_part
from megarl.models.mtp import add_mtp, why_no_mtp
from megarl.models.multimodal import VISION, WHOLE, WHOLE_ONLY
from megarl.models.value_head import without_value_head
from megarl.models.vision import add_vision, vision_of
from megarl.resharding.checkpoint import checkpoint_holder
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder
from megarl.resharding.families.canonical import HEAD, canonical_of
from megarl.resharding.families.vision import vision_shapes
from megarl.resharding.folder import SHARD_BYTES, write_description, write_folder
from megarl.resharding.piece import Holder
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.plan import Plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.selection import ONE_PROCESS
from megarl.resharding.transports.checksum import checksum, verify
from megarl.resharding.transports.reused_memory import ReusedMemory
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.torch_dist import TorchDistFolder
from megarl.resharding.transports.transport import Transport


@dataclass(frozen=True, slots=True)
class Options:
    """Options for a conversion.

    Attributes:
        dtype: dtype of all written tensors; None keeps each tensor's dtype.
        verify: compare the files in a run's checkpoint with their recorded SHA-256, and read written files back.
    """

    dtype: str | None = None
    verify: bool = True
    progress: Progress = no_progress


@dataclass(frozen=True, slots=True)
class Companion:
    """Tensors sharded like the parameters, such as Adam moments. Each is stored under `prefix` plus the parameter's
    key. `dtypes` maps keys to dtypes."""

    prefix: str
    transport: Transport
    dtypes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Weights:
    """Model weights to convert.

    Attributes:
        files: folder with the files that a Hugging Face folder has besides weights, such as the tokenizer.
        check: verifies the source's files, which takes as long as reading them; raises UserError.
    """

    hf_config: Mapping[str, Any]
    holder: Holder
    transport: Transport
    files: Path
    companions: Sequence[Companion] = ()
    check: Callable[[], None] | None = None


def layout_of_files(
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Layout:
    """Return a layout with the fewest data-parallel ranks that the expert-parallel sizes allow. Raise a UserError if
    the sizes are incompatible."""
    sizes = dict(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=lcm(tp, ep * (tp if etp is None else etp)) // tp)
    stages = dict(first_stage_layers=first_stage_layers, last_stage_layers=last_stage_layers)
    layout = Layout.model_validate(ONE_PROCESS | sizes | stages | {"sequence_parallel": False})
    check_layout("", layout)
    return layout


def huggingface_to_megatron(folder: Path, out: Path, layout: Layout, options: Options = Options()) -> int:
    """Convert a Hugging Face folder to a checkpoint and return the number of tensor bytes. Raise a UserError if the
    folder does not match its config.json. No partial output is left behind.

    Args:
        folder: a path or model id, as in megarl.models.folder.resolve.
        layout: the layout to write the checkpoint for.
    """
    with _open_folder(resolve(str(folder), key="--hf")) as weights:
        return _write_checkpoint(weights, layout, out, _common(), options)


def megatron_to_huggingface(
    checkpoint: Path,
    out: Path,
    huggingface: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    options: Options = Options(),
) -> int:
    """Convert a checkpoint to a Hugging Face folder and return the number of tensor bytes. See open_checkpoint and
    write_folder for the arguments."""
    with open_checkpoint(checkpoint, huggingface) as source:
        hf_config = without_value_head(source.hf_config)
        destination = huggingface_holder(hf_config, options.dtype)
        if options.dtype is None:
            stored = _dtypes(source.holder)
            kept = {name: stored[name] for name in destination.shapes if name in stored}
            dtypes = {**destination.dtypes, **kept}
            destination = replace(destination, shard=replace(destination.shard, dtypes=dtypes))
        plan = _checked_plan(source.holder, destination)
        if options.verify:
            require_room(out, plan.num_bytes)  # fail before reading all tensors
            source.check_files(options.progress)
        return write_folder(
            plan, source.transport(), hf_config, source.files, out, shard_bytes, options.verify, options.progress
        )


def reshape(
    checkpoint: Path, out: Path, layout: Layout, huggingface: Path | None = None, options: Options = Options()
) -> int:
    """Rewrite a checkpoint for a different layout and return the number of tensor bytes.

    Optimizer state and additional weights saved with the model are included. The ranks' RNG states are dropped because
    they are meaningless under a different layout.
    """
    with open_checkpoint(checkpoint, huggingface) as source:
        companions = [Companion(p, source.transport(p), source.dtypes(p)) for p in source.companions]
        checked = partial(source.check_files, options.progress) if options.verify else None
        weights = Weights(source.hf_config, source.holder, source.transport(), source.files, companions, checked)
        return _write_checkpoint(weights, layout, out, source.common, options)


@contextmanager
def _open_folder(folder: Path) -> Iterator[Weights]:
    hf_config = read_config(folder)
    with SafetensorsFolder(folder) as transport:
        if _has_tower(transport, hf_config):
            hf_config = add_vision(hf_config)
        if _has_mtp(transport, hf_config):
            hf_config = add_mtp(hf_config)
        holder = transport.with_file_dtypes(huggingface_holder(hf_config))
        unexpected = transport.unexpected(holder)
        refuse_unexpected(folder, [name for name in unexpected if not _is_unused(name, hf_config)])
        yield Weights(hf_config, holder, transport, folder)


def _has_mtp(transport: SafetensorsFolder, hf_config: Mapping[str, Any]) -> bool:
    """Return whether the folder has a complete MTP layer."""
    if is_denoiser(hf_config) or why_no_mtp(completed(hf_config)) is not None:
        return False
    others = huggingface_holder(hf_config)
    layer = huggingface_holder(add_mtp(hf_config)).shapes.keys() - others.shapes.keys()
    return layer <= set(transport.unexpected(others))


def _has_tower(transport: SafetensorsFolder, hf_config: Mapping[str, Any]) -> bool:
    """Return whether the folder has a complete vision tower, or belongs to a family that vLLM runs only with the
    tower."""
    vision = vision_of(add_vision(hf_config)) if WHOLE in hf_config and VISION in hf_config else None
    if vision is None:
        return False
    unexpected = transport.unexpected(huggingface_holder(hf_config))
    return hf_config["model_type"] in WHOLE_ONLY or vision_shapes(vision).keys() <= set(unexpected)


def _is_unused(name: str, hf_config: Mapping[str, Any]) -> bool:
    """Return whether the model does not use this tensor from a Hugging Face folder. Such tensors are copies of the tied
    head, constants, and parts of omitted layers."""
    canonical = canonical_of(hf_config)
    model = canonical.model
    tied_head = name == HEAD and (model.tied or score_head_of(hf_config) is not None)
    layer, has_other_parts = name.removeprefix("model.layers.").split(".")[0], untrained_part(hf_config) is not None
    beyond = layer.isdecimal() and int(layer) >= model.num_layers
    other_part = has_other_parts and (beyond or name.startswith(("mtp.", "model.visual.")))
    return tied_head or other_part or name in canonical.copies() or name.endswith("rotary_emb.inv_freq")


def _checked_plan(source: Holder, destination: Holder) -> Plan:
    plan = make_plan([source], [destination])
    check_plan(plan, [source], [destination])
    return plan


def _write_checkpoint(weights: Weights, layout: Layout, out: Path, common: bytes, options: Options) -> int:
    """Write a checkpoint. `common` is the content of the file that stores unsharded state."""
    ranks = [blueprint(weights.hf_config, layout, rank, FORMAT, options.dtype) for rank in range(layout.world_size)]
    dtypes = _dtypes_by_key(ranks, None if options.dtype else _dtypes(weights.holder))
    destination = checkpoint_holder("checkpoint", [(rank.holder, rank.extents) for rank in ranks], dtypes)
    parts = _checked_plan(weights.holder, destination).into("checkpoint").grouped_by(str)
    transports = {"": weights.transport} | {companion.prefix: companion.transport for companion in weights.companions}
    dtypes_by_prefix = {"": dtypes} | {companion.prefix: companion.dtypes for companion in weights.companions}
    entries = [_entries(rank, dtypes_by_prefix) for rank in ranks]
    total = sum(entry.num_bytes for rank in entries for entry in rank)
    memory = ReusedMemory(max(entry.num_bytes for rank in entries for entry in rank))
    checksums: dict[str, int] = {}

    def tensor(entry: Entry) -> torch.Tensor:
        name = entry.extent.name
        written = memory.tensor(entry.extent.shape, entry.dtype)
        execute(parts[name], {name: written}, transports[entry.prefix])
        if options.verify:
            checksums[entry.name] = checksum(written)
        options.progress("written", written.nbytes, total)
        return written

    with new_folder(out, total) as folder:
        if weights.check is not None:
            weights.check()
        write_extents(entries, [rank.objects for rank in ranks], tensor, folder)
        (folder / COMMON).write_bytes(common)
        description = folder / DESCRIPTION
        description.mkdir()
        write_description(without_value_head(weights.hf_config), entries[0][0].dtype, weights.files, description)
        if options.verify:
            by_name = {entry.name: entry for rank in entries for entry in rank}
            with TorchDistFolder(folder) as files:
                verify(checksums, lambda name: files.read(*by_name[name].place), out, options.progress, total)
    return total


def _common() -> bytes:
    """Return the content of a weights-only checkpoint's common file: the format, which Megatron's
    `load_content_metadata` reads."""
    stream = io.BytesIO()
    torch.save({"content_metadata": FORMAT}, stream)
    return stream.getvalue()


def _entries(rank: RankBlueprint, dtypes: Mapping[str, Mapping[str, str]]) -> list[Entry]:
    """Return the entries that a rank writes. `dtypes` maps prefix -> key -> dtype for tensors that exist."""
    return [
        Entry(extent, prefix, dtype_by_key[extent.key])
        for prefix, dtype_by_key in dtypes.items()
        for extent in rank.extents
        if extent.key in dtype_by_key
    ]


def _dtypes(holder: Holder) -> dict[str, str]:
    """Return canonical tensor name -> dtype for a holder's tensors."""
    return {tensor: holder.dtypes[piece.local] for tensor, piece in holder.shard.canonical_pieces}


def _dtypes_by_key(ranks: Sequence[RankBlueprint], kept: Mapping[str, str] | None) -> dict[str, str]:
    """Return key -> dtype for a checkpoint's tensors. `kept` maps canonical tensors to dtypes; None uses the dtypes in
    the ranks' holders."""
    by_key: dict[str, str] = {}
    for rank in ranks:
        dtypes = rank.holder.dtypes if kept is None else _kept(rank.holder, kept)
        by_key |= {extent.key: dtypes[extent.parameter] for extent in rank.extents if extent.parameter in dtypes}
    return by_key


def _kept(holder: Holder, dtypes: Mapping[str, str]) -> dict[str, str]:
    """Return parameter name -> dtype of its canonical tensors. Parameters with only padding are omitted. Raise a
    UserError if a parameter's tensors differ in dtype."""
    by_parameter: dict[str, str] = {}
    for tensor, piece in holder.shard.canonical_pieces:
        dtype = dtypes[tensor]
        if by_parameter.setdefault(piece.local, dtype) != dtype:
            raise UserError(
                f"{tensor}: the tensor is {dtype}, but other tensors of the same Megatron parameter are "
                f"{by_parameter[piece.local]}. Fix: pass --dtype to convert all tensors to one dtype"
            )
    return by_parameter
