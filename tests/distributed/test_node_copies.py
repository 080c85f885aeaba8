"""Ranks of a lost node continue bit for bit on another node, from the copies that ranks on other nodes keep.

Each node is a folder, which is lost with the node.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure
from megarl.core.partners import keepers
from megarl.megatron.checkpoint.node_copies import NodeCopies
from megarl.megatron.workers.actor import ActorWorker
from tests.distributed.test_checkpoint import assert_same_weights, config_of, draw, update
from tests.distributed.test_host_copies import SIZES
from tests.forked import run_ranks
from tests.parity import RankResult
from tests.tiny_model import write_tiny_llama

COPIED_AFTER = 2
"""Number of updates before the copy that is restored."""

CASES = {
    "2 nodes with 2 ranks, the first is lost": (
        ("actor.layout={pp: 2, dp: 2}", "model.dtype=bfloat16"),
        [0, 0, 1, 1],
        [0],
    ),
    "4 nodes, two are lost": (("actor.layout={tp: 2, pp: 2}",), [0, 1, 2, 3], [1, 3]),
    "uneven nodes, the last is lost": (("actor.layout.dp=3", "batch.prompts_per_update=3"), [4, 4, 7], [7]),
}
"""Layout, node of each rank, and lost nodes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **SIZES)


def folder_of(node: int, root: Path) -> Path:
    folder = root / f"node-{node}"
    folder.mkdir(exist_ok=True)
    return folder


def files_of(rank: int, folder: Path) -> dict[str, bytes]:
    """Return the contents of the latest copy's files of a rank on a node."""
    [record] = [file for file in folder.glob(f"actor-{rank}.*.json") if f'"step": {COPIED_AFTER},' in file.read_text()]
    return {"record": record.read_bytes(), "memory": record.with_suffix(".tensors").read_bytes()}


def copy(worker: ActorWorker, step: int, folder: Path, keepers: Sequence[int]) -> tuple[str, str]:
    """Copy the state after `step`, deliver the copy to its keeper, and return the problems of both."""
    worker.copy_state(step, folder)
    worker.start_delivery(step, folder, keepers)
    problems = worker.finish_copies(waits=True)
    assert problems is not None
    return problems


def train_and_copy(
    store, rank: int, config: Config, model: Path, root: Path, nodes: Sequence[int]
) -> tuple[RankResult, list[float], dict[str, float]]:
    worker, folder = ActorWorker(config, model, rank, store, threads=1), folder_of(nodes[rank], root)
    for number in range(COPIED_AFTER):
        update(worker, config, number)
        draw()  # advance the random generators
        assert copy(worker, number + 1, folder, keepers(nodes)) == ("", "")
    drawn = draw()
    return update(worker, config, COPIED_AFTER), drawn, worker._counters()


def restore_and_train(
    store, rank: int, config: Config, model: Path, root: Path, nodes: Sequence[int]
) -> tuple[RankResult, list[float], dict[str, float]]:
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.restore_state(COPIED_AFTER, folder_of(nodes[rank], root), keepers(nodes))
    drawn = draw()
    return update(worker, config, COPIED_AFTER), drawn, worker._counters()


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_lost_node_continue_bit_for_bit(model: Path, tmp_path: Path, name: str) -> None:
    keys, nodes, lost = CASES[name]
    config = config_of(model, *keys)
    before = run_ranks(len(nodes), train_and_copy, config, model, tmp_path, nodes)
    copies = [files_of(rank, folder_of(node, tmp_path)) for rank, node in enumerate(nodes)]
    for node in lost:
        shutil.rmtree(folder_of(node, tmp_path))
    after = run_ranks(len(nodes), restore_and_train, config, model, tmp_path, nodes)
    assert_same_weights([result for result, *_ in after], [result for result, *_ in before])
    assert [rest for _, *rest in after] == [rest for _, *rest in before]
    # After a restore, each copy must again be on two nodes, because another one may be lost before the next copy.
    for rank, keeper in enumerate(keepers(nodes)):
        for holder in (rank, keeper):
            assert files_of(rank, folder_of(nodes[holder], tmp_path)) == copies[rank]


def fail_to_restore(store, rank: int, config: Config, model: Path, root: Path, nodes: Sequence[int]) -> str:
    worker = ActorWorker(config, model, rank, store, threads=1)
    with pytest.raises(InfrastructureFailure) as error:
        worker.restore_state(COPIED_AFTER, folder_of(nodes[rank], root), keepers(nodes))
    return str(error.value)


def test_lost_copies_are_named(model: Path, tmp_path: Path) -> None:
    """Two neighboring nodes of four are lost, and with them both copies of one rank."""
    nodes, config = [0, 1, 2, 3], config_of(model, "actor.layout={pp: 2, dp: 2}")
    run_ranks(4, train_and_copy, config, model, tmp_path, nodes)
    for node in (1, 2):
        shutil.rmtree(folder_of(node, tmp_path))
    messages = run_ranks(4, fail_to_restore, config, model, tmp_path, nodes)
    expected = f"no node has a copy of actor-1 after step {COPIED_AFTER}. Fix: resume from the newest checkpoint with "
    assert {*messages} == {f"{expected}resume=auto"}


def copy_and_repeat(store, rank: int, config: Config, model: Path, root: Path, nodes: Sequence[int]) -> Any:
    """Copy two steps, and the second one again while its copy is on its way to the keeper."""
    worker, folder = ActorWorker(config, model, rank, store, threads=1), folder_of(nodes[rank], root)
    for step in (1, 2):
        update(worker, config, step)
        assert copy(worker, step, folder, keepers(nodes)) == ("", "")
    kept = worker._copies._of(1 - rank)
    found = []
    with pytest.raises(KeyboardInterrupt), kept.write_memory(2, "{}", 1):
        found = [kept.has(step) for step in (1, 2)]
        raise KeyboardInterrupt
    return found, [kept.has(step) for step in (1, 2)]


def test_interrupted_delivery_keeps_the_earlier_copy(model: Path, tmp_path: Path) -> None:
    config = config_of(model, "actor.layout.pp=2")
    results = run_ranks(2, copy_and_repeat, config, model, tmp_path, [0, 1])
    assert results == [([True, False], [True, False])] * 2


def deliver_to_full_memory(store, rank: int, config: Config, model: Path, root: Path, nodes: Sequence[int]) -> Any:
    """Deliver copies while the memory of rank 1's node has no room for the copy that it keeps, then no room for the
    record of its own copy, and finally has room for both. Return the problems."""
    worker, folder = ActorWorker(config, model, rank, store, threads=1), folder_of(nodes[rank], root)
    worker.copy_state(1, folder)
    worker.wait_for_copy()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    problems = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "posix_fallocate", full)
        worker.start_delivery(1, folder, keepers(nodes))
        problems.append(worker.finish_copies(waits=True))
    with pytest.MonkeyPatch.context() as patch:
        worker.copy_state(2, folder)
        worker.wait_for_copy()
        worker.copy_state(3, folder)
        worker.wait_for_copy()
        if rank == 1:
            patch.setattr(Path, "write_text", full)
        problems.append(copy(worker, 4, folder, keepers(nodes)))
    assert copy(worker, 5, folder, keepers(nodes)) == ("", "")
    return problems, [worker._copies._of(1 - rank).has(step) for step in (1, 4, 5)]


def test_full_node_is_reported(model: Path, tmp_path: Path) -> None:
    """The other rank must not wait for it."""
    config = config_of(model, "actor.layout.pp=2")
    results = run_ranks(2, deliver_to_full_memory, config, model, tmp_path, [0, 1])
    for rank, (((own, delivered), (copied, following)), kept) in enumerate(results):
        assert own == "" and "no room for " in delivered
        assert ("no room for " in copied) == (rank == 1) and following == ""
        assert kept == [False, False, True]


def failed_copies(monkeypatch: pytest.MonkeyPatch) -> NodeCopies:
    """Return copies of a single rank whose copy has failed with an error without a message."""
    copies = NodeCopies.__new__(NodeCopies)
    monkeypatch.setattr(copies, "_gathered", lambda value: [value], raising=False)
    copies._copied, copies._delivered = Future(), Future()
    copies._copied.set_exception(MemoryError())
    copies._delivered.set_exception(RuntimeError("Connection closed by peer"))
    return copies


def test_failed_copy_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, exchanged = failed_copies(monkeypatch), []
    monkeypatch.setattr(copies, "_exchange", lambda *arguments: exchanged.append(arguments))
    copies._deliver(1, [])
    assert not exchanged


def test_close_only_prints_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed_copies(monkeypatch).close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["copies: MemoryError()", "copies: RuntimeError('Connection closed by peer')"]
