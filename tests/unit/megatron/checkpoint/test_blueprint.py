"""Blueprints: the checkpoint entries that megatron-core declares for a model without allocated weights."""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as dist

from megarl.megatron.checkpoint.blueprint import blueprint
from tests.unit.megatron.checkpoint.test_conversion import DEEPSEEK, QWEN3_MOE
from tests.unit.resharding.cases import config_of, layout_of

FORMAT = {"non_homogeneous_layers": True}


def norms(layer: int, **changes) -> set[str]:
    """Return the keys of the norms in a layer, without the layer's prefix."""
    prefix = f"decoder.layers.{layer}."
    keys = {extent.key for extent in blueprint(config_of(**changes), layout_of(), 0, FORMAT).extents}
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix) and "norm" in key}


def test_norms_have_transformer_engine_names():
    """In Transformer Engine, a norm is part of the linear layer after it, except before experts and before latent
    attention, which starts with two linear layers.
    """
    attention, mlp = "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"
    assert norms(0) == {attention, mlp}
    heads = {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    assert norms(0, **QWEN3_MOE) == {attention, "pre_mlp_layernorm.weight", *heads}
    assert norms(1, **QWEN3_MOE) == {attention, mlp, *heads}
    latents = {f"self_attention.linear_{x}_up_proj.layer_norm_weight" for x in ("q", "kv")}
    assert norms(0, **DEEPSEEK) == {"input_layernorm.weight", mlp, *latents}
    assert norms(1, **DEEPSEEK) == {"input_layernorm.weight", "pre_mlp_layernorm.weight", *latents}


def test_ranks_write_every_element_exactly_once():
    """64 ranks, with 8 replicas of everything but the experts. No process group remains afterwards."""
    config = config_of(**DEEPSEEK | dict(num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8))
    layout = layout_of(tp=2, pp=4, dp=8, ep=8, etp=1)
    written: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        for extent in blueprint(config, layout, rank, FORMAT).extents:
            written[extent.key] = written.get(extent.key, 0) + prod(extent.shape)
            assert shapes.setdefault(extent.key, extent.global_shape) == extent.global_shape
    assert written == {key: prod(shape) for key, shape in shapes.items()}
    assert len({key for key in shapes if ".experts." in key}) == 3 * 2
    assert not dist.is_initialized() and torch.empty(0).device.type == "cpu"
