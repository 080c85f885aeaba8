"""Every recipe trains a tiny actor for two steps through the driver's functions, with fake scores for the other
models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path

import pytest
import torch

from megarl import finetune, train
from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.specs import LabelObjective
from megarl.cluster.groups.ranks import worker_class
from megarl.cluster.pending import Pending, ready
from megarl.cluster.rank_batch import Scores, Updates
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.metrics import Metric, merge_updates
from megarl.core.sample import SampleRef
from megarl.core.score import TokenTotals
from megarl.megatron.model.build import adapter_parameters
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.step import passes
from megarl.step.rollouts import Rollouts
from tests.forked import run_ranks
from tests.parity import labelled, local_batch, random_groups
from tests.paths import CONFIGS
from tests.tiny_model import write_tiny_llama

RECIPES = sorted({*CONFIGS.glob("*-*.yaml")} - {*CONFIGS.glob("*-flow-grpo.yaml")})
"""The recipes of language models. test_image_updates covers those of image models."""
TINY = (
    *("actor.layout={pp: 1}", "actor.layout.last_stage_layers=null", "actor.tokens_per_microbatch=256"),
    *("actor.optimizer.lr=0.001", "batch.prompts_per_step=4", "batch.samples_per_prompt=4"),
)

SHORT = ("rollout.context_length=256", "rollout.max_new_tokens=128")


class Actor:
    """A TrainerGroup with one rank in this process. It passes samples without the object store."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, worker: TrainerWorker):
        self.packing, self._worker = worker.packing, worker
        self.calls: list[str] = []

    def keep_log_probs(self, policy: str, updates: Updates) -> Pending[dict[str, Scores]]:
        self.calls.append(f"{policy} log-probs")
        for batches in updates:
            self._worker.keep_log_probs(policy, local_batch(*batches))
        return ready({})

    def score_tokens(self, updates: Updates):
        scores: dict[str, torch.Tensor] = {}
        for batches in updates:
            scores |= self._worker.score_tokens(local_batch(*batches))
        return ready((scores, totals(scores, updates)))

    def train(self, epochs: Sequence[Updates], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        metrics = [self._worker.update(local_batch(*batches)) for updates in epochs for batches in updates]
        self._worker.end_epoch()
        return ready(merge_updates(metrics))

    def end_step(self) -> Pending[None]:
        return ready(self._worker.end_step())

    def adapt_kl(self, divergence: float, num_samples: int) -> Pending[None]:
        return ready(self._worker.adapt_kl(divergence, num_samples))

    def renew_reference(self) -> Pending[None]:
        return ready(self._worker.renew_reference())


class Scorer:
    """A fake of another model, with a score for every token."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, packing):
        self.packing = packing

    def score_tokens(self, updates: Updates):
        generator = torch.Generator().manual_seed(1)
        samples = [item.sample for batches in updates for batch in batches for item in batch.samples]
        scores = {sample.id: torch.randn(len(sample.response_ids), generator=generator) for sample in samples}
        return ready((scores, totals(scores, updates)))

    def train(self, epochs: Sequence[Updates], begins_step: bool = True) -> Pending[dict[str, Metric]]:
        return ready({})

    def end_step(self) -> Pending[None]:
        return ready(None)


class FakeTeacher:
    """A fake of a teacher, with a log-prob for every token."""

    def __init__(self, scores: str):
        self.scores = scores

    def score_tokens(self, samples: Sequence[SampleRef], feedback: object) -> Pending[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(2)
        return ready({item.id: -torch.rand(item.num_response_tokens, generator=generator) for item in samples})


def totals(scores: dict[str, torch.Tensor], updates: Updates) -> dict[str, TokenTotals]:
    samples = [item.sample for batches in updates for batch in batches for item in batch.samples]
    return {s.id: TokenTotals.of(list(compress(scores[s.id].tolist(), s.response_mask))) for s in samples}


def train_two_steps(store, rank: int, config: Config, folder: Path) -> tuple[list[dict[str, float]], list[str], bool]:
    """Return the metrics of each step, the actor's passes, and whether its weights changed."""
    worker = worker_class(config, "actor")(config, folder, rank, store, threads=1)
    before = {name: weight.detach().clone() for name, weight in trained_weights(worker).items()}
    actor = Actor(worker)
    critic = Scorer(worker.packing) if config.has_critic else None
    implicit_reward = Scorer(worker.packing) if config.has_implicit_reward else None
    groups = {"actor": actor, "critic": critic, "implicit_reward": implicit_reward}
    groups = {role: group for role, group in groups.items() if group is not None}
    trained = TrainedModels(groups, dict.fromkeys(groups, ()))
    teachers = [FakeTeacher(teacher.scores) for teacher in config.teachers.models]
    workers = Workers(trained, None, None, None, None, None, False, Path(), teachers=teachers)
    first = config.critic.warmup_steps + 1
    metrics = []
    for number in (first, first + 1):
        groups = random_groups(number)
        groups = labelled(groups) if isinstance(config.algorithm.objective.spec, LabelObjective) else groups
        metrics.append(train_step(config, workers, [scored(group) for group in groups], number))
    moved = any(not torch.equal(weight, before[name]) for name, weight in trained_weights(worker).items())
    return metrics, actor.calls, moved


def trained_weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return worker.parameters() if worker.adapters is None else adapter_parameters(worker.chunks)


def train_step(config: Config, workers: Workers, groups: list[list[SampleRef]], number: int) -> dict[str, float]:
    if config.is_offline:
        rows = [group[: config.trained_per_prompt] for group in groups]
        metrics = finetune.train(config, workers.actor, workers.teachers, rows, number)
    else:
        metrics = train.train(config, workers, Rollouts((), groups, {}, {}), number, MovingAverage())
    return {name: metric.value for name, metric in metrics.items()}


def scored(group) -> list[SampleRef]:
    return [replace(SampleRef.of(s, s), outcome=reward, greedy=0.5) for s, reward in group]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_trains(folder, recipe):
    as_it_is = load(recipe)
    updates = as_it_is.batch.prompts_per_step // as_it_is.batch.prompts_per_update
    # Set k to half of the samples per prompt.
    keys = ["algorithm.advantage.k=2"] if as_it_is.algorithm.advantage.estimator == "pass_at_k" else []
    keys += [f"model.path={folder}", f"batch.prompts_per_update={max(4 // updates, 1)}"]
    is_long = load(recipe).rollout.context_length > 256
    config = load(recipe, [*TINY, *(SHORT if is_long else ()), *keys])
    [(metrics, calls, moved)] = run_ranks(1, train_two_steps, config, folder)
    assert moved
    for step in metrics:
        assert all(map(math.isfinite, step.values())), step
        assert any(name.endswith("grad_norm") and value > 0 for name, value in step.items())
    assert set(calls) == {name for name in ("old log-probs", "reference log-probs") if passes.needed(config, name)}
    assert ("kl/teacher_trained" in metrics[0]) == config.has_teachers
    assert (config.algorithm.kl_metric in metrics[0]) == (config.algorithm.kl.coefficient > 0)
    if updates > 1 and config.algorithm.correction.old == "trainer":
        assert metrics[0]["policy/ratio_max"] > 1  # because of the later updates of the step
