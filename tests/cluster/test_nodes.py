"""Runs over several machines with separate networks.

They train the same weights as a single machine, send as many bytes as planned, and save when they are interrupted. The
reference is the same recipe on this machine, where engines read the weights from shared memory.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cluster.cluster_run import cluster_run
from tests.cluster.machines import Machine
from tests.cluster.reference import COMMON, check_same, learned, on_one_machine
from tests.e2e.run import MEGARL
from tests.marks import exhaustive_but
from tests.paths import ROOT
from tests.timing import RUN_S, WAIT_S
from tests.tiny_model import write_tiny_llama

STEPS = 4
RECIPES = {
    # Each node has one actor stage and one engine rank. The engine rank needs both stages, so one of them is sent. Each
    # critic rank holds the whole critic.
    "colocated PPO on 2": (
        2,
        [
            *("algorithm.advantage={estimator: gae, gae_lambda: 1.0}", "critic.layout.dp=2", "critic.threads=1"),
            "rollout.tp=2",
        ],
    ),
    # Actor and critic alternate on the first two nodes. The engine has the third.
    "disaggregated GAE on 3": (
        3,
        [
            *("algorithm.advantage={estimator: gae, gae_lambda: 1.0}", "critic.layout.dp=2", "critic.threads=1"),
            *("cluster.placement=disaggregated", "cluster.roles={actor: 0-1, critic: 0-1, rollout: 2}"),
            *("actor.offload=[gradients, optimizer]", "critic.offload=[parameters, optimizer]"),
        ],
    ),
}


TRANSPORTS = {
    "colocated PPO on 2": "shared_memory within nodes, p2p between nodes",
    "disaggregated GAE on 3": "p2p",
}


# test_refit_traffic_equals_the_plan also compares a disaggregated run on three nodes.
@pytest.mark.parametrize("name", exhaustive_but(RECIPES, "colocated PPO on 2"))
def test_multi_node_run_equals_single_machine(machines: list[Machine], shared: Path, name: str) -> None:
    count, overrides = RECIPES[name]
    short, overrides = name.split()[1], [*COMMON, *overrides, f"run.steps={STEPS}"]
    vllm = "rollout.tp=2" in overrides  # such an engine spans two nodes
    alone = on_one_machine(shared, f"{short}-alone", *overrides, vllm=vllm, megatron=True)
    with cluster_run(machines[:count], shared, f"{short}-nodes", *overrides, vllm=vllm, megatron=True) as run:
        for number in range(count):
            run.check_end(number, WAIT_S if number else RUN_S, 0)
        run.check_nothing_is_left()
    assert f"refit: first refit by {TRANSPORTS[name]}" in run.output(0)
    assert len(learned(run.folder)) == STEPS
    check_same(run.folder, alone)


def test_refit_traffic_equals_the_plan(machines: list[Machine], shared: Path) -> None:
    """The machine with the only engine receives the weights in each step; other traffic is small.

    The run must still equal the run of a single machine.
    """
    model = write_tiny_llama(shared / "larger", hidden_size=512, num_heads=8, num_layers=4, intermediate_size=2048)
    keys = [*COMMON, f"model.path={model}", "run.steps=12", "actor.optimizer.lr=1.0e-6"]
    alone = on_one_machine(shared, "cables-alone", *keys)
    with cluster_run(machines, shared, "cables", *keys, "cluster.placement=disaggregated") as run:
        run.wait_for_step(2)
        before, first = run.machines[2].received_bytes(), len(run.metrics)
        run.wait_for_step(first + 8)
        carried, steps = run.machines[2].received_bytes() - before, run.metrics
        for machine, process in zip(machines, ("TrainerActor", "TrainerActor", "EngineActor"), strict=True):
            assert any(f"ray::{process}" in line for line in machine.processes())
        run.check_end(0, RUN_S, 0)
    check_same(run.folder, alone)
    refits = len(steps) - first
    [planned] = {step["refit/sent_gb"] for step in steps}
    weights = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    assert planned == pytest.approx(weights / 1e9)
    # A refit may be in progress at either end of the measurement.
    assert (refits - 1) * weights <= carried <= (refits + 1) * weights * 1.05


def test_interrupted_run_saves_and_resumes_with_early_nodes(machines: list[Machine], shared: Path) -> None:
    """The signal reaches all nodes, as Slurm's does. A stale invitation from the previous attempt must not mislead a
    node.
    """
    keys = [*COMMON, "checkpoint.on_signal=true", "checkpoint.grace_s=60", "resume=auto"]
    invitation = shared / "runs/told/nodes/invitation.json"
    with cluster_run(machines[:2], shared, "told", *keys, "run.steps=1000000") as run:
        run.wait_for_step(2)
        left_behind = invitation.read_text()
        run.signal_all(signal.SIGTERM)
        for number in (0, 1):
            run.check_end(number, WAIT_S, 130)
        run.check_nothing_is_left()
    done = len(run.metrics)
    assert f"The run ended. Resume it from step_{done:06d} with: " in run.output(0)
    invitation.write_text(left_behind)
    joining = machines[1].start([*MEGARL, "join", str(run.folder)], shared / "early.n1", ROOT)
    with cluster_run(machines[:1], shared, "told", *keys, "cluster.nodes=2", f"run.steps={done + 1}") as run:
        run.check_end(0, RUN_S, 0)
        assert joining.wait(WAIT_S) == 0, (shared / "early.n1").read_text()
        run.check_nothing_is_left()
    assert [line["step"] for line in run.metrics] == list(range(1, done + 2))
