from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe

TEACHERS = "teachers.models=[{name: math, path: large}, {name: code, path: larger, weight: 0.5}]"
ALONE = "rewards.functions=[]"


def test_teachers_have_defaults_and_their_own_devices() -> None:
    config = recipe(TEACHERS, ALONE, "teachers.layout.tp=4")
    assert [(teacher.name, teacher.weight) for teacher in config.teachers.models] == [("math", 1.0), ("code", 0.5)]
    assert config.num_ranks == {"actor": 2, "teachers": 4, "rollout": 1}
    assert config.has_teachers and not config.has_rewards and config.distills_by_advantage
    assert config.algorithm.distillation.estimator == "k1"
    in_loss = recipe(TEACHERS, "algorithm.distillation.placement=loss")
    assert in_loss.has_rewards and not in_loss.distills_by_advantage
    assert in_loss.algorithm.distillation.estimator == "k2"


def test_coefficient_of_zero_leaves_the_teachers_out() -> None:
    config = recipe(TEACHERS, "algorithm.distillation.coefficient=0")
    assert not config.has_teachers and "teachers" not in config.num_ranks
    [line] = errors(TEACHERS, ALONE, "algorithm.distillation.coefficient=0")
    assert line.startswith("rewards.functions=[]: samples would have no reward.")


def test_null_removes_the_teachers() -> None:
    assert recipe(TEACHERS, "teachers=null") == recipe()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["teachers.models=[{name: a, path: x}, {name: b, path: y}, {name: a, path: z}]"],
            "teachers.models: two teachers have the name a. Fix: give each teacher a different name",
        ),
        (
            [TEACHERS, ALONE, "batch.sampling_rounds=2"],
            "batch.sampling_rounds=2: dynamic sampling replaces prompts whose samples have equal rewards, but with",
        ),
        (
            ["algorithm.distillation.placement=loss"],
            "algorithm.distillation.placement=loss: has no effect unless teachers.models=[{name: NAME, path: PATH}].",
        ),
        (["teachers.layout.tp=2"], "teachers.layout.tp=2: has no effect unless teachers.models=[{name: NAME"),
        (
            [TEACHERS, "teachers.tokens_per_microbatch=255"],
            "teachers.tokens_per_microbatch=255: a sample can have up to rollout.context_length=256 tokens and is",
        ),
        ([TEACHERS, "teachers.layout.dp=129"], "teachers.layout.dp=129: an update has only 128 samples"),
        (
            [TEACHERS, "algorithm.objective.name=dpo"],
            "teachers.models: has no effect unless algorithm.objective.name=clip (or another objective that learns",
        ),
        (
            [TEACHERS, "algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"],
            "teachers.models: has no effect unless data.format=prompts.",
        ),
    ],
)
def test_invalid_teachers_are_rejected(overrides: list[str], line: str) -> None:
    found = errors(*overrides)
    key = line.partition("=")[0].partition(":")[0]
    assert any(each.startswith(line) or (each.startswith(key) and line.partition(": ")[2] in each) for each in found)


def test_unknown_key_of_a_teacher_is_named() -> None:
    [line] = errors("teachers.models=[{name: a, path: x, layer: 3}]")
    assert "teachers.models" in line and "layer" in line
