from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe

FILE = "data.source=rows.jsonl"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.sort_column=level", "data.shuffle=false"],
            "data.sort_column=level: has no effect unless data.source=FILE",
        ),
        (
            ["data.weight_column=level"],
            "data.weight_column=level: has no effect unless data.source=FILE",
        ),
        (
            [FILE, "data.sort_column=level"],
            "data.sort_column=level: data.shuffle=true would change the order. Fix: set",
        ),
        (
            [FILE, "data.sort_column=level", "data.solved_weight=0.1"],
            (
                "data.sort_column=level: data.weight_column, data.solved_weight and data.source_weights draw rows in "
                "random"
            ),
        ),
        (
            ["data.more_sources=[b.jsonl]"],
            "data.source=arithmetic: only files can be combined, but arithmetic generates its rows. Fix:",
        ),
        (
            [FILE, "data.more_sources=[rows.jsonl]"],
            "data.more_sources: rows.jsonl is listed twice. Fix: list it once",
        ),
        (
            [FILE, "data.more_sources=[arithmetic]"],
            "data.more_sources=arithmetic: only files can be combined, but arithmetic generates its rows.",
        ),
        (
            [FILE, "data.more_sources=[b.jsonl]", "data.source_weights={rows.jsonl: 1}"],
            "with data.source_column=null, the keys must be rows.jsonl, b.jsonl. Fix: use these keys",
        ),
        (["data.solved_above=1"], "data.solved_above=1.0: has no effect unless data.solved_weight=0.05. Fix"),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


def test_data_order_keys_require_prompts() -> None:
    lines = errors(FILE, "data.format=preferences", "algorithm.objective.name=dpo", "data.solved_weight=0.1")
    assert "data.solved_weight=0.1: has no effect unless data.format=prompts. Fix" in lines[0]


def test_only_weighted_data_is_drawn_by_weight() -> None:
    assert not recipe(FILE, "data.sort_column=level", "data.shuffle=false").data.draws_by_weight
    assert recipe(FILE, "data.weight_column=level", "data.solved_weight=0.1").data.draws_by_weight


def test_system_prompt_is_accepted_for_prompt_rows() -> None:
    assert recipe("data.system_prompt=Be brief.").data.system_prompt == "Be brief."


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.chat_template=false"], "data.chat_template=false cannot format a system message. Fix"),
        (
            ["data.source=environment", "environment.class=calculator"],
            "data.source=environment provides no prompts. Fix: set",
        ),
        (
            ["algorithm.objective.name=sft", "data.format=messages"],
            "data.format=messages provides no prompts. Fix: set",
        ),
    ],
)
def test_system_prompt_is_rejected_for_other_data(overrides: list[str], message: str) -> None:
    (line,) = [line for line in errors("data.system_prompt=Be brief.", *overrides) if "system_prompt" in line]
    assert line.startswith("data.system_prompt: ") and message in line
