"""A checkpoint in Megatron's format as a source of weights: found, described and checked against its model."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from pydantic import ValidationError

from megarl.config.model_schema import Layout, Role
from megarl.config.saved import complete
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, is_checkpoint
from megarl.core.errors import UserError
from megarl.core.files import Progress
from megarl.megatron.checkpoint.blueprint import blueprint
from megarl.megatron.checkpoint.sharded import FORMAT
from megarl.models.folder import read_config, resolve
from megarl.models.shape import ModelShape
from megarl.models.trained_model import trained_hf_config
from megarl.models.value_head import with_value_head
from megarl.resharding.checkpoint import Extent, as_stored, checkpoint_holder
from megarl.resharding.families.adapters import PREFIX
from megarl.resharding.piece import Holder
from megarl.resharding.selection import ONE_PROCESS
from megarl.resharding.transports.torch_dist import METADATA, StoredExtents, StoredTensor, TorchDistFolder

DESCRIPTION = "huggingface"
"""The folder in a checkpoint with its model's config.json and tokenizer."""

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"


@dataclass(frozen=True)
class CheckpointSource:
    """Weights in a checkpoint.

    files       a folder with the files that a Hugging Face folder has beside weights
    companions  prefixes before the parameters' keys of tensors that are cut as the parameters are:
                optimizer.state.exp_avg.
                and the like, a reference that is saved
    sealed      the checkpoint of a run that it is a part of, which knows the SHA-256 of its files
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
        """Returns a transport for the parameters themselves, or for a companion of theirs."""
        return StoredExtents(self.folder, self.extents, companion)

    @property
    def common(self) -> bytes:
        """The content of the file with the state that is not sharded. Newer versions of Megatron have it among the
        objects."""
        if COMMON_OBJECT not in self.folder.objects:
            return (self.path / COMMON).read_bytes()
        [state] = torch.load(io.BytesIO(self.folder.read_object(COMMON_OBJECT)), weights_only=True)
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    def check_files(self, progress: Progress) -> None:
        """Checks the files of a run's checkpoint. Raises UserError that names a file which is not what the run
        wrote."""
        if self.sealed is not None:
            records = _records(self.sealed, self.path)
            for record in records:
                self.sealed.verify([record])
                progress("checked", record.num_bytes, sum(record.num_bytes for record in records))

    def dtypes(self, companion: str) -> dict[str, str]:
        """Returns the dtypes of a companion by the keys of the parameters that have it: only trained ones have an
        optimizer's state."""
        tensors = self.folder.tensors.items()
        return {key.removeprefix(companion): tensor.dtype for key, tensor in tensors if key.startswith(companion)}


@contextmanager
def open_checkpoint(path: Path, huggingface: Path | None = None) -> Iterator[CheckpointSource]:
    """Opens a checkpoint as a source of weights. Raises UserError where it is no whole checkpoint of this model.

    path          a converted checkpoint, or in a run `checkpoints/step_…` (its actor) or one of the folders in it
    huggingface   a folder with the config.json and the tokenizer of its model (None: those that the checkpoint has, or
                  those of the run)
    """
    path = model_path(path)
    sealed = Checkpoint.open(path.parent) if is_of_a_run(path) else None
    if sealed is not None:
        # The metadata is unpickled next.
        sealed.verify(record for record in _records(sealed, path) if Path(record.path).name == METADATA)
    with TorchDistFolder(path) as folder:
        if any(key.startswith(PREFIX) for key in folder.tensors):
            raise UserError(
                f"{path}: it holds adapters (actor.lora) and not their model; merge them into it with adapters-to-hf, "
                "or make a PEFT folder of them with adapters-to-peft"
            )
        files, hf_config = _described(path, huggingface, sealed)
        hf_config = with_value_head(hf_config) if any("value_head." in key for key in folder.tensors) else hf_config
        plan = blueprint(hf_config, Layout(**ONE_PROCESS, sequence_parallel=False), 0, _format(folder))
        companions = _companions(path, folder, {extent.key for extent in plan.extents})
        _check(path, hf_config, plan.extents, folder)
        rectangles = {key: tensor.rectangles for key, tensor in folder.tensors.items()}
        extents = as_stored(plan.extents, rectangles)
        dtypes = {key: tensor.dtype for key, tensor in folder.tensors.items()}
        holder = checkpoint_holder(str(path), [(plan.holder, extents)], dtypes)
        by_name = {extent.name: extent for extent in extents}
        yield CheckpointSource(path, files, hf_config, holder, folder, by_name, companions, sealed)


def model_path(path: Path) -> Path:
    """Returns the checkpoint of one model: the actor's in a run's checkpoint."""
    return path / "actor" if is_checkpoint(path) else path


def is_of_a_run(path: Path) -> bool:
    """Returns whether the path is one of the models in a run's checkpoint, rather than a folder that somebody put
    there."""
    return path.name in get_args(Role) and is_checkpoint(path.parent)


def _records(sealed: Checkpoint, path: Path) -> list[FileRecord]:
    """Returns the records of the files in the folder of one of its models."""
    return [record for record in sealed.files if Path(record.path).parts[0] == path.name]


def _described(path: Path, huggingface: Path | None, sealed: Checkpoint | None) -> tuple[Path, dict[str, Any]]:
    """Returns the folder of the model's description, and its config.json."""
    description = path / DESCRIPTION
    if huggingface is not None or description.is_dir():
        files = resolve(str(huggingface or description), key="--hf")
        return files, read_config(files)
    if sealed is None:
        raise UserError(f"{path}: says nothing of its model; give --hf, a folder with its config.json and tokenizer")
    try:
        config = Config.model_validate(complete(sealed.state["config"], sealed.format))
    except ValidationError:
        raise UserError(f"{path}: its run's recipe is of another version of megarl; give --hf") from None
    role = path.name
    model_source = config.model.path if role == "actor" else getattr(config, role).path or config.model.path
    revision = config.model.revision if model_source == config.model.path else None
    files = resolve(model_source, key="--hf", revision=revision)
    return files, trained_hf_config(config, role, read_config(files))


def _format(folder: TorchDistFolder) -> dict[str, Any]:
    """Returns the format in which Megatron saved: by default all layers are slices of one tensor."""
    return FORMAT if any(re.match(r"decoder\.layers\.\d", key) for key in folder.tensors) else {}


def _check(path: Path, hf_config: Mapping[str, Any], extents: Sequence[Extent], folder: TorchDistFolder) -> None:
    for extent in extents:
        if extent.key not in folder.tensors:
            raise UserError(f"{path}: {extent.key} is missing, which a model with this config.json has")
        _check_shape(path, extent, folder.tensors[extent.key], ModelShape.of(hf_config).vocab)


def _companions(path: Path, folder: TorchDistFolder, parameters: Collection[str]) -> list[str]:
    prefixes = {key: companion_prefix(key, parameters) for key in folder.tensors.keys() - parameters}
    refuse_unexpected(path, sorted(key for key, prefix in prefixes.items() if prefix is None))
    return sorted(set(prefixes.values()))


def companion_prefix(key: str, parameters: Collection[str]) -> str | None:
    """Returns the prefix before a parameter's key in this key, None if it does not end with one."""
    parts = key.split(".")
    cuts = (cut for cut in range(1, len(parts)) if ".".join(parts[cut:]) in parameters)
    return next((".".join(parts[:cut]) + "." for cut in cuts), None)


def refuse_unexpected(path: Path, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UserError(f"{path}: {names[0]}{more}: unexpected, a model with this config.json has no such tensor")


def _check_shape(path: Path, extent: Extent, stored: StoredTensor, vocab: int) -> None:
    found, expected = stored.shape, extent.global_shape
    repadded = extent.resizable and min(found[0], expected[0]) >= vocab and found[1:] == expected[1:]
    if found != expected and not repadded:
        raise UserError(f"{path}: {extent.key} has shape {found}, but config.json makes it {expected}")
