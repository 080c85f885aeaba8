"""One rank of megarl's trainer, started by training_step.py: updates random weights, and records time and memory."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from benchmark import BASE
from training_case import Case

from megarl.cluster.memory.rank import rank_memory
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.types import NO_BASELINE, Prompt, Sample, SampleRef, VersionRun
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Lengths, Microbatch, schedule
from megarl.megatron.main_weights import begin_main_weights
from megarl.megatron.model.build import named_parameters
from megarl.megatron.workers.actor import ActorWorker
from tests.samples import training_ref


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
    worker = RandomActor(config, folder, rank, store, case.threads)
    if case.padded:
        worker.packing = replace(worker.packing, document_multiple=case.longest)
    samples = samples_of(case)
    rank_batches = schedule(lengths_of(samples), worker.packing)
    share = rank_batches[worker.data_parallel_rank]
    worker.update(LocalBatch(samples, share[:1]))  # fills caches and memory pools
    seconds = []
    for _ in range(case.updates):
        start = time.perf_counter()
        worker.update(LocalBatch(samples, share))
        worker.end_step()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {
        "saves": [saving(worker, folder / f"checkpoint-{i}", rank) for i in range(case.saves)],
        "seconds": seconds,
        "measured_bytes": peak - baseline,
        "baseline_bytes": baseline,
        "closed_form_bytes": closed_form(case, config, rank, rank_batches, samples),
        "settings": {"layout": config.actor.layout.model_dump(), "kernels": worker.kernels, "threads": case.threads},
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }
    (folder / f"megarl-{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    worker.close()
    os._exit(0)  # Gloo's threads may wait for ranks that have exited


def saving(worker: ActorWorker, folder: Path, rank: int) -> dict[str, float]:
    """Return the seconds that a save blocks the rank, the seconds of a plain copy of as many bytes to newly allocated
    host memory, and the seconds until the files are on disk."""
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
        "model.path": folder,
        "model.dtype": case.dtype,
        "data.source": "arithmetic",
        "actor.recompute": case.recompute,
        "actor.tokens_per_microbatch": max(case.microbatch, case.longest),
        "rollout.context_length": case.longest,
        "rollout.max_new_tokens": case.longest - 1,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load(BASE, overrides + [f"actor.layout.{override}" for override in case.layout])


def samples_of(case: Case) -> list[SampleRef]:
    """Return samples with distinct prompts, so that no prefix is shared."""
    weight, group = 1 / sum(response for _, response in case.lengths), NO_BASELINE
    samples = []
    for i, (prompt, response) in enumerate(case.ids()):
        n, whole = len(response), Prompt(f"{i}", "", tuple(prompt))
        sample = Sample(f"{i}", whole, tuple(response), (-1.0,) * n, (True,) * n, (VersionRun(0, n),), "stop", "")
        samples.append(training_ref(sample, (-1.0) ** i, group, weight))
    return samples


def lengths_of(samples: list[SampleRef]) -> list[Lengths]:
    return [Lengths(s.sample.id, len(s.sample.prompt.token_ids), len(s.sample.response_ids)) for s in samples]


def closed_form(
    case: Case, config: Config, rank: int, rank_batches: list[list[Microbatch]], samples: list[SampleRef]
) -> dict[str, Any]:
    """Return the closed-form bytes of a rank's memory by part, as if all microbatches were as large as the largest."""
    of_microbatch = [[samples[i].sample for i in microbatch] for share in rank_batches for microbatch in share]
    tokens = max(sum(s.num_tokens for s in members) for members in of_microbatch)
    rows = max(sum(len(s.response_ids) for s in members) for members in of_microbatch)
    num_bytes = 4 if case.dtype == "float32" else 2
    memory = rank_memory(
        case.hf_config, config.actor.layout, rank, num_bytes, tokens, rows, len(rank_batches[0]), config.actor.recompute
    )
    parts = {name: getattr(memory, name) for name in memory.__slots__}
    return parts | {"total": memory.total}


if __name__ == "__main__":
    main()
