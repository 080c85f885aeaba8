"""The state of a rank on a GPU: what offload frees, and an optimizer that goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.cluster.memory.rank import rank_memory
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.types import Baseline, Prompt, Sample, TrainingSample, VersionRun
from megarl.data.local_batch import LocalBatch
from megarl.megatron.offload import Offload
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.run.checkpoints import Checkpoints
from tests.distributed.test_offload import BYTES, PARTS
from tests.gpu.gpus import needs_gpus, run_on_gpus
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama, write_tiny_model

GRANULE = 2 * 2**20
"""The allocator of torch takes and gives back multiples of it."""

FRACTION = 1e-2
"""How far the update after a load may be from that of the process that went on, of its size: kernels of attention's
backward pass add in no fixed order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(num_heads=4, num_kv_heads=2, num_layers=4, hidden_size=256, intermediate_size=1024)
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **sizes)


def update(worker: ActorWorker, config: Config, seed: int) -> dict[str, torch.Tensor]:
    """Makes a step of one update. Returns the weights after it."""
    worker.update(local_batch(rank_batches(config, worker.packing, random_groups(seed))[worker.data_parallel_rank]))
    worker.end_step()
    return {name: weight.detach().float().cpu().clone() for name, weight in worker.parameters().items()}


def free_and_take_again(store, rank: int, config: Config, folder: Path) -> dict[str, tuple[int, int, int]]:
    """Returns for each part the bytes that it says it frees, those that torch has less, and those that the device has
    more."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    update(worker, config, 0)
    offload, found = Offload(worker.chunks, worker.optimizer), {}
    for part in PARTS:
        torch.cuda.empty_cache()
        allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
        said = offload.move_out(part)
        found[part] = said, allocated - torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free
        offload.move_in(part)
    update(worker, config, 1)
    found["parameters of the model"] = sum(weight.numel() for weight in worker.parameters().values()), 0, 0
    return found


@needs_gpus(1, can_rehearse=False)
def test_offload_frees_what_it_says(folder):
    [found] = run_on_gpus(1, free_and_take_again, config_of(folder, "model.dtype=bfloat16"), folder)
    num_parameters = found["parameters of the model"][0]
    for part, per_parameter in zip(PARTS, BYTES["bfloat16"], strict=True):
        said, of_torch, of_device = found[part]
        assert said == pytest.approx(per_parameter * num_parameters, rel=0.1), part
        assert of_torch >= said and of_device >= said - 2 * GRANULE, (part, found[part])


def save_and_go_on(store, rank: int, config: Config, folder: Path, hidden: Path) -> tuple:
    """Saves after the first update, with the optimizer's state away. Returns the checkpoint's files, the weights then,
    and those after the second update."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    before = update(worker, config, 0)
    worker.offload(("optimizer",))
    worker.save_checkpoint(hidden)
    worker.onload(("optimizer",))
    return worker.finish_checkpoint(hidden), before, update(worker, config, 1)


def load_and_go_on(store, rank: int, config: Config, folder: Path, checkpoint: Checkpoint) -> tuple:
    """Returns the weights of a checkpoint, and those after one more update."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.load_checkpoint(checkpoint)
    loaded = {name: weight.detach().float().cpu().clone() for name, weight in worker.parameters().items()}
    return loaded, update(worker, config, 1)


@needs_gpus(1)
def test_the_optimizer_goes_on_from_a_checkpoint(folder, tmp_path):
    """Its first update after a load is the one of the process that saved: with moments that begin anew it would be
    several times as large."""
    config = config_of(folder, "model.dtype=bfloat16", "actor.optimizer.lr=0.01", "actor.offload=[optimizer]")
    checkpoints = Checkpoints(tmp_path)
    hidden = checkpoints.begin(1)
    (hidden / "actor").mkdir()
    [(files, before, after)] = run_on_gpus(1, save_and_go_on, config, folder, hidden)
    checkpoint = checkpoints.commit(1, {"config": config.model_dump()}, files)
    [(loaded, later)] = run_on_gpus(1, load_and_go_on, config, folder, checkpoint)
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


def peak_of_an_update(store, rank: int, config: Config, folder: Path) -> int:
    """Returns the bytes that torch has at the peak of a second update, of one microbatch."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    prompts = [Prompt(f"{i}", "", (7 + i,) * PROMPT) for i in range(NUM_DOCUMENTS)]
    every, run = (True,) * RESPONSE, (VersionRun(0, RESPONSE),)
    drawn = [Sample(p.id, p, (5,) * RESPONSE, (-1.0,) * RESPONSE, every, run, "stop", "") for p in prompts]
    samples = [TrainingSample(sample, 1.0, Baseline(0.5), 0.1) for sample in drawn]
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        worker.update(LocalBatch(samples, [tuple(range(NUM_DOCUMENTS))]))
        worker.end_step()
    return torch.cuda.max_memory_allocated()


@needs_gpus(1, can_rehearse=False)
def test_an_update_takes_the_memory_that_the_plan_says(tmp_path):
    """Transformer Engine's layers keep less than the plan's, which are torch's."""
    folder = write_tiny_model(tmp_path / "model", "llama", **SIZES)
    tokens, rows = NUM_DOCUMENTS * (PROMPT + RESPONSE), NUM_DOCUMENTS * RESPONSE
    keys = ("model.dtype=bfloat16", f"actor.tokens_per_microbatch={tokens}", "rollout.context_length=512")
    config = config_of(folder, *keys, f"rollout.max_new_tokens={RESPONSE}")
    [peak] = run_on_gpus(1, peak_of_an_update, config, folder)
    form = rank_memory(read_config(folder), config.actor.layout, 0, 2, tokens, rows, 1).total
    assert 0.7 * form <= peak <= 1.15 * form, (peak, form)
