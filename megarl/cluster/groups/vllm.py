"""Engines on vLLM: one Ray actor for each."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from megarl.cluster.placement import VISIBLE, Process
from megarl.cluster.session import Session
from megarl.cluster.supervision import segments
from megarl.cluster.supervision.logs import log_to
from megarl.config.schema import Config
from megarl.rollout.vllm.environment import environment


class VllmActor:
    """vLLM is imported here, in the actor's own process, after its environment is set."""

    def __init__(self, config: Config, model_folder: Path, process: Process, tp: int, logs: Path, scratch: Path):
        log_to(logs / f"{process.name}.log")
        # The sockets between vLLM's processes would else stay behind.
        own = process.environment(os.environ.get(VISIBLE))
        os.environ.update(environment(tp, process.threads, process.index) | own, VLLM_RPC_BASE_PATH=str(scratch))
        segments.name_semaphores(scratch)
        self._config, self._model_folder, self._process, self._scratch = config, model_folder, process, scratch

    def start(self) -> None:
        self._engine = self._load()
        segments.note(self._scratch)

    @abstractmethod
    def _load(self) -> Any:
        """Starts the engine."""


class VllmGroup:
    """All engines of one kind."""

    actor_class: ClassVar[Any]
    """A class derived from VllmActor, as a Ray actor."""

    def __init__(self, session: Session, config: Config, model_folder: Path, processes: Sequence[Process], tp: int):
        """tp: ranks of an engine."""
        self._session = session
        self._start_timeout_s = config.cluster.start_timeout_s
        self._actors = {
            process.name: self.actor_class.remote(config, model_folder, process, tp, session.logs, session.scratch)
            for process in processes
        }
        self._watch()

    def start(self) -> None:
        calls = {name: actor.start.remote() for name, actor in self._actors.items()}
        self._session.wait(calls, f"{next(iter(calls)).rpartition('-')[0]} start", self._start_timeout_s)

    def _watch(self) -> None:
        """From now on the loss of an engine ends the run."""
        self._session.watch(self._actors)
