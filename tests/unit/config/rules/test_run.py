from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.trackers=[wandb,wandb]"], "run.trackers=[wandb, wandb]: wandb is listed twice. Fix: list it once"),
        (
            ["run.steps=3", "run.profile={steps: [2, 4]}"],
            "run.profile.steps: step 4 is after the last step of the run (run.steps=3). Fix: list",
        ),
        (
            ["run.profile={steps: [1], ranks: [0, 2]}"],
            "run.profile.ranks: no trained model has a rank 2, because the largest has 2 ranks. Fix:",
        ),
        (["run.profile.ranks=[1]"], "run.profile.ranks=[1]: has no effect unless run.profile.steps"),
        (
            ["run.allow_changes=[model.path]"],
            "run.allow_changes: model.path cannot change in the middle of a run, because its models",
        ),
        (["run.allow_changes=[data]"], "run.allow_changes: data cannot change in the middle of a run"),
        (
            ["run.allow_changes=[algorithm.objective.name]"],
            "algorithm.objective.name cannot change in the middle of a run",
        ),
        (
            ["run.allow_changes=[rollout.temprature]"],
            "run.allow_changes: rollout.temprature is not a key; did you mean rollout.temperature?",
        ),
        (["trackers.project=a"], "trackers.project=a: has no effect unless run.trackers=[wandb]"),
        (
            ["run.trackers=[mlflow]", "trackers.wandb.entity=a"],
            "trackers.wandb.entity=a: has no effect unless run.trackers=[wandb]",
        ),
    ],
)
def test_invalid_run_settings_are_rejected(overrides: list[str], message: str) -> None:
    [error] = errors(*overrides)
    assert message in error


JUDGE = "rewards.functions=[{{function: generative_judge, options: {{base_url: '{}', model: m, template: t}}}}]"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (["run.trackers=[mlflow]", "trackers.mlflow.tracking_uri=https://me:hunter2@host:5000"], "trackers.mlflow"),
        ([JUDGE.format("http://:hunter2@host/v1")], "rewards.functions.options.base_url: "),
        (["environment={class: 'a.py:A', options: {nested: [{API_KEY: hunter2}]}}"], "environment.options.nested"),
        (["environment={class: 'a.py:A', options: {hf_token: hunter2}}"], "environment.options.hf_token"),
        (["environment={class: 'a.py:A', options: {run: 'curl --token hunter2'}}"], "environment.options.run"),
        (["environment={class: 'a.py:A', options: {headers: ['Authorization: Bearer hunter2']}}"], "environment.opt"),
    ],
)
def test_credentials_are_refused_and_not_printed(override: list[str], key: str) -> None:
    """Otherwise, credentials in the config would be written to the run folder."""
    [error] = [error for error in errors(*override) if "contains credentials" in error]
    assert error.startswith(key) and "hunter2" not in error


@pytest.mark.parametrize("uri", ["https://host:5000/a@b", "https://user@host:5000"])
def test_urls_without_a_password_are_allowed(uri: str) -> None:
    recipe("run.trackers=[mlflow]", f"trackers.mlflow.tracking_uri={uri}")


def test_token_details_cover_whole_groups() -> None:
    assert [recipe(f"run.token_samples={n}").num_detailed_groups for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
