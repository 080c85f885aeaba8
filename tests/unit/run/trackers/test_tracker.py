"""Tests of trackers: whatever a tracker's library does, it neither blocks nor fails the run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cluster.trained_models import TrainedModels
from megarl.config.load import load
from megarl.run.folder import RunFolder
from megarl.run.trackers.backends import Settings
from megarl.run.trackers.tracker import QUEUED_ROWS, Tracker, check_trackers, end_all, open_trackers
from tests.children import Children
from tests.paths import BASE, ROOT
from tests.timing import HANG_S, LIMIT_S, SHORT_S, WAIT_S, wait_until
from tests.unit.run.test_context import prepare

HANGS = f"time.sleep({HANG_S})"
WANDB = """
import os, time

class Settings:
    def __init__(self, **_): pass

class Run:
    def define_metric(self, *_, **__): pass

    def log(self, row):
        {log}
        with open({out!r}, "a") as file:
            print(row["step"], row["reward/mean"], flush=True, file=file)

    def finish(self):
        {finish}
        with open({out!r}, "a") as file:
            print("finished", file=file)

class Image:
    def __init__(self, path):
        {image}
        self.path = path

def init(**options):
    {init}
    return Run()
"""
"""Source of a fake wandb module. Each of its functions first runs code that a test provides."""


@pytest.fixture
def fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that installs the module and returns the file with the logged rows."""

    def write(**code: str) -> Path:
        modules, out = tmp_path / "modules", tmp_path / "logged"
        modules.mkdir()
        named = dict.fromkeys(("init", "log", "image", "finish"), "pass") | code
        (modules / "wandb.py").write_text(WANDB.format(out=str(out), **named))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(modules), str(ROOT))))
        out.touch()
        return out

    return write


def make_tracker(folder: Path, timeout_s: float = WAIT_S, restart_s: float = WAIT_S, **options) -> Tracker:
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "run.trackers=[wandb]"]).model_dump(mode="json")
    settings = Settings("wandb", "tiny", str(folder), 0, config)
    return Tracker(settings, folder / "tracker_wandb.log", timeout_s, restart_s, **options)


def test_tracker_receives_all_finite_metrics(tmp_path: Path, fake_wandb, capfd) -> None:
    logged = fake_wandb()
    tracker = make_tracker(tmp_path)
    for step in (1, 2, 3):
        tracker.write(step, {"reward/mean": step / 2, "policy/loss": float("nan")})
    end_all([tracker], WAIT_S)
    assert logged.read_text().splitlines() == ["1 0.5", "2 1.0", "3 1.5", "finished"]
    assert capfd.readouterr() == ("", "")


def test_hanging_tracker_does_not_block_the_run(tmp_path: Path, fake_wandb, capfd, children: Children) -> None:
    logged = fake_wandb(log=HANGS)
    tracker = make_tracker(tmp_path, timeout_s=HANG_S)
    for step in range(1, 4 * QUEUED_ROWS):
        tracker.write(step, {"reward/mean": 1.0})
    end_all([tracker], SHORT_S)
    assert not children() and logged.read_text() == ""
    out, err = capfd.readouterr()
    assert err.count("megarl: warning: tracker wandb:") == 1 and f"lost {4 * QUEUED_ROWS - 1} of" in out


def test_hanging_process_is_restarted(tmp_path: Path, fake_wandb, capfd) -> None:
    mark = tmp_path / "mark"
    hang_once = f"os.path.exists({str(mark)!r}) or (open({str(mark)!r}, 'w'), time.sleep({HANG_S}))"
    logged = fake_wandb(log=hang_once)
    tracker = make_tracker(tmp_path, timeout_s=LIMIT_S, restart_s=0)
    tracker.write(1, {"reward/mean": 1.0})
    tracker.write(2, {"reward/mean": 2.0})
    wait_until(lambda: logged.read_text() != "")
    end_all([tracker], WAIT_S)
    assert logged.read_text().splitlines() == ["2 2.0", "finished"]
    out, err = capfd.readouterr()
    assert f"no response within trackers.timeout_s={LIMIT_S}" in err and "lost 1 of 2 steps" in out


def test_raising_tracker_loses_its_rows_and_warns_once(tmp_path: Path, fake_wandb, capfd) -> None:
    logged = fake_wandb(log="if row['step'] in (2, 3): raise ConnectionError('the server is away')")
    tracker = make_tracker(tmp_path)
    for step in (1, 2, 3, 4):
        tracker.write(step, {"reward/mean": float(step)})
    end_all([tracker], WAIT_S)
    assert logged.read_text().splitlines() == ["1 1.0", "4 4.0", "finished"]
    out, err = capfd.readouterr()
    assert err.count("tracker wandb: ConnectionError: the server is away. The run continues") == 1
    assert "lost 2 of 4 steps" in out and "the server is away" in (tmp_path / "tracker_wandb.log").read_text()


@pytest.mark.parametrize("failure", ["raise ImportError('no such library')", "raise SystemExit(1)", "os._exit(3)"])
def test_tracker_that_cannot_open_its_run_loses_all_rows(tmp_path: Path, fake_wandb, capfd, failure: str) -> None:
    logged = fake_wandb(init=failure)
    tracker = make_tracker(tmp_path)
    tracker.write(1, {"reward/mean": 1.0})
    wait_until(lambda: tracker._queue.empty())
    end_all([tracker], WAIT_S)
    assert logged.read_text() == "" and "lost 1 of 1 steps" in capfd.readouterr().out


def test_hanging_close_is_killed(tmp_path: Path, fake_wandb, capfd, children: Children) -> None:
    logged = fake_wandb(finish=HANGS)
    tracker = make_tracker(tmp_path)
    tracker.write(1, {"reward/mean": 1.0})
    wait_until(lambda: logged.read_text() != "")
    end_all([tracker], SHORT_S)
    assert not children()
    assert "closing timed out" in capfd.readouterr().err


def test_interrupted_run_does_not_wait_for_a_tracker(tmp_path: Path, fake_wandb) -> None:
    logged = fake_wandb(finish=HANGS)
    required = ["model.path=m", "data.source=arithmetic", "run.trackers=[wandb]", f"trackers.timeout_s={HANG_S}"]
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), open_trackers(load(BASE, required), folder, 0) as [tracker]:
        tracker.write(1, {"reward/mean": 1.0})
        wait_until(lambda: logged.read_text() != "")
        raise KeyboardInterrupt


LOG_IMAGES = """images = [(name, value.path) for name, value in row.items() if isinstance(value, Image)]
        row.setdefault("reward/mean", images)"""


def test_run_logs_the_grids_of_its_images(tmp_path: Path, fake_wandb, capfd) -> None:
    """Steps without images have no row of images."""
    logged = fake_wandb(log=LOG_IMAGES)
    required = ["model.path=m", "data.source=arithmetic", "run.trackers=[wandb]"]
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    grids = [file.with_suffix("") / "grid.png" for file in (folder.rollouts(1), folder.evaluation("a", 1))]
    for grid in grids:
        grid.parent.mkdir(parents=True)
        grid.touch()
    with open_trackers(load(BASE, required), folder, 0) as [tracker]:
        tracker.write(1, {"reward/mean": 0.5})
        tracker.write(2, {"reward/mean": 1.0})
    expected = [("rollouts/images", str(grids[0])), ("evaluation/a/images", str(grids[1]))]
    assert logged.read_text().splitlines() == ["1 0.5", f"1 {expected}", "2 1.0", "finished"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("is_readable", [True, False])
def test_metrics_are_logged_if_images_cannot_be(tmp_path: Path, fake_wandb, capfd, is_readable: bool) -> None:
    logged = fake_wandb(image="raise RuntimeError('no pictures')")
    tracker = make_tracker(
        tmp_path, images_of=lambda _: {"a": tmp_path / "a.png"} if is_readable else os.listdir("/no")
    )
    for step in (1, 2):
        tracker.write(step, {"reward/mean": float(step)})
    end_all([tracker], WAIT_S)
    assert logged.read_text().splitlines() == ["1 1.0", "2 2.0", "finished"]
    out, err = capfd.readouterr()
    reason = "RuntimeError: no pictures" if is_readable else "images of step 1: No such file or directory"
    assert err.count(f"tracker wandb: {reason}. The run continues") == 1 and out == ""


def test_missing_tracker_package_raises_with_the_command(monkeypatch) -> None:
    monkeypatch.setattr("megarl.run.trackers.tracker.find_spec", lambda name: None if name == "mlflow" else name)
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "run.trackers=[wandb,mlflow]"])
    fix = r"Fix: run pip install mlflow-skinny, or remove mlflow from run.trackers"
    expected = rf"^run.trackers=\[wandb, mlflow\]: mlflow is not installed. {fix}$"
    with pytest.raises(ValueError, match=expected):
        check_trackers(config)


@pytest.mark.parametrize("failure", [HANGS, "raise OSError('no space left')", "os._exit(1)"])
def test_run_completes_with_a_failing_tracker(
    tmp_path: Path, fake_wandb, monkeypatch, children: Children, failure: str
) -> None:
    fake_wandb(log=failure)
    monkeypatch.setattr("megarl.run.context.print_run_summary", lambda *_: None)
    with prepare(
        tmp_path, "run.trackers=[wandb]", f"trackers.timeout_s={SHORT_S}", "checkpoint.every_steps=null"
    ) as context:
        context.run(TrainedModels({}, {}), step=lambda: {"reward/mean": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3] and not children()
