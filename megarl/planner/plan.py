"""Plans a recipe on GPUs that are not there: what fits, how long a step takes, and what bounds it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.cluster.memory.parameters import Models
from megarl.cluster.memory.reserves import most_sequences
from megarl.config.device_spans import num_devices
from megarl.config.model_schema import Role
from megarl.config.rules import shared_gpu as shared_gpu_rules
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.folder import NotHere, config_here
from megarl.models.rules import check_critic_model
from megarl.models.trained_model import trained_hf_config
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.layouts import broken_rules
from megarl.planner.rollout_time import engine_step_seconds, recompute_seconds
from megarl.planner.search import Found, search
from megarl.planner.simulation import Simulated, Speeds, log_normal_lengths, recorded_lengths, simulate
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import Workload

AHEAD = (0, 1, 2, 4)
"""The values of rollout.max_staleness that are simulated."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of `megarl plan`.

    best    the fastest recipe that fits, or the given one
    found   what a search found, None where the recipe was taken as it is
    """

    best: StepPlan
    found: Found | None
    num_parameters: int


def plan_recipe(
    config: Config,
    cluster: Cluster,
    as_it_is: bool = False,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Planned:
    """Return the plans of a recipe: of all layouts, or of its own.

    prompt_tokens, response_tokens   their means, see Workload.of

    Raises UserError, with the arithmetic and the remedy, where nothing fits, or the recipe's own layout does not.
    """
    actor = _config_json("model.path", config.model.path, config.model.revision)
    models = _models(config, actor)
    workload = Workload.of(config, prompt_tokens, response_tokens)
    count = models.actor.count
    if as_it_is:
        return Planned(_own(config, actor, models, workload, cluster), None, count)
    if config.cluster.roles.given:
        raise UserError(
            "cluster.roles: its devices are those of the recipe's own layouts; leave it out to rank others, or give "
            "--as-it-is"
        )
    found = search(config, actor, models, workload, cluster)
    if not found.plans:
        more = _enough(config, actor, models, workload, cluster)
        raise UserError(f"{_nothing_fits(found, models, cluster)}; {more}")
    return Planned(found.plans[0], found, count)


def simulate_steps(planned: Planned, lengths: Sequence[int] = (), ahead: Sequence[int] = AHEAD) -> dict[int, Simulated]:
    """Return simulated runs of the first plan, by rollout.max_staleness: that of its recipe, and those of ahead.
    lengths: recorded ones of responses; else they are drawn, see log_normal_lengths. On shared GPUs keys and values are
    recomputed: nothing else goes there."""
    best, config = planned.best, planned.best.config
    if config.is_offline:
        raise UserError(f"--simulate: with data.format={config.data.format} nothing is sampled; leave it out")
    workload, times = best.workload, best.times
    model = _models(config, _config_json("model.path", config.model.path, config.model.revision)).actor
    context = workload.prompt_tokens + workload.response_tokens / 2
    recomputes = config.is_colocated or config.rollout.kv_cache_on_update == "recompute"
    speeds = Speeds(
        replicas=config.rollout.replicas,
        concurrent=min(times.rollout.concurrent, most_sequences(config.rollout)),
        token_seconds=engine_step_seconds(config, model, best.cluster, context),
        train_seconds=times.training_seconds + times.moving,
        refit_seconds=times.refit.seconds,
        recompute=recompute_seconds(config, model, best.cluster, workload.prompt_tokens) if recomputes else None,
    )
    samples, longest = workload.samples // workload.prompts, int(workload.longest_response)
    found = {}
    for max_staleness in sorted({*ahead, config.rollout.max_staleness}):
        draw = (
            recorded_lengths(lengths, samples)
            if lengths
            else log_normal_lengths(workload.response_tokens, longest, samples)
        )
        found[max_staleness] = simulate(speeds, workload.prompts, max_staleness, draw, is_colocated=config.is_colocated)
    return found


def recorded(file: Path | None) -> list[int]:
    """Return the lengths of the responses in a file of rollouts, such as rollouts/step_000010.jsonl of a run's folder.
    Raises UserError for one that is none."""
    if file is None:
        return []
    try:
        lengths = [json.loads(line)["num_response_tokens"] for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--lengths {file}: {error!r}; give a file of rollouts/ in a run's folder") from None
    if not lengths:
        raise UserError(f"--lengths {file}: it has no line; give a file of rollouts/ in a run's folder")
    return lengths


def _own(config: Config, actor: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster) -> StepPlan:
    raise_all([*broken_rules(config, actor), *(rule(config) for rule in shared_gpu_rules.RULES)])
    if config.has_critic:
        check_critic_model(config, actor, models.trained["critic"].hf_config)
    if (needed := num_devices(config)) > cluster.num_gpus:
        raise UserError(
            f"--gpus {cluster.num_gpus}x{cluster.name}: with cluster.placement={config.cluster.placement} the recipe's "
            f"ranks are on {needed} GPUs; give --gpus {needed}x{cluster.name}, or lower dp of the layouts"
        )
    plan = plan_step(config, models, workload, cluster)
    raise_all([plan.problem])
    return plan


def _models(config: Config, actor: Mapping[str, Any]) -> Models:
    """Return the run's models, from the config.json of each: the actor's where a section has no path."""
    paths: dict[Role, str | None] = {"actor": None}
    if config.has_critic:
        paths["critic"] = config.critic.path
    if config.has_implicit_reward:
        paths["implicit_reward"] = config.implicit_reward.path
    given = {role: actor if path is None else _config_json(f"{role}.path", path) for role, path in paths.items()}
    reward = _config_json("reward_model.path", config.reward_model.path) if config.has_reward_model else None
    return Models.of(
        {role: trained_hf_config(config, role, model) for role, model in given.items()}, reward, config.actor.adapters
    )


def _config_json(key: str, path: str, revision: str | None = None) -> dict[str, Any]:
    """Return a model's config.json. A quantised checkpoint counts as what it is quantised from: trainers and engines
    hold that."""
    try:
        return {**config_here(path, key=key, revision=revision), "quantization_config": None}
    except NotHere as reason:
        raise UserError(f"{key}={path}: {reason}; give a folder that has its config.json") from None


def _nothing_fits(found: Found, models: Models, cluster: Cluster) -> str:
    """Return the line for a search that found nothing: what the nearest layout lacks, or what all of them would."""
    if found.nearest is not None:
        layout = found.nearest.config.actor.layout
        sizes = ", ".join(f"{name}={size}" for name, size in describe_layout(layout.model_dump()).items())
        return f"none of {found.tried} layouts fits; the nearest is {sizes}: {found.nearest.problem}"
    count = models.actor.count
    each = 6 * count / cluster.num_gpus / GIB
    return (
        f"--gpus {cluster.num_gpus}x{cluster.name}: no layout keeps all rules and can fit: weights and gradients alone "
        f"are {count:,} parameters x (2 + 4) bytes / {cluster.num_gpus} GPUs = {each:.1f} GiB of "
        f"{cluster.gpu.memory_gib:g} on each, where they divide"
    )


def _enough(config: Config, actor: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster) -> str:
    """Return the remedy where nothing fits: as many GPUs as are enough, if twice or four times as many are."""
    for times in (2, 4):
        larger = replace(cluster, num_gpus=times * cluster.num_gpus)
        if search(config, actor, models, workload, larger).plans:
            return f"--gpus {larger.num_gpus}x{cluster.name} is enough"
    return f"nor does any on {larger.num_gpus} of them; take more, or GPUs with more memory"


def describe_layout(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a layout that differ from one process, with etp where experts are shared out."""
    found = {name: sizes[name] for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if sizes[name] > 1} or {"dp": 1}
    if sizes["ep"] > 1:
        found["etp"] = sizes["tp"] if sizes["etp"] is None else sizes["etp"]
    stages = {name: sizes[name] for name in ("first_stage_layers", "last_stage_layers") if sizes[name] is not None}
    return found | stages
