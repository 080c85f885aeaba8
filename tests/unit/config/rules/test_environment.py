from __future__ import annotations

from tests.unit.config.rules.recipes import errors, recipe

ECHO = "environment.class=echo.py:Echo"


def test_environment_tasks_require_an_environment() -> None:
    [line] = errors("data.source=environment")
    assert line.startswith("data.source=environment: the environment would generate the tasks, ")
    recipe("data.source=environment", ECHO)


def test_environment_keys_require_an_environment() -> None:
    [line] = errors("environment.max_turns=3")
    assert line.startswith("environment.max_turns=3: has no effect unless environment.class=NAME. Fix")


def test_environment_can_be_the_only_source_of_rewards() -> None:
    recipe(ECHO, "rewards.functions=[]")
    assert errors("rewards.functions=[]")


def test_single_response_features_are_rejected() -> None:
    per_turn = "rewards.functions=[{function: 'a.py:f', per_turn: true}]"
    lines = errors(ECHO, per_turn, "rewards.judge=a.py:judge", "algorithm.objective.name=dpo")
    starts = [line.split(": it scores a single response")[0] for line in lines]
    assert "rewards.judge=a.py:judge" in starts
    assert "rewards.functions: ['a.py:f'] with per_turn=true" in starts
    assert "algorithm.objective.name=dpo" in starts
    assert all("environment.class=echo.py:Echo" in line for line in lines if "one response" in line)


def test_turn_must_fit_into_a_response() -> None:
    [line] = errors(ECHO, "environment.turn_tokens=99999")
    assert line.startswith("environment.turn_tokens=99999: it exceeds rollout.max_new_tokens=")


def test_environment_requires_sampled_responses() -> None:
    lines = errors(ECHO, "data.format=messages", "algorithm.objective.name=sft", "rewards.functions=[]")
    assert any(line.startswith(f"{ECHO}: has no effect unless data.format=prompts") for line in lines)
