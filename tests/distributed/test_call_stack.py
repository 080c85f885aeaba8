"""The call stack from `step` to the objective contains exactly the megarl functions that the README lists."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl import train
from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.objectives import clip
from megarl.cluster import rank_batch
from megarl.cluster.groups.trainers import TrainerActor, TrainerGroup
from megarl.cluster.pending import Answers, ready
from megarl.cluster.placement import Process
from megarl.cluster.trained_models import TrainedModels
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.sample import SampleRef
from megarl.core.timing import Stopwatch
from megarl.megatron.workers.actor import ActorWorker
from megarl.step.rollouts import Rollouts
from tests.forked import run_ranks
from tests.parity import config_of, random_groups
from tests.paths import ROOT
from tests.tiny_model import write_tiny_llama

MAX_FUNCTIONS = 11


class ObjectiveReached(Exception):
    """Raised in the objective. Carries the megarl functions on the call stack, outermost first."""


def reach(*_: Any) -> None:
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if Path(frame.f_code.co_filename).is_relative_to(ROOT / "megarl"):
            names.append(frame.f_code.co_qualname.replace(".<locals>", ""))
        frame = frame.f_back
    raise ObjectiveReached(names[::-1])


class InProcess:
    """A session whose actors live in this process. Calls run when they are submitted."""

    logs = Path()
    trace = SimpleNamespace(take_seconds=lambda _: 0.0, add=lambda _, answers: answers.values)

    def __init__(self, worker: ActorWorker):
        self._worker = worker

    def on_node(self, *_: Any) -> Any:
        return SimpleNamespace(remote=self._launch)

    def _launch(self, *_: Any) -> Any:
        actor_class = TrainerActor.__ray_metadata__.modified_class.__ray_actor_class__
        actor = actor_class.__new__(actor_class)
        actor._worker, actor._batches = self._worker, rank_batch.FetchedBatches()
        return SimpleNamespace(call=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=actor.call)))

    def watch(self, *_: Any) -> None:
        pass

    def submit(self, calls: dict[str, Any], *_: Any) -> Any:
        return ready(Answers({name: call.value for name, call in calls.items()}, set()))


def call_stack(store: Any, rank: int, config: Config, folder: Path) -> list[str]:
    """Run a step up to the objective and return megarl's functions on the stack, starting at `step`."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    group = TrainerGroup(InProcess(worker), config, "actor", folder, [Process("trainer", 0, 1, devices=(0,))])
    group._data_parallel_ranks, group.packing = [0], worker.packing
    engines = SimpleNamespace(take_idle_share=lambda: ready(0.0))
    trained = TrainedModels({"actor": group}, {"actor": ()})
    workers = Workers(trained, None, engines, None, None, None, False, folder)
    groups = random_groups(0)
    samples = {sample.id: sample for members in groups for sample, _ in members}
    chosen = [[replace(SampleRef.of(s, s.id), outcome=reward) for s, reward in group] for group in groups]
    context = SimpleNamespace(
        stopwatch=Stopwatch,
        state=SimpleNamespace(step=1, average=MovingAverage()),
        folder=SimpleNamespace(rollouts=lambda _: folder, profile=lambda _: folder),
        saver=SimpleNamespace(commit=None),
        note_solved=lambda _: {},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "collect_rollouts", lambda *_: Rollouts((), chosen, {}, {}))
        patch.setattr(rank_batch, "_get", lambda refs: {ref: samples[ref] for ref in refs})
        patch.setattr(clip, "policy_ratio", reach)
        with pytest.raises(ObjectiveReached) as reached:
            train.step(config, workers, context, None, None)
    [names] = reached.value.args
    return names[names.index("step") :]


def listed_in_readme() -> list[str]:
    """Return the functions that the README lists from `step` to the objective."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"lead from `step` to the scalar loss.*?\n\n((?:\d+\. .*\n(?:   .*\n)*)+)", text)
    return re.findall(r"^\d+\. `([\w.]+)`", lines, re.MULTILINE)


def test_call_stack_matches_the_readme(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    [names] = run_ranks(1, call_stack, config_of(folder), folder)
    assert names == listed_in_readme()
    assert len(names) <= MAX_FUNCTIONS
