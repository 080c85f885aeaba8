"""The file adapter_config.json of a PEFT folder: what adapters it may describe, and how ours are described."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config.model_schema import Lora
from megarl.core.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PLAIN = {
    **dict(bias="none", fan_in_fan_out=False, lora_bias=False, use_dora=False, use_rslora=False, modules_to_save=None),
    **dict(rank_pattern={}, alpha_pattern={}, layer_replication=None, trainable_token_indices=None),
    **dict(target_parameters=None),
}
"""Keys by which adapters would be something else, and the values under which they are not."""


def check_adapter_config(folder: Path, lora: Lora) -> None:
    """Check that a folder has adapters as the keys say. Raises UserError with a line for each key that is wrong."""
    path = folder / CONFIG
    for file in (path, folder / WEIGHTS):
        if not file.is_file():
            raise UserError(f"actor.lora.path={folder}: it has no {file.name}; give a folder that PEFT has saved")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error}); copy the file again") from None
    lines = [
        f"actor.lora.{name}={value:g}: the adapters of {folder} have {key}={found.get(key)}; set it to that"
        for key, name, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha))
        if found.get(key) != value
    ]
    lines += [
        f"actor.lora.path={folder}: its {CONFIG} has {key}={found[key]!r}, which is not supported; give adapters with "
        f"{key}={value!r}"
        for key, value in PLAIN.items()
        if found.get(key, value) != value and found[key]
    ]
    if lines:
        raise UserError("\n".join(lines))


def adapter_config(lora: Lora, base: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return the content of the file.

    base      path or name of the model that the adapters are for
    modules   the last parts of the names of the layers that have them
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
