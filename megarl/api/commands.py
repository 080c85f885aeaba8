"""Training, evaluation and checkpoint conversion, each in a process of its own.

A run forks, handles signals and exits with a status. In a process of its own, it does none of this to the caller, which
may be a notebook. Its output is printed in the calling process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megarl.config.load import dump
from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure, RunFailure, UserError
from megarl.core.files import read_object
from megarl.report.history import read_history
from megarl.run.events import VARIABLE
from megarl.run.folder import RunFolder

MEGARL = (sys.executable, "-m", "megarl.cli")
ERROR = "megarl: error: "
EVALUATION = "evaluation/"
INTERRUPTED = 130
"""Exit status of a command that was interrupted."""

OnStep = Callable[[int, dict[str, float]], object]
OnCheckpoint = Callable[[int, Path], object]


class StopTraining(Exception):
    """Raised by a callback to end the run after its current step. `run_training` then returns as usual."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """A run that has ended.

    Attributes:
        folder: the run folder, for `read_metrics`, `read_rollouts` and `megarl report`.
        step: number of the last completed step.
        metrics: metrics of the last completed step.
        model: folder of the trained model in the Hugging Face format, or None if the run did not export one.
    """

    folder: Path
    step: int
    metrics: Mapping[str, float]
    model: Path | None


def run_training(
    config: Config,
    *,
    on_step: OnStep | None = None,
    on_evaluation: OnStep | None = None,
    on_checkpoint: OnCheckpoint | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train a model, as `megarl train` does, and wait until the run has ended.

    Callbacks run in the calling thread. Training continues meanwhile. If a callback raises an exception, the run is
    interrupted, saves a checkpoint if `checkpoint.on_signal` is set, and ends before the exception propagates.
    StopTraining ends the run in the same way, but does not propagate: `run_training` returns as usual.

    Args:
        config: the recipe, from `load_config`.
        on_step: called with the number and the metrics of each step that this run completes.
        on_evaluation: called with the step's number and the evaluation metrics after each evaluation. The evaluation
            of the initial model has the number 0.
        on_checkpoint: called with the step's number and the folder of each completed checkpoint. The folder is removed
            later if there are more than `checkpoint.keep`.
        quiet: whether to drop the run's output instead of printing it.

    Raises:
        UserError: the recipe, the data or the model is invalid.
        InfrastructureFailure: a resource outside the run was unavailable for too long; the same run may succeed later.
        RunFailure: any other failure.
        KeyboardInterrupt: the run was interrupted. It has ended.
    """

    def handle(event: Mapping[str, Any]) -> None:
        kind, step, metrics = event["event"], event["step"], event.get("metrics", {})
        if kind == "step" and on_step is not None:
            on_step(step, metrics)
        evaluated = {name: value for name, value in metrics.items() if name.startswith(EVALUATION)}
        if evaluated and on_evaluation is not None:
            on_evaluation(step, evaluated)
        if kind == "checkpoint" and on_checkpoint is not None:
            on_checkpoint(step, Path(event["path"]))

    with _recipe(config) as recipe, suppress(StopTraining):
        _run("train", str(recipe), quiet=quiet, handle=handle)
    folder = RunFolder.of(config)
    history = read_history(folder.metrics)
    last = {name: float(values[-1]) for name, values in history.columns.items() if values[-1] == values[-1]}
    step = int(history.steps[-1]) if len(history.steps) else 0
    return TrainingResult(folder.path, step, last, folder.model if folder.model.exists() else None)


def run_evaluation(model: str | Path, config: Config, out: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Evaluate a model on the evaluation sets of a recipe, as `megarl evaluate` does. Return its results, which
    `out/results.json` also contains: `sets` maps each set to its estimates with their 95 % intervals.

    Args:
        model: a model folder or a Hub id.
        out: a new folder for the results and the samples.

    Raises:
        UserError: the recipe, the model or `out` is invalid.
        RunFailure: a set could not be scored, or the evaluation failed.
    """
    with _recipe(config) as recipe:
        _run("evaluate", str(model), str(recipe), "--out", str(out), quiet=quiet)
    return read_object(Path(out) / "results.json")


def convert_to_megatron(model: str | Path, out: str | Path, *, quiet: bool = False, **layout: int) -> Path:
    """Convert a Hugging Face folder to a Megatron checkpoint (torch_dist) and return its folder.

    Args:
        out: a new folder.
        layout: sizes of the layout to write for: tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers. A
            checkpoint can be loaded with any other layout.

    Raises:
        UserError: the folder does not match its config.json, or the sizes do not fit the model.
    """
    return _convert("hf-to-megatron", {"hf": model, "out": out, **layout}, quiet)


def convert_to_huggingface(checkpoint: str | Path, out: str | Path, *, quiet: bool = False) -> Path:
    """Convert a Megatron checkpoint, or a run's `checkpoints/step_…`, to a Hugging Face folder and return the folder.

    Raises:
        UserError: the checkpoint is damaged, or `out` exists.
    """
    return _convert("megatron-to-hf", {"checkpoint": checkpoint, "out": out}, quiet)


def reshape_checkpoint(checkpoint: str | Path, out: str | Path, *, quiet: bool = False, **layout: int) -> Path:
    """Convert a Megatron checkpoint to another layout, including its optimizer state, and return the new folder. The
    sizes in `layout` are those of `convert_to_megatron`.

    Raises:
        UserError: the checkpoint is damaged, or the sizes do not fit the model.
    """
    return _convert("reshape", {"checkpoint": checkpoint, "out": out, **layout}, quiet)


def _convert(command: str, options: Mapping[str, Any], quiet: bool) -> Path:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    _run("convert", command, *flags, quiet=quiet)
    return Path(options["out"])


@contextmanager
def _recipe(config: Config) -> Iterator[Path]:
    """Yield a file with the complete recipe."""
    with tempfile.TemporaryDirectory(prefix="megarl-recipe-") as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(dump(config), encoding="utf-8")
        yield recipe


def _ignore(_: Mapping[str, Any]) -> None:
    pass


def _run(*arguments: str, quiet: bool, handle: Callable[[Mapping[str, Any]], None] = _ignore) -> None:
    """Run a megarl command and wait for it. Call `handle` with each event. Raise the error that the command printed. If
    `handle` raises an exception or this process is interrupted, interrupt the command and wait for it first."""
    events, writer = os.pipe()
    with open(events, encoding="utf-8") as pipe:
        try:
            process = subprocess.Popen(
                [*MEGARL, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                pass_fds=[writer],
                env={**os.environ, VARIABLE: str(writer), "PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(writer)
        received: SimpleQueue[str | None] = SimpleQueue()
        errors: list[str] = []
        threads = [
            threading.Thread(target=_receive, args=(pipe, received)),
            threading.Thread(target=_print, args=(process, errors, quiet)),
        ]
        for thread in threads:
            thread.start()
        try:
            while (line := received.get()) is not None:
                handle(json.loads(line))
            process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            for thread in threads:
                thread.join()
    _raise(process.returncode, errors)


def _receive(pipe: Any, received: SimpleQueue[str | None]) -> None:
    """Put the lines of the pipe into the queue, so that the run never waits for a callback, and None at its end."""
    try:
        for line in pipe:
            received.put(line)
    finally:
        received.put(None)


def _print(process: subprocess.Popen[str], errors: list[str], quiet: bool) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith(ERROR):
                errors.append(line.removeprefix(ERROR).rstrip("\n"))
            if not quiet:
                print(line, end="", flush=True)


def _raise(status: int, errors: list[str]) -> None:
    """Raise the error that an exit status stands for."""
    if status == 0:
        return
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    kinds = {kind.exit_code: kind for kind in (UserError, InfrastructureFailure)}
    message = "\n".join(errors) or f"the command exited with status {status}. Its output shows the cause"
    raise kinds.get(status, RunFailure)(message)
