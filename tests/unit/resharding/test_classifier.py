"""Classification checkpoints have the same tensors as in transformers, and all ranks of the last stage have the
head.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from megarl.models.classifier import as_classifier, score_head_of
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.planning.check import check_plan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from tests.unit.resharding.cases import config_of, layout_of

CLASSES = {
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def transformers_model(kind: str, tied: bool = False, **changes):
    """Return a model on the meta device and its config.json."""
    values = config_of(tie_word_embeddings=tied, hidden_act="silu") | changes
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = CLASSES[kind].from_config(config)
    written = config.to_diff_dict() | {"architectures": [type(model).__name__]}
    return model, values | written


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_labels", [1, 2, 5])
def test_classifier_tensors_match_transformers(kind, tied, num_labels):
    model, config = transformers_model(kind, tied, **({} if kind == "ForCausalLM" else {"num_labels": num_labels}))
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert huggingface_holder(config).shapes == expected


def test_critic_is_a_sequence_classifier_with_one_label():
    _, config = transformers_model("ForCausalLM", tied=True)
    critic = as_classifier(config)
    _, expected = transformers_model("ForSequenceClassification", tied=True, num_labels=1)
    assert critic["architectures"] == ["LlamaForSequenceClassification"] == expected["architectures"]
    assert huggingface_holder(critic).shapes == huggingface_holder(expected).shapes
    assert score_head_of(config) is None
    assert as_classifier(expected) == expected


@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForTokenClassification"])
def test_ranks_of_the_last_stage_have_the_whole_head(kind):
    _, config = transformers_model(kind, num_labels=3)
    layout = layout_of(tp=3, pp=2)
    ranks = [megatron_holder(config, layout, rank) for rank in range(layout.world_size)]
    plan = make_plan([huggingface_holder(config)], ranks)
    check_plan(plan, [huggingface_holder(config)], ranks)
    heads = [{n: s for n, s in rank.shapes.items() if "output_layer" in n} for rank in ranks]
    assert heads[:3] == [{}, {}, {}]
    assert [sorted(head.values(), key=len) for head in heads[3:]] == [
        [(3,), (3, 12)] if kind == "ForTokenClassification" else [(3, 12)]
    ] * 3


def test_head_from_a_language_model_starts_at_zero():
    _, config = transformers_model("ForCausalLM")
    source = huggingface_holder(config)
    critic = megatron_holder(as_classifier(config), layout_of(), 0).zeroed({"score.weight"})
    weights = {name: torch.ones(shape) for name, shape in source.shapes.items()}
    parameters = {name: torch.full(shape, torch.nan) for name, shape in critic.shapes.items()}
    execute(make_plan([source], [critic]).into(critic.name), parameters, LocalMemory({source.name: weights}))
    [head] = [value for name, value in parameters.items() if "output_layer" in name]
    assert head.shape == (1, 12) and not head.any()
    assert all(value.eq(1).all() for name, value in parameters.items() if "layernorm" in name)
