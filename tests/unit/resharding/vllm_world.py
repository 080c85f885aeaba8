"""Build the model of one worker of a vLLM engine of any size, in a single process without the other workers.

All families can be built without a GPU from the classes that GPU engines use. Post-processing of loaded weights by GPU
back ends (transposed or padded experts) is not covered; engines use the back end that does not change weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

SHARED = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
"""Name suffixes of the parameters that the MTP draft model shares with the policy in an engine."""


class Group:
    """A fake process group with the attributes that model classes read."""

    def __init__(self, size: int, rank: int):
        self.world_size, self.rank_in_group, self.rank = size, rank, lambda: rank
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.size = lambda: size
        self.device_group = self.cpu_group = self


@contextmanager
def process_groups(tp: int, rank: int) -> Iterator[None]:
    """Patch vLLM's process groups. The expert-parallel group is the tensor-parallel group."""
    tp_group, single = Group(tp, rank), Group(1, 0)
    fakes = {"_TP": tp_group, "_EP": tp_group, "_WORLD": tp_group}
    fakes |= dict.fromkeys(("_PP", "_DP", "_DCP", "_PCP"), single)
    with ExitStack() as patches:
        for name, group in fakes.items():
            patches.enter_context(mock.patch.object(parallel_state, name, group))
        yield


@contextmanager
def worker(
    folder: Path,
    config: dict[str, Any],
    tp: int,
    rank: int,
    expert_parallel: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "meta",
    drafts: bool = False,
) -> Iterator[torch.nn.Module]:
    """Build the model of a worker and yield it while the process groups are patched. Write config.json into `folder`.
    `drafts` builds the MTP draft model.
    """
    (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = dict(skip_tokenizer_init=True, dtype=dtype, max_model_len=64, enforce_eager=True)
    options["mm_encoder_tp_mode"] = "data"  # as engines run
    model = ModelConfig(str(folder), **options)
    built = ModelConfig(str(folder), hf_overrides=SpeculativeConfig.hf_config_override, **options) if drafts else model
    # Set the sizes after construction, because the constructor checks them against this machine's devices.
    parallel = ParallelConfig()
    parallel.tensor_parallel_size = parallel.world_size = tp
    parallel.rank, parallel.enable_expert_parallel = rank, expert_parallel
    engine = VllmConfig(model_config=model, parallel_config=parallel, cache_config=CacheConfig(block_size=16))
    with process_groups(tp, rank), set_current_vllm_config(engine):
        on_host = mock.patch.object(expert_map_manager, "determine_expert_map", expert_map_on_host)
        # For gpt-oss, CPU kernels support fewer sizes than GPU kernels.
        any_size = mock.patch.object(CPUUnquantizedExperts, "_supports_grouped_gemm", lambda config: (True, None))
        with on_host, any_size, set_default_torch_dtype(dtype), torch.device(device):
            module = initialize_model(engine, model_config=built)
        yield module


def expert_map_on_host(*args, **kwargs):
    """Create the map on CPU: vLLM reads its values while it builds the model on the meta device."""
    with torch.device("cpu"):
        return determine_expert_map(*args, **kwargs)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name; stacked experts are flattened to two axes, as refits see them."""
    return {
        name: parameter.data.flatten(0, 1) if ".routed_experts." in name else parameter.data
        for name, parameter in model.named_parameters()
    }
