"""Check the LoraConfig of imported adapters, and create its contents for exported adapters.

PEFT stores it in adapter_config.json, and diffusers in the metadata of the weights file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config.model_schema import Lora
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.core.files import parse_object, read_foreign_object
from megarl.models.weight_files import TEXT_PREFIX, open_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

METADATA = "lora_adapter_metadata"
"""Key of the LoraConfig in the metadata of diffusers' weights files. Its keys have the same prefix as the tensors."""

PREFIX = "base_model.model."
"""Prefix of the tensor names in PEFT files."""


@dataclass(frozen=True, slots=True)
class AdapterFormat:
    """A format of adapter folders.

    Attributes:
        weights: name of the weights file.
        prefix: prefix of its tensor names.
        replaced: prefix that it replaces in PEFT's names for text models.
    """

    weights: str
    prefix: str
    replaced: str = PREFIX

    def stored_name(self, tensor: str) -> str:
        """Return a tensor's name in this format, given its PEFT name for text models."""
        return f"{self.prefix}{tensor.removeprefix(self.replaced)}"

    def peft_name(self, stored: str) -> str:
        """Return a tensor's PEFT name for text models, given its name in this format. A name without this format's
        prefix is returned unchanged."""
        return f"{self.replaced}{stored.removeprefix(self.prefix)}" if stored.startswith(self.prefix) else stored


PEFT = AdapterFormat(WEIGHTS, PREFIX)
PEFT_MULTIMODAL = AdapterFormat(WEIGHTS, f"{PREFIX}{TEXT_PREFIX}", f"{PREFIX}model.")
"""PEFT's format for the text model of a multimodal model."""

DIFFUSERS = AdapterFormat("pytorch_lora_weights.safetensors", "transformer.")
"""The format that diffusers' `load_lora_weights` reads."""

HARMLESS = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("lora_dropout", "megatron_core", "runtime_config", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Keys of PEFT's LoraConfig that do not affect the output of stored adapters: metadata, the choice of layers (which the
weights file also shows), dropout, and options of initializations and variants that other keys select."""

CHECKED = {"r", "lora_alpha", "peft_type", "init_lora_weights"}
"""Keys whose values are checked individually."""

PLAIN_INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica")
"""Initializations, besides true and false, that leave the base model's weights unchanged."""

CONVERT = (
    "save the adapters with PEFT's save_pretrained(…, path_initial_model_for_weight_conversion=…), which converts them "
    "to plain LoRA. If the model in model.path already has the changed weights, set init_lora_weights to true in this "
    "file"
)
MERGE = "merge the adapters with PEFT's merge_and_unload, and set model.path to the merged model"

BASE_CHANGES = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), ("subtracts the initial adapters from them", CONVERT)),
    "loftq": ("quantizes them", MERGE),
}
"""First part of init_lora_weights -> how the initialization changes the base model's weights, and the remedy. Stored
adapters fit only the changed weights."""

VARIANTS = {
    "bias": "the base model's biases were trained",
    "modules_to_save": "other layers were trained",
    "trainable_token_indices": "token embeddings were trained",
    "layer_replication": "the model has repeated layers",
    "rank_pattern": "layers differ in rank",
    "alpha_pattern": "layers differ in alpha",
    "use_rslora": "the scale is alpha / √rank instead of alpha / rank",
    "lora_bias": "adapters have biases",
    "use_dora": "weights are normalized (DoRA)",
    "fan_in_fan_out": "weights are transposed",
    "use_qalora": "inputs are pooled (QALoRA)",
    "use_bdlora": "factors are block-diagonal (BD-LoRA)",
    "alora_invocation_tokens": "adapters apply only after these tokens (aLoRA)",
    "target_parameters": "adapters belong to parameters outside linear layers",
    "arrow_config": "tokens are routed between adapters (Arrow)",
    "kasa_config": "the base model's weights were truncated (KaSA)",
    "monteclora_config": "adapters are sampled (MonteCLoRA)",
    "velora_config": "adapters have projections (VeLoRA)",
    "megatron_config": "adapters belong to Megatron's layers",
}
"""Keys that select variants of LoRA -> how the variant differs from plain LoRA."""

CONDITIONAL = {"alora_invocation_tokens", "arrow_config"}
"""Variants whose adapters do not apply equally to all tokens, so they cannot be merged."""

_TARGET = re.compile(r"(?:\bnet\.\d+\.proj|[^.]+(?:\.\d+)?)$")
"""Matches the name suffix that PEFT uses to find a layer: the last component of its name, with the one before it if the
last is a number, as in to_out.0. net.0.proj is matched whole, because Stable Diffusion 3's pos_embed.proj has no
adapter."""

RETRAIN = "set actor.lora.path to plain LoRA adapters"


def format_of(folder: Path) -> AdapterFormat:
    """Return the format of a folder with adapters: DIFFUSERS or, regardless of the model, PEFT."""
    return DIFFUSERS if (folder / DIFFUSERS.weights).is_file() else PEFT


def names_format_of(folder: Path) -> AdapterFormat:
    """Return the format of the tensor names in a folder with adapters. Raise a UserError if the file is damaged."""
    form = format_of(folder)
    with open_file(folder / form.weights, "numpy") as file:
        is_multimodal = any(name.startswith(PEFT_MULTIMODAL.prefix) for name in map(str, file.keys()))
    return PEFT_MULTIMODAL if is_multimodal else form


def check_adapter_config(folder: Path, lora: Lora) -> None:
    """Check that the adapters in the folder are plain LoRA (B·A·alpha/rank is added to linear weights) and match the
    keys in actor.lora. Raise a UserError if files are missing or corrupt, if keys differ, or if a key that is not known
    to be harmless is set. The message has one line per key."""
    is_of_diffusers = format_of(folder) == DIFFUSERS
    if is_of_diffusers and find_spec("safetensors") is None:
        return  # the config is in the weights file, which a login node may be unable to read; the run checks it
    content = _diffusers_config(folder) if is_of_diffusers else _peft_config(folder)
    source = DIFFUSERS.weights if is_of_diffusers else CONFIG
    lines = [
        f"actor.lora.{name}={value:g}: the adapters in {folder} have {key}={content.get(key)}. Fix: set "
        f"actor.lora.{name}={content.get(key)}"
        for key, name, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha))
        if content.get(key) != value
    ]
    problems = [_kind_problem(content), _initialization_problem(content), *_variant_problems(content)]
    lines += [f"actor.lora.path={folder}: {source} has {problem}" for problem in problems if problem is not None]
    raise_all(lines)


def _peft_config(folder: Path) -> dict[str, Any]:
    for file in (folder / CONFIG, folder / WEIGHTS):
        if not file.is_file():
            raise UserError(
                f"actor.lora.path={folder}: has no {file.name}. Fix: use a folder that PEFT or diffusers saved"
            )
    return read_foreign_object(folder / CONFIG)


def _diffusers_config(folder: Path) -> dict[str, Any]:
    """Return the LoraConfig. Files without one have alpha = rank, as in diffusers."""
    path, prefix = folder / DIFFUSERS.weights, DIFFUSERS.prefix
    with open_file(path, "numpy") as file:
        text = (file.metadata() or {}).get(METADATA)
        ranks = [file.get_slice(name).get_shape()[0] for name in map(str, file.keys()) if ".lora_A." in name]
    if text is None:
        rank = ranks[0] if ranks else None
        return {"r": rank, "lora_alpha": rank}
    try:
        content = parse_object(text)
    except ValueError as error:
        raise UserError(f"{path}: {METADATA} is invalid JSON ({error}). Fix: copy the file again") from None
    return {key.removeprefix(prefix): value for key, value in content.items() if key.startswith(prefix)}


def _kind_problem(content: Mapping[str, Any]) -> str | None:
    kind = content.get("peft_type", "LORA")
    return None if kind == "LORA" else f"peft_type={kind}, which is not LoRA. Fix: {MERGE}"


def _initialization_problem(content: Mapping[str, Any]) -> str | None:
    value = content.get("init_lora_weights")
    if value is None or isinstance(value, bool) or value in PLAIN_INITIALIZATIONS:
        return None
    name = next((name for name in BASE_CHANGES if str(value).lower().startswith(name)), None)
    if name is None:
        return f"init_lora_weights={value!r}, which may change the base model's weights. Fix: {MERGE}"
    change, remedy = BASE_CHANGES[name]
    return (
        f"init_lora_weights={value!r}: this initialization changes the base model's weights ({change}), so the "
        f"adapters do not fit the original weights. Fix: {remedy}"
    )


def _variant_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key that may affect the adapters' output. Unused variants are false, null or empty."""
    for key in sorted(content.keys() - HARMLESS - CHECKED):
        if content[key] and not (key == "bias" and content[key] == "none"):
            reason = VARIANTS.get(key, "megarl does not support this key")
            remedy = RETRAIN if key in CONDITIONAL else MERGE
            yield f"{key}={content[key]!r}, which is not plain LoRA: {reason}. Fix: {remedy}"


def adapter_config(
    lora: Lora, base: str, layers: Sequence[str], task: str | None, excluded: str | None = None
) -> dict[str, Any]:
    """Return the contents of a LoraConfig.

    Args:
        base: path or name of the base model.
        layers: names of all layers with adapters.
        task: PEFT's task_type.
        excluded: regular expression for layers that match target_modules but have no adapters.
    """
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({target for layer in layers for target in _TARGET.findall(layer)}),
        **({} if excluded is None else {"exclude_modules": excluded}),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }
