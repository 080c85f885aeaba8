from __future__ import annotations

from megarl.config.names import keys
from megarl.config.vllm_arguments import MANAGED
from tests.unit.config.rules.recipes import errors, recipe


def test_vllm_arguments_of_megarl_keys_are_rejected() -> None:
    extra = "rollout.vllm_overrides={logprobs_mode: raw_logprobs, dtype: float16, block_size: 32, load_format: auto}"
    assert errors(extra, "reward_model.vllm_overrides.tensor_parallel_size=2") == [
        "reward_model.vllm_overrides.tensor_parallel_size=2: megarl sets this argument from reward_model.layout.tp. "
        "Fix: set reward_model.layout.tp instead",
        (
            "rollout.vllm_overrides.dtype=float16: megarl sets this argument from model.dtype. Fix: set model.dtype "
            "instead"
        ),
        (
            "rollout.vllm_overrides.logprobs_mode=raw_logprobs: megarl depends on its own value for this argument. "
            "Fix: remove the override"
        ),
    ]


def test_vllm_arguments_that_move_weights_are_rejected() -> None:
    extra = "{expert_placement_strategy: round_robin, enable_eplb: true, offload_group_size: 2}"
    placement, balance, offload = errors(f"rollout.vllm_overrides={extra}")
    assert placement.startswith(
        "rollout.vllm_overrides.expert_placement_strategy=round_robin: a refit writes consecutive experts"
    )
    assert balance.startswith("rollout.vllm_overrides.enable_eplb=true: a refit writes experts to their original ranks")
    assert offload.startswith(
        "rollout.vllm_overrides.offload_group_size=2: vLLM would read a layer's parameters from copies"
    )
    assert placement.endswith(". Fix: remove the override")
    as_ever = "{expert_placement_strategy: linear, enable_eplb: false, offload_group_size: 0, cpu_offload_gb: 4}"
    recipe(f"rollout.vllm_overrides={as_ever}")
    recipe(f"reward_model.vllm_overrides={extra}")  # no refit writes to the reward model


def test_keys_that_determine_vllm_arguments_exist() -> None:
    homes = {home for given in MANAGED.values() for home in given.values() if home is not None}
    assert homes <= set(keys())
