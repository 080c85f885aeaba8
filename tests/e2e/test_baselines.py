"""Complete runs of estimators whose baselines need more than a group: a greedy response, or earlier steps' rewards."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_train import metrics_of, train_in

pytestmark = pytest.mark.slow
SMALL = ("batch.prompts_per_step=4", "batch.prompts_per_update=4", "batch.samples_per_prompt=2", "run.export=false")
SINGLE_THREADED = ("actor.threads=1", "rollout.threads=1", "checkpoint.every_steps=1")


@pytest.mark.exhaustive
def test_remax_samples_one_greedy_response_per_prompt(series, model, tmp_path):
    run = train_in(series, tmp_path, model, "run.steps=2", "algorithm.advantage.estimator=remax", *SMALL)
    steps = metrics_of(run)
    rows = [json.loads(line) for line in (run / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    greedy = [row for row in rows if row["sample_id"].endswith("greedy")]
    sampled = [row for row in rows if not row["sample_id"].endswith("greedy")]
    assert (len(greedy), len(sampled)) == (4, 8)
    assert steps[1]["reward/greedy_mean"] == pytest.approx(sum(row["reward"] for row in greedy) / 4)
    assert steps[1]["reward/mean"] == pytest.approx(sum(row["reward"] for row in sampled) / 8)
    assert len({row["prompt"] for row in greedy}) == 4
    assert all(step["policy/grad_norm"] > 0 for step in steps)


@pytest.mark.exhaustive
def test_resumed_moving_average_is_bitwise_equal(series, model, tmp_path):
    """A resumed run's third step uses the rewards of the first two steps as its baseline."""
    overrides = ["algorithm.advantage={estimator: reinforce, baseline_decay: 0.5}", *SMALL, *SINGLE_THREADED]
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = metrics_of(train_in(series, tmp_path / "whole", model, "run.steps=3", *overrides))
    train_in(series, tmp_path / "parts", model, "run.steps=2", *overrides)
    parts = metrics_of(train_in(series, tmp_path / "parts", model, "run.steps=3", "resume=auto", *overrides))
    first, second, third = (step["reward/baseline"] for step in whole)
    assert first == 0 and second == pytest.approx(whole[0]["reward/mean"])
    assert third == pytest.approx((0.5 * whole[0]["reward/mean"] + whole[1]["reward/mean"]) / 1.5)
    learned = {name for name in whole[-1] if name.partition("/")[0] in ("reward", "policy")}
    assert {name: parts[-1][name] for name in learned} == {name: whole[-1][name] for name in learned}
