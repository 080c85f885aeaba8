"""The closed form of a rank's memory against what torch really keeps for the backward pass, and Megatron allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.batch import GroupStatistics, Prompt, Sample, TrainingSample, VersionRun
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.megatron import step
from megarl.megatron.actor_worker import ActorWorker
from megarl.megatron.model import named_parameters
from megarl.megatron.offload import Offload
from megarl.planning.memory import layer_bytes, rank_memory
from megarl.resharding.families.shape import ModelShape
from tests.forked import run_ranks
from tests.parity import config_of
from tests.tiny_model import write_tiny_llama

NUM_DOCUMENTS, PROMPT, RESPONSE, HIDDEN = 4, 20, 44, 128
CASES = {
    "float32": [],
    "bfloat16": ["model.dtype=bfloat16"],
    "TP2": ["actor.layout.tp=2"],
    "TP2, sequence parallel": ["actor.layout.tp=2", "actor.layout.sequence_parallel=true"],
    "PP2": ["actor.layout.pp=2"],
    "DP2, bfloat16": ["actor.layout.dp=2", "model.dtype=bfloat16"],
    "selective": ["actor.recompute=selective"],
    "full": ["actor.recompute=full"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_heads=4,
        num_kv_heads=2,
        hidden_size=128,
        num_layers=4,
        intermediate_size=320,
    )


def samples() -> list[TrainingSample]:
    """Documents that fill the buckets of attention, so that nothing is padded."""
    group, run = GroupStatistics(0.5, 1.0, 4), (VersionRun(0, RESPONSE),)
    prompts = [Prompt(f"{i}", "", (7,) * PROMPT) for i in range(NUM_DOCUMENTS)]
    every = (True,) * RESPONSE
    drawn = [Sample(p.id, p, (5,) * RESPONSE, (-1.0,) * RESPONSE, every, run, "stop", "") for p in prompts]
    return [TrainingSample(sample, 1.0, group, 0.1) for sample in drawn]


def measure(store, rank: int, config: Config, folder: Path) -> dict[str, int]:
    """Bytes of all that one microbatch saves in its forward pass and is no parameter, and of the rank's state."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batches = worker._training_batches(samples(), [tuple(range(NUM_DOCUMENTS))])
    parameters = {p.untyped_storage().data_ptr() for p in named_parameters(worker.chunks).values()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if torch._C._current_graph_task_id() == -1 and storage.data_ptr() not in parameters:  # not in a backward pass
            saved[storage.data_ptr()] = tensor  # kept, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.accumulate_gradients(worker.chunks, worker.objective, batches)
    worker.optimizer.step()
    offload = Offload(worker.chunks, worker.optimizer)
    return {
        "saved": sum(tensor.untyped_storage().nbytes() for tensor in saved.values()),
        "weights": offload.move_out("parameters"),
        "gradients": offload.move_out("gradients"),
        "optimizer": offload.move_out("optimizer"),
    }


@pytest.mark.parametrize("case", CASES)
def test_closed_form_is_what_is_kept(folder, case):
    config = config_of(folder, "actor.tokens_per_microbatch=256", *CASES[case])
    layout = config.actor.layout
    for rank, measured in enumerate(run_ranks(layout.world_size, measure, config, folder)):
        num_bytes = 2 if config.model.dtype == "bfloat16" else 4
        tokens, rows = NUM_DOCUMENTS * (PROMPT + RESPONSE), NUM_DOCUMENTS * RESPONSE
        form = rank_memory(
            read_config(folder), layout, rank, num_bytes, tokens, rows, 1, recompute=config.actor.recompute
        )
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(form, part) == pytest.approx(measured[part], rel=0.05), part
        # The head's tiles, the gradient of its rows, and what a recomputed layer has again, come in the backward pass.
        without = rank_memory(read_config(folder), layout, rank, num_bytes, 0, rows, 1).head
        head = form.head - without + rows * HIDDEN * num_bytes if form.head else 0
        again = 0 if config.actor.recompute == "none" else _one_layer(config, folder, num_bytes, tokens)
        assert form.activations - again + head == pytest.approx(measured["saved"], rel=0.06)


def _one_layer(config: Config, folder: Path, num_bytes: int, tokens: int) -> float:
    shape = ModelShape.of(read_config(folder))
    layout, mode = config.actor.layout, config.actor.recompute
    return tokens * (layer_bytes(shape, layout, num_bytes) - layer_bytes(shape, layout, num_bytes, mode))
