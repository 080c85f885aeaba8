"""Settings that Megatron or this machine rejects are reported before the run creates a folder or starts Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ray

from megarl.cluster import megatron_settings
from megarl.cluster.megatron_settings import check_megatron_settings
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import RunFailure
from megarl.models.run_models import ModelFolders, find_models
from megarl.train import run
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def config_of(folder: Path, *overrides: str) -> Config:
    given = [f"model.path={folder}", "data.source=arithmetic", "rollout.context_length=64", "rollout.max_new_tokens=16"]
    return load(BASE, [*given, "algorithm.advantage.estimator=gae", *overrides])


def test_all_rejected_settings_are_reported_before_the_start(folder: Path, tmp_path: Path, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(ray, "init", lambda **_: started.append(True))
    config = config_of(
        folder,
        f"run.folder={tmp_path}",
        "model.dtype=bfloat16",
        "actor.fp8=blockwise",
        "actor.megatron_overrides.optimizer={adam_bata1: 0.8}",
        "actor.megatron_overrides.ddp={overlap_grad_reduce: false}",
        "critic.megatron_overrides.model={moe_z_loss_coeff: high}",
    )
    with pytest.raises(ValueError) as error:
        run(config, tmp_path)
    fp8, optimizer, ddp, critic = str(error.value).splitlines()
    assert fp8.startswith("actor.fp8=blockwise: fp8 requires a CUDA device and the package transformer-engine")
    assert fp8.endswith("install the package, or set actor.fp8=null")
    assert optimizer == (
        "actor.megatron_overrides.optimizer.adam_bata1=0.8: Megatron's OptimizerConfig has no such field. Fix: use "
        "adam_beta1"
    )
    assert ddp.startswith("actor.megatron_overrides.ddp.overlap_grad_reduce=False: megarl derives this field from")
    assert critic == (
        "critic.megatron_overrides.model.moe_z_loss_coeff='high': expected Optional[float], but found str. Fix: set a "
        "value of the expected type"
    )
    assert not started
    assert not list(tmp_path.iterdir())


def test_recipe_without_such_keys_starts_no_process(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    config = config_of(folder)
    check_megatron_settings(config, ModelFolders(folder, folder, None, None))


def test_failing_check_process_ends_the_run(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(megatron_settings, "PROGRAM", "megarl.no_such_module")
    config = config_of(folder, "actor.megatron_overrides.ddp={bucket_size: 1000}")
    with pytest.raises(
        RunFailure, match=r"^check of megatron_overrides and fp8: megarl.no_such_module exited with status 1: .* No mod"
    ):
        check_megatron_settings(config, find_models(config))
