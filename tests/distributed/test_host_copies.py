"""A process that replaces a rank continues bit for bit from the copies that the rank left in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster.groups.ranks import worker_class
from megarl.cluster.groups.trainers import TrainerRank
from megarl.cluster.rank_batch import FetchedBatches
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.copy_files import slot_of
from megarl.core.errors import InfrastructureFailure
from megarl.megatron.checkpoint.host_copies import HostCopies, Spec
from megarl.megatron.workers.actor import ActorWorker
from tests.distributed.test_checkpoint import assert_same_weights, config_of, draw, update
from tests.distributed.test_families import DEEPSEEK
from tests.forked import run_ranks
from tests.parity import RankResult
from tests.timing import WAIT_S
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama, write_tiny_model

COPIED_AFTER = 2
"""Number of updates before the copy. Another update follows it."""

SIZES = dict(num_heads=4, num_kv_heads=2, hidden_size=72, intermediate_size=100, num_layers=4, vocab_size=SHARDED_VOCAB)
KEYS = {
    "TP2, SP": ("actor.layout={tp: 2, sequence_parallel: true}",),
    "PP2, DP2, bfloat16": ("actor.layout={pp: 2, dp: 2}", "model.dtype=bfloat16"),
    "float16": ("model.dtype=float16",),
    "LoRA, TP2": ("actor.layout.tp=2", "actor.lora.rank=4"),
    "renewed reference, DP2": (
        "actor.layout.dp=2",
        "algorithm.kl={coefficient: 0.5, renew_steps: 2, renew_share: 0.25}",
    ),
    "adapted coefficient": ("algorithm.kl={coefficient: 10.0, adaptive_target: 0.5, adaptive_horizon: 12}",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **SIZES)


def copy(worker: ActorWorker, step: int, folder: Path) -> None:
    """Copy the state after `step`, and wait for the copy."""
    worker.copy_state(step, folder)
    assert worker.finish_copies(waits=True) == ("", "")


def train_and_copy(
    store, rank: int, config: Config, model: Path, folder: Path
) -> tuple[RankResult, list[float], dict[str, float]]:
    """Copy the state after each update. The last rank's copy after the last update is interrupted. Return the state
    after it."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    copy(worker, 0, folder)  # a copy before the optimizer has moments
    for number in range(COPIED_AFTER):
        update(worker, config, number)
        draw()  # advance the random generators
        copy(worker, number + 1, folder)
    drawn = draw()
    result = update(worker, config, COPIED_AFTER)
    if rank < config.actor.layout.world_size - 1:
        copy(worker, COPIED_AFTER + 1, folder)
    else:
        copies, spec = worker._copies.own, Spec(torch.float32, (1,))
        with pytest.raises(KeyboardInterrupt), copies.write(COPIED_AFTER + 1, {"0.weight": spec}, {}) as tensors:
            tensors["0.weight"].fill_(float("nan"))
            raise KeyboardInterrupt
    return result, drawn, worker._counters()


def restore_and_train(
    store, rank: int, config: Config, model: Path, folder: Path
) -> tuple[RankResult, list[float], dict[str, float]]:
    worker = ActorWorker(config, model, rank, store, threads=1)
    ranks = range(config.actor.layout.world_size)
    # One rank's copy is interrupted. The other ranks have overwritten their copies after an earlier step.
    for step, lost in ((COPIED_AFTER + 1, ranks[-1:]), (COPIED_AFTER - 1, ranks)):
        names = ", ".join(f"actor-{number}" for number in lost)
        with pytest.raises(InfrastructureFailure, match=rf"no node has a copy of {names} after step {step}\. Fix: "):
            worker.restore_state(step, folder)
    worker.restore_state(COPIED_AFTER, folder)
    assert not worker._copies.own.has(COPIED_AFTER + 1), "a later loss could restore it beside other ranks' new copies"
    drawn = draw()
    return update(worker, config, COPIED_AFTER), drawn, worker._counters()


def check(config: Config, model: Path, folder: Path) -> None:
    size = config.actor.layout.world_size
    before, after = (
        run_ranks(size, function, config, model, folder) for function in (train_and_copy, restore_and_train)
    )
    assert_same_weights([result for result, *_ in after], [result for result, *_ in before])
    assert [rest for _, *rest in after] == [rest for _, *rest in before]
    assert any((result.weights[name] != 0).any() for result, *_ in after for name in result.weights)


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_restored_ranks_continue_bit_for_bit(model: Path, tmp_path: Path, keys: tuple[str, ...]) -> None:
    check(config_of(model, *keys), model, tmp_path)


def test_router_biases_are_restored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "deepseek_v3", **DEEPSEEK)
    (tmp_path / "copies").mkdir()
    rate = "actor.megatron_overrides.model.moe_router_bias_update_rate=0.01"
    config = config_of(folder, "actor.layout.dp=2", "actor.layout.ep=2", rate)
    check(config, folder, tmp_path / "copies")


def copy_offloaded(store, rank: int, config: Config, model: Path, folder: Path) -> Any:
    """Return the names of tensors whose copies differ between offloaded and resident state, and the number of all."""
    worker = worker_class(config, "actor")(config, model, rank, store, 1)
    update(worker, config, 0)
    worker.offload(("gradients", "optimizer"))
    copy(worker, 1, folder)
    state = {name: tensor.clone() for name, tensor in worker._copies.own.read(1, _specs(worker))[0].items()}
    worker.onload(("gradients", "optimizer"))
    copy(worker, 2, folder)
    resident = worker._copies.own.read(2, _specs(worker))[0]
    return [name for name in state if not torch.equal(state[name], resident[name])], len(state)


def _specs(worker: ActorWorker) -> dict[str, Spec]:
    from megarl.megatron.checkpoint import host_copies

    return host_copies._specs(worker.optimizer, host_copies._others(worker.chunks, worker._weight_snapshots))


def test_offloaded_state_is_copied(model: Path, tmp_path: Path) -> None:
    config = config_of(model, "model.dtype=bfloat16", "actor.offload=[gradients, optimizer]")
    [(differing, count)] = run_ranks(1, copy_offloaded, config, model, tmp_path)
    assert count > 10 and not differing


def copy_slowly(store, rank: int, config: Config, model: Path, folder: Path) -> Any:
    """Hold the thread that copies the state until a call waits for it, then run an update. Return whether the copy
    existed while the thread was held, and whether it contains the weights before the update."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    actor = TrainerRank.__new__(TrainerRank)
    actor._batches, actor._worker = FetchedBatches(), worker
    update(worker, config, 0)
    copy(worker, 0, folder)
    release, wait = threading.Event(), worker.wait_for_copy

    @contextmanager
    def held() -> Iterator[None]:
        assert release.wait(WAIT_S)
        yield

    def released() -> None:
        release.set()
        wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "own_stream", held)
        worker.copy_state(1, folder)
        before = _sorted(worker.parameters().values())
        actor.call("prepare_refit")
        existed = worker._copies.own.has(1), actor.call("finish_copies", False).value is not None
        patch.setattr(worker, "wait_for_copy", released)
        actor.call("onload", ("parameters",))
        update(worker, config, 1)
    tensors = worker._copies.own.read(1, _specs(worker))[0]
    return existed, torch.equal(_sorted(tensors[name] for name in tensors if name.endswith(".weight")), before)


def _sorted(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().view(-1) for tensor in tensors]).sort().values


def test_rank_changes_its_state_after_the_copy(model: Path, tmp_path: Path) -> None:
    assert run_ranks(1, copy_slowly, config_of(model), model, tmp_path) == [((False, False), True)]


def test_killed_process_leaves_the_previous_copy(tmp_path: Path) -> None:
    specs = {name: Spec(torch.float32, (2**16,)) for name in "ab"}

    def copy_and_die() -> None:
        for step in (1, 2, 3):
            with HostCopies(tmp_path, "actor-0").write(step, specs, {"step": step}) as tensors:
                tensors["a"].fill_(step)
                if step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                tensors["b"].fill_(step)

    process = multiprocessing.get_context("fork").Process(target=copy_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [slot_of(tmp_path, "actor-0", step) is not None for step in (1, 2, 3)] == [False, True, False]
    tensors, values = HostCopies(tmp_path, "actor-0").read(2, specs)
    assert values == {"step": 2} and all((tensor == 2).all() for tensor in tensors.values())


def test_the_older_copy_is_replaced(tmp_path: Path) -> None:
    specs = {"a": Spec(torch.float32, (3, 5)), "b": Spec(torch.bfloat16, (7,)), "c": Spec(torch.int64, ())}
    for step in range(1, 6):
        copies = HostCopies(tmp_path, "actor-0")  # as in a new process
        with copies.write(step, specs, {"step": step}) as tensors:
            for tensor in tensors.values():
                tensor.fill_(step)
        for kept in (step - 1, step) if step > 1 else (step,):
            tensors, values = HostCopies(tmp_path, "actor-0").read(kept, specs)
            assert values == {"step": kept}
            assert {name: Spec(t.dtype, tuple(t.shape)) for name, t in tensors.items()} == specs
            assert all((tensor == kept).all() for tensor in tensors.values())
    assert [HostCopies(tmp_path, "actor-0").has(step) for step in range(3, 6)] == [False, True, True]
    assert {os.stat(file).st_mode & 0o077 for file in tmp_path.glob("*.tensors")} == {0}


def test_copy_of_a_repeated_step_keeps_the_earlier_step(tmp_path: Path) -> None:
    """A step is repeated if another rank is lost before it has copied its state. Its first copy is worthless then."""
    copies, specs = HostCopies(tmp_path, "actor-0"), {"a": Spec(torch.float32, (3,))}
    for step, value in ((1, 1.0), (2, 2.0), (3, 3.0), (3, 4.0)):
        with copies.write(step, specs, {}) as tensors:
            assert copies.has(2) or step < 3
            tensors["a"].fill_(value)
    assert copies.read(2, specs)[0]["a"].tolist() == [2.0] * 3
    assert copies.read(3, specs)[0]["a"].tolist() == [4.0] * 3


def test_full_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    copies = HostCopies(tmp_path, "actor-0")
    with (
        pytest.raises(InfrastructureFailure, match=r"no room for 1\.00 GiB\. Fix: enlarge /dev/shm"),
        copies.write(1, {"a": Spec(torch.float32, (2**28,))}, {}),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_record_without_room_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    copies = HostCopies(tmp_path, "actor-0")
    with (
        pytest.raises(InfrastructureFailure, match=r"no room for 0\.00 GiB\. Fix: enlarge /dev/shm"),
        copies.write(1, {"a": Spec(torch.float32, (3,))}, {}),
    ):
        monkeypatch.setattr(Path, "write_text", no_space)
    assert not copies.has(1)


def test_each_slot_is_page_locked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []
    monkeypatch.setattr(device, "lock_pages", lambda memory: locked.append(memory.nbytes))
    copies = HostCopies(tmp_path, "actor-0")
    for step in range(5):
        with copies.write(step, {"a": Spec(torch.float32, (32,))}, {}):
            pass
    assert locked == [128, 128]
