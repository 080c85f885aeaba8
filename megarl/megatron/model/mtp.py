"""The layer for multi-token prediction (MTP, section 2.2 of arXiv 2412.19437) on the last pipeline stage. It is kept
for engines and exports, and is not part of the forward pass."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.model.layer_spec import layer_spec, norm_class
from megarl.models.shape import ModelShape


class MtpLayer(MegatronModule):
    """A projection of a token's hidden state and the next token's embedding, and a decoder layer. Parameters have the
    names of Megatron's MultiTokenPredictionLayer."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, fused: bool):
        super().__init__(config)
        norm = norm_class(fused)
        sizes: dict[str, Any] = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.enorm, self.hnorm, self.final_layernorm = norm(**sizes), norm(**sizes), norm(**sizes)
        assert config.init_method is not None, "TransformerConfig sets a default"
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        spec = layer_spec(shape, shape.kind(shape.num_layers), fused)
        self.mtp_model_layer = build_module(spec, config=config, layer_number=1, is_mtp_layer=True)


class MtpBlock(MegatronModule):
    """The model's MTP layers."""

    def __init__(self, config: TransformerConfig, shape: ModelShape, fused: bool):
        config = copy.copy(config)  # with this field, the decoder's layers and GPTModel would behave differently
        config.mtp_num_layers = shape.mtp_layers
        super().__init__(config)
        self.layers = torch.nn.ModuleList([MtpLayer(config, shape, fused) for _ in range(shape.mtp_layers)])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded state. Megatron's own method treats all parameters in a ModuleList as replicated."""
        state: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, MtpLayer)
            state |= layer.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return state
