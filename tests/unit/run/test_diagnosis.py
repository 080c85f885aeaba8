"""The comparison of sides stage by stage, and what `megarl diagnose` says of a run that it cannot take."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.config.load import dump, load
from megarl.core.errors import UserError
from megarl.run.diagnosis.comparison import compare, difference, first_different, table, verdict
from megarl.run.diagnosis.diagnose import find_rollout, find_weights, on_one_rank, read_config
from tests.paths import BASE

STAGES = ("embedding", "layer 0", "layer 1", "final norm")


def outputs(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    hidden = {stage: random.standard_normal((5, 8)).astype(np.float32) for stage in STAGES}
    return hidden | {"log-probs": -random.random(5).astype(np.float32)}


def broken_from(stage: str) -> dict[str, np.ndarray]:
    """One token is a tenth away from there on."""
    found = outputs()
    for name in list(found)[list(found).index(stage) :]:
        found[name][3] *= 1.1
    return found


def test_a_difference_is_of_the_token_that_is_furthest_away() -> None:
    a, b = outputs()["layer 0"], broken_from("layer 0")["layer 0"]
    assert difference("layer 0", b, a) == pytest.approx(0.1, rel=1e-5)
    assert difference("log-probs", np.float32([-1, -2]), np.float32([-1, -2.5, -9])) == pytest.approx(0.5)


@pytest.mark.parametrize(("odd", "apart"), [("trainer", "1.0e-01"), ("engine", "9.1e-02")])
def test_the_first_stage_that_differs_is_named_with_its_side(odd: str, apart: str) -> None:
    """The difference is relative to the engine's values, a tenth larger if it is the odd one."""
    sides = dict.fromkeys(("trainer", "engine", "plain"), outputs()) | {odd: broken_from("layer 1")}
    stages = compare(sides, "float32")
    found = first_different(stages)
    assert (found.name, found.odd) == ("layer 1", odd)
    assert verdict(stages).startswith(f"layer 1 is the first that differs: trainer and engine are {apart} apart")
    assert verdict(stages).endswith(f"look at the {odd}'s")
    assert [row.endswith("<") for row in table(stages).splitlines()] == [False, False, False, True, True, True]


def test_sides_that_agree_are_told_so() -> None:
    stages = compare(dict.fromkeys(("trainer", "engine", "plain"), outputs()), "float32")
    assert first_different(stages) is None and verdict(stages).startswith("trainer and engine agree")


def test_values_that_are_no_numbers_differ() -> None:
    nothing = {name: np.full_like(values, np.nan) for name, values in outputs().items()}
    stages = compare({"trainer": outputs(), "engine": nothing, "plain": outputs()}, "float32")
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


def test_the_first_sample_with_token_ids_is_taken(run: Path) -> None:
    found = find_rollout(run, None, None)
    assert (found.step, found.sample_id) == (3, "3.0.1") and found.token_ids[:3] == [1, 2, 3]
    assert len(found.token_ids) == 512
    assert find_rollout(run, 3, "3.0.1") == found


@pytest.mark.parametrize(
    ("step", "sample", "message"),
    [
        (2, None, "--step 2: .* has the rollouts of the steps 1 to 3"),
        (3, "3.9.9", "--sample 3.9.9: step 3 has no such sample"),
        (3, "3.0.0", "sample 3.0.0 lacks token ids, which run.token_samples of a step's samples have"),
        (1, None, "no sample has token ids"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(run: Path, step, sample, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        find_rollout(run, step, sample)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_run_or_no_model_is_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run, as it has no config\.resolved\.yaml"):
        read_config(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"--model .*: no Hugging Face folder"):
        find_weights(run, read_config(run), tmp_path / "elsewhere")


def test_one_rank_computes_the_whole_model_without_adapters(run: Path) -> None:
    config = on_one_rank(read_config(run), 512)
    assert config.actor.layout.world_size == config.num_ranks["rollout"] == 1
    assert config.actor.adapters is None and config.rollout.vllm_overrides == {"load_format": "auto"}
