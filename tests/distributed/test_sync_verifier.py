"""The changes of an update in Megatron arrive in the engines; an update that changes nothing, or arrives nowhere, is
found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.cluster.sync_verifier import SyncVerifier
from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, vllm_holders
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.verification import check_weights, regions
from megarl.step.metrics import update_rate
from tests.forked import run_ranks
from tests.parity import config_of, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Fault:
    """The steps, counted from 1, whose updates do not reach the weights, and whose refits do not reach the engine."""

    updates: Sequence[int] = ()
    refits: Sequence[int] = ()


def steps(store, rank: int, config: Config, folder: Path, num_steps: int, fault: Fault) -> str:
    """Returns why a run of these steps ends, with its number; empty if it does not."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    hf_config, dtype = read_config(folder), config.model.dtype
    export_plan = make_plan([worker.holder], [huggingface_holder(hf_config, dtype)])
    [engine] = vllm_holders(hf_config, 1, 1, dtype)
    weights = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape in engine.shapes.items()}
    writes = make_plan([worker.holder], [engine]).into(engine.name)
    arrival = SyncVerifier(lambda wanted: worker.checksums(wanted, export_plan), "first", config.actor.frozen)
    rate, do_update = 0.0, worker.optimizer.step
    for number in range(num_steps + 1):
        if number:
            worker.optimizer.step = (lambda: None) if number in fault.updates else do_update
            rate = update_rate(worker.update(local_batch(rank_batches(config, worker.packing, random_groups(0))[0])))
            worker.end_step()
        try:
            expected = arrival.expect(regions([engine]), rate)
            if number not in fault.refits:
                execute(writes, weights, LocalMemory({worker.holder.name: worker.parameters()}))
            check_weights(engine, weights, expected)
        except RuntimeError as error:
            return f"step {number}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("keys", [["model.dtype=float32"], ["model.dtype=bfloat16", "actor.optimizer.lr=1e-6"]])
@pytest.mark.parametrize("frozen", [[], ["actor.frozen=['*.self_attn.*', '*.mlp.*', '*norm*']"]])
def test_updates_arrive(folder, keys, frozen):
    """Updates arrive by however little they change bfloat16, and also where only embeddings are trained, some of which
    no token of a step uses."""
    config = config_of(folder, *keys, *frozen)
    assert run_ranks(1, steps, config, folder, 6, Fault()) == [""]


def test_an_engine_that_keeps_its_weights_is_found_at_once(folder):
    [message] = run_ranks(1, steps, config_of(folder), folder, 4, Fault(refits=[3]))
    assert message.startswith("step 3: RuntimeError: the engine's weights are not the trainer's: ")


@pytest.mark.parametrize(("updates", "end"), [(range(1, 5), 1), (range(3, 5), 4)])
def test_updates_that_do_not_reach_the_weights_end_the_run(folder, updates, end):
    [message] = run_ranks(1, steps, config_of(folder), folder, 4, Fault(updates=updates))
    assert message.startswith(f"step {end}: RunFailure: refit: no byte of the actor's weights has changed")


def test_an_update_without_a_gradient_is_no_reason_to_end(folder):
    """Rewards that are all the same: the weights are what they were."""
    assert run_ranks(1, rests, config_of(folder), folder) == [True]


def rests(store, rank: int, config: Config, folder: Path) -> bool:
    """Returns whether an update leaves the weights as they are, and has no rate."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    groups = [[(sample, 0.5) for sample, _ in group] for group in random_groups(0)]
    before = {name: weight.clone() for name, weight in worker.parameters().items()}
    metrics = worker.update(local_batch(rank_batches(config, worker.packing, groups)[0]))
    worker.end_step()
    is_unchanged = all(torch.equal(before[name], weight) for name, weight in worker.parameters().items())
    return is_unchanged and update_rate(metrics) == 0
