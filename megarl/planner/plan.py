"""Plans for running a recipe on GPUs that this machine does not have: layouts that fit, step times and bottlenecks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.cluster.memory.parameters import Models
from megarl.cluster.memory.reserves import max_sequences
from megarl.config.device_spans import num_devices
from megarl.config.divisors import listed
from megarl.config.model_schema import Role
from megarl.config.rules import shared_gpu as shared_gpu_rules
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.core.files import parse_object
from megarl.models.folder import ModelNotLocal, read_local_config
from megarl.models.rules import check_critic_model
from megarl.models.trained_model import trained_hf_config
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.layouts import broken_rules, stage_counts
from megarl.planner.rollout_time import engine_step_seconds, recompute_seconds
from megarl.planner.search import SearchResult, search, trainer_gpus
from megarl.planner.simulation import Simulated, Speeds, log_normal_lengths, recorded_lengths, simulate
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import ImageWorkload, TextWorkload, Workload, workload_of

AHEAD = (0, 1, 2, 4)
"""Values of rollout.max_staleness to simulate."""

MORE_GPUS = (2, 4)
"""Multiples of the given number of GPUs that are tried if no layout fits."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of `megarl plan`.

    Attributes:
        best: the fastest recipe that fits, or the given recipe.
        search_result: the search result, or None with --as-is.
    """

    best: StepPlan
    search_result: SearchResult | None
    num_parameters: int


def plan_recipe(
    config: Config,
    cluster: Cluster,
    as_is: bool = False,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Planned:
    """Return the plans for running a recipe on a cluster. Raise a UserError if no layout fits, or the recipe's own
    layout does not fit. The message includes the arithmetic and a fix.

    Args:
        as_is: whether to plan only the recipe's own layout instead of searching all layouts.
        prompt_tokens: mean number of tokens per prompt; see `workload_of` for the default.
        response_tokens: mean number of tokens per response; see `workload_of` for the default.
    """
    if config.samples_images and response_tokens is not None:
        raise UserError(
            f"--response-tokens {response_tokens:g}: rollout.engine=diffusers samples images, whose number of tokens "
            "follows from their size. Fix: remove --response-tokens, or change rollout.denoising.height and width"
        )
    actor = _config_json("model.path", config.model.path, config.model.revision)
    models = _models(config, actor)
    workload = workload_of(config, models.actor.shape, prompt_tokens, response_tokens)
    count = models.actor.count
    if as_is:
        return Planned(_plan_own_layout(config, actor, models, workload, cluster), None, count)
    if config.cluster.roles.assigned:
        raise UserError(
            "cluster.roles: the ranges match only the recipe's own layouts, so other layouts cannot be ranked. Fix: "
            "remove cluster.roles, or pass --as-is"
        )
    result = search(config, actor, models, workload, cluster)
    if not result.plans:
        larger = _sufficient_gpus(config, actor, models, workload, cluster)
        raise UserError(_nothing_fits(config, result, models, cluster, larger))
    return Planned(result.plans[0], result, count)


def simulate_steps(planned: Planned, lengths: Sequence[int] = (), ahead: Sequence[int] = AHEAD) -> dict[int, Simulated]:
    """Simulate runs of the first plan with different values of rollout.max_staleness.

    On shared GPUs, the KV cache is always recomputed after a refit, because it is discarded during training. Raise a
    UserError if the recipe trains on offline data or samples images.

    Args:
        lengths: recorded response lengths in tokens. If empty, lengths are drawn with `log_normal_lengths`.
        ahead: values of rollout.max_staleness to simulate in addition to the recipe's own value.

    Returns:
        The simulated run for each value of rollout.max_staleness.
    """
    best, config = planned.best, planned.best.config
    if config.is_offline:
        raise UserError(
            f"--simulate: data.format={config.data.format} has no rollouts to simulate. Fix: remove --simulate"
        )
    if config.samples_images:
        raise UserError(
            "--simulate: rollout.engine=diffusers does not sample ahead, so there is nothing to simulate. Fix: remove "
            "--simulate and --lengths"
        )
    workload, times, rollout, refit = best.workload, best.times, best.times.rollout, best.times.refit
    assert rollout is not None and refit is not None, "a run with rollouts has no rollout time"
    assert isinstance(workload, TextWorkload), "only texts are simulated"
    model = _models(config, _config_json("model.path", config.model.path, config.model.revision)).actor
    context = workload.prompt_tokens + workload.response_tokens / 2
    recomputes = config.is_colocated or config.rollout.kv_cache_on_update == "recompute"
    speeds = Speeds(
        replicas=config.rollout.replicas,
        concurrent=min(rollout.concurrent, max_sequences(config.rollout)),
        token_seconds=engine_step_seconds(config, model, best.cluster, context),
        train_seconds=times.training_seconds + times.moving,
        refit_seconds=refit.seconds,
        recompute=recompute_seconds(config, model, best.cluster, workload.prompt_tokens) if recomputes else None,
    )
    samples, longest = workload.samples // workload.prompts, int(workload.longest_response)
    runs = {}
    for max_staleness in sorted({*ahead, config.rollout.max_staleness}):
        draw = (
            recorded_lengths(lengths, samples)
            if lengths
            else log_normal_lengths(workload.response_tokens, longest, samples)
        )
        is_own = max_staleness == config.rollout.max_staleness  # batch.oversampling is set for this value only
        runs[max_staleness] = simulate(
            speeds,
            workload.prompts,
            max_staleness,
            draw,
            is_colocated=config.is_colocated,
            num_ahead=config.prompts_ahead if is_own else None,
            drops=config.drops_rollouts,
        )
    return runs


def recorded(file: Path | None) -> list[int]:
    """Return the response lengths that a rollout file records, such as rollouts/step_000010.jsonl in a run folder.
    Raise a UserError if the file is empty or is not a rollout file."""
    if file is None:
        return []
    lengths = []
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            length = parse_object(line).get("num_response_tokens")
            if type(length) is not int or not 0 <= length < 2**31:
                raise ValueError(f"line {number}: num_response_tokens={length!r}")
            lengths.append(length)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--lengths {file}: cannot be read ({error}). Fix: use a file from the rollouts/ folder of a run"
        ) from None
    if not lengths:
        raise UserError(f"--lengths {file}: the file is empty. Fix: use a file from the rollouts/ folder of a run")
    return lengths


def _plan_own_layout(
    config: Config, actor: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster
) -> StepPlan:
    rules = (rule(config) for rule in shared_gpu_rules.RULES)
    raise_all([*broken_rules(config, actor), *rules, _step_exceeds_budget(config, workload)])
    if config.has_critic:
        check_critic_model(config, actor, models.trained["critic"].hf_config)
    if (needed := num_devices(config)) > cluster.num_gpus:
        raise UserError(
            f"--gpus {cluster.num_gpus}x{cluster.name}: with cluster.placement={config.cluster.placement} the recipe "
            f"needs {needed} GPUs. Fix: use --gpus {needed}x{cluster.name}, or lower dp in the layouts"
        )
    plan = plan_step(config, models, workload, cluster)
    raise_all([plan.problem])
    return plan


def _step_exceeds_budget(config: Config, workload: Workload) -> str | None:
    """Return an error line if a microbatch of the actor cannot hold the denoising step with the longest caption."""
    budget, cp = config.actor.tokens_per_microbatch, config.actor.layout.cp
    if not isinstance(workload, ImageWorkload) or workload.longest <= budget * cp:
        return None
    needed = -(-workload.longest // cp)
    return (
        f"actor.tokens_per_microbatch={budget}: a denoising step can have up to {workload.longest} tokens on "
        f"actor.layout.cp={cp} ranks and is never split over microbatches. Fix: set actor.tokens_per_microbatch to at "
        f"least {needed}"
    )


def _models(config: Config, actor: Mapping[str, Any]) -> Models:
    """Read the run's models from their config.json files. Sections without a path use the actor's model."""
    paths: dict[Role, str | None] = {"actor": None}
    if config.has_critic:
        paths["critic"] = config.critic.path
    if config.has_implicit_reward:
        paths["implicit_reward"] = config.implicit_reward.path
    trained: dict[Role, Mapping[str, Any]] = {}
    for role, path in paths.items():
        initial = actor if path is None else _config_json(f"{role}.path", path)
        trained[role] = trained_hf_config(config, role, initial)
    others = {
        "reward_model.path": config.reward_model.path,
        "rollout.speculative.path": config.rollout.speculative.path,
    }
    reward, draft = (None if path is None else _config_json(key, path) for key, path in others.items())
    teachers = {
        teacher.name: _config_json(teacher.path_key, path, teacher.revision) for teacher, path in config.placed_teachers
    }
    return Models.of(trained, reward, config.actor.adapters, draft, teachers, config.muon_roles)


def _config_json(key: str, path: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json with its quantization removed, because trainers and engines hold unquantized
    weights."""
    try:
        return {**read_local_config(path, key=key, revision=revision), "quantization_config": None}
    except ModelNotLocal as reason:
        raise UserError(f"{key}={path}: {reason}. Fix: use a folder that contains its config.json") from None


def _nothing_fits(config: Config, result: SearchResult, models: Models, cluster: Cluster, larger: int | None) -> str:
    """Return the error message for a search that found no plan. It describes why the nearest layout does not fit or, if
    no valid layout exists, what makes layouts invalid. larger: number of GPUs on which a layout fits, if known."""
    remedy = f"use --gpus {larger}x{cluster.name}"
    if larger is None:
        remedy = f"use more than {MORE_GPUS[-1] * cluster.num_gpus} GPUs, or GPUs with more memory"
    if result.nearest is not None:
        layout = result.nearest.config.actor.layout
        sizes = ", ".join(f"{name}={size}" for name, size in describe_layout(layout.model_dump()).items())
        return (
            f"none of the {result.tried} valid layouts fits. The closest is {sizes}: {result.nearest.problem}, or "
            f"{remedy}"
        )
    given, num_gpus = f"--gpus {cluster.num_gpus}x{cluster.name}", max(trainer_gpus(config, cluster), default=0)
    if num_gpus == 0 or result.tried:
        placed = dict.fromkeys(placed.section for placed in config.all_placed)
        roles = [*placed] + ([] if config.is_offline else ["engines"])
        return (
            f"{given}: too few GPUs for cluster.placement={config.cluster.placement}, which separates "
            f"{', '.join(roles)}. Fix: {remedy}"
        )
    needed = 6 * models.actor.count
    memory = (
        f"Weights and gradients of the actor need {models.actor.count:,} parameters x (2 + 4) bytes = "
        f"{needed / GIB:.1f} GiB, and a plan may use {cluster.describe_memory()} of each GPU."
    )
    if needed > num_gpus * cluster.memory_bytes:
        return (
            f"{given}: no layout fits. {memory} Even if they are divided evenly over {num_gpus} GPUs, each GPU would "
            f"hold {needed / num_gpus / GIB:.1f} GiB. Fix: {remedy}"
        )
    num_layers = models.actor.shape.num_layers
    stages = listed(stage_counts(num_layers, num_gpus))
    limits = [line for line in result.refused if not line.startswith("rollout.tp=")]
    limits += [f"actor.layout.pp: num_hidden_layers={num_layers} and {num_gpus} GPUs require pp={stages}"]
    lines = [line.partition(" Fix: ")[0].rstrip(".") for line in (*limits, *result.broken)]
    problem, alternative = "no layout is valid. Limits on layouts:", "use fewer GPUs"
    if needed > cluster.memory_bytes:
        problem, alternative = f"no valid layout fits. {memory} Limits on splitting them:", "use GPUs with more memory"
    if larger is None:
        remedy = f"change the model or the recipe so that a limit no longer applies, or {alternative}"
    return "\n  ".join([f"{given}: {problem}", *lines]) + f"\nFix: {remedy}"


def _sufficient_gpus(
    config: Config, actor: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster
) -> int | None:
    """Return a number of GPUs on which a layout fits, or None if no multiple in MORE_GPUS is enough."""
    for times in MORE_GPUS:
        larger = replace(cluster, num_gpus=times * cluster.num_gpus)
        if search(config, actor, models, workload, larger).plans:
            return larger.num_gpus
    return None


def describe_layout(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout keys that differ from a single-process layout, plus etp if ep > 1."""
    changed = {name: sizes[name] for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if sizes[name] > 1} or {"dp": 1}
    if sizes["ep"] > 1:
        changed["etp"] = sizes["tp"] if sizes["etp"] is None else sizes["etp"]
    stages = {name: sizes[name] for name in ("first_stage_layers", "last_stage_layers") if sizes[name] is not None}
    return changed | stages
