"""Plans of published models with given layouts, shared by several test files."""

from __future__ import annotations

from typing import Any

from megarl.cluster.memory.parameters import Models
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.planner.hardware import Cluster, read_cluster
from megarl.planner.layouts import broken_rules
from megarl.planner.step_plan import StepPlan, plan_step
from megarl.planner.workload import TextWorkload
from tests.paths import BASE
from tests.published_models import CONFIGS

ON_HOST = (
    "actor.megatron_overrides.optimizer="
    "{optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, use_precision_aware_optimizer: true}"
)


def recipe(*overrides: str) -> Config:
    return load(BASE, ["model.path=published", "data.source=arithmetic", "rollout.sleep=true", *overrides])


def layout_keys(**sizes: Any) -> list[str]:
    parallel = {"sequence_parallel": "true" if sizes.get("tp", 1) > 1 else "false"}
    return [f"actor.layout.{name}={size}" for name, size in (parallel | sizes).items()]


def plan_of(model: str, gpus: str, *overrides: str, **workload: float) -> StepPlan:
    config = recipe(*overrides)
    assert broken_rules(config, CONFIGS[model]) == []
    cluster: Cluster = read_cluster(gpus)
    models = Models.of({"actor": CONFIGS[model]}, muon=config.muon_roles)
    return plan_step(config, models, TextWorkload.of(config, **workload), cluster)
