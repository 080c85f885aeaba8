from __future__ import annotations

import re
from pathlib import Path

import pytest

from megarl.config.evaluation import config_of_set
from megarl.config.load import load
from tests.readme import text_of
from tests.unit.config.rules.recipes import errors, recipe

SET = "evaluation.sets=[{name: a, samples_per_prompt: 4, temperature: 1.0}]"


def sets(*items: str) -> str:
    return f"evaluation.sets=[{', '.join('{' + item + '}' for item in items)}]"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            [sets("name: a", "name: b", "name: a")],
            "evaluation.sets: two sets have the name a. Fix: rename one of them",
        ),
        (
            [SET, "evaluation.at_start=false", "evaluation.at_end=false"],
            (
                "evaluation.sets: a would never be evaluated, because at_start=false, at_end=false and "
                "every_steps=null. Fix: set"
            ),
        ),
        (
            [sets("name: a, samples_per_prompt: 2")],
            "evaluation.sets: a has samples_per_prompt=2 and temperature=0, so all samples of a prompt would be",
        ),
        (
            [sets("name: a, functions: []")],
            "evaluation.sets: a has no reward functions, and rewards.functions=[]. Fix: list",
        ),
        (
            ["rewards.functions=[]", "reward_model.path=m", sets("name: a")],
            "evaluation.sets: a has no reward functions, and rewards.functions=[]. Fix: list",
        ),
        (
            ["data.chat_template=false", sets("name: a, system_prompt: Be brief.")],
            "evaluation.sets: a has a system_prompt, but chat_template=false cannot format it. Fix: set",
        ),
        (
            [sets("name: a, system_prompt: Be brief., source: environment, environment: {class: text_game}")],
            "evaluation.sets: a has a system_prompt, but with source=environment the environment writes the prompts.",
        ),
        (
            [sets("name: a, environment: {class: null, options: {size: 3}}")],
            "evaluation.sets: a has environment.options={'size': 3}, but no environment.class",
        ),
        (
            [sets("name: a, source: environment")],
            "evaluation.sets: a has source=environment but no environment to generate the tasks. Fix: set the",
        ),
        (
            ["environment.class=text_game", "data.source=environment", sets("name: a, environment: {class: null}")],
            "evaluation.sets: a has source=environment but no environment to generate the tasks. Fix: set the",
        ),
        (
            [sets("name: a, functions: [{function: 'f.py:f', per_turn: true}], environment: {class: text_game}")],
            "evaluation.sets: a has f.py:f with per_turn=true, which scores a single response, but with "
            "environment.class=text_game a rollout has several turns. Fix:",
        ),
        (
            ["environment.class=text_game", "rewards.functions=[]", sets("name: a, environment: {class: null}")],
            "evaluation.sets: a has no reward functions, and rewards.functions=[]. Fix: list",
        ),
        (
            ["environment.options={width: 4}", sets("name: a, environment: {class: text_game}")],
            "environment.options={width: 4}: has no effect unless environment.class=NAME. Fix",
        ),
        (
            [SET, "evaluation.best.metric=evaluation/a/turns_mean"],
            "evaluation.best.metric=evaluation/a/turns_mean: no evaluation set has this metric. Did you mean",
        ),
        (["environment.max_turns=3"], "environment.max_turns=3: has no effect unless environment.class=NAME"),
        (
            [sets("name: a, max_new_tokens: 256")],
            "evaluation.sets: a has max_new_tokens=256, which leaves 256 - 256 = 0 of rollout.context_length=256 "
            "tokens for the",
        ),
        (
            ["evaluation.best.metric=x"],
            "evaluation.best.metric=x: evaluation.sets=[] provides no metrics. Fix: add an evaluation set",
        ),
        (
            [SET, "evaluation.best.metric=evaluation/a/pass@8"],
            "evaluation.best.metric=evaluation/a/pass@8: no evaluation set has this metric. Did you mean "
            "evaluation/a/pass@4? Fix: use one of evaluation/a/avg@4, evaluation/a/pass@1, evaluation/a/pass@2, "
            "evaluation/a/pass@4, evaluation/a/pass^2, ",
        ),
        (
            [SET, "evaluation.best.metric=evaluation/a/avg@4", "checkpoint.every_steps=null"],
            "evaluation.best.metric=evaluation/a/avg@4: checkpoint.every_steps=null saves no checkpoint to select "
            "from. Fix: set",
        ),
        (
            [
                SET,
                "evaluation.best.metric=evaluation/a/avg@4",
                "evaluation.every_steps=15",
                "checkpoint.every_steps=10",
            ],
            "evaluation.best.metric=evaluation/a/avg@4: a is evaluated every 15 steps, but checkpoints are saved "
            "every 10 steps, so some evaluations would have no checkpoint. Fix: set checkpoint.every_steps=5",
        ),
        (["evaluation.every_steps=5"], "evaluation.every_steps=5: has no effect unless evaluation.sets="),
        ([SET, "evaluation.best.mode=min"], "evaluation.best.mode=min: has no effect unless evaluation.best.metr"),
    ],
)
def test_invalid_sets_are_rejected(overrides: list[str], line: str) -> None:
    [found] = errors(*overrides)
    assert found.startswith(line)


def test_sets_require_an_engine() -> None:
    offline = ("data.format=messages", "algorithm.objective.name=sft", "algorithm.objective.aggregation=token_mean")
    [found] = [line for line in errors(SET, *offline) if line.startswith("evaluation")]
    assert found.startswith("evaluation.sets: with data.format=messages the run has no engines")


@pytest.mark.parametrize(
    "overrides",
    [
        [SET, "evaluation.best.metric=evaluation/a/pass^4", "evaluation.every_steps=100"],
        [SET, "evaluation.best.metric=evaluation/a/avg@4"],
        [sets("name: a, every_steps: 3"), "evaluation.at_start=false", "evaluation.at_end=false"],
        ["rewards.functions=[]", "reward_model.path=m", sets("name: a, functions: [{function: exact_match}]")],
        ["environment.class=text_game", "rewards.functions=[]", "data.source=environment", sets("name: a, size: 4")],
        ["environment.max_turns=3", sets("name: a, functions: [], environment: {class: text_game}")],
        [sets("name: a, samples_per_prompt: 4, environment: {class: 'f.py:Answering'}")],
        [
            sets("name: a, environment: {class: text_game}"),
            "evaluation.best={metric: evaluation/a/turns_mean, mode: min}",
        ],
    ],
)
def test_valid_sets_are_accepted(overrides: list[str]) -> None:
    recipe(*overrides)


def test_set_is_due_at_its_interval_and_at_both_ends() -> None:
    settings = recipe(sets("name: a", "name: b, every_steps: 2"), "evaluation.every_steps=3").evaluation
    due = {step: [item.name for item in settings.due(step, last=7)] for step in range(8)}
    assert due == {0: ["a", "b"], 1: [], 2: ["b"], 3: ["a"], 4: ["b"], 5: [], 6: ["a", "b"], 7: ["a", "b"]}
    neither = recipe(sets("name: b, every_steps: 2"), "evaluation.at_start=false", "evaluation.at_end=false").evaluation
    assert [len(neither.due(step, last=5)) for step in range(6)] == [0, 0, 1, 0, 1, 0]


def test_example_of_the_docs_page_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(evaluation:.*?)```", text_of("docs/guide/evaluation.md"), re.DOTALL).group(1)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"base: base.yaml\n{example}")
    aime, gsm8k = load(file, ["model.path=m", "data.source=rows.jsonl"]).evaluation.sets
    assert (aime.samples_per_prompt, gsm8k.temperature, gsm8k.every_steps) == (16, 0.0, 100)


def test_example_with_environments_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(environment:.*?)```", text_of("docs/guide/evaluation.md"), re.DOTALL).group(1)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"base: base.yaml\n{example}")
    config = load(file, ["model.path=m", "data.source=rows.jsonl"])
    played = [config_of_set(config, given).environment.name for given in config.evaluation.sets]
    assert played == ["search", "text_game", None] and not config.has_environment and config.plays_in_environments


def test_best_checkpoint_is_kept_in_addition() -> None:
    assert recipe("checkpoint.keep=3").max_checkpoints == 3
    assert recipe("checkpoint.keep=3", SET, "evaluation.best.metric=evaluation/a/avg@4").max_checkpoints == 4
