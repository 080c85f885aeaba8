"""The agreement check of image models, and its message if an engine's velocities differ from the trainer's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from megarl.cluster.pending import ready
from megarl.config.load import load
from megarl.config.model_schema import Dtype
from megarl.core.errors import PermanentFailure
from megarl.data.prompts import PromptSet
from megarl.resharding.families import diffusers_holders
from megarl.resharding.verification import regions
from megarl.step.image_canaries import ImageCanaries
from megarl.step.logprob_check import LogprobCheck
from tests.paths import BASE
from tests.tiny_denoiser import CONFIG, write_tiny_denoiser

HOLDERS = diffusers_holders(CONFIG, 2, "float32")


def check_of(
    folder: Path, monkeypatch, measured: dict[str, float], differing: dict[str, list[str]], *overrides: str
) -> LogprobCheck:
    """Return the check of a run whose engines have these differences and parts of their weights that differ."""
    monkeypatch.setattr(ImageCanaries, "measure", lambda self: measured)
    info = SimpleNamespace(description="diffusers 1.2, Z-Image, float32, 2 threads")
    workers = SimpleNamespace(
        model_folder=write_tiny_denoiser(folder),
        engines=SimpleNamespace(info=lambda _: ready(dict.fromkeys(measured, info)), holders=HOLDERS),
        actor=SimpleNamespace(kernels="torch layers"),
        trained=SimpleNamespace(stage_actor_for_sync=lambda: None),
        refit=SimpleNamespace(differing=lambda: differing),
        suspend_engines=lambda: None,
    )
    keys = "model.path=m", "model.dtype=float32", "data.source=d", "rollout.engine=diffusers"
    return LogprobCheck(load(BASE, [*keys, *overrides]), workers, PromptSet((), "hash"))


def test_difference_beyond_rounding_ends_the_run(tmp_path, monkeypatch):
    """The message names the engine that differs most and the parts of its weights."""
    parts = [f"layers.{i}.weight" for i in range(5)]
    differing = {"engine-0": [], "engine-1": parts}
    check = check_of(tmp_path, monkeypatch, {"engine-0": 1e-7, "engine-1": 0.25}, differing)
    count = len(regions(HOLDERS))
    with pytest.raises(PermanentFailure) as error:
        check.begin()
    assert str(error.value) == (
        "logprob_check: before the first step, the velocities of engine-1 differ from the trainer's (relative "
        f"difference 2.5e-01): 5 of {count} parts of its weights differ: layers.0.weight; layers.1.weight; "
        "layers.2.weight\nThe limit is 0.0001. Fix: check the installed versions with megarl doctor, or set "
        "logprob_check.canaries=off to disable this check"
    )


@pytest.mark.parametrize("dtype", get_args(get_args(Dtype)[0]))
def test_equal_velocities_pass_in_every_dtype(tmp_path, monkeypatch, dtype):
    check_of(tmp_path, monkeypatch, {"engine-0": 0.0}, {"engine-0": []}, f"model.dtype={dtype}").begin()


def test_equal_weights_with_other_velocities_name_both_programs(tmp_path, monkeypatch):
    check = check_of(tmp_path, monkeypatch, {"engine-0": 2e-4}, {"engine-0": []}, "logprob_check.canaries=refits")
    with pytest.raises(PermanentFailure) as error:
        check.after_refit(7)
    assert str(error.value).startswith(
        "logprob_check: after the refit of step 7, the velocities of engine-0 differ from the trainer's (relative "
        "difference 2.0e-04): its weights equal the trainer's, so their implementations compute different results. "
        "Trainer: torch layers. Engine: diffusers 1.2, Z-Image, float32, 2 threads\n"
    )


def test_rounding_is_accepted(tmp_path, monkeypatch, capsys):
    check = check_of(tmp_path, monkeypatch, {"engine-0": 3e-6, "engine-1": 2e-6}, {}, "logprob_check.canaries=refits")
    check.begin()
    assert "passed, relative difference of canary velocities 3.0e-06" in capsys.readouterr().out
    assert check.after_refit(1)["mismatch/canary_velocity"].value == 3e-6


def test_check_can_be_disabled(tmp_path, monkeypatch):
    check = check_of(tmp_path, monkeypatch, {"engine-0": 1.0}, {"engine-0": []}, "logprob_check.canaries=off")
    check.begin()
    assert check.after_refit(1) == {}
