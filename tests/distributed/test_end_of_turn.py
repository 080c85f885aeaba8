"""At the end of its turn, a rank has complete parameters and frees its memory for other processes on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from megarl.cluster.rank_batch import RankBatch
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.sample import SampleRef
from megarl.data.packing import Lengths, schedule
from megarl.megatron import step
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.reward_model import RewardModelWorker
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

PLACEMENTS = pytest.mark.parametrize("placement", ["colocated", "disaggregated"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


def copies(worker: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in worker.parameters().items()}


def trained(store, rank: int, config: Config, folder: Path) -> tuple[dict, list[tuple[str, dict]]]:
    """Return the parameters before an update, and the device operations at the end of the step with the parameters at
    each."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    before, done = copies(worker), []
    worker.update(local_batch(rank_batches(config, worker.packing, random_groups(0))[worker.data_parallel_rank]))
    device.synchronize = lambda: done.append(("synchronized", copies(worker)))
    device.release_cache = lambda: done.append(("released", copies(worker)))
    worker.end_step()
    return before, done


@PLACEMENTS
def test_every_rank_has_all_parameters_after_a_step(folder, placement):
    """Each of two replicas updates its half. Readers of the parameters do not synchronize again."""
    config = config_of(
        folder, "actor.layout.dp=2", "actor.overlap_communication=true", f"cluster.placement={placement}"
    )
    (before, done), (_, done_by_other) = run_ranks(2, trained, config, folder)
    expected = ["synchronized", "released"] if placement == "colocated" else ["synchronized"]
    assert [what for what, _ in done] == [what for what, _ in done_by_other] == expected
    (_, seen), (_, seen_by_other) = done[0], done_by_other[0]
    assert all(torch.equal(seen[name], seen_by_other[name]) for name in seen)
    assert not any(torch.equal(seen[name], before[name]) for name in seen)


def scored(store, rank: int, config: Config, folder: Path) -> list[str]:
    """Return the device operations of a scoring pass, in order."""
    worker, done = RewardModelWorker(config, folder, rank, store, threads=1), []
    samples = [sample for group in random_groups(0) for sample, _ in group]
    [microbatches] = schedule([Lengths.of(SampleRef.of(sample)) for sample in samples], worker.packing)
    batch = local_batch(RankBatch.of([SampleRef.of(sample, sample) for sample in samples], microbatches))
    compute = step.score
    step.score = lambda *args: done.append("scored") or compute(*args)
    device.release_cache = lambda: done.append("released")
    scores = worker.score_tokens(batch)
    assert scores.keys() == {sample.id for sample in samples}
    return done


@PLACEMENTS
def test_reward_model_frees_its_memory_after_scoring(folder, tmp_path, placement):
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(tmp_path)
    config = config_of(folder, f"reward_model.path={tmp_path}", f"cluster.placement={placement}")
    [done] = run_ranks(1, scored, config, tmp_path)
    assert done == ["scored", *(["released"] if placement == "colocated" else [])]
