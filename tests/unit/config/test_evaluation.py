"""The recipe of an evaluation set, and its seeds."""

from __future__ import annotations

from pathlib import Path

from megarl.config.evaluation import config_of_set, seed_of_set
from megarl.data.arithmetic import arithmetic_rows
from tests.unit.config.rules.recipes import recipe

SETS = (
    "evaluation.sets=[{name: a}, {name: b, source: rows.jsonl, size: 5, answer_column: solution, max_new_tokens: 32, "
    "functions: [{function: numeric_match}]}]"
)


def test_set_inherits_unset_keys_from_the_run() -> None:
    config = recipe(SETS, "data.size=100", "rewards.overlong_buffer=4", "rewards.judge=f.py:judge")
    a, b = (config_of_set(config, item) for item in config.evaluation.sets)
    assert (a.data.source, a.data.size, a.data.answer_column) == ("arithmetic", None, "answer")
    assert (b.data.source, b.data.size, b.data.answer_column) == (f"{Path.cwd()}/rows.jsonl", 5, "solution")
    assert [[entry.function for entry in c.rewards.functions] for c in (a, b)] == [["exact_match"], ["numeric_match"]]
    assert [c.rollout.max_new_tokens for c in (a, b)] == [16, 32]
    assert {(c.rewards.judge, c.rewards.overlong_buffer) for c in (a, b)} == {(None, None)}
    assert a.actor == config.actor


def test_procedural_prompts_differ_from_training_prompts() -> None:
    config = recipe(SETS)
    [seed, other] = (config_of_set(config, item).run.seed for item in config.evaluation.sets)
    assert len({seed, other, config.run.seed}) == 3
    rows, trained = (list(arithmetic_rows(s, 50)) for s in (seed, config.run.seed))
    assert rows != trained


def test_sample_seeds_are_unique_and_reproducible() -> None:
    config = recipe(SETS)
    [a, b] = config.evaluation.sets
    seeds = [seed_of_set(config, item, i, k) for item in (a, b) for i in range(20) for k in range(20)]
    assert len(set(seeds)) == 800
    assert seeds[0] == seed_of_set(recipe(SETS, "run.steps=7"), a, 0, 0)
    assert seeds[0] != seed_of_set(recipe(SETS, "run.seed=1"), a, 0, 0)


def test_set_uses_its_environment_or_the_runs() -> None:
    sets = (
        "evaluation.sets=[{name: a}, {name: b, environment: {class: 'f.py:World', options: {n: 1}}}, "
        "{name: c, environment: {class: null}, temperature: 0.6, top_k: 7}]"
    )
    environment = "environment={class: text_game, options: {width: 4}, max_turns: 5}"
    config = recipe(sets, environment, "rollout.temperature=1.2")
    a, b, c = (config_of_set(config, item) for item in config.evaluation.sets)
    assert [(s.environment.name, s.environment.options) for s in (a, b)] == [
        ("text_game", {"width": 4}),
        (f"{Path.cwd()}/f.py:World", {"n": 1}),
    ]
    assert not c.has_environment
    assert {(s.environment.max_turns, s.environment.max_consecutive_failures) for s in (a, b)} == {(5, None)}
    assert [(s.rollout.temperature, s.rollout.top_k) for s in (a, b, c)] == [(0.0, None), (0.0, None), (0.6, 7)]
    assert config.environment.max_consecutive_failures == 16
