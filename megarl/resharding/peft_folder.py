"""Read and write folders with adapters, in the format of PEFT or diffusers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config.model_schema import Lora
from megarl.core.errors import UserError
from megarl.core.files import new_folder
from megarl.models.denoiser import is_denoiser
from megarl.models.peft import (
    CONFIG,
    DIFFUSERS,
    METADATA,
    PEFT,
    PEFT_MULTIMODAL,
    AdapterFormat,
    adapter_config,
    check_adapter_config,
    names_format_of,
)
from megarl.models.vision import vision_of
from megarl.models.weight_files import open_file
from megarl.resharding.families.adapters import check_adapter_weights, expert_tensor_names
from megarl.resharding.piece import Holder, Rectangle

TOWER_LAYERS = r".*\bvisual\..*"
"""Matches the names of layers in vision towers, which have no adapters."""


class PeftFolder(AbstractContextManager):
    """The adapters in a folder of any supported format, as a context manager that closes the file."""

    def __init__(self, folder: Path, lora: Lora, whole: Holder, num_experts: int):
        """`whole` is the holder of all adapter tensors for the model. Raise a UserError if the folder has no
        adapters, or if they do not match the config or the model."""
        self._folder, self._num_experts = folder, num_experts
        check_adapter_config(folder, lora)
        check_adapter_weights(folder, whole, num_experts)
        self._format = names_format_of(folder)
        self._file = open_file(folder / self._format.weights, "pt")
        self._names = set(map(self._format.peft_name, self._file.keys()))

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def read(self, tensor: str, rectangle: Rectangle) -> torch.Tensor | None:
        """Return a rectangle of a tensor, or None if the folder has no adapter for its layer. Raise a UserError if
        experts that share an adapter have different weights in the folder."""
        names = [name for name in expert_tensor_names(tensor, self._num_experts) if name in self._names]
        if not names:
            return None
        spans = tuple(slice(start, stop) for start, stop in rectangle)
        parts = [self._file.get_slice(self._format.stored_name(name))[spans] for name in names]
        for name, part in zip(names, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise UserError(
                    f"actor.lora.share_experts=true: {name} differs from {names[0]} in {self._folder}. "
                    "Fix: set actor.lora.share_experts=false"
                )
        return parts[0]


def export_format(hf_config: Mapping[str, Any]) -> AdapterFormat:
    """Return the format in which libraries load a model's adapters. `hf_config` is the policy's."""
    if is_denoiser(hf_config):
        return DIFFUSERS
    return PEFT if vision_of(hf_config) is None else PEFT_MULTIMODAL


def save_adapters(
    tensors: Mapping[str, torch.Tensor], lora: Lora, base: str, num_experts: int, out: Path, form: AdapterFormat
) -> None:
    """Write unsharded adapter tensors to a folder in the given format. A shared adapter is repeated for each expert.
    `base` is the path or name of the base model."""
    for_diffusers = form == DIFFUSERS
    named = {
        form.stored_name(each): tensor.clone()
        for name, tensor in tensors.items()
        for each in expert_tensor_names(name, num_experts)
    }
    layers = [name.removesuffix(".weight").rpartition(".")[0] for name in named]
    tower = TOWER_LAYERS if form == PEFT_MULTIMODAL else None
    config = adapter_config(lora, base, layers, None if for_diffusers else "CAUSAL_LM", tower)
    metadata = {"format": "pt"}
    if for_diffusers:
        metadata[METADATA] = json.dumps({f"{form.prefix}{key}": value for key, value in config.items()}, indent=2)
    with new_folder(out, sum(tensor.nbytes for tensor in named.values())) as folder:
        file = folder / form.weights
        file.touch()
        mode = file.stat().st_mode
        save_file(named, file, metadata=metadata)
        file.chmod(mode)  # safetensors makes files readable only by their owner
        if not for_diffusers:
            (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
