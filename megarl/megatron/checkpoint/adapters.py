"""Exports a run's adapters as a folder for PEFT or diffusers, or merged into their base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.config.model_schema import Lora
from megarl.config.saved import validated
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import UserError
from megarl.megatron.checkpoint.conversion import Options
from megarl.megatron.checkpoint.source import is_of_a_run, model_path
from megarl.models.denoiser import shape_of
from megarl.models.folder import loadable_path, read_config, resolve
from megarl.models.peft import PREFIX
from megarl.models.trained_model import policy_hf_config
from megarl.models.weights_hash import weights_hash
from megarl.resharding.families import huggingface_holder
from megarl.resharding.families.adapters import A, B, expert_tensor_names
from megarl.resharding.folder import SHARD_BYTES, write_folder
from megarl.resharding.peft_folder import export_format, save_adapters
from megarl.resharding.piece import Holder, Rectangle, whole
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder
from megarl.resharding.transports.torch_dist import TorchDistFolder
from megarl.resharding.transports.transport import Readable


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """The adapters in a checkpoint.

    Attributes:
        config: the run's config.
        folder: the checkpoint folder with the adapter factors.
        base: the base model's Hugging Face folder.
        base_hash: the base model's `weights_hash` when the run started.
    """

    config: Config
    folder: TorchDistFolder
    base: Path
    base_hash: str

    @property
    def lora(self) -> Lora:
        return self.config.actor.lora

    @property
    def num_experts(self) -> int:
        experts = shape_of(read_config(self.base)).experts
        return experts.count if experts else 0

    def factors(self) -> dict[str, torch.Tensor]:
        """Return PEFT name -> factor, as views of files. The name of a factor that experts share has no expert
        number."""
        stored = {name: tensor.shape for name, tensor in self.folder.tensors.items() if name.startswith(PREFIX)}
        return {name: self.folder.read(name, whole(shape)) for name, shape in stored.items()}


class MergedWeights(Readable):
    """Transport for merged weights. The adapters' products are added in float32 to the base weights in the run's
    dtype."""

    def __init__(self, base: SafetensorsFolder, weights: Holder, adapters: StoredAdapters):
        """`weights` describes all weights of the base model, with the run's dtypes."""
        self._base, self._weights, self._scale = base, weights, adapters.lora.scale
        self._factors = {
            each: factor
            for name, factor in adapters.factors().items()
            for each in expert_tensor_names(name, adapters.num_experts)
        }
        stored = weights.dtypes.items()
        dtypes = {name: dtype if self._factor(name, A) is None else "float32" for name, dtype in stored}
        self.holder = replace(weights, name="merged", shard=replace(weights.shard, dtypes=dtypes))
        """Holder that describes the merged weights."""

    def dtype(self, source: str, parameter: str) -> torch.dtype:
        return getattr(torch, self.holder.dtypes[parameter])

    def read(self, source: str, parameter: str, rectangle: Rectangle) -> torch.Tensor:
        weight = self._base.read(source, parameter, rectangle).to(getattr(torch, self._weights.dtypes[parameter]))
        inner, outer = self._factor(parameter, A), self._factor(parameter, B)
        if inner is None or outer is None:
            return weight
        rows, columns = (slice(start, stop) for start, stop in rectangle)
        return torch.addmm(weight.float(), outer[rows], inner[:, columns], alpha=self._scale)

    def _factor(self, parameter: str, factor: str) -> torch.Tensor | None:
        return self._factors.get(f"{PREFIX}{parameter.removesuffix('.weight')}.{factor}.weight")


def adapters_to_peft(path: Path, out: Path) -> int:
    """Write the adapters as a PEFT folder, or as a folder for diffusers if they belong to an image model. Return the
    number of tensor bytes. See `_open` for the path."""
    with _open(path, None) as adapters:
        factors = adapters.factors()
        base = loadable_path(adapters.config.model.path, adapters.base)
        form = export_format(policy_hf_config(adapters.config, read_config(adapters.base)))
        save_adapters(factors, adapters.lora, base, adapters.num_experts, out, form)
        return sum(factor.nbytes for factor in factors.values())


def adapters_to_huggingface(
    path: Path, out: Path, options: Options, huggingface: Path | None = None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write the model with merged adapters as a Hugging Face folder, identical to the run's export at this step. Raise
    a UserError if the base model differs from the one that the run trained with.

    Args:
        options: conversion options. Here a dtype of None means the run's dtype.
        shard_bytes: as in write_folder. See `_open` for the remaining arguments and errors.

    Returns:
        The number of tensor bytes written.
    """
    with _open(path, huggingface) as adapters, SafetensorsFolder(adapters.base) as base:
        if adapters.base_hash != weights_hash(adapters.base):
            raise UserError(
                f"{adapters.base}: the adapters in {path} were trained on different base weights. Fix: pass --hf with "
                "the folder of the original base model"
            )
        hf_config, dtype = policy_hf_config(adapters.config, read_config(adapters.base)), adapters.config.model.dtype
        weights = huggingface_holder(hf_config, dtype)
        base.with_file_dtypes(weights)  # validates the folder
        transport = MergedWeights(base, weights, adapters)
        source, destination = transport.holder, huggingface_holder(hf_config, options.dtype or dtype)
        plan = make_plan([source], [destination])
        check_plan(plan, [source], [destination])
        return write_folder(
            plan, transport, hf_config, adapters.base, out, shard_bytes, options.verify, options.progress
        )


@contextmanager
def _open(path: Path, huggingface: Path | None) -> Iterator[StoredAdapters]:
    """Open a checkpoint's adapters. Raise a UserError if the checkpoint has no adapters, or if a file does not
    match its checksum.

    Args:
        path: a run's `checkpoints/step_…` folder.
        huggingface: the base model's folder; None uses the run's `model.path`.
    """
    path = model_path(path)
    if not is_of_a_run(path):
        raise UserError(f"{path}: not a checkpoint of a run. Fix: pass a run's checkpoints/step_… folder")
    sealed = Checkpoint.open(path.parent)
    sealed.verify(record for record in sealed.files if Path(record.path).parts[0] == path.name)
    config = validated(sealed.state.get("config"), sealed.format, path)
    if config.actor.adapters is None or path.name != "actor":
        raise UserError(
            f"{path}: contains no adapters. Fix: run megarl convert megatron-to-hf --checkpoint {path} --out FOLDER"
        )
    revision = config.model.revision if huggingface is None else None
    base = resolve(str(huggingface or config.model.path), key="--hf", revision=revision)
    with TorchDistFolder(path) as folder:
        try:
            base_hash = sealed.state["models"]["model.path"]["hash"]
        except (LookupError, TypeError) as error:
            raise UserError(
                f"{sealed.path}: manifest.json has no hash of model.path ({error}). Fix: restore the file"
            ) from None
        yield StoredAdapters(config, folder, base, base_hash)
