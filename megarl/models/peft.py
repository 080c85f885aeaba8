"""Check the adapter_config.json of imported PEFT adapters, and create its contents for exported adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.model_schema import Lora
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.core.files import read_foreign_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PLAIN = {
    **dict(bias="none", fan_in_fan_out=False, lora_bias=False, use_dora=False, use_rslora=False, modules_to_save=None),
    **dict(rank_pattern={}, alpha_pattern={}, layer_replication=None, trainable_token_indices=None),
    **dict(target_parameters=None),
}
"""Keys that select variants of LoRA -> the only supported value of the key."""


def check_adapter_config(folder: Path, lora: Lora) -> None:
    """Check that the adapters in the folder match the keys in actor.lora. Raise a UserError if files are missing or
    corrupt, or keys differ. The message has one line per key."""
    path = folder / CONFIG
    for file in (path, folder / WEIGHTS):
        if not file.is_file():
            raise UserError(f"actor.lora.path={folder}: has no {file.name}. Fix: use a folder that PEFT saved")
    content = read_foreign_object(path)
    lines = [
        f"actor.lora.{name}={value:g}: the adapters in {folder} have {key}={content.get(key)}. Fix: set "
        f"actor.lora.{name}={content.get(key)}"
        for key, name, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha))
        if content.get(key) != value
    ]
    lines += [
        f"actor.lora.path={folder}: {CONFIG} has {key}={content[key]!r}, which is not supported. Fix: use adapters "
        f"with {key}={value!r}"
        for key, value in PLAIN.items()
        if content.get(key, value) != value and content[key]
    ]
    raise_all(lines)


def adapter_config(lora: Lora, base: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        base: path or name of the base model.
        modules: last component of the names of all layers with adapters.
    """
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
