"""Tests of the stage-by-stage comparison and of the errors of `megarl diagnose`."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from megarl.config import document
from megarl.config.load import dump, load
from megarl.config.model_schema import Dtype
from megarl.core.errors import UserError
from megarl.run.diagnosis import diagnose as diagnosis
from megarl.run.diagnosis.comparison import compare, difference, first_different, table, verdict
from megarl.run.diagnosis.diagnose import difference_in_run, find_rollout, find_weights, on_one_rank, read_run_config
from tests.paths import BASE

DTYPES = get_args(get_args(Dtype)[0])
STAGES = ("embedding", "layer 0", "layer 1", "final norm")


def outputs(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden = {stage: random.standard_normal((5, 8)).astype(np.float32) for stage in STAGES}
    return hidden | {"log-probs": -random.random(5).astype(np.float32)}


def broken_from(stage: str) -> dict[str, np.ndarray]:
    """Return outputs in which one token is scaled by 1.1 from `stage` on."""
    broken = outputs()
    for name in list(broken)[list(broken).index(stage) :]:
        broken[name][3] *= 1.1
    return broken


def test_difference_is_the_maximum_or_the_mean_over_tokens() -> None:
    a, b = outputs()["layer 0"], broken_from("layer 0")["layer 0"]
    assert difference("layer 0", b, a) == pytest.approx(0.1, rel=1e-5)
    assert difference("log-probs", np.float32([-1, -2]), np.float32([-1, -2.5, -9])) == pytest.approx(0.25)


@pytest.mark.parametrize(("odd", "expected"), [("trainer", "1.0e-01"), ("engine", "9.1e-02")])
def test_first_differing_stage_is_reported_with_its_side(odd: str, expected: str) -> None:
    """The difference is relative to the engine's values, which are 1.1 times larger if the engine is odd."""
    sides = dict.fromkeys(("trainer", "engine", "plain"), outputs()) | {odd: broken_from("layer 1")}
    stages = compare(sides, "float32", 1e-4)
    first = first_different(stages)
    assert (first.name, first.outlier) == ("layer 1", odd)
    assert verdict(stages).startswith(
        f"layer 1 is the first stage that differs. After it, the trainer and the engine differ by {expected}"
    )
    assert verdict(stages).endswith(f"inspect this stage in the {odd}")
    assert [row.endswith("<") for row in table(stages).splitlines()] == [False, False, False, True, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_sides_agree(dtype: str) -> None:
    stages = compare(dict.fromkeys(("trainer", "engine", "plain"), outputs()), dtype, 1e-4)
    assert first_different(stages) is None and verdict(stages).startswith("The trainer and the engine agree")


@pytest.mark.parametrize(("limit", "agrees"), [(1e-4, False), (1e-3, True)])
def test_log_probs_are_compared_with_the_limit_of_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, limit: float, agrees: bool
) -> None:
    config = read_run_config(run)
    check = config.logprob_check.model_copy(update={"limit": limit})
    shifted = outputs() | {"log-probs": outputs()["log-probs"] + np.float32(5e-4)}
    monkeypatch.setattr(diagnosis, "_compute", lambda side, *_: shifted if side == "engine" else outputs())
    stages = diagnosis.diagnose(
        config.model_copy(update={"logprob_check": check}), [1, 2], dict.fromkeys(diagnosis.SIDES, run), run
    )
    assert (first_different(stages) is None) == agrees
    assert f"{limit:g}" in verdict(stages)


def test_nan_outputs_differ() -> None:
    nan_outputs = {name: np.full_like(values, np.nan) for name, values in outputs().items()}
    stages = compare({"trainer": outputs(), "engine": nan_outputs, "plain": outputs()}, "float32", 1e-4)
    assert first_different(stages).name == "embedding"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "actor.layout.pp=2", "actor.lora.rank=4"])
    (tmp_path / "config.resolved.yaml").write_text(dump(config))
    (tmp_path / "rollouts").mkdir()
    empty = {"sample_id": "3.0.2", "prompt_ids": [], "response_ids": []}
    rows = [{"sample_id": "3.0.0"}, empty, {"sample_id": "3.0.1", "prompt_ids": [1, 2], "response_ids": [3] * 600}]
    (tmp_path / "rollouts/step_000003.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rollouts/step_000001.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return tmp_path


def test_find_rollout_takes_the_first_sample_with_token_ids(run: Path) -> None:
    rollout = find_rollout(run, None, None)
    assert (rollout.step, rollout.sample_id) == (3, "3.0.1") and rollout.token_ids[:3] == [1, 2, 3]
    assert len(rollout.token_ids) == 512
    assert find_rollout(run, 3, "3.0.1") == rollout


@pytest.mark.parametrize(
    ("step", "sample", "message"),
    [
        (2, None, r"--step 2: the run has no rollouts of this step\. Fix: pass a step from 1 to 3"),
        (3, "3.9.9", "--sample 3.9.9: step 3 has no such sample. Fix: pass a sample_id from"),
        (3, "3.0.0", "sample 3.0.0 has no token ids. megarl saves them for run.token_samples samples per step"),
        (1, None, "no sample has token ids"),
    ],
)
def test_missing_rollout_raises_a_one_line_error(run: Path, step, sample, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        find_rollout(run, step, sample)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["prompt_images", "observation_images"])
def test_samples_with_images_are_skipped(run: Path, key: str) -> None:
    file = run / "rollouts/step_000003.jsonl"
    ids = {"prompt_ids": [1, 2], "response_ids": [3]}
    image = {"start": 0, "stop": 1, "num_tokens": 1, "digest": "0" * 64}
    pictured, text = {"sample_id": "3.1.0", **ids, key: [image]}, {"sample_id": "3.2.0", **ids}
    file.write_text("".join(json.dumps(row) + "\n" for row in (pictured, text)))
    assert find_rollout(run, None, None).sample_id == "3.2.0"
    with pytest.raises(UserError, match=r"the prompt of sample 3.1.0 contains images, which megarl diagnose does not"):
        find_rollout(run, 3, "3.1.0")
    file.write_text(json.dumps(pictured) + "\n")
    with pytest.raises(UserError, match=r"the prompts of all samples contain images.* Fix: pass a --sample or --step"):
        find_rollout(run, None, None)


def test_recorded_differences_contradict_equal_sides(run: Path) -> None:
    """The run's engine had an argument that `megarl diagnose` does not pass on."""
    row = {"sample_id": "3.0.0", "prompt_ids": [1, 2], "response_ids": [3, 4], "logprob_differences": [0.5, None, -0.3]}
    (run / "rollouts" / "step_000003.jsonl").write_text(json.dumps(row) + "\n")
    rollout, config = find_rollout(run, 3, None), read_run_config(run)
    assert rollout.differences == [0.5, -0.3]
    message = difference_in_run(config, rollout)
    assert message is not None and "differed by 4.0e-01 per token" in message and "rollout.verify_refit" in message
    changed = {"vllm_overrides": {"logits_processors": ["x:Bias"], "block_size": 16}}
    biased = config.model_copy(update={"rollout": config.rollout.model_copy(update=changed)})
    assert "rollout.vllm_overrides.logits_processors (which this command ignores)" in difference_in_run(biased, rollout)
    assert difference_in_run(config, replace(rollout, differences=[1e-6])) is None
    stale = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_staleness": 1})})
    assert difference_in_run(stale, rollout) is None


def test_folders_without_a_run_or_model_raise(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run folder \(no config\.resolved\.yaml\)"):
        read_run_config(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"--model .*: not a Hugging Face model folder"):
        find_weights(run, read_run_config(run), tmp_path / "elsewhere")


def test_single_rank_config_has_no_adapters(run: Path) -> None:
    config = on_one_rank(read_run_config(run), 512)
    assert config.actor.layout.world_size == config.num_ranks["rollout"] == 1
    assert config.actor.adapters is None and config.rollout.vllm_overrides == {"load_format": "auto"}


def test_the_run_folder_cannot_execute_code(run: Path, tmp_path: Path) -> None:
    """Anyone may have written the folder."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    config = run / "config.resolved.yaml"
    values = deepcopy(document.parse(config.read_text(), "config").values)
    values["algorithm"]["objective"]["name"] = f"{tmp_path}/planted.py:SPEC"
    values["rollout"]["vllm_overrides"] = {"trust_remote_code": True, "worker_cls": "planted.Worker", "block_size": 32}
    config.write_text(document.render(values))
    overrides = on_one_rank(read_run_config(run), 512).rollout.vllm_overrides
    assert overrides == {"block_size": 32, "load_format": "auto"}
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("text", ["run: {}\n", "algorithm: []\n", "base: other.yaml\nalgorithm: {}\n", "a: [" * 5000])
def test_an_invalid_config_is_named(run: Path, text: str) -> None:
    (run / "config.resolved.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.resolved\.yaml"):
        read_run_config(run)
