from __future__ import annotations

import pytest

from megarl.models.families import completed
from megarl.models.rules import check_model
from megarl.models.rules.engine import engine_shards_keep_blocks_whole
from megarl.resharding.families import quantized_destinations, vllm_holders
from tests.marks import each_value
from tests.published_models import CONFIGS
from tests.unit.config.rules.recipes import recipe
from tests.unit.models.rules.model_configs import DEEPSEEK, SMOLLM2, model_errors


def test_gpt_oss_engine_does_not_replicate_kv_heads() -> None:
    model = CONFIGS["gpt-oss-20b"]
    check_model(recipe("rollout.tp=8"), model)
    assert model_errors(model, "rollout.tp=16") == [
        "rollout.tp=16: 8 KV heads are not divisible by 16 (8 / 16 = 0.5). Fix: set rollout.tp to 1, 2, 4 or 8"
    ]


def test_engine_may_replicate_kv_heads() -> None:
    wide = SMOLLM2 | {"num_attention_heads": 12}
    check_model(recipe("rollout.tp=6"), wide)
    assert model_errors(wide, "rollout.tp=4") == [
        "rollout.tp=4: 3 KV heads are not divisible by 4 (3 / 4 = 0.75). Fix: set rollout.tp to 1, 3, 6 or 12"
    ]


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_missing_router_keys_for_the_engine_are_refused(model_type: str) -> None:
    model = DEEPSEEK | {"model_type": model_type}
    (line,) = model_errors({key: value for key, value in model.items() if key != "topk_method"})
    assert "lacks topk_method, so the engine would route with softmax and without the bias. Fix: add" in line


def test_gated_delta_nets_are_not_quantized() -> None:
    [line] = model_errors(CONFIGS["Qwen3.5-27B"], "rollout.quantization=fp8_block", "model.dtype=bfloat16")
    assert line.startswith("rollout.quantization=fp8_block: vLLM's gated delta nets keep") and "=null" in line


QUANTIZABLE = [name for name, hf_config in CONFIGS.items() if "linear_num_key_heads" not in hf_config]


@pytest.mark.parametrize(("name", "whole_experts"), each_value(QUANTIZABLE, [False, True]))
def test_engine_tp_that_splits_fp8_blocks_is_refused(name: str, whole_experts: bool) -> None:
    """The rule accepts exactly the tensor-parallel sizes whose shards start and end at block boundaries."""
    model = completed(CONFIGS[name] | {"num_hidden_layers": 4})
    for tp in (1, 2, 4, 8):
        keys = ("rollout.quantization=fp8_block", f"rollout.tp={tp}")
        experts = f"rollout.vllm_overrides={{enable_expert_parallel: {str(whole_experts).lower()}}}"
        try:
            holders = vllm_holders(model, tp, 1, "bfloat16", whole_experts)
        except ValueError:
            continue
        messages = [*engine_shards_keep_blocks_whole(recipe(*keys, experts), model)]
        try:
            quantized_destinations(model, holders)
        except ValueError:
            assert len(messages) == 1
            assert messages[0].startswith(f"rollout.quantization=fp8_block: with rollout.tp={tp} ")
        else:
            assert messages == []


def test_split_fp8_block_error_names_the_fixes() -> None:
    keys = ("rollout.quantization=fp8_block", "rollout.tp=4")
    [message] = engine_shards_keep_blocks_whole(recipe(*keys), completed(CONFIGS["Qwen3-30B-A3B"]))
    assert message == (
        "rollout.quantization=fp8_block: with rollout.tp=4 an engine rank has 192 MLP rows of an expert, which is not "
        "a multiple of the block size 128. Fix: set rollout.tp to 1 or 2, or set "
        "rollout.vllm_overrides={enable_expert_parallel: true} so that each expert stays on one rank"
    )
    smollm2 = completed(SMOLLM2 | {"hidden_size": 576})
    [message] = engine_shards_keep_blocks_whole(recipe("rollout.quantization=fp8_block"), smollm2)
    assert message.endswith(
        "has 576 query rows, which is not a multiple of the block size 128. Fix: set rollout.quantization=null"
    )
