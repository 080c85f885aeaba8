"""Rules for vision-language models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.model_schema import Layout, Placed, layout_key
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.models.multimodal import VISION, WHOLE, WHOLE_ONLY
from megarl.models.rules.model_path import path_of
from megarl.models.vision import vision_of


def check_tower(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Raise a UserError if model.vision=true but the model has no vision tower, or if model.vision=false but vLLM
    cannot run its text model alone."""
    path, family = path_of(config, config.actor), hf_config.get("model_type")
    if config.model.vision and (VISION not in hf_config or WHOLE not in hf_config):
        raise UserError(f"model.vision=true: {path} has no vision tower (vision_config). Fix: set model.vision=false")
    if not config.model.vision and family in WHOLE_ONLY:
        raise UserError(
            f"model.vision=false: {path}: vLLM runs models of type {hf_config[WHOLE]['model_type']} only with their "
            "vision tower. Fix: set model.vision=true"
        )


def text_model_runs_alone(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Reject vision-language models that vLLM runs only as a whole, in roles other than the policy."""
    if placed is not config.actor and hf["model_type"] in WHOLE_ONLY:
        yield f"{path_of(config, placed)}: {only_policies(hf)}"


def only_policies(hf: Mapping[str, Any]) -> str:
    """Return the error for a model that can only be a policy, without the key of its path."""
    return f"models of type {hf[WHOLE]['model_type']} are supported only as the policy. Fix: use a language model"


def deepstack_layers_are_in_the_first_chunk(config: Config, placed: Placed, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require the deepstack layers, which add features from inner tower layers, to be in the first chunk."""
    vision, layout, key = vision_of(hf), placed.layout, layout_key(placed)
    needed = 0 if vision is None else len(vision.deepstack)
    num_layers, vpp = hf["num_hidden_layers"], layout.vpp
    first = _first_stage(num_layers, layout)
    if first is None or first // vpp >= needed:
        return
    size = next((size for size in range(needed * vpp, num_layers, vpp) if _fits(num_layers, layout, size)), None)
    if size is None:
        pp = next((pp for pp in range(layout.pp - 1, 1, -1) if _even(num_layers, pp * vpp, needed)), 1)
        virtual_stages = "vpp=1, " if pp == 1 else ""
        fix = f"set {key}.pp={pp}, {virtual_stages}first_stage_layers=null and last_stage_layers=null"
    else:
        fix = f"set {key}.first_stage_layers={size}"
    chunk = first // vpp
    virtual = f"{first} / vpp={vpp} = " if vpp > 1 else ""
    added = "the first layer adds" if needed == 1 else f"the first {needed} layers add"
    yield (
        f"{key}.pp={layout.pp}, vpp={vpp}: {added} vision features (deepstack) and must be in the first stage's first "
        f"chunk, which has {virtual}{chunk} {'layer' if chunk == 1 else 'layers'}. Fix: {fix}"
    )


def _even(num_layers: int, chunks: int, least: int) -> bool:
    """Return whether the layers can be split evenly into chunks of at least `least` layers."""
    return num_layers % chunks == 0 and num_layers // chunks >= least


def _first_stage(num_layers: int, layout: Layout) -> int | None:
    """Return the number of layers in the first stage; None if the layers cannot be split evenly."""
    if layout.first_stage_layers is not None:
        return layout.first_stage_layers
    rest, stages = num_layers - (layout.last_stage_layers or 0), layout.pp - (layout.last_stage_layers is not None)
    return rest // stages if stages > 0 and rest % stages == 0 else None


def _fits(num_layers: int, layout: Layout, first: int) -> bool:
    """Return whether the other layers can be split evenly if the first stage has this number of layers."""
    last = layout.last_stage_layers
    rest, stages = num_layers - first - (last or 0), layout.pp - 1 - (last is not None)
    if stages == 0:
        return rest == 0
    return stages > 0 and rest >= stages and rest % stages == 0 and rest // stages % layout.vpp == 0


def engine_reads_rotary_sections(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    """Require the keys of multimodal rotary embeddings that vLLM reads from config.json. transformers has defaults."""
    vision = vision_of(hf)
    if vision is None:
        return
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(key) or {}
    missing = [] if "mrope_section" in rope else [f"mrope_section: {list(vision.rotary_sections)}"]
    missing += ["mrope_interleaved: true"] if vision.is_interleaved and not rope.get("mrope_interleaved") else []
    if missing:
        yield (
            f"{path_of(config, config.actor)}: {key} in its config.json lacks {' and '.join(missing)}, which engines "
            f"require. Fix: add {' and '.join(missing)} to {key} of text_config in config.json (or of config.json, if "
            "it has no text_config)"
        )


def vision_excludes_other_models(config: Config, hf: Mapping[str, Any]) -> Iterator[str]:
    """Reject models that would need the images, which only the policy and its reference receive, and features that a
    vision tower does not support."""
    if vision_of(hf) is None:
        return
    algorithm, speculative = config.algorithm, config.rollout.speculative
    found: dict[str, tuple[bool, str, str]] = {
        f"algorithm.advantage.estimator={algorithm.advantage.estimator}": (
            config.has_critic,
            "the critic does not see the images",
            "set critic.shared_backbone=true, or use an estimator without a critic, such as grpo",
        ),
        f"implicit_reward.coefficient={config.implicit_reward.coefficient:g}": (
            config.has_implicit_reward,
            "the implicit reward model does not see the images",
            "set implicit_reward.coefficient=0",
        ),
        f"reward_model.input_format={config.reward_model.input_format}": (
            config.has_reward_model and config.reward_model.input_format == "ids",
            "the reward model would read placeholders without their images",
            "set reward_model.path=null and score responses with rewards.functions",
        ),
        f"teachers.models=[{', '.join(teacher.name for teacher in config.teachers.models)}]": (
            config.has_teachers,
            "teachers do not see the images",
            "set teachers.models=[]",
        ),
        f"algorithm.objective.name={algorithm.objective.name}": (
            config.trains_reward_model,
            "classifiers have no vision tower",
            "set model.vision=false, or use a text model",
        ),
        f"actor.mtp.loss_coefficient={config.actor.mtp.loss_coefficient}": (
            config.actor.has_mtp,
            "MTP layers are not supported with a vision tower",
            "set actor.mtp.loss_coefficient=null",
        ),
        f"rollout.speculative.method={speculative.method}": (
            speculative.method not in (None, "ngram"),
            "draft models do not see the images",
            "set rollout.speculative.method=ngram and rollout.speculative.path=null",
        ),
        f"rollout.quantization={config.rollout.quantization}": (
            config.rollout.quantization is not None,
            "engines would also quantize the vision tower, which refits do not support",
            "set rollout.quantization=null",
        ),
    }
    for key, (is_used, problem, fix) in found.items():
        if is_used:
            yield f"{key}: with model.vision=true, {problem}. Fix: {fix}"
