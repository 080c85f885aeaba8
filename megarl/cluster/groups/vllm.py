"""Engines on vLLM, one Ray actor for each."""

from __future__ import annotations

import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from ray.actor import ActorHandle

from megarl.cluster.groups.group import Answer, Group, ProcessActor, W
from megarl.cluster.pending import Pending
from megarl.cluster.placement import Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.scratch import own_scratch
from megarl.config.schema import Config
from megarl.rollout.vllm.environment import environment


class VllmActor(ProcessActor):
    """One engine, which vLLM imports after its environment is set."""

    def __init__(self, config: Config, model_folder: Path, process: Process, tp: int, logs: Path):
        super().__init__(process, logs)
        scratch = own_scratch()
        # Elsewhere the sockets between vLLM's processes would stay behind, and the files by which its ranks meet.
        folders = {"VLLM_RPC_BASE_PATH": str(scratch), "TMPDIR": str(scratch)}
        os.environ.update(environment(tp, process.threads, process.index, bool(process.gpus)), **folders)
        tempfile.tempdir = None  # Python has read the variable when Ray imported it
        segments.name_semaphores(scratch)
        self._config, self._model_folder = config, model_folder

    def start(self) -> Answer:
        """Starts the engine, which is the actor's worker."""
        begin = time.time()
        self._worker = self._load()
        segments.note(own_scratch())
        return Answer(None, begin, time.time())

    @abstractmethod
    def _load(self) -> Any:
        """Makes the engine."""


class VllmGroup(Group[W]):
    """All engines of one kind."""

    actor_class: ClassVar[Any]
    """A class derived from VllmActor, as a Ray actor."""
    title: ClassVar[str]
    """The name of that class."""

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process], tp: int):
        """tp: the number of an engine's ranks."""

        def launch(process: Process) -> ActorHandle:
            return session.on_node(self.actor_class, process).remote(config, model_folder, process, tp, session.logs)

        self._launch = launch
        self._processes = {process.name: process for process in processes}
        super().__init__(session, self.title, {process.name: launch(process) for process in processes})
        self._watch()

    def start(self) -> Pending[Any]:
        calls = {name: actor.start.remote() for name, actor in self._actors.items()}
        return self._read(f"{next(iter(calls)).rpartition('-')[0]} start", "start", "start", calls)

    def _watch(self) -> None:
        """Makes the loss of an engine end the run, from now on."""
        self._session.watch(self._actors)
