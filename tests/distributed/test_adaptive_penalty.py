"""The adaptive penalty on divergence from the old policy changes between steps and survives a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT, Checkpoint
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import Group, TokenScores, config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

GROUPS = random_groups(0)
OLD = {"old": {s.id: torch.linspace(-6, -4, len(s.response_ids)) for group in GROUPS for s, _ in group}}


def losses(
    store, rank: int, config: Config, folder: Path, groups: list[Group], scores: TokenScores, divergences: list[float]
) -> tuple[float, float, dict[str, float]]:
    """Return the loss and penalty that an update reports after steps with these divergences, and the counters that a
    checkpoint saves.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for divergence in divergences:
        worker.adapt_penalty(divergence)
    counters = worker._counters()
    again = {name: value for name, value in counters.items() if name != "num_updates"}
    worker._penalty = None
    worker._restore_counters({"num_updates": 0, **again})
    metrics = worker.update(local_batch(rank_batches(config, worker.packing, groups, scores=scores)[rank]))
    return metrics["policy/loss"].value, metrics["policy/penalty"].value, counters


def test_divergences_set_the_penalty_of_the_next_update(tmp_path: Path) -> None:
    """The target is 1: the penalty doubles above 1.5, halves below 1 / 1.5 and is unchanged in between (0.7, 1.4, 1.4,
    2.8, 1.4).
    """
    folder = write_tiny_llama(tmp_path)

    def run(penalty: float, divergences: list[float]) -> tuple[float, float, dict[str, float]]:
        keys = f"algorithm.objective={{name: kl_penalty, penalty: {penalty}, penalty_target: 1.0}}"
        config = config_of(folder, keys, "batch.prompts_per_update=1")
        [result] = run_ranks(1, losses, config, folder, GROUPS, OLD, divergences)
        return result

    loss, penalty, counters = run(0.7, [2.0, 1.4, 2.0, 0.5])
    expected, given, fresh = run(1.4, [])
    assert (penalty, given) == pytest.approx((1.4, 1.4))
    assert loss == expected
    assert counters["penalty"] == 1.4 and "penalty" not in fresh


def restored(store, rank: int, config: Config, folder: Path, saved: Config) -> tuple[float, float | None]:
    """Return the KL coefficient and the penalty after loading a checkpoint of a run with the config `saved`, which has
    adapted both."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.kl_coefficient, worker._penalty = 0.7, 0.9
    (folder / "checkpoint" / "actor").mkdir(parents=True)
    worker.save_checkpoint(folder / "checkpoint")
    worker.finish_checkpoint(folder / "checkpoint")
    state = {"config": saved.model_dump()}
    worker.load_checkpoint(Checkpoint(folder / "checkpoint", 1, state, (), FORMAT))
    return worker.kl_coefficient, worker._penalty


@pytest.mark.parametrize(
    ("kl", "penalty", "expected"),
    [
        ("{coefficient: 0.1, adaptive_target: 1.0}", "{penalty: 0.5, penalty_target: 1.0}", (0.7, 0.9)),
        ("{coefficient: 0.2, adaptive_target: 1.0}", "{penalty: 0.6, penalty_target: 1.0}", (0.2, None)),
        ("{coefficient: 0.1}", "{penalty: 0.5}", (0.1, None)),
    ],
)
def test_changed_coefficients_replace_adapted_ones(tmp_path: Path, kl: str, penalty: str, expected) -> None:
    """A checkpoint contains the adapted coefficients, which must not hide a change of the config."""
    folder = write_tiny_llama(tmp_path)

    def settings(kl: str, penalty: str) -> Config:
        objective = f"algorithm.objective={{name: kl_penalty, {penalty[1:]}"
        return config_of(folder, f"algorithm.kl={kl}", objective, "batch.prompts_per_update=1")

    saved = settings("{coefficient: 0.1, adaptive_target: 1.0}", "{penalty: 0.5, penalty_target: 1.0}")
    assert run_ranks(1, restored, settings(kl, penalty), folder, saved) == [expected]
