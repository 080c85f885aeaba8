"""A rank's state on a GPU: memory freed by offloading, and resuming the optimizer from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.cluster.memory.rank import rank_memory
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Baseline
from megarl.data.local_batch import LocalBatch
from megarl.megatron.offload import Offload
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.run.checkpoints import Checkpoints
from tests.distributed.test_offload import BYTES, PARTS
from tests.gpu.gpus import needs_gpus, run_on_gpus
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.samples import training_ref
from tests.tiny_model import write_tiny_llama, write_tiny_model

GRANULE = 2 * 2**20
"""torch's allocator reserves and releases memory in multiples of this many bytes."""

FRACTION = 1e-2
"""Allowed relative difference between the update after loading and the uninterrupted one. Attention's backward kernels
are not deterministic."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(num_heads=4, num_kv_heads=2, num_layers=4, hidden_size=256, intermediate_size=1024)
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **sizes)


def update(worker: ActorWorker, config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Run a step with one update. Return the weights after it."""
    worker.update(local_batch(rank_batches(config, worker.packing, random_groups(seed))[worker.data_parallel_rank]))
    worker.end_step()
    return {name: weight.detach().float().cpu().clone() for name, weight in worker.parameters().items()}


def offload_and_onload(store, rank: int, config: Config, folder: Path) -> dict[str, tuple[int, int, int]]:
    """Offload each part of the state. Return the bytes reported as freed, freed in torch, and freed on the device."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    update(worker, config, 0)
    offload, freed = Offload(worker.chunks, worker.optimizer), {}
    for part in PARTS:
        torch.cuda.empty_cache()
        allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        reported = offload.move_out(part)
        freed[part] = reported, allocated - torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
        offload.move_in(part)
    update(worker, config, 1)
    freed["parameters of the model"] = sum(weight.numel() for weight in worker.parameters().values()), 0, 0
    return freed


@needs_gpus(1, can_rehearse=False)
def test_offload_frees_the_reported_bytes(folder):
    [freed] = run_on_gpus(1, offload_and_onload, config_of(folder, "model.dtype=bfloat16"), folder)
    num_parameters = freed["parameters of the model"][0]
    for part, per_parameter in zip(PARTS, BYTES["bfloat16"], strict=True):
        reported, by_torch, on_device = freed[part]
        assert reported == pytest.approx(per_parameter * num_parameters, rel=0.1), part
        assert by_torch >= reported and on_device >= reported - 2 * GRANULE, (part, freed[part])


def save_and_continue(store, rank: int, config: Config, folder: Path, hidden: Path) -> tuple:
    """Save after the first update with an offloaded optimizer, and run a second update.

    Returns:
        The checkpoint's files, and the weights after the first and the second update.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    before = update(worker, config, 0)
    worker.offload(("optimizer",))
    worker.save_checkpoint(hidden)
    worker.onload(("optimizer",))
    return worker.finish_checkpoint(hidden), before, update(worker, config, 1)


def load_and_continue(store, rank: int, config: Config, folder: Path, checkpoint: Checkpoint) -> tuple:
    """Load a checkpoint. Return its weights and those after one more update."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.load_checkpoint(checkpoint)
    loaded = {name: weight.detach().float().cpu().clone() for name, weight in worker.parameters().items()}
    return loaded, update(worker, config, 1)


@needs_gpus(1)
def test_optimizer_resumes_from_a_checkpoint(folder, tmp_path):
    """The first update after loading equals the saving process's next one. With moments reset to zero it would be
    several times as large."""
    config = config_of(folder, "model.dtype=bfloat16", "actor.optimizer.lr=0.01", "actor.offload=[optimizer]")
    checkpoints = Checkpoints(tmp_path)
    hidden = checkpoints.begin(1)
    (hidden / "actor").mkdir()
    [(files, before, after)] = run_on_gpus(1, save_and_continue, config, folder, hidden)
    checkpoint = checkpoints.commit(1, {"config": config.model_dump()}, files)
    [(loaded, later)] = run_on_gpus(1, load_and_continue, config, folder, checkpoint)
    assert all(torch.equal(loaded[name], before[name]) for name in before)
    moved = sum(float((after[name] - before[name]).square().sum()) for name in before)
    apart = sum(float((after[name] - later[name]).square().sum()) for name in before)
    assert apart <= FRACTION**2 * moved, (apart / moved) ** 0.5


SIZES = dict(
    vocab_size=32000,
    hidden_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    num_hidden_layers=8,
    intermediate_size=4096,
    max_position_embeddings=512,
)
NUM_DOCUMENTS, PROMPT, RESPONSE = 16, 128, 384


def peak_memory_of_an_update(store, rank: int, config: Config, folder: Path) -> int:
    """Return torch's peak memory in bytes during a second update with one microbatch."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    prompts = [Prompt(f"{i}", "", (7 + i,) * PROMPT) for i in range(NUM_DOCUMENTS)]
    mask, run = (True,) * RESPONSE, (VersionRun(0, RESPONSE),)
    sampled = [Sample(p.id, p, (5,) * RESPONSE, (-1.0,) * RESPONSE, mask, run, "stop", "") for p in prompts]
    samples = [training_ref(sample, 1.0, Baseline(0.5), 0.1) for sample in sampled]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        worker.update(LocalBatch(samples, [tuple(range(NUM_DOCUMENTS))]))
        worker.end_step()
    return torch.cuda.max_memory_allocated()


@needs_gpus(1, can_rehearse=False)
def test_update_takes_the_planned_memory(tmp_path):
    """Transformer Engine's layers may keep less than the plan, which assumes torch's layers."""
    folder = write_tiny_model(tmp_path / "model", "llama", **SIZES)
    tokens, rows = NUM_DOCUMENTS * (PROMPT + RESPONSE), NUM_DOCUMENTS * RESPONSE
    keys = ("model.dtype=bfloat16", f"actor.tokens_per_microbatch={tokens}", "rollout.context_length=512")
    config = config_of(folder, *keys, f"rollout.max_new_tokens={RESPONSE}")
    [peak] = run_on_gpus(1, peak_memory_of_an_update, config, folder)
    planned = rank_memory(read_config(folder), config.actor.layout, 0, 2, tokens, rows, 1).total
    assert 0.7 * planned <= peak <= 1.15 * planned, (peak, planned)
