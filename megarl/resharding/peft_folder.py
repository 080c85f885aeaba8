"""Read and write PEFT folders: adapter weights and adapter_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.config.model_schema import Lora
from megarl.core.errors import UserError
from megarl.core.files import new_folder
from megarl.models.peft import CONFIG, WEIGHTS, adapter_config, check_adapter_config
from megarl.models.weight_files import open_file
from megarl.resharding.families.adapters import check_adapter_weights, expert_tensor_names
from megarl.resharding.piece import Holder, Rectangle


class PeftFolder(AbstractContextManager):
    """The adapters in a PEFT folder, as a context manager that closes the file."""

    def __init__(self, folder: Path, lora: Lora, whole: Holder, num_experts: int):
        """`whole` is the holder of all adapter tensors for the model. Raise a UserError if the folder is not a PEFT
        folder, or if its adapters do not match the config or the model."""
        self._folder, self._num_experts = folder, num_experts
        check_adapter_config(folder, lora)
        check_adapter_weights(folder, whole, num_experts)
        self._file = open_file(folder / WEIGHTS, "pt")
        self._names = set(self._file.keys())

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def read(self, tensor: str, rectangle: Rectangle) -> torch.Tensor | None:
        """Return a rectangle of a tensor, or None if the folder has no adapter for its layer. Raise a UserError if
        experts that share an adapter have different weights in the folder."""
        names = [name for name in expert_tensor_names(tensor, self._num_experts) if name in self._names]
        if not names:
            return None
        spans = tuple(slice(start, stop) for start, stop in rectangle)
        parts = [self._file.get_slice(name)[spans] for name in names]
        for name, part in zip(names, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise UserError(
                    f"actor.lora.share_experts=true: {name} differs from {names[0]} in {self._folder}. "
                    "Fix: set actor.lora.share_experts=false"
                )
        return parts[0]


def save_adapters(tensors: Mapping[str, torch.Tensor], lora: Lora, base: str, num_experts: int, out: Path) -> None:
    """Write unsharded tensors as a PEFT folder, repeating a shared adapter for each expert. `base` is the path or name
    of the base model."""
    named = {
        each: tensor.clone() for name, tensor in tensors.items() for each in expert_tensor_names(name, num_experts)
    }
    modules = sorted({name.removesuffix(".weight").split(".")[-2] for name in named})
    with new_folder(out, sum(tensor.nbytes for tensor in named.values())) as folder:
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(adapter_config(lora, base, modules), indent=2), encoding="utf-8")
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors creates files that only the owner may read
