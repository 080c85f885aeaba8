"""What the devices of a machine do not allow is said in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.cluster.machine import check_machine
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.train import run

BASE = Path(__file__).parents[3] / "configs" / "base.yaml"


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=no/such/folder", "data.source=arithmetic", *overrides])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("offload", ["actor.offload=[gradients]", "critic.offload=[parameters]"])
def test_what_a_cpu_allows(offload: str) -> None:
    check_machine(config(offload))


@pytest.mark.usefixtures("no_cuda")
def test_published_parameters_do_not_move() -> None:
    message = r"^actor.offload=\['gradients', 'parameters'\]: without a GPU the actor's parameters are in host memory"
    with pytest.raises(ValueError, match=message):
        check_machine(config("actor.offload=[gradients, parameters]"))


@pytest.mark.usefixtures("cuda")
def test_a_run_on_a_gpu_ends_before_it_looks_for_its_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^rollout.transport=shared_memory: this machine has a CUDA device"):
        run(config("rollout.transport=shared_memory", f"run.folder={tmp_path}"), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transport", ["auto", "p2p"])
def test_what_a_gpu_allows(transport: str) -> None:
    check_machine(config("actor.offload=[parameters]", f"rollout.transport={transport}"))
