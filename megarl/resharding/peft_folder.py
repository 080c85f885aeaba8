"""Reads and writes a PEFT folder: the tensors of a model's adapters, and how they are meant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.config.schema import Lora
from megarl.core.errors import UserError
from megarl.core.files import new_folder
from megarl.resharding.execute import execute
from megarl.resharding.families.adapters import of_each_expert
from megarl.resharding.piece import Holder, Rectangle
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.transport import Transport

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

UNREAD = {
    **dict(bias="none", fan_in_fan_out=False, lora_bias=False, use_dora=False, use_rslora=False, modules_to_save=None),
    **dict(rank_pattern={}, alpha_pattern={}, layer_replication=None, trainable_token_indices=None),
    **dict(target_parameters=None),
}
"""Keys of adapter_config.json by which adapters would be something else, and the values under which they are not."""


class PeftFolder(AbstractContextManager):
    """The adapters in a folder. A context manager, which closes the file."""

    def __init__(self, folder: Path, lora: Lora, whole: Holder, num_experts: int):
        """whole: the holder of all tensors that adapters of the model have.

        Raises UserError for a folder that is none, and for adapters that are not those of the keys.
        """
        self._folder, self._num_experts = folder, num_experts
        _check_config(folder, lora)
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"actor.lora.path={folder}: it has no {WEIGHTS}; save the adapters as safetensors")
        self._file = safe_open(folder / WEIGHTS, framework="pt")
        self._names = set(self._file.keys())
        expected = {each for name in whole.shapes for each in of_each_expert(name, num_experts)}
        if unknown := sorted(self._names - expected):
            raise UserError(
                f"actor.lora.path={folder}: {unknown[0]} is of no linear layer of the model's decoder; give adapters "
                "of this model"
            )
        for name, shape in whole.shapes.items():
            for each in self._names.intersection(of_each_expert(name, num_experts)):
                if (found := tuple(self._file.get_slice(each).get_shape())) != shape:
                    raise UserError(
                        f"actor.lora.path={folder}: {each} has shape {found}, but the model makes it {shape}"
                    )

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def read(self, tensor: str, rectangle: Rectangle) -> torch.Tensor | None:
        """Returns a rectangle of a tensor; None where the folder has no adapter of that layer. Raises UserError where
        experts that are to share it have different ones."""
        found = [name for name in of_each_expert(tensor, self._num_experts) if name in self._names]
        if not found:
            return None
        spans = tuple(slice(start, stop) for start, stop in rectangle)
        parts = [self._file.get_slice(name)[spans] for name in found]
        for name, part in zip(found, parts, strict=True):
            if not torch.equal(part, parts[0]):
                raise UserError(
                    f"actor.lora.share_experts=true: {name} in {self._folder} is not {found[0]}; set it to false"
                )
        return parts[0]


def _check_config(folder: Path, lora: Lora) -> None:
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"actor.lora.path={folder}: it has no {CONFIG}; give a folder that PEFT has saved")
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, name, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if config.get(key) != value:
            raise UserError(
                f"actor.lora.{name}={value:g}: the adapters of {folder} have {key}={config.get(key)}; set "
                f"actor.lora.{name} to that"
            )
    for key, value in UNREAD.items():
        if config.get(key, value) not in (value, None) and config[key]:
            raise UserError(
                f"actor.lora.path={folder}: its {CONFIG} has {key}={config[key]!r}, which is not read; give adapters "
                f"with {key}={value!r}"
            )


def write_peft_folder(
    plan: Plan, transport: Transport, whole: Holder, lora: Lora, base: str, num_experts: int, out: Path
) -> None:
    """Writes adapters as a PEFT folder.

    plan    goes into `whole`, the holder of all tensors
    base    path or name of the model that they are for
    """
    tensors = {name: torch.empty(shape) for name, shape in whole.shapes.items()}
    execute(plan.into(whole.name), tensors, transport)
    save_adapters(tensors, lora, base, num_experts, out)


def save_adapters(tensors: Mapping[str, torch.Tensor], lora: Lora, base: str, num_experts: int, out: Path) -> None:
    """Writes whole tensors as a PEFT folder, in which those that experts share are there for each."""
    named = {each: tensor.clone() for name, tensor in tensors.items() for each in of_each_expert(name, num_experts)}
    modules = sorted({name.removesuffix(".weight").split(".")[-2] for name in named})
    with new_folder(out, sum(tensor.nbytes for tensor in named.values())) as folder:
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(_config(lora, base, modules), indent=2), encoding="utf-8")


def _config(lora: Lora, base: str, modules: list[str]) -> dict[str, Any]:
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
