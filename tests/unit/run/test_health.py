"""Health warnings on synthetic series of metrics."""

from __future__ import annotations

import json
import random

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.run.health import CHECKS, Health
from tests.paths import BASE, CONFIGS, ROOT

HEALTHY = {
    "reward/mean": 0.4,
    "reward/std": 0.5,
    "reward/zero_std_groups": 0.3,
    "response/truncated_frac": 0.1,
    "policy/grad_norm": 1.0,
    "policy/entropy": 1.0,
    "mismatch/logprob_abs_mean": 0.01,
}
CONSTANT = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0, "policy/grad_norm": 0.0}


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])


def found(series: list[dict[str, float]], *overrides: str) -> dict[str, tuple[int, str]]:
    """Return the step and the message of each warning. Metrics that a step lacks get healthy values."""
    health, warnings = Health(config(*overrides)), {}
    for step, changed in enumerate(series, start=1):
        for finding in health.check(HEALTHY | changed):
            assert finding.name not in warnings, "a warning is repeated"
            assert "Likely cause" in finding.message and "Fix: " in finding.message
            warnings[finding.name] = step, finding.message
    return warnings


def test_constant_rewards_are_named_after_three_steps() -> None:
    [(name, (step, message))] = found([{}, CONSTANT, CONSTANT, CONSTANT, CONSTANT]).items()
    assert (name, step) == ("constant_reward", 4)
    assert message.startswith("all rewards of the last 3 steps are 0, and the gradient norm is 0. Earlier steps had")
    [(_, message)] = found([CONSTANT] * 9).values()
    assert "Likely causes: the reward function returns the same value for all responses, or the prompts" in message


def test_runs_without_rewards_have_no_constant_reward() -> None:
    teacher = "teachers.models=[{name: a, path: x}]"
    series = [CONSTANT | {"policy/grad_norm": 1.0}] * 9
    assert found(series, teacher, "rewards.functions=[]") == {}
    assert list(found(series, teacher)) == ["constant_reward"]


def test_cause_of_constant_rewards_depends_on_the_run() -> None:
    truncated = found([CONSTANT | {"response/truncated_frac": 1.0}] * 9)
    assert list(truncated) == ["constant_reward"]
    assert "Fix: raise rollout.max_new_tokens=1024" in truncated["constant_reward"][1]
    solved = found([{}, *[CONSTANT | {"reward/mean": 1.0}] * 3])
    assert "the policy solves all prompts" in solved["constant_reward"][1]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (CONSTANT, "constant_reward"),
        ({"reward/zero_std_groups": 1.0}, "uninformative_groups"),
        ({"policy/grad_norm": 0.0}, "zero_gradient"),
        ({"response/truncated_frac": 1.0}, "all_truncated"),
    ],
)
def test_conditions_must_hold_in_consecutive_steps_and_256_samples(changed: dict, name: str) -> None:
    assert list(found([changed] * 3)) == [name]
    assert found([changed, changed, {}] * 20) == {}
    small = ["batch.prompts_per_step=4", "batch.prompts_per_update=4", "batch.samples_per_prompt=4"]
    assert found([changed] * 15, *small) == {}
    assert list(found([changed] * 16, *small)) == [name]


def test_groups_of_one_sample_are_never_uninformative() -> None:
    one = "algorithm.advantage={estimator: reinforce_plus_plus}", "batch.samples_per_prompt=1"
    assert found([{"reward/zero_std_groups": 1.0}] * 9, *one) == {}


@pytest.mark.parametrize(
    ("overrides", "compares_groups"),
    [
        (["algorithm.advantage.estimator=rloo"], True),
        (["algorithm.objective={name: dpo}"], True),
        (["algorithm.advantage.estimator=gae"], False),
        (["algorithm.advantage.estimator=reinforce"], False),
        (["algorithm.advantage.estimator=policy_gradient"], False),
        (["algorithm.advantage.estimator=reinforce_plus_plus"], False),
        (["algorithm.advantage.estimator=remax"], False),
        (["algorithm.advantage.credit=reward_to_go"], False),
        (["algorithm.kl={coefficient: 0.1, placement: reward, estimator: k1}"], False),
        (["implicit_reward.coefficient=1"], False),
    ],
)
def test_equal_rewards_in_groups_matter_only_if_groups_are_compared(
    overrides: list[str], compares_groups: bool
) -> None:
    equal = {"reward/zero_std_groups": 1.0}
    warnings = found([equal] * 9, *overrides)
    assert list(warnings) == ["uninformative_groups"] * compares_groups
    idle = found([equal | {"policy/grad_norm": 0.0}] * 9, *overrides)
    assert list(idle) == ["uninformative_groups" if compares_groups else "zero_gradient"]


@pytest.mark.parametrize(("form", "objective"), [("messages", "sft"), ("preferences", "dpo")])
def test_offline_runs_have_no_rewards(form: str, objective: str) -> None:
    health = Health(config(f"data.format={form}", "data.source=x.jsonl", f"algorithm.objective={{name: {objective}}}"))
    findings = [finding for _ in range(300) for finding in health.check({"policy/grad_norm": 0.0})]
    [message] = [finding.message for finding in findings if finding.name == "zero_gradient"]
    assert len(findings) == 1 and "reward" not in message and "Fix: " in message


def falling_entropy(rewards: list[float]) -> list[dict[str, float]]:
    """Return a series whose entropy halves every 3 steps."""
    return [{"policy/entropy": 2 * 0.5 ** (step / 3), "reward/mean": reward} for step, reward in enumerate(rewards)]


def test_entropy_collapse_needs_a_reward_that_does_not_rise() -> None:
    stuck = found(falling_entropy([0.4] * 40))
    assert list(stuck) == ["entropy_collapse"] and stuck["entropy_collapse"][0] == 20
    assert found(falling_entropy([0.01 * step for step in range(80)])) == {}  # the policy learns until the end
    assert found(falling_entropy([0.95] * 40)) == {}  # the prompts are solved
    assert found([{"policy/entropy": 0.3, "reward/mean": 0.4}] * 100) == {}


def test_mismatch_must_rise_and_approach_the_limit() -> None:
    def rising(scale: float) -> list[dict[str, float]]:
        return [{"mismatch/logprob_abs_mean": scale * (1 + step / 10)} for step in range(60)]

    warnings = found(rising(0.015))  # bfloat16, with a limit of 0.15
    assert list(warnings) == ["rising_mismatch"] and warnings["rising_mismatch"][0] in (39, 40)  # depends on rounding
    assert found(rising(0.002)) == {}
    assert found([{"mismatch/logprob_abs_mean": 0.1}] * 60) == {}
    assert list(found(rising(0.015), "rollout.max_staleness=1")) == ["rising_mismatch"]


def test_mismatch_above_the_limit_is_reported_once() -> None:
    series = [{"mismatch/logprob_abs_mean": value} for value in (0.1, 0.2, 0.3)]
    warnings = found(series)  # bfloat16, with a limit of 0.15
    assert list(warnings) == ["mismatch"] and warnings["mismatch"][0] == 2
    assert "2.0e-01 (limit 0.15)" in warnings["mismatch"][1] and "megarl diagnose " in warnings["mismatch"][1]


def test_truncation_does_not_explain_a_positive_reward() -> None:
    for reward in (0.0, 1.0):
        row = {"reward/mean": reward, "reward/std": 0.0, "response/truncated_frac": 1.0}
        message = found([row] * 9)["constant_reward"][1]
        assert ("truncated before the answer" in message) == (reward == 0.0), message


@pytest.mark.parametrize("seed", range(20))
def test_noisy_healthy_runs_have_no_warnings(seed: int) -> None:
    """A policy that learns a task from a solve rate of 2 % to 90 % in small, noisy steps."""
    random_, series = random.Random(seed), []
    for step in range(200):
        rate = 0.02 + 0.88 * step / 200
        rewards = [[random_.random() < rate for _ in range(4)] for _ in range(8)]
        flat = [reward for group in rewards for reward in group]
        mean = sum(flat) / len(flat)
        series.append(
            {
                "reward/mean": mean,
                "reward/std": (mean * (1 - mean)) ** 0.5,
                "reward/zero_std_groups": sum(len(set(group)) == 1 for group in rewards) / len(rewards),
                "policy/grad_norm": 0.0 if mean in (0, 1) else random_.lognormvariate(0, 1),
                "policy/entropy": 1.5 - step / 150,
                "mismatch/logprob_abs_mean": random_.lognormvariate(-4, 0.5),
            }
        )
    small = ["batch.prompts_per_step=8", "batch.prompts_per_update=8", "batch.samples_per_prompt=4"]
    assert found(series, *small) == {}


def test_quickstart_has_no_warnings() -> None:
    """The rewards come from a recorded run. The entropies come from its first steps and then fall further."""
    rewards = json.loads((ROOT / "tools/benchmarks/results/quickstart.json").read_text())["reward"]["per_step"]
    entropies = [2.32457, 1.89699, 1.66966, 1.36387, 1.23636, *(0.9**step for step in range(9))]
    series = [
        {"reward/mean": mean, "reward/std": (mean * (1 - mean)) ** 0.5, "policy/entropy": entropy}
        for mean, entropy in zip(rewards, entropies, strict=True)
    ]
    quickstart, warnings = load(CONFIGS / "quickstart.yaml"), []
    health = Health(quickstart)
    for step in series:
        warnings += health.check(HEALTHY | {"mismatch/logprob_abs_mean": 1.5e-5} | step)
    assert warnings == []


def test_warnings_of_earlier_attempts_are_not_repeated() -> None:
    rows = [HEALTHY | CONSTANT] * 3
    assert Health(config(), rows, ["constant_reward"]).check(HEALTHY | CONSTANT) == []
    [finding] = Health(config(), rows[:2]).check(HEALTHY | CONSTANT)
    assert finding.name == "constant_reward"


def test_rows_without_metrics_are_accepted() -> None:
    health = Health(config())
    assert [health.check({"policy/entropy": float("nan")}) for _ in range(40)] == [[]] * 40


@pytest.mark.parametrize("value", ["x", [1.0], {}, True, 10**400])
def test_malformed_values_count_as_missing(value: object) -> None:
    """Rows of earlier attempts are read from a file that users may edit."""
    health = Health(config(), [HEALTHY | CONSTANT | {"reward/mean": value, "reward/std": value}] * 3)
    assert [health.check(HEALTHY | CONSTANT) for _ in range(2)] == [[], []]
    [finding] = health.check(HEALTHY | CONSTANT)
    assert finding.name == "constant_reward"


def test_documentation_lists_every_warning() -> None:
    page, base = (ROOT / "docs/how/failures.md").read_text(), (CONFIGS / "base.yaml").read_text()
    assert all(f"| `{name}` |" in page and name in base for name in CHECKS)
