"""Weights quantized jointly by trainer ranks match those that vLLM's quantizer computes from whole tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, quantized_destinations, quantized_sources
from megarl.resharding.families.quantized import SCALES
from megarl.resharding.piece import Holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from tests.forked import run_ranks
from tests.parity import config_of
from tests.tiny_model import SHARDED_VOCAB, write_tiny_model

SIZES = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=192,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=2,
    intermediate_size=320,
    max_position_embeddings=64,
    num_experts=2,
    num_experts_per_tok=2,
    moe_intermediate_size=192,
    mlp_only_layers=[0],
)
"""With these sizes, shard boundaries between two ranks split blocks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SIZES)


def refit_weights(store, rank: int, config: Config, folder: Path) -> tuple[Holder, dict[str, torch.Tensor]]:
    """Return the rank's holder and the weights that its second refit would send."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for _ in range(2):
        worker.prepare_refit()
    weights = worker._refit_weights.items()
    # torch cannot pickle fp8 tensors.
    return worker.holder, {n: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.clone() for n, t in weights}


@pytest.mark.parametrize(
    "layout",
    [
        "{tp: 2, sequence_parallel: true}",
        "{tp: 2, sequence_parallel: true, ep: 2, etp: 1}",
        "{dp: 4, ep: 2, etp: 2}",
    ],
)
def test_ranks_agree_on_scales_of_shared_blocks(folder, layout):
    config = config_of(folder, "model.dtype=bfloat16", "rollout.quantization=fp8_block", f"actor.layout={layout}")
    results = run_ranks(config.actor.layout.world_size, refit_weights, config, folder)
    hf_config = read_config(folder)
    tensors = {
        f"{rank}": {n: t.view(torch.float8_e4m3fn) if t.dtype == torch.uint8 else t for n, t in weights.items()}
        for rank, (_, weights) in enumerate(results)
    }
    sources = quantized_sources(
        hf_config, [replace(holder, name=f"{rank}") for rank, (holder, _) in enumerate(results)]
    )
    [whole] = quantized_destinations(hf_config, [huggingface_holder(hf_config, "bfloat16")])
    gathered = {n: torch.empty(shape, dtype=getattr(torch, whole.dtypes[n])) for n, shape in whole.shapes.items()}
    execute(make_plan(sources, [whole]).into(whole.name), gathered, LocalMemory(tensors))

    from vllm.utils.deep_gemm import per_block_cast_to_fp8  # import only after forking the ranks

    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            fp8, scales = per_block_cast_to_fp8._torchdynamo_orig_callable(tensor.bfloat16(), [128, 128])
            assert torch.equal(gathered[name].view(torch.uint8), fp8.view(torch.uint8)), name
            assert torch.equal(gathered[name + SCALES], scales), name
        else:
            assert torch.equal(gathered[name], tensor.bfloat16()), name
    assert any(".experts." in name and name.endswith(SCALES) for name in gathered)
