"""The parameters of a Megatron rank that a pattern over Hugging Face names chooses."""

from __future__ import annotations

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.selection import check_selections, select_tensors, whole_parameters
from tests.paths import BASE
from tests.unit.resharding.cases import layout_of

HF = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}
EXPERTS = dict(model_type="qwen3_moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
NAMES = list(huggingface_holder(HF).shapes)
LAST_OF_TWO = megatron_holder(HF, layout_of(pp=2), 1)


def chosen(*patterns: str) -> list[str]:
    return whole_parameters("actor.frozen", select_tensors("actor.frozen", patterns, NAMES), LAST_OF_TWO)


def test_a_layer_counts_from_the_start_of_the_model():
    names = chosen("model.layers.2.*")
    assert sorted(names) == sorted(name for name in LAST_OF_TWO.shapes if ".layers.0." in name)
    assert len(names) == 7


def test_all_parts_of_a_fused_parameter_choose_it():
    assert chosen("model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_*") == [
        "chunk0.decoder.layers.1.mlp.linear_fc1.weight"
    ]


def test_a_tied_embedding_is_chosen_with_its_copy_on_the_last_stage():
    assert chosen("*embed_tokens*") == ["chunk0.output_layer.weight"]


def test_what_another_stage_holds_is_not_here():
    assert chosen("model.layers.1.*") == []


def test_a_part_of_a_fused_parameter_is_refused_by_name():
    message = (
        "actor.frozen: it matches model.layers.2.self_attn.k_proj.weight but not "
        "model.layers.2.self_attn.q_proj.weight, model.layers.2.self_attn.v_proj.weight, "
        "and the trainer holds these as one parameter; match all 3 or none"
    )
    with pytest.raises(ValueError) as error:
        chosen("*.k_proj.weight")
    assert str(error.value) == message


def test_a_pattern_without_a_match_is_refused_with_near_ones():
    with pytest.raises(
        ValueError, match=r"actor.frozen: model.layer.0.\* matches no tensor .* near .* model.layers.0."
    ):
        chosen("model.layers.0.*", "model.layer.0.*")


def recipe(*overrides: str) -> Config:
    return load(BASE, ["model.path=x", "data.source=arithmetic", "actor.layout={pp: 4, tp: 2}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.frozen=['*']"], r"actor.frozen=\['\*'\]: nothing is left to train; match fewer tensors"),
        (["actor.frozen=[lm_head.weight]"], "actor.frozen: lm_head.weight matches no tensor of the model"),
        (["actor.optimizer.no_weight_decay=['*.v_proj.*']"], "actor.optimizer.no_weight_decay: it matches .*v_proj"),
    ],
)
def test_selections_are_checked_before_anything_starts(overrides, message):
    config = recipe(*overrides)
    with pytest.raises(ValueError, match=message):
        check_selections(config.actor, HF)


def test_legal_selections_pass():
    patterns = "['model.layers.[01].*', '*embed*']"
    config = recipe(f"actor.frozen={patterns}", f"actor.optimizer.no_weight_decay={patterns}")
    check_selections(config.actor, HF)


def test_single_experts_are_not_frozen_and_may_go_without_weight_decay():
    hf_config = HF | EXPERTS
    decayed = "actor.optimizer.no_weight_decay=['*.experts.1.*']"
    check_selections(recipe(decayed, "actor.frozen=['*.1.mlp.experts.*']").actor, hf_config)
    message = (
        r"^actor.frozen: it matches (\S+)\.experts\.1\.(\w+)\.weight, but of (\d) experts, .*, \d not; "
        r"match \1\.experts\.\*\.\2\.weight, or none"
    )
    with pytest.raises(UserError, match=message):
        check_selections(recipe("actor.frozen=['*.experts.1.*']").actor, hf_config)
