"""The recipes on a cluster that fit, ranked by the seconds of their step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megarl.cluster.memory.parameters import Models
from megarl.cluster.memory.rank import Recompute, item_bytes
from megarl.config.model_schema import Layout, Role
from megarl.config.schema import Config
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.layouts import Sizes, broken_rules, training_layouts, with_engine
from megarl.planner.rollout_time import kv_bytes
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import Workload

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
OFFLOADS: tuple[tuple[str, ...], ...] = ((), ("gradients", "optimizer"), ("parameters", "gradients", "optimizer"))
FASTEST, SMALLEST = 16, 8
"""How many layouts for training are tried with engines: those that train fastest, and those that leave most memory."""

SMALLEST_CACHE_GIB = 0.5
SPARE_GIB = 1.0
"""The memory that a KV cache of the planner's own choice leaves free."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    plans     recipes that fit, the fastest first
    nearest   the one that lacks least memory, where none fits
    refused   lines for sizes that the model does not divide by
    tried     layouts for training that keep all rules
    """

    plans: tuple[StepPlan, ...]
    nearest: StepPlan | None
    refused: tuple[str, ...]
    tried: int


def search(config: Config, hf_config: Mapping[str, Any], models: Models, workload: Workload, cluster: Cluster) -> Found:
    """Return the fitting layouts of training and engines. The other models that are trained take the actor's layout; a
    reward model keeps its own."""
    sizes = Sizes(config, hf_config, models.actor, cluster)
    trained: list[StepPlan] = []
    nearest: StepPlan | None = None
    tried = 0
    for for_training in _trainer_gpus(config, cluster):
        for layout in training_layouts(config, models.actor, sizes, for_training, cluster.memory_bytes):
            found = _training_plan(config, hf_config, models, workload, cluster, layout)
            if found is None:
                continue
            tried += 1
            if found.problem is None:
                trained.append(found)
            elif nearest is None or found.fullest.total < nearest.fullest.total:
                nearest = found
    plans: list[StepPlan] = []
    lacking: list[StepPlan] = []
    for plan in _shortlist(trained):
        fitting, least = _with_engines(plan, models, workload, cluster, sizes)
        plans += fitting
        lacking += [] if least is None else [least]
    if lacking:
        nearest = min(lacking, key=lambda plan: plan.fullest.total)
    plans.sort(key=lambda plan: plan.times.seconds)
    return Found(tuple(plans), None if plans else nearest, tuple(sizes.refused), tried)


def _trainer_gpus(config: Config, cluster: Cluster) -> list[int]:
    """Return the numbers of GPUs that a trained model may have: all where they are shared, else a quarter, a half or
    three quarters of them for all trained models, in whole nodes if there are several."""
    if config.is_colocated or config.is_offline:
        return [cluster.num_gpus // (1 if config.is_colocated else len(config.all_trained))]
    unit = cluster.gpus_per_node if cluster.num_nodes > 1 else 1
    found = []
    for quarters in (1, 2, 3):
        gpus = cluster.num_gpus * quarters // 4 // len(config.all_trained) // unit * unit
        found += [gpus] if 0 < gpus < cluster.num_gpus else []
    return sorted(set(found))


def _training_plan(
    config: Config,
    hf_config: Mapping[str, Any],
    models: Models,
    workload: Workload,
    cluster: Cluster,
    layout: Layout,
) -> StepPlan | None:
    """Return the layout with the least recomputation that fits while training, or with all of it; None where it breaks
    a rule."""
    budget = _budget(config, layout)
    best = None
    for recompute in RECOMPUTE:
        # What is away while other models compute is tried with engines; here all of it may be.
        offload = config.actor.offload if config.is_offline or not config.is_colocated else list(OFFLOADS[-1])
        changed = _for_roles(
            config, models, layout=layout, recompute=recompute, tokens_per_microbatch=budget, offload=offload
        )
        if recompute == "none" and broken_rules(_without_engine(changed), hf_config):
            return None
        best = plan_step(changed, models, _offline(workload), cluster)
        if best.problem is None:
            break
    return best


def _without_engine(config: Config) -> Config:
    return config if config.is_offline else with_engine(config, tp=1)


def _offline(workload: Workload) -> Workload:
    return replace(workload, is_offline=True)


def _budget(config: Config, layout: Layout) -> int:
    """Return the recipe's tokens of a microbatch, or what a rank's share of the longest sample needs, if that is
    more."""
    context = config.context_of(config.actor)[1]
    needed = context if layout.cp == 1 else -(-context // (2 * layout.cp)) * 2
    together = 2 if config.algorithm.objective.spec.is_pairwise else 1
    return max(config.actor.tokens_per_microbatch, needed * together)


def _for_roles(config: Config, models: Models, **keys: Any) -> Config:
    """Return the recipe with these keys in the section of every trained model."""
    sections: dict[Role, Any] = {role: config.placed(role).model_copy(update=keys) for role in models.trained}
    return config.model_copy(update=sections)


def _shortlist(trained: list[StepPlan]) -> list[StepPlan]:
    """Return the plans that train fastest, and those whose states take least memory, of those on as many GPUs."""
    found: list[StepPlan] = []
    for gpus in dict.fromkeys(plan.config.actor.layout.world_size for plan in trained):
        on_as_many = [plan for plan in trained if plan.config.actor.layout.world_size == gpus]
        fastest = sorted(on_as_many, key=lambda plan: plan.times.seconds)[:FASTEST]
        smallest = sorted(on_as_many, key=lambda plan: (plan.fullest.total, plan.times.seconds))[:SMALLEST]
        found += fastest + [plan for plan in smallest if plan not in fastest]
    return found


def _with_engines(
    plan: StepPlan, models: Models, workload: Workload, cluster: Cluster, sizes: Sizes
) -> tuple[list[StepPlan], StepPlan | None]:
    """Return the plan with the fastest of the engines that fit, and the one that lacks least where none does."""
    if workload.is_offline:
        return [plan], None
    config = plan.config
    taken = sum(placed.layout.world_size for placed in config.all_placed)
    gpus = cluster.num_gpus if config.is_colocated else cluster.num_gpus - taken
    fitting: list[StepPlan] = []
    least: StepPlan | None = None
    whole = [tp for tp in sizes.engine if tp <= cluster.gpus_per_node or tp % cluster.gpus_per_node == 0]
    for tp in (tp for tp in whole if gpus and gpus % tp == 0):
        for offload in OFFLOADS if config.is_colocated else OFFLOADS[:1]:
            found = _with_engine(config, models, workload, cluster, tp, gpus // tp, offload)
            if found.problem is None:
                fitting.append(found)
            elif least is None or found.fullest.total < least.fullest.total:
                least = found
    fitting.sort(key=lambda found: found.times.seconds)
    return fitting[:1], least


def _with_engine(
    config: Config,
    models: Models,
    workload: Workload,
    cluster: Cluster,
    tp: int,
    replicas: int,
    offload: tuple[str, ...],
) -> StepPlan:
    """Return the plan with these engines, whose KV cache is all that is left, up to what a step's samples can fill."""
    config = _for_roles(config, models, offload=list(offload))
    sleep = config.is_colocated
    smallest = with_engine(config, tp=tp, replicas=replicas, sleep=sleep, kv_cache_gib=SMALLEST_CACHE_GIB)
    plan = plan_step(smallest, models, workload, cluster)
    left = (cluster.memory_bytes - _sampling(plan)) / GIB - SPARE_GIB
    if plan.problem is not None or left <= 0:
        return plan
    longest = workload.prompt_tokens + workload.longest_response
    filled = -(-workload.samples // replicas) * longest * kv_bytes(models.actor, tp, item_bytes(config)) / GIB
    cache = max(SMALLEST_CACHE_GIB, int(10 * min(SMALLEST_CACHE_GIB + left, filled + 0.1)) / 10)
    return plan_step(with_engine(smallest, kv_cache_gib=cache), models, workload, cluster)


def _sampling(plan: StepPlan) -> float:
    return next(load.total for load in plan.loads if load.phase == "while the engine samples")
