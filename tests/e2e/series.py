"""Runs that follow each other in one tree of processes: Ray starts once, and so does an engine for all runs that want
the same of it. Rewards and trainer ranks are each run's own, and so are their logs.

As a program it reads from stdin, line by line, the arguments of `megarl train`, and answers when that run is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

from megarl import finetune, train
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.cluster.trace import Trace
from megarl.cluster.workers import launch_workers
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.offline import load_offline_data
from megarl.data.prompts import load_prompts
from megarl.models.run_models import ModelFolders, find_models
from megarl.run.context import RunContext
from megarl.run.preflight import load_evaluation_sets
from tests.paths import ROOT
from tests.timing import RUN_S, WAIT_S

DONE = "done\n"
OF_THE_DRIVER = {"transport"}
"""Keys of `rollout` of which an engine is not told."""


class Series:
    """The program, started for its first run."""

    def __init__(self, folder: Path):
        """folder: for the logs of its processes."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def train(self, recipe: Path, *overrides: str) -> None:
        """Return when the run has reached its last step. After one that fails, the next starts the program anew."""
        process, self._process = self._process or self._start(), None
        process.stdin.write(json.dumps([str(recipe), *overrides]) + "\n")
        process.stdin.flush()
        deadline = Timer(RUN_S, process.terminate)
        deadline.start()
        try:
            assert process.stdout.readline() == DONE, self._errors.read_text()[-5000:]
        finally:
            deadline.cancel()
        self._process = process

    def end(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            assert self._process.wait(WAIT_S) == 0, self._errors.read_text()[-5000:]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.e2e.series", str(self._folder)]
        with self._errors.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)

    @property
    def _errors(self) -> Path:
        return self._folder / "errors"


class Stage:
    """The surroundings of the runs: a Ray and the newest engines."""

    def __init__(self, session: Session):
        self._session = session
        self._engines: EngineGroup | None = None
        self._asked = ""

    def run(self, config: Config) -> None:
        models = find_models(config)
        load_data = load_offline_data if config.is_offline else load_prompts
        sets = load_evaluation_sets(config, models.actor)
        with RunContext.prepare(config, models, load_data(config, models.actor), evaluation=sets) as loop:
            self._session.logs = loop.folder.logs.resolve()
            self._session.trace = Trace(self._session.logs)
            if config.is_offline:
                finetune.learn(self._session, config, models, loop)
            else:
                self._run_with_engines(config, models, loop)

    def _run_with_engines(self, config: Config, models: ModelFolders, loop: RunContext) -> None:
        rollout = config.rollout.model_dump_json(exclude=OF_THE_DRIVER)
        asked = (
            f"{models.actor} {config.model.dtype} {config.model.head_dtype} {config.run.seed} {config.pauses_rollouts} "
            f"{rollout}"
        )
        engines = self._engines if asked == self._asked else None
        checkpoint = loop.resume_point.checkpoint
        workers = launch_workers(self._session, config, models, loop.placement, checkpoint, engines)
        self._engines, self._asked = workers.engines, asked
        train.learn(config, workers, loop)


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where runs say what they do
    with supervised() as scratch, ExitStack() as stack:
        stage = None
        for line in sys.stdin:
            recipe, *overrides = json.loads(line)
            config = load(Path(recipe), overrides)
            stage = stage or Stage(stack.enter_context(Session(config, folder, scratch)))
            stage.run(config)
            answers.write(DONE)
            answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
