"""The closed form of a denoiser rank's memory against the tensors that torch saves for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megarl.cluster.memory.rank import FLOAT32, layer_bytes, rank_memory
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.core.latents import Conditioning
from megarl.megatron import denoiser_step, parallel
from megarl.megatron.model.build import named_parameters
from megarl.megatron.model.denoiser.build import build_denoiser
from megarl.megatron.model.denoiser.inputs import Document
from megarl.megatron.optimizer import build_optimizer
from megarl.models.denoiser import DenoiserShape
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import config_of
from tests.timing import WAIT_S
from tests.tiny_denoiser import CONFIG, STABLE_DIFFUSION_3

MODEL = CONFIG | dict(dim=192, n_heads=4, n_kv_heads=4, axes_dims=[16, 16, 16], n_layers=6)
SD3_MODEL = STABLE_DIFFUSION_3 | dict(
    num_attention_heads=4,
    attention_head_dim=48,
    caption_projection_dim=192,
    num_layers=6,
    pos_embed_max_size=16,
    dual_attention_layers=[0, 1, 2],
)
NUM_DOCUMENTS, IMAGE, CAPTION = 2, 16 * 16, 32
"""Number of documents, and numbers of image and caption tokens in each."""
TOKENS = NUM_DOCUMENTS * (IMAGE + CAPTION)


def documents(shape: DenoiserShape) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    pooled = None if shape.pooled is None else torch.randn(shape.pooled, generator=generator)
    return [
        Document(
            torch.randn(shape.channels, 32, 32, generator=generator),
            0.5,
            Conditioning(torch.randn(CAPTION, shape.caption, generator=generator), pooled),
        )
        for _ in range(NUM_DOCUMENTS)
    ]


def measure(store, rank: int, model: dict[str, Any], config: Config) -> tuple[int, int]:
    """Return the number of parameters, and the bytes that a microbatch saves in its forward pass without parameters."""
    settings, dtype = config.actor, getattr(torch, config.model.dtype)
    parallel.initialize(settings.layout, store, rank, seed=0, timeout_s=WAIT_S)
    chunks = build_denoiser(settings, model, dtype)
    own = named_parameters(chunks)
    build_optimizer(settings, chunks, dtype)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in own.values()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if torch._C._current_graph_task_id() == -1 and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = tensor
        return tensor

    def loss(_: Sequence[Document], found: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        return torch.stack([velocity.square().sum() for velocity in found]).sum(), None

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        denoiser_step.accumulate_gradients(chunks, loss, [documents(DenoiserShape.of(model))])
    count = sum(parameter.numel() for parameter in own.values())
    return count, sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


CASES = {
    "bfloat16": ("bfloat16", "", "none"),
    "float32": ("float32", "", "none"),
    "selective": ("bfloat16", "", "selective"),
    "full": ("bfloat16", "", "full"),
    "TP2, sequence parallel": ("bfloat16", "tp: 2, sequence_parallel: true", "none"),
    "TP2": ("float32", "tp: 2", "none"),
    "PP2": ("bfloat16", "pp: 2", "none"),
    "CP2": ("bfloat16", "cp: 2", "none"),
}


@pytest.mark.parametrize("case", exhaustive_but(CASES, "bfloat16", "full", "TP2, sequence parallel", "PP2"))
def test_closed_form_matches_measured_memory(tmp_path, case):
    dtype, axes, recompute = CASES[case]
    keys = f"actor.layout={{{axes}}}", f"model.dtype={dtype}", f"actor.recompute={recompute}"
    config = config_of(tmp_path, "actor.overlap_communication=false", *keys)
    layout, num_bytes = config.actor.layout, 2 if dtype == "bfloat16" else 4
    shape = DenoiserShape.of(MODEL)
    for rank, (count, saved) in enumerate(run_ranks(layout.world_size, measure, MODEL, config)):
        form = rank_memory(MODEL, layout, rank, num_bytes, TOKENS, 0, 1, recompute)
        assert form.weights == count * num_bytes
        is_first = rank < layout.world_size // layout.pp
        # Exclude recomputed activations, which are allocated only in the backward pass.
        again = layer_bytes(shape, layout, num_bytes) - layer_bytes(shape, layout, num_bytes, recompute)
        layers = 0 if recompute == "full" else MODEL["n_layers"] / layout.pp + is_first * shape.refiners
        more = layers * _more_on_cpu(shape, layout, num_bytes)
        expected = form.activations + form.head + TOKENS / layout.cp * (more - again)
        # The closed form omits the inputs of the embeddings, a tenth of the bytes with full recomputation.
        assert saved == pytest.approx(expected, rel=0.1 if recompute == "full" else 0.06)


@pytest.mark.parametrize("case", exhaustive_but(list(CASES)[:5], "bfloat16"))
def test_closed_form_of_stable_diffusion_3_matches_measured_memory(tmp_path, case):
    """The position embedding is a parameter without gradient. Images are 89 % of the tokens, but the form counts the
    second attention for all."""
    dtype, axes, recompute = CASES[case]
    keys = f"actor.layout={{{axes}}}", f"model.dtype={dtype}", f"actor.recompute={recompute}"
    config = config_of(tmp_path, "actor.overlap_communication=false", *keys)
    layout, num_bytes = config.actor.layout, 2 if dtype == "bfloat16" else 4
    shape = DenoiserShape.of(SD3_MODEL)
    for rank, (count, saved) in enumerate(run_ranks(layout.world_size, measure, SD3_MODEL, config)):
        form = rank_memory(SD3_MODEL, layout, rank, num_bytes, TOKENS, 0, 1, recompute)
        constant = shape.grid**2 * shape.hidden
        assert form.weights == count * num_bytes and form.gradients == (count - constant) * FLOAT32
        again = layer_bytes(shape, layout, num_bytes) - layer_bytes(shape, layout, num_bytes, recompute)
        norms = 0 if recompute == "full" else SD3_MODEL["num_layers"] * 4 * 2 * shape.query / layout.tp
        assert saved == pytest.approx(form.activations + form.head + TOKENS * (norms - again), rel=0.1)


def _more_on_cpu(shape: DenoiserShape, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token and layer that norms keep on CPU in addition to the GPU's kernels: their outputs, and
    their inputs in float32. In float32, the inputs of the queries' and keys' norms are not copies."""
    sequence = layout.tp if layout.sequence_parallel else 1
    heads = FLOAT32 * 2 * shape.query / layout.tp if num_bytes < FLOAT32 else 0
    return 4 * shape.hidden * (2 * FLOAT32 - num_bytes) / sequence + heads
