"""Consecutive runs in one process tree that share Ray, and share engines if their settings are equal.

Each run starts its own reward processes and trainer ranks, with their own logs. As a program, this module reads one run
per line from stdin: a JSON list of the training function and the arguments of `megarl train`. It prints a line when a
run has finished.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from threading import Timer

from megarl import finetune
from megarl.cluster.groups.engines import EngineGroup
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.cluster.trace import Trace
from megarl.cluster.workers import launch_workers
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.files import ALL_COLUMNS
from megarl.data.offline import load_offline_data
from megarl.data.prompts import load_prompts
from megarl.models.run_models import ModelFolders, find_models
from megarl.run.audit.audit import audit
from megarl.run.context import RunContext
from megarl.run.preflight import load_evaluation_sets
from tests.metrics import undeclared
from tests.paths import ROOT
from tests.timing import RUN_S, WAIT_S

DONE = "done\n"
LEARN = "megarl.train:learn"
DRIVER_KEYS = {"transport"}
"""Keys of `rollout` that do not reach the engines."""


class Series:
    """The program's process, which starts with the first run."""

    def __init__(self, folder: Path):
        """`folder` receives the processes' logs."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def train(self, recipe: Path, *overrides: str, learn: str = LEARN) -> None:
        """Train until the last step, or call another function in place of megarl.train.learn. After a failed run, the
        next one starts a new process."""
        process, self._process = self._process or self._start(), None
        process.stdin.write(json.dumps([learn, str(recipe), *overrides]) + "\n")
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
    """The resources shared by the runs: a Ray session and the latest engines."""

    def __init__(self, session: Session):
        self._session = session
        self._engines: EngineGroup | None = None
        self._settings = ""

    def run(self, config: Config, learn: str) -> None:
        models = find_models(config)
        if config.is_offline:
            data = load_offline_data(config, models.actor)
        else:
            data = load_prompts(config, models.actor, {ALL_COLUMNS: None} if config.has_environment else {})
        sets = load_evaluation_sets(config, models.actor)
        with RunContext.prepare(config, models, data, evaluation=sets) as loop:
            self._session.logs = loop.folder.logs.resolve()
            self._session.trace = Trace(self._session.logs)
            if config.is_offline:
                finetune.learn(self._session, config, models, loop)
            else:
                self._run_with_engines(config, models, loop, learn)
        engines = self._engines.actors if self._engines else {}
        # The session's handles would keep the run's processes alive. Only engines continue.
        for watched in (self._session._watched, self._session._replaceable):
            for name in watched.keys() - engines.keys():
                del watched[name]
        if learn != LEARN:
            return
        is_proven, proof = audit(loop.folder.path, reads_all=True)
        assert is_proven, proof
        assert undeclared(loop.folder.path / "metrics.jsonl") == []

    def _run_with_engines(self, config: Config, models: ModelFolders, loop: RunContext, learn: str) -> None:
        rollout = config.rollout.model_dump_json(exclude=DRIVER_KEYS)
        settings = (
            f"{models.actor} {config.model.dtype} {config.model.head_dtype} {config.run.seed} {config.pauses_rollouts} "
            f"{rollout}"
        )
        engines = self._engines if settings == self._settings else None
        checkpoint = loop.resume_point.checkpoint
        workers = launch_workers(self._session, config, models, loop.placement, checkpoint, engines)
        self._engines, self._settings = workers.engines, settings
        resolve_name(learn)(config, workers, loop)


def main(folder: Path) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # runs print to stdout, which would mix with the answers
    with supervised() as scratch, ExitStack() as stack:
        stage = None
        for line in sys.stdin:
            learn, recipe, *overrides = json.loads(line)
            config = load(Path(recipe), overrides)
            stage = stage or Stage(stack.enter_context(Session(config, folder, scratch)))
            stage.run(config, learn)
            gc.collect()  # frees the other handles, so that the run's processes exit
            answers.write(DONE)
            answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
