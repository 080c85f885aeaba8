"""Commands in their own process: callbacks, errors and interrupts. A script replaces megarl."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

import megarl
from megarl.api import commands
from megarl.run.folder import RunFolder
from tests.paths import QUICKSTART
from tests.timing import POLL_S

START = """
import json, os, shutil, signal, sys, time
from pathlib import Path
pipe = open(int(os.environ["MEGARL_EVENTS"]), "w")

def send(**event):
    print(json.dumps(event), file=pipe, flush=True)

folder = Path(FOLDER)
folder.mkdir(parents=True)
shutil.copy(sys.argv[2], folder / "recipe.yaml")
lines = [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 1.0, "policy/kl": None}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""

TRAINS = """
send(event="evaluation", step=0, metrics={"evaluation/gsm8k/avg@1": 0.25})
send(event="step", step=1, metrics={"reward/mean": 0.5})
send(event="checkpoint", step=1, path=str(folder / "checkpoints/step_1"))
send(event="step", step=2, metrics={"reward/mean": 1.0, "evaluation/gsm8k/avg@1": 0.5})
(folder / "model").mkdir()
(folder / "manifest.json").write_text(json.dumps({"finished_after_step": 2}))
print("a line of output")
"""

WAITS = """
def end(*_):
    (folder / "interrupted").touch()
    sys.exit(130)

signal.signal(signal.SIGINT, end)
send(event="step", step=1, metrics={})
while True:
    time.sleep(0.1)  # a signal just before a long sleep would be handled only after it
"""


@pytest.fixture
def config(tmp_path):
    return megarl.load_config(QUICKSTART, {"run.folder": str(tmp_path / "runs"), "run.name": "api"})


@pytest.fixture
def replace(config, tmp_path, monkeypatch):
    """`replace(code)` makes commands run the code after START."""
    folder = str(RunFolder.of(config).path)

    def replace(code: str, start: str = START) -> None:
        script = tmp_path / "megarl.py"
        script.write_text(start.replace("FOLDER", repr(folder)) + code)
        monkeypatch.setattr(commands, "MEGARL", (sys.executable, "-P", str(script)))

    return replace


def test_callbacks_receive_all_events_in_order(config, replace, capfd):
    replace(TRAINS)
    calls, threads = [], set()

    def note(name):
        def call(*arguments):
            calls.append((name, *arguments))
            threads.add(threading.current_thread())

        return call

    result = megarl.run_training(
        config, on_step=note("step"), on_evaluation=note("evaluation"), on_checkpoint=note("checkpoint")
    )
    folder = RunFolder.of(config).path
    assert megarl.load_config(folder / "recipe.yaml") == config
    assert calls == [
        ("evaluation", 0, {"evaluation/gsm8k/avg@1": 0.25}),
        ("step", 1, {"reward/mean": 0.5}),
        ("checkpoint", 1, folder / "checkpoints/step_1"),
        ("step", 2, {"reward/mean": 1.0, "evaluation/gsm8k/avg@1": 0.5}),
        ("evaluation", 2, {"evaluation/gsm8k/avg@1": 0.5}),
    ]
    assert threads == {threading.main_thread()}
    assert result == megarl.TrainingResult(folder, 2, {"reward/mean": 1.0}, folder / "model")
    assert capfd.readouterr().out == "a line of output\n"


def test_quiet_command_prints_nothing(config, replace, capfd):
    replace(TRAINS)
    assert megarl.run_training(config, quiet=True).step == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (1, megarl.RunFailure),
        (2, megarl.UserError),
        (75, megarl.InfrastructureFailure),
        (-9, megarl.RunFailure),
    ],
)
def test_exit_status_becomes_an_exception(config, replace, status, error):
    ends = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
    replace(f"print('megarl: error: first\\nmegarl: error: second', file=sys.stderr, flush=True); {ends}")
    with pytest.raises(error, match=r"^first\nsecond$"):
        megarl.run_training(config, quiet=True)


def test_command_without_a_message_is_named_by_its_status(config, replace):
    replace("print('last line'); sys.exit(3)")
    with pytest.raises(megarl.RunFailure, match=r"^the command exited with status 3\. Its last lines:\nlast line$"):
        megarl.run_training(config, quiet=True)


def test_error_keeps_its_indented_lines(config, replace):
    replace("print('megarl: error: first\\n    code\\nmegarl: error: second\\nother', file=sys.stderr); sys.exit(2)")
    with pytest.raises(megarl.UserError, match=r"^first\n    code\nsecond$"):
        megarl.run_training(config, quiet=True)


@pytest.mark.parametrize("error", [KeyError("from a callback"), KeyboardInterrupt()])
def test_exception_in_a_callback_ends_the_run_first(config, replace, error):
    replace(WAITS)

    def fail(*_):
        raise error

    with pytest.raises(type(error)) as caught:
        megarl.run_training(config, on_step=fail)
    assert caught.value is error and (RunFolder.of(config).path / "interrupted").exists()


def test_stop_training_returns_the_result(config, replace):
    replace(WAITS)

    def stop(step, _):
        raise megarl.StopTraining

    result = megarl.run_training(config, on_step=stop)
    assert (result.step, result.model) == (2, None) and (result.folder / "interrupted").exists()


def test_failure_after_an_early_end_is_raised(config, replace):
    replace(WAITS.replace("sys.exit(130)", "print('megarl: error: full'); sys.exit(75)"))

    def stop(*_):
        raise megarl.StopTraining

    with pytest.raises(megarl.InfrastructureFailure, match=r"^full$"):
        megarl.run_training(config, on_step=stop)


def test_interrupted_run_raises_keyboard_interrupt(config, replace):
    replace("sys.exit(130)")
    with pytest.raises(KeyboardInterrupt):
        megarl.run_training(config)


def test_command_that_sends_many_events_does_not_wait_for_callbacks(config, replace):
    """The first callback returns only after the run has sent more events than fit into a pipe, and ended."""
    replace('for step in range(3_000): send(event="step", step=step, metrics={})\n(folder / "sent").touch()')
    steps = []

    def wait(step, _):
        while not (RunFolder.of(config).path / "sent").exists():
            time.sleep(POLL_S)
        steps.append(step)

    megarl.run_training(config, on_step=wait)
    assert steps == list(range(3_000))


def test_no_file_descriptor_or_thread_is_left(config, replace, tmp_path):
    replace(TRAINS)
    files, threads = os.listdir("/proc/self/fd"), threading.active_count()
    megarl.run_training(config, quiet=True)
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == (files, threads)


def test_evaluation_returns_its_results(config, replace, tmp_path):
    code = """
import sys, json, pathlib
command, model, recipe, flag, out = sys.argv[1:]
pathlib.Path(out).mkdir()
(pathlib.Path(out) / "results.json").write_text(json.dumps({"sets": {model: f"{command} {flag}"}}))
"""
    replace(code, start="")
    assert megarl.run_evaluation("org/model", config, tmp_path / "out") == {"sets": {"org/model": "evaluate --out"}}


def test_unknown_layout_size_is_reported(tmp_path):
    with pytest.raises((megarl.UserError, megarl.RunFailure)):
        megarl.reshape_checkpoint(Path(tmp_path), tmp_path / "out", quiet=True, tensor=2)
