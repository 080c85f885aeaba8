"""Searches for recipes that fit on a cluster and ranks them by predicted step time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.cluster.memory.parameters import Models
from megarl.cluster.memory.rank import Recompute
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.layouts import Sizes, broken_rules, replace_engine, training_layouts
from megarl.planner.rollout_time import engine_kv_bytes
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import TextWorkload, Workload

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("gradients", "optimizer"), ("parameters", "gradients", "optimizer"))
FASTEST, SMALLEST = 16, 8
"""The search combines this many of the fastest training layouts, and this many of those that need the least memory,
with every engine layout."""

SMALLEST_CACHE_GIB = 0.5
SPARE_GIB = 1.0
"""GPU memory in GiB that the planner leaves free when it chooses the size of the KV cache."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        plans: plans that fit, fastest first.
        nearest: the plan that exceeds the GPU memory by the smallest amount, if no plan fits.
        refused: an error line for each parallel size into which the model cannot be split evenly.
        tried: number of valid training layouts.
        broken: an error line for each rule that an invalid training layout breaks.
    """

    plans: tuple[StepPlan, ...]
    nearest: StepPlan | None
    refused: tuple[str, ...]
    tried: int
    broken: tuple[str, ...] = ()


def search(
    config: Config, hf_config: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster
) -> SearchResult:
    """Search for combinations of training layout and engine layout that fit. All trained models use the actor's layout.
    A reward model keeps its own layout."""
    sizes = Sizes(config, hf_config, models.actor, cluster)
    trained: list[StepPlan] = []
    nearest: StepPlan | None = None
    tried = 0
    broken: dict[str, None] = {}
    for num_gpus in trainer_gpus(config, cluster):
        for layout in training_layouts(workload.longest, models.actor, sizes, num_gpus, cluster.memory_bytes):
            plan = _training_plan(config, hf_config, models, workload, cluster, layout)
            if not isinstance(plan, StepPlan):
                broken |= dict.fromkeys(plan)
                continue
            tried += 1
            if plan.problem is None:
                trained.append(plan)
            elif nearest is None or plan.fullest.total < nearest.fullest.total:
                nearest = plan
    plans: list[StepPlan] = []
    overfull: list[StepPlan] = []
    for plan in _shortlist(trained):
        fitting, smallest = _with_engines(plan, models, workload, cluster, sizes)
        plans += fitting
        overfull += [] if smallest is None else [smallest]
    if overfull:
        nearest = min(overfull, key=lambda plan: plan.fullest.total)
    plans.sort(key=lambda plan: plan.times.seconds)
    return SearchResult(tuple(plans), None if plans else nearest, tuple(sizes.refused), tried, tuple(broken))


def trainer_gpus(config: Config, cluster: Cluster) -> list[int]:
    """Return the GPU counts to try for each trained model. Colocated models use all GPUs. Without rollouts, the models
    divide the GPUs. Otherwise, the trained models together use one quarter, one half or three quarters of the GPUs. On
    several nodes, each model uses whole nodes."""
    if config.is_colocated or config.is_offline:
        return [cluster.num_gpus // (1 if config.is_colocated else len(config.all_trained))]
    unit = cluster.gpus_per_node if cluster.num_nodes > 1 else 1
    sizes = []
    for quarters in (1, 2, 3):
        gpus = cluster.num_gpus * quarters // 4 // len(config.all_trained) // unit * unit
        sizes += [gpus] if 0 < gpus < cluster.num_gpus else []
    return sorted(set(sizes))


def _training_plan(
    config: Config, hf_config: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster, layout: Layout
) -> StepPlan | list[str]:
    """Return the plan for a layout with the least activation recomputation that fits during training. If no plan fits,
    return the plan with full recomputation. If the layout breaks rules, return their error lines."""
    budget = _budget(config, workload, layout)
    best: StepPlan | None = None
    for recompute in RECOMPUTE:
        # Assume maximum offloading here. The states to offload are chosen later, together with the engines.
        offload = config.actor.offload if config.is_offline or not config.is_colocated else list(OFFLOADS[-1])
        changed = _for_roles(
            config, models, layout=layout, recompute=recompute, tokens_per_microbatch=budget, offload=offload
        )
        one_engine_rank = changed if config.is_offline else replace_engine(changed, tp=1)
        if recompute == "none" and (lines := broken_rules(one_engine_rank, hf_config)):
            return lines
        best = plan_step(changed, models, replace(workload, is_offline=True), cluster)
        if best.problem is None:
            break
    assert best is not None, "RECOMPUTE is not empty"
    return best


def _budget(config: Config, workload: Workload, layout: Layout) -> int:
    """Return the recipe's tokens_per_microbatch, increased if the longest sample needs more tokens per rank."""
    context = workload.longest
    needed = context if layout.cp == 1 else -(-context // (2 * layout.cp)) * 2
    samples = 2 if config.algorithm.objective.spec.is_pairwise else 1
    return max(config.actor.tokens_per_microbatch, needed * samples)


def _for_roles(config: Config, models: Models, **keys: Any) -> Config:
    """Return the recipe with the given keys replaced in the section of each trained model."""
    return config.model_copy(update={role: config.placed(role).model_copy(update=keys) for role in models.trained})


def _shortlist(trained: list[StepPlan]) -> list[StepPlan]:
    """Return the plans with the fastest training and the plans with the least memory, for each number of GPUs."""
    shortlist: list[StepPlan] = []
    for gpus in dict.fromkeys(plan.config.actor.layout.world_size for plan in trained):
        same_size = [plan for plan in trained if plan.config.actor.layout.world_size == gpus]
        fastest = sorted(same_size, key=lambda plan: plan.times.seconds)[:FASTEST]
        smallest = sorted(same_size, key=lambda plan: (plan.fullest.total, plan.times.seconds))[:SMALLEST]
        shortlist += fastest + [plan for plan in smallest if plan not in fastest]
    return shortlist


def _with_engines(
    plan: StepPlan, models: Models, workload: Workload, cluster: Cluster, sizes: Sizes
) -> tuple[list[StepPlan], StepPlan | None]:
    """Combine a training plan with engines.

    Returns:
        The plan with the fastest engines that fit, in a list that is empty if no engines fit.
        The plan with the smallest memory load among the plans that do not fit, or None.
    """
    if workload.is_offline:
        return [plan], None
    config = plan.config
    taken = sum(count for role, count in config.num_ranks.items() if role != "rollout")
    gpus = cluster.num_gpus if config.is_colocated else cluster.num_gpus - taken
    fitting: list[StepPlan] = []
    smallest: StepPlan | None = None
    tp_sizes = [tp for tp in sizes.engine if tp <= cluster.gpus_per_node or tp % cluster.gpus_per_node == 0]
    for tp in (tp for tp in tp_sizes if gpus > 0 and gpus % tp == 0):
        for offload in OFFLOADS if config.is_colocated else OFFLOADS[:1]:
            candidate = _with_engine(config, models, workload, cluster, tp, gpus // tp, offload)
            if candidate.problem is None:
                fitting.append(candidate)
            elif smallest is None or candidate.fullest.total < smallest.fullest.total:
                smallest = candidate
    fitting.sort(key=lambda candidate: candidate.times.seconds)
    return fitting[:1], smallest


def _with_engine(
    config: Config,
    models: Models,
    workload: Workload,
    cluster: Cluster,
    tp: int,
    replicas: int,
    offload: tuple[str, ...],
) -> StepPlan:
    """Return the plan with the given engines. The KV cache of language models uses the free GPU memory, up to the size
    that a step's samples need."""
    config = _for_roles(config, models, offload=list(offload))
    sleep = config.is_colocated
    cache_key = {} if config.samples_images else {"kv_cache_gib": SMALLEST_CACHE_GIB}
    smallest = replace_engine(config, tp=tp, replicas=replicas, sleep=sleep, **cache_key)
    plan = plan_step(smallest, models, workload, cluster)
    if not isinstance(workload, TextWorkload):
        return plan
    sampling = next(load.total for load in plan.loads if load.phase == "while the engine samples")
    left = (cluster.memory_bytes - sampling) / GIB - SPARE_GIB
    if plan.problem is not None or left <= 0:
        return plan
    longest = workload.prompt_tokens + workload.longest_response
    sequence = engine_kv_bytes(smallest, models.actor, models.draft, longest)
    filled = -(-workload.samples // replicas) * sequence / GIB
    cache = max(SMALLEST_CACHE_GIB, int(10 * min(SMALLEST_CACHE_GIB + left, filled + 0.1)) / 10)
    return plan_step(replace_engine(smallest, kv_cache_gib=cache), models, workload, cluster)
