"""Fields for Megatron's dataclasses: which are taken, and what is said of those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.extra import build, checked


def extra(target: type = TransformerConfig, **fields: Any) -> dict[str, Any]:
    return checked("actor.megatron_extra.x", fields, target, {"num_layers": "the model's config.json", "fp16": None})


def test_values_of_the_right_type_pass():
    fields = dict(moe_aux_loss_coeff=0, moe_z_loss_coeff=None, recompute_modules=["mlp"], moe_router_dtype="fp32")
    assert extra(**fields) == fields
    assert extra(DistributedDataParallelConfig, bucket_size=1000) == {"bucket_size": 1000}


def test_names_become_dtypes_and_enum_members():
    assert extra(OptimizerConfig, exp_avg_dtype="bfloat16") == {"exp_avg_dtype": torch.bfloat16}
    assert extra(attention_backend="flash") == {"attention_backend": AttnBackend.flash}


def test_none_is_taken_where_it_is_the_default_of_a_field_that_says_otherwise():
    assert extra(DistributedDataParallelConfig, suggested_communication_unit_size=None) is not None


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        (
            TransformerConfig,
            {"moe_aux_loss_coef": 0.1},
            "actor.megatron_extra.x.moe_aux_loss_coef: Megatron's TransformerConfig has no such field; did you mean "
            "moe_aux_loss_coeff?",
        ),
        (
            TransformerConfig,
            {"num_layers": 3},
            "actor.megatron_extra.x.num_layers=3: this follows from the model's config.json; set it there",
        ),
        (TransformerConfig, {"fp16": True}, "actor.megatron_extra.x.fp16=True: the trainer relies on its own value"),
        (
            TransformerConfig,
            {"qk_layernorm": "yes"},
            "actor.megatron_extra.x.qk_layernorm='yes': expected bool, found str",
        ),
        (
            TransformerConfig,
            {"moe_router_topk": 2.0},
            "actor.megatron_extra.x.moe_router_topk=2.0: expected int, found float",
        ),
        (
            TransformerConfig,
            {"moe_router_score_function": "tanh"},
            "moe_router_score_function='tanh': expected Literal['softmax', 'sigmoid'], found str",
        ),
        (
            TransformerConfig,
            {"attention_backend": "fast"},
            "attention_backend='fast': expected one of flash, fused, unfused, local, auto, found str",
        ),
        (OptimizerConfig, {"exp_avg_dtype": "bf16"}, "x.exp_avg_dtype='bf16': expected dtype, found str"),
        (OptimizerConfig, {"exp_avg_dtype": "nn"}, "x.exp_avg_dtype='nn': expected dtype, found str"),
        (DistributedDataParallelConfig, {"bucket_size": True}, "x.bucket_size=True: expected Optional[int], found boo"),
    ],
)
def test_refusal_names_the_field(target: type, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        extra(target, **fields)
    assert message in str(error.value)


def test_what_megatron_refuses_is_an_error_of_the_section():
    message = r"actor: Megatron's OptimizerConfig refuses these settings: exp_avg_dtype can only be fp32"
    with pytest.raises(ValueError, match=message):
        build("actor", OptimizerConfig, extra(OptimizerConfig, exp_avg_dtype="bfloat16"))
