"""vLLM's errors about invalid engine arguments."""

from __future__ import annotations

import pydantic
import pytest

from megarl.core.errors import UserError
from megarl.rollout.vllm.refusal import refusal


class Model(pydantic.BaseModel):
    gpu_memory_utilization: float = pydantic.Field(le=1)


def rejected_by_pydantic() -> Exception:
    with pytest.raises(pydantic.ValidationError) as caught:
        Model(gpu_memory_utilization=2)
    return caught.value


def test_refusal_names_the_overrides_and_the_reason() -> None:
    error = refusal(NotImplementedError("FP8 KV cache\non CPU."), "rollout", {"kv_cache_dtype": "fp8"})
    assert str(error) == (
        "rollout.vllm_overrides={'kv_cache_dtype': 'fp8'}: vLLM rejects the engine's arguments: FP8 KV cache on CPU. "
        "Fix: change or remove the rejected argument"
    )
    assert str(refusal(rejected_by_pydantic(), "reward_model", {})) == (
        "reward_model: vLLM rejects the engine's arguments: gpu_memory_utilization: Input should be less than or equal "
        "to 1. Fix: change the key of reward_model that sets this argument"
    )


@pytest.mark.parametrize(
    "error",
    [
        UserError("rollout: wrong"),
        RuntimeError("Engine core initialization failed"),
        MemoryError(),
        ValueError("Free memory on device (1/80 GiB) on startup is less than desired GPU memory utilization."),
    ],
)
def test_other_errors_are_not_refusals(error: Exception) -> None:
    assert refusal(error, "rollout", {}) is None
