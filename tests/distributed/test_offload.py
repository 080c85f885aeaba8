"""Offloading parameters, gradients and optimizer state frees their bytes, and reloading restores every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.model.build import named_parameters
from megarl.megatron.offload import Offload, Part
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
BYTES = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12)}
"""Bytes per parameter of each of PARTS. Adam's state is two float32, plus the main weight with bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


def update(worker: ActorWorker, config: Config, seed: int) -> None:
    worker.update(local_batch(rank_batches(config, worker.packing, random_groups(seed))[worker.data_parallel_rank]))
    worker.end_step()


def tensors(worker: ActorWorker) -> dict[Part, list[torch.Tensor]]:
    state = [
        value
        for part in worker.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
    ]
    parameters = list(named_parameters(worker.chunks).values())
    if parameters[0].dtype is not torch.float32:  # with float32, the main weights are the parameters
        state += [p for group in worker.optimizer.param_groups for p in group["params"]]
    return {"parameters": parameters, "gradients": [p.main_grad for p in parameters], "optimizer": state}


def checksum(values: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()  # hash copies, because a storage that NumPy uses cannot be resized
    for value in values:
        digest.update(value.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def offload_and_reload(store, rank: int, config: Config, folder: Path) -> tuple:
    """Offload and reload each part between two updates, first alone and then all together. Return the bytes freed by
    part, the number of parameters, and a checksum of the parameters after the second update."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    update(worker, config, 0)
    offload = Offload(worker.chunks, worker.optimizer)
    before = {part: checksum(values) for part, values in tensors(worker).items()}
    freed = {}
    for part in PARTS:
        freed[part] = offload.move_out(part)
        assert all(p.untyped_storage().nbytes() == 0 for p in tensors(worker)[part])
        assert offload.move_in(part) == freed[part]
        if part == "gradients":  # gradients are discarded: an update starts from zeros
            before[part] = checksum([torch.zeros_like(value) for value in tensors(worker)[part]])
        assert before == {part: checksum(values) for part, values in tensors(worker).items()}
    assert [offload.move_out(part) for part in PARTS] == list(freed.values())
    assert [offload.move_in(part) for part in PARTS] == list(freed.values())
    assert offload.move_in("optimizer") == 0
    update(worker, config, 1)
    num_parameters = sum(p.numel() for p in named_parameters(worker.chunks).values())
    return freed, num_parameters, checksum(tensors(worker)["parameters"])


def undisturbed(store, rank: int, config: Config, folder: Path) -> str:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for seed in (0, 1):
        update(worker, config, seed)
    return checksum(tensors(worker)["parameters"])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("dtype", BYTES)
def test_all_parts_are_restored_bit_for_bit(folder, dtype, dp):
    config = config_of(folder, f"model.dtype={dtype}", f"actor.layout.dp={dp}")
    for freed, num_parameters, weights in run_ranks(dp, offload_and_reload, config, folder):
        for part, per_parameter in zip(PARTS, BYTES[dtype], strict=True):
            expected = per_parameter * num_parameters / (dp if part == "optimizer" else 1)
            assert expected * 0.98 <= freed[part] <= expected * 1.1, part  # padding and split parameters
        assert weights == run_ranks(dp, undisturbed, config, folder)[0]


def published(store, rank: int, config: Config, folder: Path) -> int:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.publish(for_refit=False)
    offload = Offload(worker.chunks, worker.optimizer)
    with pytest.raises(ValueError, match="publishes the parameters in shared memory"):
        offload.move_out("parameters")
    return offload.move_out("gradients")


def test_published_parameters_are_not_offloaded(folder):
    [freed] = run_ranks(1, published, config_of(folder), folder)
    assert freed > 0
