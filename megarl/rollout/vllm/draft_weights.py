"""Load a draft model's weights from its folder although rollout engines start without weights."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

PREFIX = "draft_model"
"""The prefix with which both of vLLM's model runners load a draft model. They ignore
SpeculativeConfig.draft_load_config."""

_load_dummy = DummyModelLoader.load_model


def install() -> None:
    """Patch vLLM in this worker process, before it loads a model."""
    DummyModelLoader.load_model = _load_model


def _load_model(
    self: DummyModelLoader, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
) -> torch.nn.Module:
    """Load random weights, except into a draft model, whose weights no refit writes."""
    if prefix == PREFIX:
        return DefaultModelLoader(LoadConfig()).load_model(vllm_config, model_config, prefix)
    return _load_dummy(self, vllm_config, model_config, prefix)
