"""Updates arrive in engines, and updates that change nothing or do not arrive are detected."""

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Fault:
    """Steps, counted from 1, whose updates are not applied to the weights, or whose refits do not reach the engine."""

    updates: Sequence[int] = ()
    refits: Sequence[int] = ()


def steps(store, rank: int, config: Config, folder: Path, num_steps: int, fault: Fault) -> str:
    """Run the steps. Return the number and the error of the step that fails, or an empty string."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    hf_config, dtype = read_config(folder), config.model.dtype
    export_plan = make_plan([worker.holder], [huggingface_holder(hf_config, dtype)])
    [engine] = vllm_holders(hf_config, 1, 1, dtype)
    weights = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape in engine.shapes.items()}
    writes = make_plan([worker.holder], [engine]).into(engine.name)
    verifier = SyncVerifier(lambda wanted: worker.checksums(wanted, export_plan), "first", config.actor.frozen)
    rate, do_update = 0.0, worker.optimizer.step
    for number in range(num_steps + 1):
        if number:
            worker.optimizer.step = (lambda: None) if number in fault.updates else do_update
            rate = update_rate(worker.update(local_batch(rank_batches(config, worker.packing, random_groups(0))[0])))
            worker.end_step()
        try:
            expected = verifier.expect(regions([engine]), rate)
            if number not in fault.refits:
                execute(writes, weights, LocalMemory({worker.holder.name: worker.parameters()}))
            check_weights(engine, weights, expected)
            verifier.summarize(expected, [])
        except RuntimeError as error:
            return f"step {number}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("keys", [["model.dtype=float32"], ["model.dtype=bfloat16", "actor.optimizer.lr=1e-6"]])
@pytest.mark.parametrize("frozen", [[], ["actor.frozen=['*.self_attn.*', '*.mlp.*', '*norm*']"]])
def test_updates_arrive_in_the_engine(folder, keys, frozen):
    """Tiny changes in bfloat16 are detected. Runs that train only embeddings pass, although no token uses some of
    these.
    """
    config = config_of(folder, *keys, *frozen)
    assert run_ranks(1, steps, config, folder, 6, Fault()) == [""]


def test_engine_with_stale_weights_is_detected_at_once(folder):
    [message] = run_ranks(1, steps, config_of(folder), folder, 4, Fault(refits=[3]))
    assert message.startswith("step 3: RuntimeError: engine and trainer weights differ in ")


@pytest.mark.parametrize(("updates", "end"), [(range(1, 5), 1), (range(3, 5), 4)])
def test_updates_without_effect_stop_the_run(folder, updates, end):
    [message] = run_ranks(1, steps, config_of(folder), folder, 4, Fault(updates=updates))
    assert message.startswith(
        f"step {end}: RunFailure: refit: the optimizer's updates do not reach the actor's weights"
    )


def test_zero_gradient_does_not_stop_the_run(folder):
    """With equal rewards, the weights do not change."""
    assert run_ranks(1, update_without_gradient, config_of(folder), folder) == [True]


def update_without_gradient(store, rank: int, config: Config, folder: Path) -> bool:
    """Return whether an update leaves the weights unchanged and reports a learning rate of 0."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    groups = [[(sample, 0.5) for sample, _ in group] for group in random_groups(0)]
    before = {name: weight.clone() for name, weight in worker.parameters().items()}
    metrics = worker.update(local_batch(rank_batches(config, worker.packing, groups)[0]))
    worker.end_step()
    is_unchanged = all(torch.equal(before[name], weight) for name, weight in worker.parameters().items())
    return is_unchanged and update_rate(metrics) == 0
