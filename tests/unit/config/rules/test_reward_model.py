from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe

VLLM = "reward_model.engine=vllm"


def test_reward_engines_cannot_offload_parameters() -> None:
    keys = ["reward_model.path=rm", "reward_model.offload=[parameters]"]
    recipe(*keys)
    assert errors(*keys, VLLM) == [
        "reward_model.offload=[parameters]: has no effect unless reward_model.engine=megatron. Fix: set "
        "reward_model.engine=megatron, or remove the key (its default is [])"
    ]


def test_reward_engines_support_only_tp_and_dp() -> None:
    assert errors("reward_model.path=rm", VLLM, "reward_model.layout={tp: 2, pp: 2, sequence_parallel: true}") == [
        "reward_model.engine=vllm: reward engines support only tp and dp, but reward_model.layout has pp=2, "
        "sequence_parallel=true. Fix: remove these keys, or set reward_model.engine=megatron"
    ]
    recipe("reward_model.path=rm", VLLM, "reward_model.layout={tp: 3, dp: 2}")


def judge(*overrides: str) -> list[str]:
    return [
        "reward_model.path=rm",
        VLLM,
        "reward_model.input_format=question",
        "reward_model.judge.max_new_tokens=64",
    ] + [f"reward_model.{override}" for override in overrides]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["engine=megatron"],
            "reward_model.input_format=question: a judge must generate text, but reward_model.engine=megatron only "
            "computes scores. Fix: set reward_model.engine=vllm",
        ),
        (["step_end=x"], "reward_model.step_end=x: has no effect unless reward_model.input_format=ids. Fix"),
        (["aggregation=min"], "reward_model.aggregation=min: has no effect unless reward_model.input_format=ids. Fix"),
        (
            ["judge.template=Good?"],
            "reward_model.judge.template=Good?: the template has no {response}, so all responses would get the same "
            "rating. Fix: add {response} where the",
        ),
        (
            ["judge.scale=[10, 1]"],
            "reward_model.judge.scale=[10.0, 1.0]: the lowest rating must be below the highest. Fix: list the lower "
            "rating first, for example [1,",
        ),
        (
            ["judge.max_new_tokens=256"],
            "reward_model.judge.max_new_tokens=256: no tokens are left for the question, because "
            "rollout.context_length=256 limits the question and the answer together. Fix: set",
        ),
    ],
)
def test_invalid_judge_is_rejected(overrides: list[str], line: str) -> None:
    [error] = errors(*judge(*overrides))
    assert error.startswith(line)


def test_judge_can_have_a_separate_context_length() -> None:
    given = recipe(*judge("context_length=4096", "judge={scale: [0, 1], template: 'Rate {response}'}")).reward_model
    assert (given.judge.scale, given.context_length) == ([0.0, 1.0], 4096)


def test_judge_keys_require_the_question_format() -> None:
    [line] = errors("reward_model.path=rm", "reward_model.judge.scale=[0, 1]")
    assert line.startswith(
        "reward_model.judge.scale=[0.0, 1.0]: has no effect unless reward_model.input_format=question."
    )
