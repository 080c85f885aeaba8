"""The forward-only passes in a step, and the log lines that explain them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.cluster.groups.trainers import TrainerGroup
from megarl.cluster.pending import Pending, join
from megarl.cluster.rank_batch import Scores, Updates, join_named_scores
from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.step.needed_passes import PassName, passes

if TYPE_CHECKING:
    from megarl.megatron.workers.actor import Policy


def describe(config: Config) -> list[str]:
    """Return a line that lists the passes that run, and a line that lists the skipped passes. A line without passes is
    omitted."""
    by_need = {"passes": True, "skipped passes": False}
    chosen = {label: [p for p in passes(config) if p.needed == need] for label, need in by_need.items()}
    return [
        f"{label}: {'; '.join(f'{p.name} ({p.reason})' for p in listed)}" for label, listed in chosen.items() if listed
    ]


def needed(config: Config, name: PassName) -> bool:
    return {p.name: p.needed for p in passes(config)}[name]


def policies(config: Config) -> list[Policy]:
    """Return the policies whose log-probs the algorithm needs: the old policy and the reference."""
    names: dict[Policy, PassName] = {"old": "old log-probs", "reference": "reference log-probs"}
    return [policy for policy, name in names.items() if needed(config, name)]


def teacher_scores(
    config: Config, actor: TrainerGroup, number: int, run_teachers: Callable[[], dict[str, Scores]]
) -> tuple[dict[str, Scores], dict[str, Metric]]:
    """Set the coefficient of the divergence from the teachers for this step, and run the teachers unless it is 0.
    Return the scores keyed by Teacher.scores, and metrics."""
    distillation = config.algorithm.distillation
    coefficient, metrics = distillation.coefficient_in(number), {}
    if distillation.anneal_steps is not None:
        actor.set_distillation_coefficient(coefficient).result()
        metrics["distillation/coefficient"] = Metric(coefficient)
    if coefficient == 0:
        return {}, metrics
    begin = time.perf_counter()
    scores = run_teachers()
    return scores, metrics | {"teachers/seconds": Metric(time.perf_counter() - begin)}


def make_policy_passes(config: Config, actor: TrainerGroup, updates: Updates) -> Pending[dict[str, Scores]]:
    """Submit a pass for each needed policy. The log-probs stay on the ranks. See TrainerGroup.keep_log_probs."""
    return join([actor.keep_log_probs(policy, updates) for policy in policies(config)]).then(join_named_scores)
