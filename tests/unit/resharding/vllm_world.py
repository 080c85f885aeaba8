"""The model that a worker of a vLLM engine of any size builds, in one process: others are only asked for their number.

All families can be built without a GPU, by the classes that a GPU engine has too. What GPU back ends do to weights
after they are loaded (transposed or padded experts) is not seen here; the engine is started with the one that leaves
them as they are.
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
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import expert_map_manager
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


class Group:
    """A process group with as much as model classes ask of one."""

    def __init__(self, size: int, rank: int):
        self.world_size, self.rank_in_group, self.rank = size, rank, lambda: rank
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.size = lambda: size
        self.device_group = self.cpu_group = self


@contextmanager
def groups(tp: int, rank: int) -> Iterator[None]:
    """Experts are spread over the tensor-parallel ranks, if they are."""
    ours, alone = Group(tp, rank), Group(1, 0)
    found = {"_TP": ours, "_EP": ours, "_WORLD": ours, "_PP": alone, "_DP": alone, "_DCP": alone, "_PCP": alone}
    with ExitStack() as patches:
        for name, group in found.items():
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
) -> Iterator[torch.nn.Module]:
    """Its model, while its place in the engine is pretended. folder: for the config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    model = ModelConfig(str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=64, enforce_eager=True)
    # Given to the constructor, sizes would be checked against this machine's devices.
    parallel = ParallelConfig()
    parallel.tensor_parallel_size = parallel.world_size = tp
    parallel.rank, parallel.enable_expert_parallel = rank, expert_parallel
    engine = VllmConfig(model_config=model, parallel_config=parallel, cache_config=CacheConfig(block_size=16))
    with groups(tp, rank), set_current_vllm_config(engine):
        on_host = mock.patch.object(expert_map_manager, "determine_expert_map", expert_map_on_host)
        with on_host, set_default_torch_dtype(dtype), torch.device(device):
            built = initialize_model(engine)
        yield built


def expert_map_on_host(*args, **kwargs):
    """vLLM reads the numbers in this tensor while it builds the model."""
    with torch.device("cpu"):
        return determine_expert_map(*args, **kwargs)


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Stacks of experts, [experts, rows, columns], with two axes, as the refit has them."""
    return {
        name: parameter.data.flatten(0, 1) if parameter.dim() == 3 else parameter.data
        for name, parameter in model.named_parameters()
    }
