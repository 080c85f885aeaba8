"""The closed form of a rank's memory against the tensors that torch saves for the backward pass and Megatron's
allocations."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster.memory.rank import FLOAT32, layer_bytes, rank_memory
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Baseline
from megarl.data.local_batch import LocalBatch
from megarl.megatron import step
from megarl.megatron.model.build import named_parameters
from megarl.megatron.model.mtp import shared_embedding
from megarl.megatron.offload import Offload
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.shape import ModelShape
from megarl.models.trained_model import policy_hf_config
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import config_of
from tests.samples import training_ref
from tests.tiny_model import SHARDED_VOCAB, add_mtp_layer, write_tiny_model

NUM_DOCUMENTS, PROMPT, RESPONSE, HIDDEN = 4, 20, 44, 128
"""Number of documents, and mean numbers of tokens."""
MODEL = dict(
    vocab_size=SHARDED_VOCAB,
    hidden_size=HIDDEN,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_hidden_layers=4,
    intermediate_size=320,
    max_position_embeddings=256,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=80)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=56,
    kv_lora_rank=72,
    qk_nope_head_dim=40,
    qk_rope_head_dim=8,
    v_head_dim=20,
    first_k_dense_replace=1,
    moe_intermediate_size=48,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", dict(tie_word_embeddings=True)),
    "experts": ("qwen3_moe", EXPERTS | dict(mlp_only_layers=[1])),
    "latent attention": ("deepseek_v3", LATENT),
    "predicts two tokens": ("deepseek_v3", LATENT),
}
SHARDED_EXPERTS = [
    "actor.layout.tp=2",
    "actor.layout.sequence_parallel=true",
    "actor.layout.ep=2",
    "actor.layout.etp=1",
]
ADAPTERS = "actor.lora.rank=2"
CASES = {
    "float32": ("dense", []),
    "bfloat16": ("dense", ["model.dtype=bfloat16"]),
    "TP2": ("dense", ["actor.layout.tp=2"]),
    "TP2, sequence parallel": ("dense", ["actor.layout.tp=2", "actor.layout.sequence_parallel=true"]),
    "PP2": ("dense", ["actor.layout.pp=2"]),
    "DP2, bfloat16": ("dense", ["actor.layout.dp=2", "model.dtype=bfloat16"]),
    "selective": ("dense", ["actor.recompute=selective"]),
    "full": ("dense", ["actor.recompute=full"]),
    "experts": ("experts", []),
    "experts, bfloat16": ("experts", ["model.dtype=bfloat16"]),
    "experts, PP2": ("experts", ["actor.layout.pp=2"]),
    "experts, TP2, EP2": ("experts", SHARDED_EXPERTS),
    "experts, TP2, ETP2": ("experts", [*SHARDED_EXPERTS[:2], "actor.layout.etp=2"]),
    "latent attention": ("latent attention", []),
    "latent attention, bfloat16": ("latent attention", ["model.dtype=bfloat16"]),
    "two tokens, bfloat16": ("predicts two tokens", ["model.dtype=bfloat16", "actor.mtp.loss_coefficient=1.0"]),
    "two tokens, PP2": ("predicts two tokens", ["actor.layout.pp=2", "actor.mtp.loss_coefficient=1.0"]),
    "adapters, bfloat16": ("dense", ["model.dtype=bfloat16", ADAPTERS]),
    "adapters, DP2": ("dense", ["actor.layout.dp=2", ADAPTERS]),
    "adapters, experts, TP2, EP2": ("experts", [*SHARDED_EXPERTS, ADAPTERS]),
    "adapters, two tokens, PP2": (
        "predicts two tokens",
        ["actor.layout.pp=2", "actor.mtp.loss_coefficient=0.0", ADAPTERS],
    ),
    "latent attention, TP2, EP2": ("latent attention", SHARDED_EXPERTS),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    written = {
        name: write_tiny_model(tmp_path_factory.mktemp("model"), family, **MODEL | keys)
        for name, (family, keys) in MODELS.items()
    }
    add_mtp_layer(written["predicts two tokens"])
    return written


def samples() -> list[SampleRef]:
    """Return documents that fill attention's buckets exactly, so that nothing is padded. Their lengths differ, because
    attention saves less for documents of equal lengths."""
    drawn = []
    for number, more in enumerate((0, 0, 16, -16)):
        prompt, length = Prompt(f"{number}", "", (7,) * PROMPT), RESPONSE + more
        logprobs, mask, runs = (-1.0,) * length, (True,) * length, (VersionRun(0, length),)
        drawn.append(Sample(prompt.id, prompt, (5,) * length, logprobs, mask, runs, "stop", ""))
    return [training_ref(sample, 1.0, Baseline(0.5), 0.1) for sample in drawn]


def measure(store, rank: int, config: Config, folder: Path) -> dict[str, int]:
    """Return the bytes that one microbatch saves in its forward pass, without parameters, and the bytes of the rank's
    state."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batches = worker._training_batches(LocalBatch(samples(), [tuple(range(NUM_DOCUMENTS))]))
    parameters = {p.untyped_storage().data_ptr() for p in named_parameters(worker.chunks).values()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if torch._C._current_graph_task_id() == -1 and storage.data_ptr() not in parameters:  # not in a backward pass
            saved[storage.data_ptr()] = tensor  # keep a reference so that the address is not reused
        return tensor

    context = shared_embedding(worker.chunks) if config.actor.mtp.is_trained else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.accumulate_gradients(worker.chunks, worker.loss, batches)
    worker.optimizer.step()
    offload = Offload(worker.chunks, worker.optimizer)
    merged = worker.adapters.merged.values() if worker.adapters else ()
    measured = {
        "saved": sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
        "weights": offload.move_out("parameters") + sum(weight.nbytes for weight in merged),
        "gradients": offload.move_out("gradients"),
        "optimizer": offload.move_out("optimizer"),
    }
    worker.close()
    return measured


FURTHER = (
    *(
        "bfloat16",
        "TP2",
        "experts, bfloat16",
        "experts, TP2, ETP2",
        "latent attention, bfloat16",
        "two tokens, bfloat16",
    ),
    *("adapters, DP2", "adapters, experts, TP2, EP2", "adapters, two tokens, PP2"),
)
"""Cases without keys of their own: all keys also occur in other cases."""


@pytest.mark.parametrize("case", exhaustive_but(CASES, *(CASES.keys() - {*FURTHER})))
def test_closed_form_matches_measured_memory(folders, case):
    model, overrides = CASES[case]
    folder = folders[model]
    # Disable overlapped gradient reduction, which copies of parameters from torch's saved-tensor hooks do not trigger.
    settings = ("actor.tokens_per_microbatch=256", "actor.overlap_communication=false")
    config = config_of(folder, *settings, *overrides)
    layout, hf_config = config.actor.layout, policy_hf_config(config, read_config(folder))
    num_bytes = 2 if config.model.dtype == "bfloat16" else 4
    tokens, rows = NUM_DOCUMENTS * (PROMPT + RESPONSE), NUM_DOCUMENTS * RESPONSE
    ranks = run_ranks(layout.world_size, measure, config, folder)
    kept = []
    for rank, measured in enumerate(ranks):
        form = rank_memory(
            hf_config, layout, rank, num_bytes, tokens, rows, 1, config.actor.recompute, config.actor.adapters
        )
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(form, part) == pytest.approx(measured[part], rel=0.05), part
        # Exclude what is allocated only in the backward pass: the head's tiles, its row gradients, and recomputation.
        without = rank_memory(hf_config, layout, rank, num_bytes, 0, rows, 1).head
        predicted = (1 + config.actor.mtp.is_trained) * rows
        head = form.head - without + predicted * HIDDEN * num_bytes if form.head else 0
        again = 0 if config.actor.recompute == "none" else _one_layer(config, folder, num_bytes, tokens)
        layers = 0 if config.actor.recompute == "full" else MODEL["num_hidden_layers"] // layout.pp
        layers += bool(form.head and config.actor.mtp.is_trained)
        more = layers * _more_on_cpu(ModelShape.of(hf_config), layout, num_bytes)
        more += HIDDEN * (2 * FLOAT32 - num_bytes) if form.head else 0  # the final norm
        kept.append((measured["saved"], form.activations - again + head + tokens * more))
    if layout.ep > 1:  # the router distributes tokens unevenly over experts
        kept = [tuple(map(sum, zip(*kept, strict=True)))]
    for measured, form in kept:
        if config.actor.adapters is None:
            assert form == pytest.approx(measured, rel=0.06)
        else:  # frozen norms and layers before the first adapter save less
            assert 0.7 * form < measured < 1.06 * form


def _more_on_cpu(shape: ModelShape, layout: Layout, num_bytes: int) -> float:
    """Return the bytes per token and layer that norms keep on CPU in addition to the GPU's kernels: their outputs, and
    their inputs in float32. In float32, the inputs of the queries' and keys' norms are not copies."""
    sequence = layout.tp if layout.sequence_parallel else 1
    more = 2 * shape.hidden * (2 * FLOAT32 - num_bytes) / sequence
    if shape.latent:
        ranks, position = (shape.latent.query_rank or 0) + shape.latent.kv_rank, shape.latent.position_dim
        latents = 2 * ranks * FLOAT32 - ranks * num_bytes if num_bytes < FLOAT32 else ranks * FLOAT32
        return more + (latents - (position * num_bytes if num_bytes < FLOAT32 else 0)) / sequence
    return more + (FLOAT32 * (shape.query + shape.key) / layout.tp if shape.qk_norm else 0)


def _one_layer(config: Config, folder: Path, num_bytes: int, tokens: int) -> float:
    shape = ModelShape.of(read_config(folder))
    layout, mode = config.actor.layout, config.actor.recompute
    return tokens * (layer_bytes(shape, layout, num_bytes) - layer_bytes(shape, layout, num_bytes, mode))
