"""What a rank leaves to others on its GPU: parameters that are complete, and memory that torch would have kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl import device
from megarl.config.load import load
from megarl.megatron import step
from megarl.megatron.reward_model_worker import RewardModelWorker
from megarl.megatron.worker import TrainerWorker

BASE = Path(__file__).parents[3] / "configs" / "base.yaml"


@pytest.fixture(params=["colocated", "disaggregated"])
def placement(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def worker(placement: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a rank has when it is done; what it does then is in its log."""
    log: list[str] = []
    monkeypatch.setattr(device, "release_cache", lambda: log.append("release"))
    monkeypatch.setattr(device, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(step, "gather_parameters", lambda chunks: log.append("gather"))
    config = load(BASE, ["model.path=m", "data.source=arithmetic", f"cluster.placement={placement}"])
    moved = SimpleNamespace(offload=[])
    return SimpleNamespace(
        log=log, chunks=[], _kept={}, _config=config, _settings=moved, _move_out=lambda: log.append("move out")
    )


def test_of_a_trainer_at_the_end_of_a_step(worker: SimpleNamespace, placement: str) -> None:
    """Other processes read its parameters without asking it again."""
    TrainerWorker.end_step(worker)
    assert worker.log == ["gather", "synchronize", *(["release"] if placement == "colocated" else [])]


def test_of_a_reward_model_that_has_scored(worker: SimpleNamespace, placement: str) -> None:
    with RewardModelWorker._present(worker):
        worker.log.append("score")
    assert worker.log == ["score", "move out", *(["release"] if placement == "colocated" else [])]
