"""Keys that have no effect in a run: a table of conditions, and the check that applies it.

A key is rejected if its condition is not met and its value differs from the base recipe's. A coefficient of 0 is an
ordinary value that a sweep may contain: keys that only have an effect with a nonzero coefficient remain valid, and the
startup log names skipped passes. Options that an estimator or an objective does not have are not listed here: they are
unknown keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from megarl.config.algorithm_schema import VARIANTS
from megarl.config.document import show, value_at
from megarl.config.model_schema import Critic, Teachers
from megarl.config.run_schema import TrackerName
from megarl.config.schema import Config

BASE = object()

Keys = tuple[str, ...] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class KeyRequirement:
    """Keys that have an effect only under a condition.

    Args:
        unless: the condition, in the form `key=value`.
        keys: keys or sections that may differ from the base recipe's values only if the condition is met. A mapping
            names the value to compare each of them with; BASE stands for the base recipe's.
    """

    unless: str
    is_met: Callable[[Config], bool]
    keys: Keys


def _if_set(unless: str, keys: Keys) -> KeyRequirement:
    """Return the requirement that the value of the key in `unless` is not null, 0, false or empty."""
    return KeyRequirement(unless, lambda config: bool(attrgetter(unless.partition("=")[0])(config)), keys)


def _if_equal(unless: str, keys: Keys) -> KeyRequirement:
    """Return the requirement that the key in `unless` has the value in `unless`."""
    key, _, value = unless.partition("=")
    return KeyRequirement(unless, lambda config: attrgetter(key)(config) == value, keys)


def _tracker(name: TrackerName) -> KeyRequirement:
    return KeyRequirement(f"run.trackers=[{name}]", lambda config: name in config.run.trackers, (f"trackers.{name}",))


def _optimizer(section: str) -> tuple[KeyRequirement, ...]:
    """Return the requirements for a trained model's optimizer and learning-rate schedule."""
    prefix = f"{section}.optimizer.schedule"

    def name(config: Config) -> str:
        return getattr(config, section).optimizer.schedule.name

    return (
        _if_equal(f"{section}.optimizer.name=muon", (f"{section}.optimizer.momentum",)),
        KeyRequirement(f"{prefix}.name=wsd", lambda config: name(config) == "wsd", (f"{prefix}.decay",)),
        KeyRequirement(f"{prefix}.name=cosine", lambda config: name(config) != "constant", (f"{prefix}.min_lr",)),
    )


KEY_REQUIREMENTS = (
    KeyRequirement(
        "data.format=prompts",
        lambda config: not config.is_offline,
        {
            "logprob_check": BASE,
            "rollout.temperature": 1.0,
            "rollout.top_p": 1.0,
            "rollout.top_k": None,
            "rollout.max_staleness": 0,
            "rollout.on_stale": "wait",
            "rollout.speculative": BASE,
            "actor.offload": [],
            "actor.experts.replay_routes": False,
            "reward_model.path": None,
            "rewards.judge": None,
            "rewards.overlong_buffer": None,
            "environment.class": None,
            "batch.epochs": 1,
            "batch.oversampling": None,
            "data.sort_column": None,
            "data.weight_column": None,
            "data.solved_weight": None,
            "data.source_weights": {},
        },
    ),
    _if_equal("rollout.engine=diffusers", {"rollout.denoising": BASE, "algorithm.objective.step_weight": "none"}),
    _if_equal(
        "rollout.engine=vllm",
        {
            "rollout.tp": 1,
            "rollout.kv_cache_on_update": "keep",
            "rollout.longest_first": False,
            "rollout.temperature": 1.0,
            "rollout.top_p": 1.0,
            "rollout.top_k": None,
            "rollout.max_new_tokens": BASE,
            "rollout.stop": [],
            "rollout.context_length": BASE,
            "rollout.kv_cache_gib": BASE,
            "rollout.quantization": None,
            "rollout.batch_invariant": False,
            "rollout.speculative": BASE,
            "rollout.vllm_overrides": {},
            "algorithm.objective.skip_truncated": False,
            "algorithm.kl.level": "token",
            "algorithm.kl.straight_through": False,
            "algorithm.kl.limit": None,
            "actor.experts": BASE,
            "actor.mtp": BASE,
            "actor.fp8": BASE,
            "reward_model.path": None,
            "teachers.models": [],
            "implicit_reward.coefficient": 0.0,
            "rewards.judge": None,
            "rewards.overlong_buffer": None,
            "environment.class": None,
            "batch.oversampling": None,
            "data.chat_template": BASE,
            "data.system_prompt": None,
            "model.vision": False,
        },
    ),
    _if_set("model.vision=true", {"data.image_column": None}),
    KeyRequirement(
        "data.image_column=images (or an environment with model.vision=true and data.chat_template=true)",
        lambda config: config.may_have_images,
        {"data.image_folders": [], "data.min_pixels": None, "data.max_pixels": None},
    ),
    KeyRequirement(
        "algorithm.objective.name=clip (or another objective that learns from advantages)",
        lambda config: config.algorithm.objective.spec.is_policy_objective,
        {
            "algorithm.advantage": BASE,
            "algorithm.advantage.estimator": "grpo",
            "algorithm.objective.entropy_coefficient": 0.0,
            "algorithm.objective.imitation_coefficient": 0.0,
            "algorithm.objective.skip_truncated": False,
            "algorithm.correction.old": "trainer",
            "algorithm.correction.weight": None,
            "algorithm.correction.mask": None,
            "algorithm.kl.coefficient": 0.0,
            "implicit_reward.coefficient": 0.0,
            "batch.epochs_kl_limit": None,
        },
    ),
    KeyRequirement(
        "algorithm.objective.name=clip (or another objective with a loss for each token)",
        lambda config: not config.algorithm.objective.spec.is_pairwise,
        {
            "algorithm.objective.aggregation": "sequence_mean_of_token_means",
            "algorithm.objective.empty_samples": "include",
        },
    ),
    KeyRequirement(
        "algorithm.objective.name=clip (or another objective that uses log-probs)",
        lambda config: not config.algorithm.objective.spec.adds_noise,
        {
            "algorithm.objective.step_weight": "none",
            "algorithm.objective.imitation_coefficient": 0.0,
            "algorithm.correction.old": "trainer",
            "algorithm.correction.weight": None,
            "algorithm.correction.mask": None,
            "batch.epochs_kl_limit": None,
            "logprob_check.threshold": None,
            "logprob_check.limit": None,
            "logprob_check.action": "warn",
            "rollout.denoising.kind": BASE,
            "rollout.denoising.noise_level": BASE,
            "rollout.denoising.logprob": BASE,
        },
    ),
    KeyRequirement(
        "algorithm.advantage.estimator=gae",
        lambda config: config.has_critic or config.actor_has_values,
        ("algorithm.value", "critic"),
    ),
    KeyRequirement(
        "critic.shared_backbone=false",
        lambda config: not config.actor_has_values,
        (
            "algorithm.value.aggregation",
            *(f"critic.{name}" for name in Critic.model_fields if name != "shared_backbone"),
        ),
    ),
    _if_equal(
        "algorithm.correction.old=trainer", {"algorithm.correction.weight": None, "algorithm.correction.mask": None}
    ),
    _if_set(
        "algorithm.correction.weight=token", ("algorithm.correction.weight_limit", "algorithm.correction.weight_floor")
    ),
    _if_set("algorithm.correction.mask=token", ("algorithm.correction.mask_low", "algorithm.correction.mask_high")),
    _if_set("algorithm.kl.coefficient=0.001", {"algorithm.kl.adaptive_target": None}),
    _if_set("algorithm.kl.adaptive_target=0.1", ("algorithm.kl.adaptive_horizon",)),
    KeyRequirement(
        "algorithm.kl.coefficient=0.001", lambda config: config.keeps_reference, {"algorithm.kl.renew_steps": None}
    ),
    _if_set("algorithm.kl.renew_steps=1", {"algorithm.kl.renew_share": 1.0}),
    _if_set("algorithm.trust_region.kl_limit=0.01", ("algorithm.trust_region",)),
    *(requirement for section in ("actor", "critic", "implicit_reward") for requirement in _optimizer(section)),
    KeyRequirement("actor.lora.rank=16", lambda config: config.actor.adapters is not None, ("actor.lora",)),
    _if_set("reward_model.path=PATH", ("reward_model",)),
    _if_equal("reward_model.engine=megatron", {"reward_model.offload": []}),
    KeyRequirement(
        "data.format=prompts (or, with algorithm.objective.name=sft, algorithm.distillation.divergence=jsd)",
        lambda config: not config.is_offline or config.may_have_teachers,
        {"teachers.models": []},
    ),
    KeyRequirement(
        "algorithm.objective.name=clip (or another objective that learns from advantages)",
        lambda config: config.may_have_teachers,
        {"teachers.models": []},
    ),
    _if_set("teachers.models=[{name: NAME, path: PATH}]", ("teachers", "algorithm.distillation")),
    _if_equal(
        "algorithm.distillation.divergence=sampled",
        {"algorithm.distillation.estimator": None, "algorithm.distillation.limit": None},
    ),
    KeyRequirement(
        "algorithm.distillation.divergence=reverse_kl",
        lambda config: not config.algorithm.distillation.is_sampled,
        {"algorithm.distillation.top_k": None},
    ),
    _if_equal("algorithm.distillation.divergence=jsd", ("algorithm.distillation.beta",)),
    KeyRequirement(
        "rollout.prefix_share=0.5 or algorithm.distillation.on_policy_share=0.5",
        lambda config: config.rollout.prefix_share > 0 or config.trains_given_responses,
        {"data.response_column": None},
    ),
    _if_set("algorithm.distillation.anneal_steps=100", {"algorithm.distillation.final_coefficient": 0.0}),
    KeyRequirement(
        "teachers.models=[{name: NAME, path: PATH}]",
        lambda config: any(teacher.path is not None for teacher in config.teachers.models),
        tuple(f"teachers.{name}" for name in Teachers.model_fields if name != "models"),
    ),
    KeyRequirement(
        "teachers.models=[{name: NAME, path: PATH}] (a teacher without its own layout)",
        lambda config: not config.placed_teachers or any(each.layout is None for each, _ in config.placed_teachers),
        ("teachers.layout",),
    ),
    KeyRequirement(
        "teachers.models=[{name: NAME, path: PATH, engine: vllm}]",
        lambda config: not config.placed_teachers or "vllm" in config.teacher_engines,
        ("teachers.kv_cache_gib", "teachers.vllm_overrides"),
    ),
    KeyRequirement(
        "teachers.models=[{name: NAME, path: PATH, engine: megatron}]",
        lambda config: not config.placed_teachers or "megatron" in config.teacher_engines,
        {"teachers.offload": []},
    ),
    KeyRequirement(
        "reward_model.input_format=question", lambda config: config.reward_model.judges, ("reward_model.judge",)
    ),
    KeyRequirement(
        "reward_model.input_format=ids",
        lambda config: not config.reward_model.judges,
        {"reward_model.step_end": None, "reward_model.aggregation": None},
    ),
    KeyRequirement(
        "reward_model.input_format=text",
        lambda config: config.reward_model.input_format != "ids",
        {"reward_model.context_length": None},
    ),
    _if_set("rollout.max_staleness=1", ("rollout.kv_cache_on_update",)),
    KeyRequirement(
        "rollout.max_staleness=1 or batch.oversampling=1.25",
        lambda config: config.prompts_ahead > 0,
        {"rollout.on_stale": "wait"},
    ),
    KeyRequirement("batch.oversampling=null", lambda config: config.prompts_ahead > 0, {"rollout.max_staleness": 0}),
    _if_equal("logprob_check.action=mask", ("logprob_check.mask",)),
    KeyRequirement("environment.class=NAME", lambda config: config.plays_in_environments, ("environment",)),
    KeyRequirement("environment.class=NAME", lambda config: config.has_environment, {"environment.options": {}}),
    _if_set("environment.observation_tokens=500", ("environment.overlong_observation",)),
    KeyRequirement(
        "sandbox.provider=apptainer", lambda config: config.sandbox.provider != "bubblewrap", {"sandbox.image": None}
    ),
    _if_set("evaluation.sets=[{name: NAME}]", ("evaluation.every_steps", "evaluation.at_start", "evaluation.at_end")),
    _if_set("evaluation.best.metric=METRIC", ("evaluation.best.mode",)),
    KeyRequirement("batch.epochs=2", lambda config: config.batch.epochs > 1, ("batch.epochs_kl_limit",)),
    KeyRequirement(
        "data.source=reasoning_gym:TASK",
        lambda config: config.data.reasoning_task is not None,
        {"data.options": {}, "data.stages": []},
    ),
    KeyRequirement("data.source=FILE", lambda config: config.data.source != "arithmetic", {"data.source_column": None}),
    KeyRequirement("data.source=FILE", lambda config: not config.data.is_procedural, {"data.image_column": None}),
    KeyRequirement(
        "data.format=prompts (or messages or preferences)",
        lambda config: config.data.format != "labels",
        {"data.image_column": None},
    ),
    KeyRequirement(
        "data.source=FILE",
        lambda config: not config.data.is_procedural or config.data.reasoning_task is not None,
        {"data.sort_column": None, "data.weight_column": None},
    ),
    KeyRequirement(
        "rollout.speculative.method=ngram",
        lambda config: config.rollout.speculative.method is not None,
        ("rollout.speculative.tokens",),
    ),
    KeyRequirement(
        "rollout.speculative.method=draft_model",
        lambda config: config.rollout.has_draft_model,
        ("rollout.speculative.path",),
    ),
    _if_set("data.solved_weight=0.05", ("data.solved_above",)),
    _if_set("run.trackers=[wandb]", ("trackers.timeout_s", "trackers.project")),
    *(_tracker(name) for name in ("wandb", "mlflow", "trackio")),
    _if_set("run.profile.steps=[2]", ("run.profile.ranks",)),
    _if_set("cluster.replace_ranks=true", {"cluster.spare_processes": None, "cluster.copy_every_steps": BASE}),
)


def keys_without_effect(config: Config, base: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that was changed but has no effect. `base` contains the base recipe's values."""
    values, lines = config.model_dump(), {}
    for requirement in KEY_REQUIREMENTS:
        if requirement.is_met(config):
            continue
        keys = requirement.keys
        for section, neutral in (keys if isinstance(keys, Mapping) else dict.fromkeys(keys, BASE)).items():
            default = value_at(base, section) if neutral is BASE else neutral
            for key, value, unset in _changed(section, value_at(values, section), default):
                lines.setdefault(
                    key,
                    f"{key}={show(value)}: has no effect unless {requirement.unless}. Fix: set {requirement.unless}, "
                    f"or remove the key (its default is {show(unset)})",
                )
    return list(lines.values())


def _changed(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value and default of each value that differs. If a variant section names a different entry, only the
    key that names the entry is compared, because the two entries have different options."""
    if isinstance(value, dict) and default:
        names = {variant.key.rpartition(".")[0]: variant.discriminator for variant in VARIANTS}
        chooser = names.get(key)
        for name in value if chooser is None or value[chooser] == default[chooser] else (chooser,):
            yield from _changed(f"{key}.{name}", value[name], default[name])
    elif value != default:
        yield key, value, default
