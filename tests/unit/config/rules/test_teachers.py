from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.rules.recipes import errors, recipe

TEACHERS = "teachers.models=[{name: math, path: large}, {name: code, path: larger, weight: 0.5}]"
SHOWN = "teachers.models=[{name: math, path: large, revision: null, sources: null,...: has no effect unless "
ALONE = "rewards.functions=[]"
OFFLINE = (
    *("algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"),
    "algorithm.distillation={divergence: forward_kl, placement: loss}",
)


def test_teachers_have_defaults_and_their_own_devices() -> None:
    config = recipe(TEACHERS, ALONE, "teachers.layout.tp=4")
    assert [(teacher.name, teacher.weight) for teacher in config.teachers.models] == [("math", 1.0), ("code", 0.5)]
    assert config.num_ranks == {"actor": 2, "teachers": 4, "rollout": 1}
    assert config.has_teachers and not config.has_rewards and config.distills_by_advantage
    assert config.algorithm.distillation.estimator == "k1"
    in_loss = recipe(TEACHERS, "algorithm.distillation.placement=loss")
    assert in_loss.has_rewards and not in_loss.distills_by_advantage
    assert in_loss.algorithm.distillation.estimator == "k2"


def test_exact_divergence_has_no_estimator() -> None:
    config = recipe(TEACHERS, "algorithm.distillation={divergence: jsd, beta: 0.1, placement: loss}")
    assert config.distills_exactly and not config.distills_by_advantage
    assert config.algorithm.distillation.estimator is None
    assert not recipe(TEACHERS).distills_exactly


def test_given_responses_are_imitated_beside_exact_divergences() -> None:
    config = recipe(TEACHERS, *OFFLINE)
    assert config.distills_exactly and config.num_ranks == {"actor": 2, "teachers": 1}
    [line] = errors(TEACHERS, *OFFLINE, "algorithm.objective.name=dpo", "data.format=preferences")
    assert line.startswith(f"{SHOWN}data.format=prompts (or, with algorithm.objective.name=sft")


def test_actor_reads_teachers_from_their_folders() -> None:
    teachers = recipe(TEACHERS).teachers.in_folders({"math": Path("/models/a"), "code": Path("/models/b")})
    assert [(item.path, item.revision, item.weight) for item in teachers.models] == [
        ("/models/a", None, 1.0),
        ("/models/b", None, 0.5),
    ]


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
            ["teachers.models=[{name: a, path: x, sources: [math]}]"],
            "teachers.models: a with sources=['math']: the source of a row is unknown, because data.source_column=",
        ),
        (
            ["algorithm.distillation.placement=loss"],
            "algorithm.distillation.placement=loss: has no effect unless teachers.models=[{name: NAME, path: PATH}].",
        ),
        (
            [TEACHERS, "algorithm.distillation.divergence=jsd"],
            "algorithm.distillation.divergence=jsd: an exact divergence is a loss with a gradient for the whole",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: jsd, placement: loss}", "rollout.top_k=50"],
            "algorithm.distillation.divergence=jsd: an exact divergence covers the full vocabulary, but with",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: jsd, placement: loss, estimator: k2}"],
            "algorithm.distillation.estimator=k2: has no effect unless algorithm.distillation.divergence=sampled.",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: forward_kl, placement: loss, limit: 1.0}"],
            "algorithm.distillation.limit=1.0: has no effect unless algorithm.distillation.divergence=sampled.",
        ),
        (
            [TEACHERS, "algorithm.distillation={divergence: forward_kl, placement: loss, beta: 0.1}"],
            "algorithm.distillation.beta=0.1: has no effect unless algorithm.distillation.divergence=jsd.",
        ),
        (["teachers.layout.tp=2"], "teachers.layout.tp=2: has no effect unless teachers.models=[{name: NAME"),
        (
            [TEACHERS, "teachers.tokens_per_microbatch=255"],
            "teachers.tokens_per_microbatch=255: a sample can have up to rollout.context_length=256 tokens and is",
        ),
        ([TEACHERS, "teachers.layout.dp=129"], "teachers.layout.dp=129: an update has only 128 samples"),
        (
            [TEACHERS, "algorithm.objective.name=dpo"],
            f"{SHOWN}algorithm.objective.name=clip (or another objective that",
        ),
        (
            [TEACHERS, "algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"],
            f"{SHOWN}data.format=prompts (or, with algorithm.objective.name=sft, algorithm.distillation.divergence=j",
        ),
        (
            ["teachers.models=[{name: a, path: x, sources: [math]}]", *OFFLINE],
            "teachers.models: a with sources=['math']: with data.format=messages, every teacher teaches all rows. Fix:",
        ),
    ],
)
def test_invalid_teachers_are_rejected(overrides: list[str], line: str) -> None:
    [found] = errors(*overrides)
    assert found.startswith(line)


def test_image_models_have_no_teachers() -> None:
    assert any(line.startswith(f"{SHOWN}rollout.engine=vllm") for line in errors(TEACHERS, "rollout.engine=diffusers"))


@pytest.mark.parametrize(
    ("teacher", "line"),
    [
        ("{name: a, path: x, layer: 3}", "command line: teachers.models.0.layer: unknown key; did you mean"),
        ("{name: a b, path: x}", "command line: teachers.models.0.name=a b: expected text that matches"),
        ("{path: x}", "command line: missing key teachers.models.0.name."),
        ("{name: a, path: x, weight: 0}", "command line: teachers.models.0.weight=0: "),
    ],
)
def test_invalid_key_of_a_teacher_is_named(teacher: str, line: str) -> None:
    [found] = errors(f"teachers.models=[{teacher}]")
    assert found.startswith(line)
