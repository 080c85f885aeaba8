"""Training, evaluation and checkpoint conversion, each in its own child process.

A run forks, installs signal handlers and exits with a status. The child process isolates the caller, such as a
notebook, from all of this. The calling process prints the child's output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from megarl.config.load import dump
from megarl.config.schema import Config
from megarl.core.errors import ERROR, INDENT, InfrastructureFailure, RunFailure, UserError
from megarl.core.files import read_object
from megarl.core.interpreter import MEGARL
from megarl.report.history import read_history
from megarl.run.events import VARIABLE
from megarl.run.folder import RunFolder

EVALUATION = "evaluation/"
INTERRUPTED = 130
"""Exit status of a command that was interrupted."""

MAX_LINES = 50
"""Maximum number of output lines to quote if a command fails without printing an error."""

OnStep = Callable[[int, dict[str, float]], object]
OnCheckpoint = Callable[[int, Path], object]


class StopTraining(Exception):
    """Raised by a callback to end the run early. `run_training` then returns as usual."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training run.

    Attributes:
        folder: the run folder, for `read_metrics`, `read_rollouts` and `megarl report`.
        step: number of the last completed step.
        metrics: metrics of the last completed step.
        model: folder of the trained model in the Hugging Face format; None if the run has not reached its last step, or
            exports no model.
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

    Callbacks run in the calling thread, while training continues. If a callback raises an exception, the run ends as it
    does after Ctrl-C: at once, or, with `checkpoint.on_signal`, after the current step and its checkpoint. The
    exception then propagates, unless it is StopTraining.

    Args:
        config: the recipe, from `load_config`.
        on_step: called with the step number and the metrics after each step.
        on_evaluation: called with the step number and the evaluation metrics after each evaluation. The step number of
            the initial model's evaluation is 0.
        on_checkpoint: called with the step number and the folder of each completed checkpoint. The run deletes the
            folder once newer checkpoints exceed `checkpoint.keep`.
        quiet: whether to drop the run's output instead of printing it.

    Raises:
        UserError: the recipe, the data or the model is invalid, or a warning in `run.stop_on` ended the run.
        InfrastructureFailure: a resource outside the run was unavailable for too long; the same run may succeed later.
        RunFailure: any other failure.
        KeyboardInterrupt: the run was interrupted and has ended.
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

    with _recipe(config) as recipe:
        _run("train", str(recipe), quiet=quiet, handle=handle)
    folder = RunFolder.of(config)
    history = read_history(folder.metrics)
    last = {name: float(values[-1]) for name, values in history.columns.items() if values[-1] == values[-1]}
    step = int(history.steps[-1]) if len(history.steps) else 0
    is_finished = folder.finished_after is not None and folder.model.exists()
    return TrainingResult(folder.path, step, last, folder.model if is_finished else None)


def run_evaluation(model: str | Path, config: Config, out: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Evaluate a model on the evaluation sets of a recipe, as `megarl evaluate` does. Return the results and write them
    to `out/results.json`: `sets` maps each set to its estimates with their 95 % intervals.

    Args:
        model: a model folder or a Hub id.
        out: a new folder for the results and the samples.

    Raises:
        UserError: the recipe, the model or `out` is invalid.
        RunFailure: an evaluation set could not be scored, or the evaluation failed.
    """
    with _recipe(config) as recipe:
        _run("evaluate", str(model), str(recipe), "--out", str(out), quiet=quiet)
    return read_object(Path(out) / "results.json")


def convert_to_megatron(model: str | Path, out: str | Path, *, quiet: bool = False, **layout: int) -> Path:
    """Convert a Hugging Face folder to a Megatron checkpoint (torch_dist) and return the checkpoint's folder.

    Args:
        out: a new folder.
        layout: the layout of the written checkpoint: tp, pp, vpp, ep, etp, first_stage_layers, last_stage_layers. The
            checkpoint can be loaded with any other layout.

    Raises:
        UserError: the folder does not match its config.json, or the layout does not fit the model.
    """
    return _convert("hf-to-megatron", {"hf": model, "out": out, **layout}, quiet)


def convert_to_huggingface(checkpoint: str | Path, out: str | Path, *, quiet: bool = False) -> Path:
    """Convert a Megatron checkpoint, or a run's `checkpoints/step_…`, to a Hugging Face folder and return the folder.

    Raises:
        UserError: the checkpoint is damaged, or `out` exists.
    """
    return _convert("megatron-to-hf", {"checkpoint": checkpoint, "out": out}, quiet)


def reshape_checkpoint(checkpoint: str | Path, out: str | Path, *, quiet: bool = False, **layout: int) -> Path:
    """Convert a Megatron checkpoint to another layout, including its optimizer state, and return the new folder. See
    `convert_to_megatron` for the keys of `layout`.

    Raises:
        UserError: the checkpoint is damaged, or the layout does not fit the model.
    """
    return _convert("reshape", {"checkpoint": checkpoint, "out": out, **layout}, quiet)


def _convert(command: str, options: Mapping[str, Any], quiet: bool) -> Path:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    _run("convert", command, *flags, quiet=quiet)
    return Path(options["out"])


@contextmanager
def _recipe(config: Config) -> Iterator[Path]:
    """Yield the path of a temporary file that contains the complete recipe."""
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
                process_group=0,  # this process alone receives Ctrl-C from a terminal and forwards it
            )
        finally:
            os.close(writer)
        received: SimpleQueue[str | None] = SimpleQueue()
        output = _Output(quiet)
        threads = [
            threading.Thread(target=_receive, args=(pipe, received)),
            threading.Thread(target=output.read, args=(process.stdout,)),
        ]
        for thread in threads:
            thread.start()
        is_stopped = False
        try:
            while (line := received.get()) is not None:
                handle(json.loads(line))
            process.wait()
        except StopTraining:
            is_stopped = True
            _interrupt(process)
        except BaseException:
            _interrupt(process)
            raise
        finally:
            for thread in threads:
                thread.join()
    if not (is_stopped and process.returncode == INTERRUPTED):
        _raise(process.returncode, output)


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Interrupt the command and wait until it has ended. Forward further interrupts to it."""
    while process.poll() is None:
        with suppress(KeyboardInterrupt):
            process.send_signal(signal.SIGINT)
            process.wait()


def _receive(pipe: Iterable[str], received: SimpleQueue[str | None]) -> None:
    """Put the pipe's lines into the queue, then None. The run never waits for a callback, because this thread keeps
    reading."""
    try:
        for line in pipe:
            received.put(line)
    finally:
        received.put(None)


class _Output:
    """Reads a command's output, and keeps its errors and last lines."""

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self.errors: list[str] = []
        self.last: deque[str] = deque(maxlen=MAX_LINES)

    def read(self, lines: TextIO) -> None:
        is_error = False
        with lines:
            for line in lines:
                is_error = line.startswith(ERROR) or (is_error and line.startswith(INDENT))
                if is_error:
                    self.errors.append(line.removeprefix(ERROR).rstrip("\n"))
                self.last.append(line.rstrip("\n"))
                if not self._quiet:
                    print(line, end="", flush=True)


def _raise(status: int, output: _Output) -> None:
    """Raise the exception for an exit status, unless the command succeeded."""
    if status == 0:
        return
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    kinds = {kind.exit_code: kind for kind in (UserError, InfrastructureFailure)}
    last = [f"the command exited with status {status}. Its last lines:", *output.last]
    raise kinds.get(status, RunFailure)("\n".join(output.errors or last))
