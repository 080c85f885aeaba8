"""Check the config and a model's config.json for compatibility. Rules are generators, as in `megarl.config.rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.model_schema import Placed, Teacher, Teachers, layout_key
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError, prefix_lines
from megarl.models.classifier import score_head_of
from megarl.models.denoiser import DenoiserShape, is_denoiser
from megarl.models.families import completed
from megarl.models.rules.classifiers import (
    classifier_kind_fits_objective,
    has_one_label,
    step_end_requires_token_classifier,
    token_scores_require_sampled_tokens,
    vocabulary_covers_actors,
)
from megarl.models.rules.engine import (
    delta_nets_are_not_quantized,
    engine_router_keys_are_present,
    engine_shards_keep_blocks_whole,
    engine_sizes_divide_by_tp,
    top_k_fits_the_vocabulary,
)
from megarl.models.rules.features import (
    attention_is_full,
    context_fits_the_positions,
    expert_keys_require_experts,
    features_are_supported,
    model_has_mtp,
    teacher_engine_has_a_position_left,
    trust_region_requires_dense_model,
)
from megarl.models.rules.images import images_fit_the_positions, microbatch_holds_a_denoising_step
from megarl.models.rules.layout import (
    delta_net_heads_divide_by_tp_and_cp,
    expert_biases_require_whole_experts,
    expert_mlps_divide_by_tp,
    experts_and_tensor_parallel_need_sequence_parallel,
    experts_divide_by_ep,
    layers_tile_the_stages,
    sizes_divide_by_tp,
)
from megarl.models.rules.model_path import path_of
from megarl.models.rules.vision import (
    check_tower,
    deepstack_layers_are_in_the_first_chunk,
    engine_reads_rotary_sections,
    text_model_runs_alone,
    vision_excludes_other_models,
)
from megarl.models.vision import add_vision


def check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check the config against the actor's config.json. Raise a UserError if a rule is violated. The message has one
    line per violated rule."""
    actor = config.actor
    if is_denoiser(hf_config) != config.samples_images:
        engine, kind = ("diffusers", "an image model") if is_denoiser(hf_config) else ("vllm", "a language model")
        raise UserError(
            f"rollout.engine={config.rollout.engine}: {path_of(config, actor)} is {kind}. Fix: set "
            f"rollout.engine={engine}, or use another model"
        )
    check_tower(config, hf_config)
    if config.samples_images:
        raise_all(_broken_by_denoiser(config, DenoiserShape.of(hf_config)))
        return
    model = _completed(config, actor, add_vision(hf_config) if config.model.vision else hf_config)
    violations = [*_violations(config, actor, model), *expert_keys_require_experts(config, model)]
    violations += trust_region_requires_dense_model(config, model)
    violations += delta_nets_are_not_quantized(config, model)
    violations += model_has_mtp(config, model)
    violations += vision_excludes_other_models(config, model)
    if not config.is_offline:
        violations += _broken_by_engine("rollout.tp", config.rollout.tp, path_of(config, actor), model)
        violations += top_k_fits_the_vocabulary(config, model)
        violations += engine_shards_keep_blocks_whole(config, model)
        violations += engine_reads_rotary_sections(config, model)
    elif head := score_head_of(model):
        violations += has_one_label(config, actor, head.num_labels) if config.trains_reward_model else ()
        violations += classifier_kind_fits_objective(config, head.kind)
    raise_all(violations)


def check_images(config: Config, shape: DenoiserShape, pixels_per_latent: int) -> None:
    """Check the size of images against an image model. Raise a UserError as in `check_model`.

    Args:
        pixels_per_latent: height and width in pixels of one latent of the VAE.
    """
    denoising = config.rollout.denoising
    size = denoising.height, denoising.width
    raise_all(
        [
            *images_fit_the_positions(*size, shape, pixels_per_latent),
            *microbatch_holds_a_denoising_step(config, shape, pixels_per_latent),
        ]
    )


def check_critic_model(config: Config, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the config.json of the critic's initial model, as in `check_model`."""
    critic = _completed(config, config.critic, critic_hf_config)
    head = score_head_of(critic)
    labels = () if head is None else has_one_label(config, config.critic, head.num_labels)
    covered = vocabulary_covers_actors(config, config.critic, hf_config, critic)
    raise_all([*_violations(config, config.critic, critic), *labels, *covered])


def check_reward_model(config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]) -> None:
    """Check the config against the reward model's config.json, as in `check_model`."""
    placed = config.reward_model
    reward = _completed(config, placed, reward_hf_config)
    if placed.engine == "megatron":
        violations = _violations(config, placed, reward)
    else:
        violations = _broken_by_engine("reward_model.layout.tp", placed.layout.tp, path_of(config, placed), reward)
        violations += context_fits_the_positions(config, placed, reward)
        violations += features_are_supported(config, placed, reward)
        violations += text_model_runs_alone(config, placed, reward)
    head = score_head_of(reward)
    architectures = ", ".join(reward.get("architectures") or ["none"])
    if placed.judges and head is not None:
        raise UserError(
            f"{path_of(config, placed)}: its architecture is {architectures}, but reward_model.input_format=question "
            "requires a language model. Fix: use a ...ForCausalLM model, or set reward_model.input_format=ids, text "
            "or chat"
        )
    if not placed.judges and head is None:
        raise UserError(
            f"{path_of(config, placed)}: its architecture is {architectures}, which has no score head. Fix: use a "
            "classification checkpoint (...ForSequenceClassification or ...ForTokenClassification), or set "
            "reward_model.input_format=question to use it as a judge"
        )
    if head is not None:
        violations += has_one_label(config, placed, head.num_labels)
        violations += step_end_requires_token_classifier(config, head.kind)
        violations += token_scores_require_sampled_tokens(config, head.kind)
    if placed.input_format == "ids":
        violations += vocabulary_covers_actors(config, placed, hf_config, reward)
    raise_all(violations)


def check_implicit_reward_model(
    config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]
) -> None:
    """Check the config against the implicit reward model's config.json, as in `check_model`."""
    purpose = "the log-probs for token rewards require"
    _check_language_model(config, config.implicit_reward, hf_config, reward_hf_config, purpose)


def _check_language_model(
    config: Config, placed: Placed, hf_config: Mapping[str, Any], own_hf_config: Mapping[str, Any], purpose: str
) -> None:
    """Check a language model that computes log-probs of the actor's tokens, as in `check_model`. purpose: the beginning
    of a sentence that ends with `a language model`."""
    model = _completed(config, placed, own_hf_config)
    if score_head_of(model) is not None:
        raise UserError(
            f"{path_of(config, placed)}: its architecture is {', '.join(model['architectures'])}, but {purpose} a "
            "language model. Fix: use a ...ForCausalLM model"
        )
    # Samples with tokens beyond a teacher's vocabulary are not sent to it.
    covered = () if isinstance(placed, Teachers) else vocabulary_covers_actors(config, placed, hf_config, model)
    if isinstance(placed, Teachers) and placed.engine == "vllm":
        violations = _broken_by_engine(f"{layout_key(placed)}.tp", placed.layout.tp, path_of(config, placed), model)
        violations += teacher_engine_has_a_position_left(config, placed, model)
        violations += features_are_supported(config, placed, model)
        violations += text_model_runs_alone(config, placed, model)
    else:
        violations = _violations(config, placed, model)
    raise_all([*violations, *covered])


def check_teacher_model(
    config: Config, teacher: Teacher, hf_config: Mapping[str, Any], teacher_hf_config: Mapping[str, Any]
) -> None:
    """Check the config against the config.json of a teacher, as in `check_model`. Each line names the teacher."""
    placed, purpose = config.teachers.only(teacher), "the divergence from a teacher requires"
    try:
        _check_language_model(config, placed, hf_config, teacher_hf_config, purpose)
    except UserError as error:
        raise UserError(prefix_lines(f"teachers.models: {teacher.name}: ", str(error))) from None


_PLACED_MODEL_RULES = (
    sizes_divide_by_tp,
    delta_net_heads_divide_by_tp_and_cp,
    experts_divide_by_ep,
    expert_mlps_divide_by_tp,
    expert_biases_require_whole_experts,
    experts_and_tensor_parallel_need_sequence_parallel,
    layers_tile_the_stages,
    deepstack_layers_are_in_the_first_chunk,
    context_fits_the_positions,
    attention_is_full,
    features_are_supported,
    text_model_runs_alone,
)
"""Rules for a model's config section and its config.json."""


def _violations(config: Config, placed: Placed, hf: Mapping[str, Any]) -> list[str]:
    return [line for rule in _PLACED_MODEL_RULES for line in rule(config, placed, hf)]


def _broken_by_denoiser(config: Config, shape: DenoiserShape) -> list[str]:
    """Return violations of the layout rules, which depend only on the model's sizes."""
    sizes = {
        "model_type": shape.model_type,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
    }
    rules = sizes_divide_by_tp, experts_divide_by_ep, layers_tile_the_stages
    return [line for rule in rules for line in rule(config, config.actor, sizes)]


def _broken_by_engine(key: str, tp: int, model: str, hf: Mapping[str, Any]) -> list[str]:
    """Return the violations of an engine's rules. model: config key and value of the model's path."""
    return [*engine_sizes_divide_by_tp(key, tp, hf), *engine_router_keys_are_present(model, hf)]


def _completed(config: Config, placed: Placed, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise UserError(f"{path_of(config, placed)}: {error}") from None
    needed = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    if missing := [name for name in needed if name not in model]:
        raise UserError(
            f"{path_of(config, placed)}: its config.json lacks {', '.join(missing)}. Fix: use the config.json of the "
            "original model"
        )
    return model
