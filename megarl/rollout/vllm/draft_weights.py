"""Make vLLM load draft models from their folders. The policy starts with random weights, because refits
overwrite them, but refits do not write draft models."""

from __future__ import annotations

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from megarl.models.eagle import LAYER_IDS

RUNNER = "draft"
"""The runner_type of a draft model. vLLM's model runners load draft models in the policy's load format."""

_load_dummy = DummyModelLoader.load_model


def install() -> None:
    """Patch vLLM in this worker process, before it loads a model."""
    DummyModelLoader.load_model = _load_model


def _load_model(
    self: DummyModelLoader, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
) -> torch.nn.Module:
    """Load random weights, except into draft models, because refits do not write those. vLLM also treats the MTP layer
    as a draft model, but refits write it."""
    speculative = vllm_config.speculative_config
    if model_config.runner_type == RUNNER and speculative is not None and speculative.method != "mtp":
        return DefaultModelLoader(LoadConfig()).load_model(vllm_config, model_config, prefix)
    if speculative is not None and speculative.method == "eagle3":
        _copy_layer_ids(speculative.draft_model_config)
    return _load_dummy(self, vllm_config, model_config, prefix)


def _copy_layer_ids(draft: ModelConfig) -> None:
    """Copy the indices of the layers whose hidden states an EAGLE-3 draft reads, from its eagle_config to the top level
    of its config. vLLM's model runner for GPUs reads them only there, and would otherwise use its default."""
    nested = getattr(draft.hf_config, "eagle_config", None) or {}
    if not getattr(draft.hf_config, LAYER_IDS, None) and nested.get(LAYER_IDS):
        setattr(draft.hf_config, LAYER_IDS, nested[LAYER_IDS])
