from __future__ import annotations

from tests.unit.config.rules.recipes import errors, recipe

VLLM = "reward_model.engine=vllm"


def test_reward_engines_keep_their_parameters() -> None:
    keys = ["reward_model.path=rm", "reward_model.offload=[parameters]"]
    recipe(*keys)
    assert errors(*keys, VLLM) == [
        "reward_model.offload=['parameters']: only a reward model in Megatron moves them, and "
        "reward_model.engine=vllm; set reward_model.offload=[] or reward_model.engine=megatron"
    ]


def test_reward_engines_have_no_other_layout_than_tensor_and_data_parallel() -> None:
    assert errors("reward_model.path=rm", VLLM, "reward_model.layout={tp: 2, pp: 2, sequence_parallel: true}") == [
        "reward_model.engine=vllm: its layout is dp engines of tp ranks, and reward_model.layout has pp=2, "
        "sequence_parallel=true; take the default there, or set reward_model.engine=megatron"
    ]
    recipe("reward_model.path=rm", VLLM, "reward_model.layout={tp: 3, dp: 2}")
