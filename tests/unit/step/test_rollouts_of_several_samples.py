"""Statistics are per rollout: a rollout trained on as several samples counts once."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from megarl.algorithms.baselines import MovingAverage
from megarl.config.load import load
from megarl.core.episode import RolloutInfo
from megarl.core.errors import InfrastructureFailure, RunFailure, UserError
from megarl.core.sample import SampleRef
from megarl.core.score import Score, TokenTotals
from megarl.step.baselines import attach_baselines, update_reward_average
from megarl.step.metrics import step_metrics
from megarl.step.scoring import is_informative, select
from tests.paths import QUICKSTART

REWARDS = {"1.0.0": 1.0, "1.0.1": 0.0, "1.0.2": 0.5}
NUM_SAMPLES = {"1.0.0": 3, "1.0.1": 1, "1.0.2": 2}


def sample_of(rollout: str, number: int, stop: str = "done") -> SampleRef:
    numbers = RolloutInfo(stop, 4, NUM_SAMPLES.get(rollout, 1), {"ok": 2, "raised": 1}, 100, 80)
    name = rollout if number == 0 else f"{rollout}/{number}"
    return SampleRef(name, "p", 10, 5, 3, "stop", 0, 0, rollout_id=rollout, rollout=numbers)


def group() -> list[SampleRef]:
    return [sample_of(name, k) for name, count in NUM_SAMPLES.items() for k in range(count)]


def scores(samples: list[SampleRef]) -> list[Score]:
    return [Score(REWARDS[sample.rollout_id], {"environment": REWARDS[sample.rollout_id]}) for sample in samples]


def config(*overrides: str):
    return load(QUICKSTART, ["environment.class=a.py:A", "batch.samples_per_prompt=3", *overrides])


def test_grpo_compares_rollouts_not_samples():
    samples = group()
    [scored], metrics = select(config(), [samples], scores(samples))
    assert len(scored) == 6 and is_informative(scored)
    assert metrics["reward/mean"].value == pytest.approx(0.5)
    assert metrics["reward/std"].value == pytest.approx(statistics.pstdev([1.0, 0.0, 0.5]))
    assert metrics["reward/environment"].value == pytest.approx(0.5)
    assert metrics["reward/failed_frac"].value == 0
    based = attach_baselines(config(), [scored], {}, {}, MovingAverage())
    assert [item.id for item in based] == [sample.id for sample in samples]
    for item in based:
        advantage = (item.reward - item.baseline.center) / item.baseline.scale
        expected = (REWARDS[item.rollout_id] - 0.5) / (statistics.stdev([1.0, 0.0, 0.5]) + 1e-6)
        assert advantage == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kinds", "limit", "raised"),
    [
        ("lost lost fine", 0.5, InfrastructureFailure),
        ("lost code fine", 0.5, InfrastructureFailure),
        ("code code fine", 0.5, UserError),
        ("code code lost", 0.5, UserError),
        ("lost lost lost", 1, InfrastructureFailure),
        ("lost lost code", 1, RunFailure),
    ],
)
def test_infrastructure_failures_are_not_user_errors(kinds: str, limit: float, raised: type[Exception]) -> None:
    samples = [sample_of(name, 0) for name in REWARDS]
    of_kind = {"fine": Score(1.0, {}), "code": Score(None, {}, "KeyError")}
    of_kind["lost"] = Score(None, {}, "the judge is away", is_infrastructure=True)
    with pytest.raises(raised) as caught:
        select(config(f"rewards.failure_limit={limit}"), [samples], [of_kind[kind] for kind in kinds.split()])
    assert type(caught.value) is raised
    if limit < 1:
        assert str(caught.value).startswith("the judge is away" if raised is InfrastructureFailure else "KeyError")


def test_infrastructure_failures_are_counted_separately():
    samples, lost = [sample_of(name, 0) for name in REWARDS], Score(None, {}, "lost", is_infrastructure=True)
    results = [lost, Score(None, {}, "code"), Score(1.0, {})]
    settings = config("rewards.failure_limit=1", "rewards.max_consecutive_failures=2")
    _, metrics = select(settings, [samples], results)
    assert metrics["reward/failed_frac"].value == pytest.approx(2 / 3)
    assert metrics["reward/infrastructure_failed_frac"].value == pytest.approx(1 / 3)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus_baseline", "opo", "gpg"])
def test_rollout_has_the_baseline_of_a_single_sample(estimator):
    """OPO weights rewards by the token count of the whole rollout."""
    settings = config(f"algorithm.advantage.estimator={estimator}")
    samples = group()
    [scored], _ = select(settings, [samples], scores(samples))
    whole = [SampleRef(name, "p", 10, 5, 3 * count, "stop", 0, 0) for name, count in NUM_SAMPLES.items()]
    [of_whole], _ = select(settings, [whole], scores(whole))
    expected = {item.id: item.baseline for item in attach_baselines(settings, [of_whole], {}, {}, MovingAverage())}
    for item in attach_baselines(settings, [scored], {}, {}, MovingAverage()):
        assert item.baseline == expected[item.rollout_id]


def test_token_rewards_and_kl_are_summed_over_a_rollout():
    settings = config("algorithm.advantage.estimator=rloo")
    samples = group()
    [scored], _ = select(settings, [samples], scores(samples))
    kl = {sample.id: TokenTotals(3, -0.1, 0.01) for sample in samples}
    based = attach_baselines(settings, [scored], {}, kl, MovingAverage())
    rewards = {name: REWARDS[name] - 0.1 * count for name, count in NUM_SAMPLES.items()}
    first = next(item for item in based if item.rollout_id == "1.0.0")
    assert first.baseline.center == pytest.approx((rewards["1.0.1"] + rewards["1.0.2"]) / 2)


def test_moving_average_is_over_rollouts():
    settings = config("algorithm.advantage.estimator=reinforce")
    samples = group()
    [scored], _ = select(settings, [samples], scores(samples))
    average = MovingAverage()
    update_reward_average(settings, [scored], {}, {}, average)
    assert average.value == pytest.approx(0.5)


def test_greedy_rollout_is_excluded_with_all_its_samples():
    settings = config("algorithm.advantage.estimator=remax")
    samples = group()
    greedy = [sample_of("1.0.greedy", k) for k in range(2)]
    given = [*scores(samples), Score(0.25, {}), Score(0.25, {})]
    [scored], metrics = select(settings, [[*samples, *greedy]], given)
    assert {item.rollout_id for item in scored} == set(REWARDS)
    assert {item.greedy for item in scored} == {0.25}
    assert metrics["reward/greedy_mean"].value == 0.25


def test_failed_environment_is_not_a_reward_failure():
    samples = group()
    failed = sample_of("1.0.9", 0, "failed")
    [scored], metrics = select(
        config(), [[*samples, failed]], [*scores(samples), Score(None, {}, "environment: step raised")]
    )
    assert len(scored) == 6
    assert metrics["reward/failed_frac"].value == pytest.approx(1 / 4)


def test_metrics_of_environments_count_rollouts():
    class Watch:
        def metrics(self):
            return {"time/step": 2.0}

    found = step_metrics(config(), [group()], Watch(), 1)
    assert found["environment/samples_per_rollout"] == pytest.approx(2.0)
    assert found["environment/turns_mean"] == 4
    assert found["environment/tool_calls"] == 3 and found["environment/tool_raised"] == 1
    assert found["environment/tool_error_frac"] == pytest.approx(1 / 3)
    assert found["environment/prefix_hit_frac"] == pytest.approx(0.8)
    assert found["environment/stop_done"] == 1


def test_failed_reward_of_a_rollout_counts_once():
    """One of three rollouts has no reward. It consists of three samples."""
    samples = group()
    given = [
        Score(None, {}, "f raised") if sample.rollout_id == "1.0.0" else score
        for sample, score in zip(samples, scores(samples), strict=True)
    ]
    limits = "rewards.failure_limit=0.34", "rewards.max_consecutive_failures=2"
    [scored], _ = select(config(*limits), [samples], given)
    assert {item.rollout_id for item in scored} == {"1.0.1", "1.0.2"}
    with pytest.raises(ValueError, match=r"f raised \(1 of 3 rollouts failed, but rewards.failure_limit=0.33 allows"):
        select(config("rewards.failure_limit=0.33"), [samples], given)


@pytest.mark.parametrize(("limit", "num_rollouts", "allowed"), [(0.29, 100, 29), (0.57, 100, 57), (0.3, 10, 3)])
def test_failure_limit_is_exact(limit, num_rollouts, allowed):
    samples = [SampleRef(f"1.0.{k}", "p", 10, 5, 3, "stop", 0, 0) for k in range(num_rollouts)]
    keys = f"rewards.failure_limit={limit}", f"rewards.max_consecutive_failures={num_rollouts}"

    def given(num_failures: int) -> list[Score]:
        return [Score(None, {}, "f raised") if k < num_failures else Score(1.0, {}) for k in range(num_rollouts)]

    [scored], _ = select(config(*keys), [samples], given(allowed))
    assert len(scored) == num_rollouts - allowed
    with pytest.raises(ValueError, match=rf"allows only {allowed}\)"):
        select(config(*keys), [samples], given(allowed + 1))


def test_greedy_reward_includes_all_length_rewards():
    """With a limit of 16 tokens and a buffer of 2, samples of 15 and 16 tokens have penalties of 0.5 and 1."""
    keys = "algorithm.advantage.estimator=remax", "rollout.max_new_tokens=16", "rewards.overlong_buffer=2"
    samples = [SampleRef("1.0.0", "p", 10, 5, 3, "stop", 0, 0)]
    greedy = [replace(sample_of("1.0.greedy", k), num_response_tokens=15 + k) for k in range(2)]
    [[item]], _ = select(config(*keys), [[*samples, *greedy]], [Score(1.0, {})] * 3)
    assert item.greedy == pytest.approx(1 - 1.5)
