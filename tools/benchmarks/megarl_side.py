"""One rank of megarl's trainer, started by training_step.py: updates random weights, and records time and memory."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from benchmark import load_config, local_batches, sample_of
from training_case import Case, peak_rss_bytes, timed, write_result

from megarl.cluster.memory.rank import rank_memory
from megarl.config.algorithm_schema import Distillation
from megarl.config.schema import Config
from megarl.core.prompt import Prompt
from megarl.core.row_batch import TEACHER
from megarl.data.local_batch import LocalBatch
from megarl.megatron.main_weights import begin_main_weights
from megarl.megatron.model.build import named_parameters
from megarl.megatron.model.head import TeacherDivergence
from megarl.megatron.routes import model_of
from megarl.megatron.workers import actor
from megarl.megatron.workers.actor import ActorWorker

TEACHER_SCORES = f"{TEACHER}teacher"


class RandomActor(ActorWorker):
    """An actor with random weights, whose folder contains only config.json."""

    def _load_weights(self) -> None:
        for name, parameter in named_parameters(self.chunks).items():
            parameter.detach().fill_(1.0) if "norm" in name else parameter.detach().normal_(std=0.02)

    def _begin_main_weights(self, rounded: Mapping[str, torch.nn.Parameter]) -> None:
        begin_main_weights(self.optimizer, rounded, self.holder, exact=())


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    case = Case.read(folder)
    config = config_of(case, folder)
    baseline = psutil.Process().memory_info().rss
    store = dist.FileStore(str(folder / "store"), config.actor.layout.world_size)
    actor.prepare_divergence = random_teacher_head
    worker = RandomActor(config, folder, rank, store, case.threads)
    if case.padded:
        worker.packing = replace(worker.packing, document_multiple=case.longest)
    batches = batches_of(case, worker)
    batch = batches[worker.data_parallel_rank]

    def update(batch: LocalBatch = batch) -> None:
        # Use a new batch, so that the time includes its collation.
        batch = LocalBatch(batch.samples, batch.microbatches)
        worker.update(with_teacher_states(worker, batch) if case.has_teacher else batch)
        worker.end_step()

    update(LocalBatch(batch.samples, batch.microbatches[:1]))  # fills caches and memory pools

    seconds, peak = timed(update, case.updates), peak_rss_bytes()
    result = {
        "saves": [saving(worker, folder / f"checkpoint-{i}", rank) for i in range(case.saves)],
        "seconds": seconds,
        "measured_bytes": peak - baseline,
        "closed_form_bytes": closed_form(case, config, rank, batches),
        "settings": {"layout": config.actor.layout.model_dump(), "kernels": worker.kernels, "threads": case.threads},
    }
    write_result(folder / f"megarl-{rank}.json", result, "torch", "megatron-core")
    worker.close()
    os._exit(0)  # Gloo's threads may wait for ranks that have exited


def random_teacher_head(head: Any, teachers: Sequence[Any], distillation: Distillation, dtype: torch.dtype) -> None:
    """Add an output layer with random weights to the actor's head, in place of `prepare_divergence`."""
    assert distillation.divergence != "sampled", "a sampled divergence needs no output layer"
    weight = torch.empty(head.output_size_per_partition, head.input_size, dtype=dtype).normal_(std=0.02)
    head.teachers = TeacherDivergence(distillation.divergence, distillation.beta, [weight])


def with_teacher_states(worker: ActorWorker, batch: LocalBatch) -> LocalBatch:
    """Return the batch with hidden states from a forward-only pass of the actor, which stands in for a teacher of the
    same size."""
    head: Any = model_of(worker.chunks[-1]).output_layer
    head.returns_hidden = True
    states = worker._forward(batch, to_host=True)
    head.returns_hidden = False
    samples = [
        replace(item, scores={TEACHER_SCORES: states[item.sample.id]} if item.sample.id in states else {})
        for item in batch.samples
    ]
    return LocalBatch(samples, batch.microbatches)


def saving(worker: ActorWorker, folder: Path, rank: int) -> dict[str, float]:
    """Return, in seconds, how long a save blocks the rank, how long a plain copy of as many bytes to new host memory
    takes, and how long it takes until the files are on disk."""
    weights = [weight.detach() for weight in worker.parameters().values()]
    dist.barrier()
    start = time.perf_counter()
    copies = [weight.clone() for weight in weights for _ in range(4)]  # Adam's state is three times as large
    copied = time.perf_counter()
    num_bytes = sum(copy.nbytes for copy in copies)
    del copies
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    begin = time.perf_counter()
    worker.save_checkpoint(folder)
    saved = time.perf_counter()
    worker.finish_checkpoint(folder)
    written = time.perf_counter()
    return {
        "bytes": num_bytes,
        "copy_seconds": copied - start,
        "stall_seconds": saved - begin,
        "seconds_to_the_disk": written - begin,
    }


def config_of(case: Case, folder: Path) -> Config:
    settings = {
        "model.dtype": case.dtype,
        "actor.recompute": case.recompute,
        "actor.tokens_per_microbatch": max(case.microbatch, case.longest),
        "rollout.context_length": case.longest,
        "rollout.max_new_tokens": case.longest - 1,
        **{f"actor.layout.{key}": value for key, value in case.layout.items()},
    }
    if case.has_teacher:
        settings |= {
            "teachers.models": [{"name": "teacher", "path": str(folder)}],
            "algorithm.distillation.divergence": "jsd",
            "algorithm.distillation.placement": "loss",
        }
    return load_config(folder, settings)


def batches_of(case: Case, worker: ActorWorker) -> list[LocalBatch]:
    """Return the batch of each rank. Prompts are distinct, so that no prefix is shared."""
    samples = [sample_of(f"{i}", Prompt(f"{i}", "", ids[0]), ids[1]) for i, ids in enumerate(case.ids())]
    return local_batches(samples, [(-1.0) ** i for i in range(len(samples))], worker.packing)


def closed_form(case: Case, config: Config, rank: int, batches: Sequence[LocalBatch]) -> dict[str, Any]:
    """Return the closed-form bytes of a rank's memory by part, as if all microbatches were as large as the largest."""
    of_microbatch = [[item.sample for item in members] for batch in batches for members in batch.members]
    tokens = max(sum(s.num_tokens for s in members) for members in of_microbatch)
    rows = max(sum(len(s.response_ids) for s in members) for members in of_microbatch)
    num_bytes = 4 if case.dtype == "float32" else 2
    layout, count = config.actor.layout, len(batches[0].microbatches)
    memory = rank_memory(case.hf_config, layout, rank, num_bytes, tokens, rows, count, config.actor.recompute)
    return {name: getattr(memory, name) for name in (*memory.__slots__, "total")}


if __name__ == "__main__":
    main()
