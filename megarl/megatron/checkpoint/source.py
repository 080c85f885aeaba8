"""A Megatron checkpoint as a source of weights: located, described and checked against its model."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from megarl.config.model_schema import Layout, Role
from megarl.config.saved import validated
from megarl.core.checkpoint import Checkpoint, FileRecord, is_checkpoint
from megarl.core.errors import UserError
from megarl.core.files import Progress, open_regular, shown
from megarl.megatron.checkpoint.blueprint import blueprint
from megarl.megatron.checkpoint.sharded import FORMAT
from megarl.models.folder import read_config, resolve
from megarl.models.mtp import add_mtp
from megarl.models.multimodal import WHOLE, WHOLE_ONLY
from megarl.models.peft import PREFIX
from megarl.models.trained_model import trained_hf_config
from megarl.models.value_head import add_value_head
from megarl.models.vision import MEGATRON_PREFIX, add_vision, vision_of
from megarl.resharding.checkpoint import Extent, as_stored, checkpoint_holder
from megarl.resharding.families.canonical import canonical_of
from megarl.resharding.piece import Holder
from megarl.resharding.selection import ONE_PROCESS
from megarl.resharding.transports.torch_dist import METADATA, StoredExtents, TorchDistFolder

DESCRIPTION = "huggingface"
"""Name of the folder in a checkpoint that contains the model's config.json and tokenizer."""

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"


@dataclass(frozen=True)
class CheckpointSource:
    """The weights in a checkpoint.

    Attributes:
        files: folder with the files that a Hugging Face folder has besides weights, such as the tokenizer.
        companions: key prefixes of tensors sharded like the parameters, such as optimizer.state.exp_avg. or a saved
            reference.
        sealed: the run checkpoint that contains this one and records the SHA-256 of its files; None for a standalone
            checkpoint.
    """

    path: Path
    files: Path
    hf_config: Mapping[str, Any]
    holder: Holder
    folder: TorchDistFolder
    extents: Mapping[str, Extent]
    companions: Sequence[str]
    sealed: Checkpoint | None

    def transport(self, companion: str = "") -> StoredExtents:
        """Return a transport for the parameters, or for the tensors of one companion."""
        return StoredExtents(self.folder, self.extents, companion)

    @property
    def common(self) -> bytes:
        """The unsharded state, as the content of a file. Megatron stores it among the objects; `megarl convert`
        stores it in a separate file."""
        if COMMON_OBJECT not in self.folder.objects:
            try:
                with open_regular(self.path / COMMON) as file:
                    return file.read()
            except FileNotFoundError:
                raise UserError(f"{self.path}: contains no {COMMON}. Fix: copy the checkpoint again") from None
        states = self.folder.read_object(COMMON_OBJECT)
        if not isinstance(states, list) or len(states) != 1:
            raise UserError(
                f"{self.path}: {COMMON_OBJECT} is {shown(states)} instead of a list with one object. Fix: use another "
                "checkpoint"
            )
        stream = io.BytesIO()
        torch.save(states[0], stream)
        return stream.getvalue()

    def check_files(self, progress: Progress) -> None:
        """Verify the files in a run's checkpoint. Raise a UserError that names the first changed file."""
        if self.sealed is not None:
            records = _records(self.sealed, self.path)
            for record in records:
                self.sealed.verify([record])
                progress("checked", record.num_bytes, sum(record.num_bytes for record in records))

    def dtypes(self, companion: str) -> dict[str, str]:
        """Return parameter key -> dtype of a companion. Parameters without this companion are omitted: only trained
        parameters have optimizer state."""
        tensors = self.folder.tensors.items()
        return {key.removeprefix(companion): tensor.dtype for key, tensor in tensors if key.startswith(companion)}


@contextmanager
def open_checkpoint(path: Path, huggingface: Path | None = None) -> Iterator[CheckpointSource]:
    """Open a checkpoint as a source of weights. Raise a UserError if it is incomplete or belongs to a different model.

    Args:
        path: a converted checkpoint, a run's `checkpoints/step_…` folder (which opens the actor), or a role's folder in
            it.
        huggingface: folder with the model's config.json and tokenizer; None uses those from the checkpoint or the run.
    """
    path = model_path(path)
    sealed = Checkpoint.open(path.parent) if is_of_a_run(path) else None
    if sealed is not None:
        # Verify the metadata before it is unpickled.
        sealed.verify(record for record in _records(sealed, path) if Path(record.path).name == METADATA)
    with TorchDistFolder(path) as folder:
        if any(key.startswith(PREFIX) for key in folder.tensors):
            raise UserError(
                f"{path}: contains adapters (actor.lora) without their base model. Fix: merge them with "
                "adapters-to-hf, or export them with adapters-to-peft"
            )
        files, hf_config = _model_description(path, huggingface, sealed)
        hf_config = add_value_head(hf_config) if any("value_head." in key for key in folder.tensors) else hf_config
        hf_config = add_mtp(hf_config) if any(key.startswith("mtp.") for key in folder.tensors) else hf_config
        hf_config = (
            add_vision(hf_config) if any(key.startswith(MEGATRON_PREFIX) for key in folder.tensors) else hf_config
        )
        if hf_config.get("model_type") in WHOLE_ONLY and vision_of(hf_config) is None:
            raise UserError(
                f"{path}: has no vision tower, but vLLM requires one to run models of type "
                f"{hf_config[WHOLE]['model_type']}. Fix: use a checkpoint that contains the tower (vision.*)"
            )
        # Checkpoints in Megatron's default format store all layers as slices of one tensor.
        form = FORMAT if any(re.match(r"decoder\.layers\.\d", key) for key in folder.tensors) else {}
        plan = blueprint(hf_config, Layout.model_validate(ONE_PROCESS | {"sequence_parallel": False}), 0, form)
        companions = _companions(path, folder, {extent.key for extent in plan.extents})
        _check(path, hf_config, plan.extents, folder)
        rectangles = {key: tensor.rectangles for key, tensor in folder.tensors.items()}
        extents = as_stored(plan.extents, rectangles)
        dtypes = {key: tensor.dtype for key, tensor in folder.tensors.items()}
        holder = checkpoint_holder(str(path), [(plan.holder, extents)], dtypes)
        by_name = {extent.name: extent for extent in extents}
        yield CheckpointSource(path, files, hf_config, holder, folder, by_name, companions, sealed)


def model_path(path: Path) -> Path:
    """Return the folder that stores one model: the actor's folder if `path` is a run's checkpoint, else `path`."""
    return path / "actor" if is_checkpoint(path) else path


def is_of_a_run(path: Path) -> bool:
    """Return whether the path is a model folder in a run's checkpoint rather than a standalone checkpoint."""
    return path.name in get_args(Role) and is_checkpoint(path.parent)


def _records(sealed: Checkpoint, path: Path) -> list[FileRecord]:
    """Return the checkpoint's file records for one model's folder."""
    return [record for record in sealed.files if Path(record.path).parts[0] == path.name]


def _model_description(path: Path, huggingface: Path | None, sealed: Checkpoint | None) -> tuple[Path, dict[str, Any]]:
    """Return the folder with the model's description, and the content of its config.json."""
    description = path / DESCRIPTION
    if huggingface is not None or description.is_dir():
        files = resolve(str(huggingface or description), key="--hf")
        return files, read_config(files)
    if sealed is None:
        raise UserError(
            f"{path}: has no model description. Fix: pass --hf with a folder that contains config.json and a tokenizer"
        )
    fix = "pass --hf with the base model's folder"
    config = validated(sealed.state.get("config"), sealed.format, path, fix)
    role = next(role for role in get_args(Role) if role == path.name)
    model_source = config.model.path if role == "actor" else getattr(config, role).path or config.model.path
    revision = config.model.revision if model_source == config.model.path else None
    files = resolve(model_source, key="--hf", revision=revision)
    return files, trained_hf_config(config, role, read_config(files))


def _check(path: Path, hf_config: Mapping[str, Any], extents: Sequence[Extent], folder: TorchDistFolder) -> None:
    vocab = canonical_of(hf_config).model.vocab
    for extent in extents:
        if extent.key not in folder.tensors:
            raise UserError(
                f"{path}: config.json requires {extent.key}, but the checkpoint does not contain it. Fix: pass --hf "
                "with the folder of the checkpoint's model"
            )
        shape, expected = folder.tensors[extent.key].shape, extent.global_shape
        repadded = extent.resizable and min(shape[0], expected[0]) >= vocab and shape[1:] == expected[1:]
        if shape != expected and not repadded:
            raise UserError(
                f"{path}: {extent.key} has shape {shape}, but config.json requires {expected}. Fix: pass --hf with the "
                "folder of the checkpoint's model"
            )


def _companions(path: Path, folder: TorchDistFolder, parameters: Collection[str]) -> list[str]:
    prefixes = {key: companion_prefix(key, parameters) for key in folder.tensors.keys() - parameters}
    refuse_unexpected(path, sorted(key for key, prefix in prefixes.items() if prefix is None))
    return sorted({prefix for prefix in prefixes.values() if prefix is not None})


def companion_prefix(key: str, parameters: Collection[str]) -> str | None:
    """Return the part of a key that precedes a parameter's key, or None if the key does not end with one."""
    parts = key.split(".")
    cuts = (cut for cut in range(1, len(parts)) if ".".join(parts[cut:]) in parameters)
    return next((".".join(parts[:cut]) + "." for cut in cuts), None)


def refuse_unexpected(path: Path, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(
            f"{path}: config.json does not define the stored tensor {names[0]}{more}. Fix: use the config.json of the "
            "model that these weights belong to"
        )
