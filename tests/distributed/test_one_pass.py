"""A microbatch's loss, KL, entropy and metrics come out of one pass through the model, and neither head nor objective
waits for a number. (Attention on CPU does, for the lengths of documents.)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.config.schema import Config
from megarl.megatron import head, step
from megarl.megatron.actor_worker import ActorWorker
from megarl.ops import linear_head
from tests.forked import run_ranks
from tests.parity import config_of, own_share, random_groups
from tests.tiny_model import write_tiny_llama

WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
"""Operators after which the host waits for the device: `.item()`, and what has a size that depends on values."""

OBJECTIVES = (
    "{name: clip, dual_clip: 3.0, entropy_coefficient: 0.1, imitation_coefficient: 0.1}",
    *(f"{{name: {name}}}" for name in ("unclipped", "kl_penalty", "gspo", "gmpo", "cispo", "sapo")),
    *(f"{{name: {name}}}" for name in ("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro")),
)


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        if func.overloadpacket in WAITING or any(x is not None and x.dtype is torch.bool for x in masks):
            self.found.add(str(func))
        return func(*args, **(kwargs or {}))


def gradients(store, rank: int, configs: Sequence[Config], folder: Path) -> list[tuple[set[str], int, int]]:
    """For each: operators of the update that wait; how often the model was called; number of microbatches."""
    worker = ActorWorker(configs[0], folder, rank, store, threads=1)
    return [of_update(worker, config) for config in configs]


def of_update(worker: ActorWorker, config: Config) -> tuple[set[str], int, int]:
    worker._config = config
    share, samples = own_share(config, worker, random_groups(0), None)
    worker.score("reference", samples, share.microbatches)
    worker.score("old", samples, share.microbatches)
    batches = worker._training_batches(samples, share.microbatches)
    waits, calls = Waits(), []

    def watched(function):
        def call(*args, **kwargs):
            with waits:
                return function(*args, **kwargs)

        return call

    hook = worker.chunks[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "log_prob_and_entropy", watched(head.log_prob_and_entropy))
        patch.setattr(linear_head, "_add_gradients", watched(linear_head._add_gradients))
        parts = step.accumulate_gradients(worker.chunks, watched(worker.objective), batches)
    hook.remove()
    worker.end_step()
    names = {name for part in parts for name in part}
    assert names >= {
        "policy/loss",
        "policy/entropy",
        "policy/clip_low_share",
        "correction/weight_max",
        "kl/coefficient",
    }
    return waits.found, len(calls), len(batches)


def test_an_update_calls_the_model_once_a_microbatch_and_never_waits(tmp_path):
    folder = write_tiny_llama(tmp_path / "model")
    common = ["algorithm.kl.coefficient=0.05", "algorithm.correction={weight: token, mask: sequence}"]
    configs = [config_of(folder, *common, f"algorithm.objective={objective}") for objective in OBJECTIVES]
    [results] = run_ranks(1, gradients, configs, folder)
    for objective, (waits, calls, microbatches) in zip(OBJECTIVES, results, strict=True):
        assert not waits, objective
        assert calls == microbatches > 1
