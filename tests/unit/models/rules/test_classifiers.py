from __future__ import annotations

from typing import Any

import pytest

from megarl.models.rules import check_critic_model, check_model, check_reward_model
from tests.unit.config.rules.recipes import GAE, errors, recipe
from tests.unit.models.rules.model_configs import CLASSIFIER, SMOLLM2, TOKEN_CLASSIFIER


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        (
            {},
            ["critic.layout.tp=2"],
            "critic.layout.tp=2: 9 attention heads are not divisible by 2 (9 / 2 = 4.5). Fix: set",
        ),
        ({}, ["critic.layout.pp=7"], "critic.layout.pp=7: 30 layers cannot be split evenly over the stages"),
        ({"model_type": "gpt2"}, [], "critic.path=rm: model_type gpt2 is not supported"),
        ({"hidden_act": "gelu"}, [], "critic.path=rm: megarl does not support hidden_act gelu"),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "critic.path=rm: the model has 2 labels (id2label), but a score is a single",
        ),
        (
            {"vocab_size": 49151},
            [],
            "critic.path=rm: its vocab_size=49151 is smaller than the actor's vocab_size=49152, but it reads",
        ),
    ],
)
def test_critic_that_does_not_fit_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe(GAE, "critic.path=rm", "critic.layout.pp=1", "critic.tokens_per_microbatch=256", *overrides)
    with pytest.raises(ValueError) as error:
        check_critic_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_critic_from_the_actors_model_fits() -> None:
    model = SMOLLM2 | {"vocab_size": 49152, "architectures": ["LlamaForCausalLM"]}
    check_critic_model(recipe(GAE, "critic.layout.tp=3"), model, model)


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads are not divisible by 2"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            [],
            "reward_model.path=rm: its architecture is LlamaForCausalLM, which",
        ),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "reward_model.path=rm: the model has 2 labels (id2label), but a score",
        ),
        ({}, ["reward_model.step_end='. '"], "reward_model.step_end='. ': reward_model.path=rm scores whole samples"),
        ({"vocab_size": 9}, [], "reward_model.path=rm: its vocab_size=9 is smaller than the actor's vocab_size=49152"),
    ],
)
def test_reward_model_that_does_not_fit_is_refused(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe("reward_model.path=rm", *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_judge_is_a_language_model_of_any_vocabulary() -> None:
    judge = ["reward_model.path=rm", VLLM, "reward_model={input_format: question, judge: {max_new_tokens: 64}}"]
    actor, model = SMOLLM2 | {"vocab_size": 49152}, SMOLLM2 | {"architectures": ["LlamaForCausalLM"], "vocab_size": 9}
    check_reward_model(recipe(*judge), actor, model)
    with pytest.raises(ValueError, match="its architecture is LlamaForCausalLM, which has no score head"):
        check_reward_model(recipe("reward_model.path=rm", VLLM), actor, model)
    with pytest.raises(
        ValueError, match=r"SequenceClassification, but reward_model.input_format=question requires a language"
    ):
        check_reward_model(recipe(*judge), actor, CLASSIFIER | {"vocab_size": 49152})
    with pytest.raises(ValueError, match=r"reward_model.layout.tp=2: 9 attention heads are not divisible by 2"):
        check_reward_model(recipe(*judge, "reward_model.layout.tp=2"), actor, model)


def test_trained_classifier_kind_must_fit_the_objective() -> None:
    whole = ["algorithm.objective.name=reward_model", "data.format=preferences"]
    steps = ["algorithm.objective.name=process_reward_model", "data.format=labels"]
    check_model(recipe(*whole), CLASSIFIER)
    check_model(recipe(*steps), TOKEN_CLASSIFIER)
    for keys in (whole, steps):
        check_model(recipe(*keys), SMOLLM2)
    with pytest.raises(
        ValueError, match=r"its architecture is \.\.\.ForSequenceClassification, but .*=process_reward_model trains"
    ):
        check_model(recipe(*steps), CLASSIFIER)
    with pytest.raises(
        ValueError, match=r"its architecture is \.\.\.ForTokenClassification, but .*=reward_model trains \.\.\.ForSeq"
    ):
        check_model(recipe(*whole), TOKEN_CLASSIFIER)


VLLM = "reward_model.engine=vllm"


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads are not divisible by 2"),
        ({"max_position_embeddings": 128}, [], "rollout.context_length=256: the model has 128 positions"),
        ({"hidden_act": "gelu"}, [], "reward_model.path=rm: megarl does not support hidden_act gelu"),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            [],
            "reward_model.path=rm: the model has 2 labels (id2label), but a score",
        ),
    ],
)
def test_reward_model_that_vllm_cannot_serve_is_refused(
    changed: dict[str, Any], overrides: list[str], message: str
) -> None:
    config = recipe("reward_model.path=rm", VLLM, *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_vllm_supports_attention_windows_unlike_megatron() -> None:
    model = CLASSIFIER | {"vocab_size": 49152, "model_type": "mistral", "sliding_window": 64}
    check_reward_model(recipe("reward_model.path=rm", VLLM), SMOLLM2 | {"vocab_size": 49152}, model)
    with pytest.raises(ValueError, match="exceeds the model's sliding_window=64"):
        check_reward_model(recipe("reward_model.path=rm"), SMOLLM2 | {"vocab_size": 49152}, model)


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model.input_format=ids"],
        ["reward_model.input_format=chat", "reward_model.step_end=."],
        ["reward_model.input_format=chat", "reward_model.aggregation=mean"],
        ["reward_model.input_format=chat", "algorithm.advantage.estimator=grpo"],
    ],
)
def test_token_scores_must_refer_to_sampled_tokens(overrides: list[str]) -> None:
    actor = SMOLLM2 | {"vocab_size": 300}
    check_reward_model(recipe("reward_model.path=rm", GAE, *overrides), actor, TOKEN_CLASSIFIER)
    with pytest.raises(
        ValueError, match=r"reward_model.input_format=text: reward_model.path=rm scores the tokens of its own tokenizer"
    ):
        check_reward_model(
            recipe("reward_model.path=rm", GAE, "reward_model.input_format=text"), actor, TOKEN_CLASSIFIER
        )


def test_text_reward_model_has_its_own_vocabulary_and_length() -> None:
    read = ["reward_model.path=rm", "reward_model.input_format=text", "reward_model.aggregation=mean"]
    check_reward_model(recipe(*read), SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    long = recipe(*read, "reward_model.context_length=9000")
    with pytest.raises(ValueError, match=r"reward_model.context_length=9000: the model has 8192 positions"):
        check_reward_model(long, SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    (line,) = errors(*read, "reward_model.context_length=20000")
    assert line.startswith(
        "reward_model.tokens_per_microbatch=16384: a sample can have up to reward_model.context_length=20000"
    )
    (line,) = errors("reward_model.path=rm", "reward_model.context_length=512")
    assert line == (
        "reward_model.context_length=512: has no effect unless reward_model.input_format=text. Fix: set "
        "reward_model.input_format=text, or remove the key (its default is null)"
    )
