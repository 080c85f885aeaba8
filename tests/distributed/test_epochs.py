"""Several epochs of a step through the driver's functions, in each layout, against plain Hugging Face and torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.groups.ranks import worker_class
from megarl.cluster.pending import Pending, ready
from megarl.cluster.rank_batch import Updates, join_by_sample, join_named_scores
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.metrics import Metric, merge, merge_updates
from megarl.core.sample import SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.classifier import as_classifier
from megarl.models.folder import read_config
from megarl.step.dispatch import epochs_of
from megarl.step.rollouts import Rollouts
from megarl.train import train
from tests.closeness import Expected, assert_close, expected
from tests.distributed.test_ppo_parity import EVERYTHING, ppo_config, renamed, write_critic
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import Group, RankResult, local_batch, random_groups, whole_tensors
from tests.ppo_reference import PpoReference
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama

GROUPS = random_groups(0, SHARDED_VOCAB) + [
    [(renamed(sample), reward) for sample, reward in group] for group in random_groups(1, SHARDED_VOCAB)
]
BATCH = "batch={prompts_per_step: 6, prompts_per_update: 2, epochs: 3}"
NUMBER = 5
"""Number of the step."""


class Ranks:
    """A TrainerGroup whose ranks are processes that each run the driver's part as well. Object references are the
    objects themselves."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, worker: TrainerWorker):
        self.packing, self._worker = worker.packing, worker

    def keep_log_probs(self, policy: str, updates: Updates) -> Pending[dict]:
        pending = [self._worker.keep_log_probs(policy, batch) for batch in self._own(updates)]
        return ready(join_named_scores([part for parts in gathered(pending) for part in parts]))

    def score_tokens(self, updates: Updates) -> Pending[tuple[dict, dict]]:
        pending = [self._worker.score_tokens(batch) for batch in self._own(updates)]
        return ready((join_by_sample([part for parts in gathered(pending) for part in parts]), {}))

    def train(self, epochs: Sequence[Updates], begins_step: bool) -> Pending[dict[str, Metric]]:
        pending = []
        for updates in epochs:
            pending += [self._worker.update(batch) for batch in self._own(updates)]
            self._worker.end_epoch()
        return ready(merge_updates([merge(ranks) for ranks in zip(*gathered(pending), strict=True)]))

    def end_step(self) -> Pending[None]:
        return ready(self._worker.end_step())

    def _own(self, updates: Updates) -> list[LocalBatch]:
        return [local_batch(batches[self._worker.data_parallel_rank]) for batches in updates]


class Other:
    """The model that is not trained. As a critic, it returns fixed values at the start of the step."""

    offloads: frozenset[str] = frozenset()

    def __init__(self, packing, values: dict[str, torch.Tensor]):
        self.packing, self._values = packing, values

    def score_tokens(self, updates: Updates) -> Pending[tuple[dict, dict]]:
        return ready((self._values, {}))

    def train(self, epochs: Sequence[Updates], begins_step: bool) -> Pending[dict[str, Metric]]:
        return ready({})

    def end_step(self) -> Pending[None]:
        return ready(None)


def gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def scored(group: Group) -> list[SampleRef]:
    return [replace(SampleRef.of(sample, sample), outcome=reward) for sample, reward in group]


def train_step(
    store, rank: int, config: Config, folders: dict[str, Path], role: str, values: dict[str, torch.Tensor]
) -> RankResult:
    worker = worker_class(config, role)(config, folders[role], rank, store, threads=1)
    groups = {"actor": Other(worker.packing, values), "critic": Other(worker.packing, values)} | {role: Ranks(worker)}
    workers = Workers(TrainedModels(groups, dict.fromkeys(groups, ())), None, None, None, None, None, False, Path())
    rollouts = Rollouts((), [scored(group) for group in GROUPS], {}, {})
    metrics = train(config, workers, rollouts, NUMBER, MovingAverage())
    return RankResult(worker.holder, {}, {n: p.clone() for n, p in worker.parameters().items()}, metrics)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    sizes = dict(num_heads=3, num_kv_heads=3, hidden_size=96, num_layers=4, intermediate_size=96)
    actor = write_tiny_llama(tmp_path_factory.mktemp("actor"), **sizes, vocab_size=SHARDED_VOCAB)
    return {"actor": actor, "critic": write_critic(tmp_path_factory.mktemp("critic"), actor)}


@pytest.fixture(scope="module")
def plain(folders):
    """Return a function that maps a number of epochs to the trained reference and the initial values."""

    @cache
    def trained(num_epochs: int) -> Expected[tuple[PpoReference, dict[str, torch.Tensor]]]:
        return expected(lambda: train_plainly(num_epochs))

    def train_plainly(num_epochs: int) -> tuple[PpoReference, dict[str, torch.Tensor]]:
        reference = PpoReference(folders["actor"], folders["critic"], EVERYTHING)
        with torch.no_grad():
            values = {sample.id: reference.values(sample) for group in GROUPS for sample, _ in group}
        config = ppo_config(folders["actor"], folders["critic"], ("{}", "{}"), EVERYTHING, BATCH)
        epochs = epochs_of(config, [range(i, i + 1) for i in range(len(GROUPS))], NUMBER)
        reference.step([[GROUPS[i] for [i] in update] for updates in epochs[:num_epochs] for update in updates])
        return reference, values

    return trained


CASES = {
    "actor, 1 process": ("actor", "{}", 3),
    "actor, DP2": ("actor", "{dp: 2}", 3),
    "actor, CP2 PP2": ("actor", "{cp: 2, pp: 2}", 3),
    "actor, TP3 SP": ("actor", "{tp: 3, sequence_parallel: true}", 3),
    "actor, DP2, stopped early": ("actor", "{dp: 2}", 1),
    "critic, DP2": ("critic", "{dp: 2}", 3),
    "critic, CP2 PP2": ("critic", "{cp: 2, pp: 2}", 3),
}


@pytest.mark.parametrize(
    "case",
    exhaustive_but(CASES, "actor, DP2, stopped early", "critic, DP2"),
)
def test_epochs_equal_plain_torch(folders, plain, case):
    role, layout, num_epochs = CASES[case]
    (exact, _), (rounded, values) = plain(num_epochs)
    config = ppo_config(
        folders["actor"],
        folders["critic"],
        (layout, layout),
        EVERYTHING,
        BATCH,
        *(["batch.epochs_kl_limit=1.0e-9"] if num_epochs == 1 else []),
        *([f"critic.warmup_steps={NUMBER}"] if role == "critic" else []),
    )
    ranks = run_ranks(config.actor.layout.world_size, train_step, config, folders, role, values)
    assert all(rank.metrics["update/epochs"].value == num_epochs for rank in ranks)
    hf_config = read_config(folders["actor"])
    expected_weights = (
        dict((one.actor if role == "actor" else one.critic).named_parameters()) for one in (exact, rounded)
    )
    weights = whole_tensors(hf_config if role == "actor" else as_classifier(hf_config), ranks, "weights")
    assert_close(weights, *expected_weights, "weight")
