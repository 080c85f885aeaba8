from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.cluster.placement import Placement, place
from megarl.config.load import load

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def placed(*overrides: str, cores: int | None = None) -> Placement:
    return place(load(QUICKSTART, overrides), cores)


def test_every_process_has_a_role_an_index_and_a_name() -> None:
    placement = placed("actor.layout.dp=2", "rollout.replicas=2", cores=8)
    assert [process.name for process in placement.trainers] == ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]
    assert [process.name for process in placement.engines] == ["engine-0", "engine-1"]
    assert placement.rewards.name == "rewards-0"
    assert placement.describe() == "4 trainer × 2 threads, 2 engine × 4 threads, 1 rewards × 1 threads"


@pytest.mark.parametrize(
    ("overrides", "cores", "trainer", "engine"),
    [
        ([], 8, 4, 8),  # two ranks share the cores, then the engine has them all
        (["rollout.tp=2"], 8, 4, 4),  # an engine's ranks share them too
        (["rollout.replicas=3"], 8, 4, 2),
        ([], 1, 1, 1),
        (["actor.threads=3", "rollout.threads=5"], 8, 3, 5),
    ],
)
def test_threads(overrides: list[str], cores: int, trainer: int, engine: int) -> None:
    placement = placed(*overrides, cores=cores)
    assert {process.threads for process in placement.trainers} == {trainer}
    assert {process.threads for process in placement.engines} == {engine}


def test_counts_the_cores_of_this_process() -> None:
    assert placed().engines[0].threads == len(os.sched_getaffinity(0))


def test_a_reward_model_in_vllm_has_a_process_for_each_engine() -> None:
    layout = ["reward_model.path=rm", "reward_model.layout={tp: 2, dp: 2}"]
    assert len(placed(*layout, cores=8).reward_models) == 4
    engines = placed(*layout, "reward_model.engine=vllm", cores=8).reward_models
    assert [(process.name, process.threads) for process in engines] == [("reward-model-0", 2), ("reward-model-1", 2)]
