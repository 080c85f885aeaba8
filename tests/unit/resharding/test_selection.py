"""Selecting parameters of a Megatron rank with patterns over Hugging Face names."""

from __future__ import annotations

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.models.multimodal import text_config
from megarl.models.vision import add_vision
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.families.adapters import adapted_weights
from megarl.resharding.selection import check_selections, layer_matrices, select_tensors, whole_parameters
from tests.paths import BASE
from tests.published_models import VISION_CONFIGS
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


def selected(*patterns: str) -> list[str]:
    return whole_parameters("actor.frozen", select_tensors("actor.frozen", patterns, NAMES), LAST_OF_TWO)


def test_layer_index_counts_from_the_start_of_the_model():
    names = selected("model.layers.2.*")
    assert sorted(names) == sorted(name for name in LAST_OF_TWO.shapes if ".layers.0." in name)
    assert len(names) == 7


def test_all_parts_of_a_fused_parameter_select_it():
    assert selected("model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.up_*") == [
        "chunk0.decoder.layers.1.mlp.linear_fc1.weight"
    ]


def test_tied_embedding_selects_its_copy_on_the_last_stage():
    assert selected("*embed_tokens*") == ["chunk0.output_layer.weight"]


def test_parameters_of_another_stage_are_not_selected():
    assert selected("model.layers.1.*") == []


def test_part_of_a_fused_parameter_is_rejected():
    message = (
        "actor.frozen: the patterns match model.layers.2.self_attn.k_proj.weight but not "
        "model.layers.2.self_attn.q_proj.weight, model.layers.2.self_attn.v_proj.weight. "
        "The trainer fuses these tensors into one parameter. Fix: match all 3 or none"
    )
    with pytest.raises(ValueError) as error:
        selected("*.k_proj.weight")
    assert str(error.value) == message


def test_unmatched_pattern_is_rejected_with_suggestions():
    with pytest.raises(
        ValueError,
        match=r"actor.frozen: model.layer.0.\* matches no tensor .* Fix: use a name such as .* model.layers.0.",
    ):
        selected("model.layers.0.*", "model.layer.0.*")


def recipe(*overrides: str) -> Config:
    return load(BASE, ["model.path=x", "data.source=arithmetic", "actor.layout={pp: 4, tp: 2}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.frozen=['*']"],
            r"actor.frozen=\['\*'\]: the patterns freeze all parameters. Fix: remove patterns until",
        ),
        (["actor.frozen=[lm_head.weight]"], "actor.frozen: lm_head.weight matches no tensor in the model"),
        (
            ["actor.optimizer.no_weight_decay=['*.v_proj.*']"],
            "actor.optimizer.no_weight_decay: the patterns match .*v_proj",
        ),
    ],
)
def test_invalid_selections_are_rejected(overrides, message):
    config = recipe(*overrides)
    with pytest.raises(ValueError, match=message):
        check_selections(config.actor, HF)


def test_valid_selections_pass():
    patterns = "['model.layers.[01].*', '*embed*']"
    config = recipe(f"actor.frozen={patterns}", f"actor.optimizer.no_weight_decay={patterns}")
    check_selections(config.actor, HF)


def test_single_experts_can_skip_decay_but_not_be_frozen():
    hf_config = HF | EXPERTS
    decayed = "actor.optimizer.no_weight_decay=['*.experts.1.*']"
    check_selections(recipe(decayed, "actor.frozen=['*.1.mlp.experts.*']").actor, hf_config)
    message = (
        r"^actor.frozen: the patterns match (\S+)\.experts\.1\.(\w+)\.weight, but not 3 of the layer's 4 experts\. .* "
        r"Fix: add \1\.experts\.\*\.\2\.weight, or match none"
    )
    with pytest.raises(UserError, match=message):
        check_selections(recipe("actor.frozen=['*.experts.1.*']").actor, hf_config)


def test_vision_tower_is_selected_and_has_no_adapters():
    """Muon does not update the tower either."""
    hf_config = add_vision(text_config(VISION_CONFIGS["Qwen2.5-VL-7B"]))
    first, last = (megatron_holder(hf_config, layout_of(pp=2), rank) for rank in range(2))
    tower = select_tensors("actor.frozen", ["model.visual.*"], huggingface_holder(hf_config).shapes)
    frozen = whole_parameters("actor.frozen", tower, first)
    assert frozen == [name for name in first.shapes if name.startswith("chunk0.vision.")]
    assert len(frozen) == len(tower) and whole_parameters("actor.frozen", tower, last) == []
    adapted = {adapted.weight for adapted in adapted_weights(first, share_experts=False)}
    assert len(adapted) == 14 * 4 and adapted.isdisjoint(frozen)
    assert set(layer_matrices(first)).isdisjoint(frozen)
