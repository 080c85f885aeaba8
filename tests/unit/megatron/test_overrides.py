"""Overrides of Megatron's dataclasses: accepted fields, and error messages of rejected ones."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.megatron.model.architecture import FORM
from megarl.megatron.model.build import MODEL_DEFAULTS, PLACEMENT, data_parallel_config, transformer_config
from megarl.megatron.optimizer import DEFAULTS, optimizer_config
from megarl.megatron.overrides import build, checked, describe_settings
from megarl.megatron.preflight import refusals
from tests.paths import BASE

LLAMA = dict(
    model_type="llama",
    vocab_size=128,
    hidden_size=64,
    num_attention_heads=2,
    num_hidden_layers=2,
    intermediate_size=128,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)


def extra(target: type = TransformerConfig, **fields: Any) -> dict[str, Any]:
    return checked(
        "actor.megatron_overrides.x", fields, target, {"num_layers": "the model's config.json", "fp16": None}
    )


def test_values_of_the_right_type_are_accepted():
    fields = dict(moe_aux_loss_coeff=0, moe_z_loss_coeff=None, recompute_modules=["mlp"], moe_router_dtype="fp32")
    assert extra(**fields) == fields
    assert extra(DistributedDataParallelConfig, bucket_size=1000) == {"bucket_size": 1000}


def test_names_resolve_to_dtypes_and_enum_members():
    assert extra(OptimizerConfig, exp_avg_dtype="bfloat16") == {"exp_avg_dtype": torch.bfloat16}
    assert extra(attention_backend="flash") == {"attention_backend": AttnBackend.flash}


def test_none_is_accepted_if_it_is_the_default():
    assert extra(DistributedDataParallelConfig, suggested_communication_unit_size=None) is not None


@pytest.mark.parametrize(
    ("target", "fields", "message"),
    [
        (
            TransformerConfig,
            {"moe_aux_loss_coef": 0.1},
            "actor.megatron_overrides.x.moe_aux_loss_coef=0.1: Megatron's TransformerConfig has no such field. Fix: "
            "use moe_aux_loss_coeff",
        ),
        (TransformerConfig, {"zzz": 1}, "x.zzz=1: Megatron's TransformerConfig has no such field. Fix: remove zzz"),
        (
            TransformerConfig,
            {"num_layers": 3},
            "actor.megatron_overrides.x.num_layers=3: megarl derives this field from the model's config.json",
        ),
        (
            TransformerConfig,
            {"fp16": True},
            "actor.megatron_overrides.x.fp16=True: the trainer requires its own value",
        ),
        (
            TransformerConfig,
            {"qk_layernorm": "yes"},
            "actor.megatron_overrides.x.qk_layernorm='yes': expected bool, but found str",
        ),
        (
            TransformerConfig,
            {"moe_router_topk": 2.0},
            "actor.megatron_overrides.x.moe_router_topk=2.0: expected int, but found float",
        ),
        (
            TransformerConfig,
            {"moe_router_score_function": "tanh"},
            "moe_router_score_function='tanh': expected Literal['softmax', 'sigmoid', 'sqrtsoftplus']",
        ),
        (
            TransformerConfig,
            {"attention_backend": "fast"},
            "attention_backend='fast': expected one of flash, fused, unfused, local, auto, but found str",
        ),
        (OptimizerConfig, {"exp_avg_dtype": "bf16"}, "x.exp_avg_dtype='bf16': expected dtype, but found str"),
        (OptimizerConfig, {"exp_avg_dtype": "nn"}, "x.exp_avg_dtype='nn': expected dtype, but found str"),
        (
            DistributedDataParallelConfig,
            {"bucket_size": True},
            "x.bucket_size=True: expected Optional[int], but found boo",
        ),
    ],
)
def test_error_names_the_field(target: type, fields: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:
        extra(target, **fields)
    assert message in str(error.value)


def test_megatrons_own_errors_name_the_overrides():
    refusal = "Megatron's OptimizerConfig rejects these settings: exp_avg_dtype can only be fp32"
    config = config_of_llama("critic", "optimizer", exp_avg_dtype="bfloat16", decoupled_weight_decay=False)
    overrides = "critic.megatron_overrides.optimizer.exp_avg_dtype=torch.bfloat16, .*decoupled_weight_decay=False"
    with pytest.raises(ValueError, match=f"^{overrides}: {refusal}"):
        optimizer_config(config.critic, torch.float32)
    with pytest.raises(ValueError, match=f"^actor: {refusal}"):
        build(describe_settings("actor", "x", {}), OptimizerConfig, {"exp_avg_dtype": torch.bfloat16})


def config_of_llama(role: str, part: str, **fields: Any) -> Config:
    extra = json.dumps(fields)
    gae = "algorithm.advantage.estimator=gae"  # otherwise there is no critic
    return load(BASE, ["model.path=m", "data.source=arithmetic", gae, f"{role}.megatron_overrides.{part}={extra}"])


FROM_LAYOUT = r"megarl derives this field from critic.layout. Fix: remove \w+ and change critic.layout instead"
FROM_MODEL = r"megarl derives this field from the model's config.json. Fix: .* change the model's config.json instead"
RELIED_ON = r"the trainer requires its own value. Fix: remove \w+"


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("deallocate_pipeline_outputs", False, FROM_LAYOUT),
        ("batch_p2p_comm", True, FROM_LAYOUT),
        ("account_for_loss_in_pipeline_split", True, FROM_LAYOUT),
        ("num_moe_experts", 4, FROM_MODEL),  # even for a dense model
        ("window_size", [4, 0], FROM_MODEL),
        ("moe_router_force_load_balancing", True, FROM_MODEL),
        (
            "fp8",
            "hybrid",
            r"megarl derives this field from critic.fp8. Fix: remove \w+ and change critic.fp8 instead",
        ),  # an override would bypass megarl's check
        ("microbatch_group_size_per_vp_stage", 1, RELIED_ON),
        ("perform_initialization", False, RELIED_ON),
        ("overlap_p2p_comm_warmup_flush", True, RELIED_ON),
        ("gtp_weight_remat_size", 2, FROM_LAYOUT),
        ("moe_router_force_biased", 1.0, FROM_MODEL),
        ("use_transformer_engine_op_fuser", True, RELIED_ON),
    ],
)
def test_fields_derived_from_our_keys_are_rejected(field: str, value: Any, why: str):
    config = config_of_llama("critic", "model", **{field: value})
    with pytest.raises(ValueError, match=rf"^critic.megatron_overrides.model.{field}=.*: .*{why}$"):
        transformer_config(config.critic, LLAMA, torch.float32)


def test_maximal_update_parametrization_is_rejected():
    config = config_of_llama("actor", "model", use_mup=True)
    with pytest.raises(ValueError, match=rf"^actor.megatron_overrides.model.use_mup=True: {RELIED_ON}$"):
        transformer_config(config.actor, LLAMA, torch.float32)


def test_optimizer_and_ddp_reject_our_fields():
    for field, value in (("optimizer_cpu_offload", True), ("grad_norm_skip_threshold", 1.0)):
        config = config_of_llama("actor", "optimizer", **{field: value})
        with pytest.raises(ValueError, match=rf"^actor.megatron_overrides.optimizer.{field}={value}: {RELIED_ON}$"):
            optimizer_config(config.actor, torch.float32)
    config = config_of_llama("actor", "ddp", overlap_grad_reduce=False)
    with pytest.raises(
        ValueError, match=r"overlap_grad_reduce=False: megarl derives this field from actor.overlap_communication"
    ):
        data_parallel_config(config.actor)


def test_overrides_take_precedence_over_our_defaults():
    """recompute_modules and bias_dropout_fusion differ from our defaults."""
    overrides = dict(recompute_modules=["core_attn"], bias_dropout_fusion=True, moe_aux_loss_coeff=0.25)
    model = transformer_config(config_of_llama("actor", "model", **overrides).actor, LLAMA, torch.float32)
    assert {name: getattr(model, name) for name in overrides} == overrides
    optimizer = optimizer_config(config_of_llama("actor", "optimizer", log_num_zeros_in_grad=True).actor, torch.float32)
    assert optimizer.log_num_zeros_in_grad
    assert data_parallel_config(config_of_llama("actor", "ddp", bucket_size=1000).actor).bucket_size == 1000


def test_preflight_reports_rejected_settings_only():
    good = config_of_llama("actor", "ddp", bucket_size=1000)
    assert refusals(good, {"actor": LLAMA}) == []
    for part in ("model", "optimizer", "ddp"):
        [line] = refusals(config_of_llama("actor", part, nothing=1), {"actor": LLAMA})
        assert line.startswith(f"actor.megatron_overrides.{part}.nothing=1: ")


def test_reserved_fields_exist_in_megatron():
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)}
    assert {*FORM, *PLACEMENT, *MODEL_DEFAULTS} <= fields
    assert set(DEFAULTS) <= {field.name for field in dataclasses.fields(OptimizerConfig)}
