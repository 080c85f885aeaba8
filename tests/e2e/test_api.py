"""Training from Python: callbacks during a run, its result, and an early end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megarl
from megarl.api import commands
from tests.e2e.run import FAKE_MEGARL, write_recipe
from tests.paths import ROOT
from tests.readme import text_of

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def test_run_calls_back_and_continues_after_an_early_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MEGARL", tuple(FAKE_MEGARL))
    overrides = {
        "run.folder": str(tmp_path),
        "run.steps": 2,
        "checkpoint.every_steps": 1,
        "logprob_check": {"limit": 1000, "threshold": 1000, "canaries": "off"},
    }
    recipe = write_recipe(tmp_path)
    steps, checkpoints = [], []
    result = megarl.run_training(
        megarl.load_config(recipe, overrides),
        on_step=lambda step, metrics: steps.append((step, metrics["reward/mean"])),
        on_checkpoint=lambda step, folder: checkpoints.append((step, folder.name)),
    )
    assert [step for step, _ in steps] == [1, 2] and result.step == 2
    assert checkpoints == [(1, "step_000001"), (2, "step_000002")]
    table = megarl.read_metrics(result.folder)
    assert table.column("reward/mean").to_pylist() == [reward for _, reward in steps]
    assert result.metrics["reward/mean"] == steps[-1][1]
    assert megarl.read_rollouts(result.folder, steps=[2]).num_rows == 16

    def stop(step: int, _: dict[str, float]) -> None:
        steps.append(step)
        raise megarl.StopTraining

    longer = overrides | {"run.steps": 1_000_000, "resume": "auto"}
    again = megarl.run_training(megarl.load_config(recipe, longer), on_step=stop)
    assert steps[2:] == [3] and again.step >= 3


def test_scripts_of_the_tutorial_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(commands, "MEGARL", tuple(FAKE_MEGARL))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the fakes
    monkeypatch.chdir(tmp_path)
    limits = "logprob_check: {limit: 1000, threshold: 1000, canaries: off}\n"
    (tmp_path / "recipe.yaml").write_text(write_recipe(tmp_path).read_text() + limits)
    scripts = re.findall(r"^```py\n(.*?)^```", text_of("docs/tutorials/python-api.md"), re.DOTALL | re.MULTILINE)
    exec("\n".join(scripts), {})
    output = capfd.readouterr().out
    assert "step 2: reward" in output and "saved" in output and (tmp_path / "huggingface" / "config.json").exists()
