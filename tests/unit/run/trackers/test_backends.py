"""Tests of the tracker backends: metrics and images of a run and its second attempt are read back with each library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path

import pytest
from PIL import Image

from megarl.config.load import load
from megarl.run.trackers.backends import Settings
from megarl.run.trackers.tracker import Tracker, end_all
from tests.marks import exhaustive_but
from tests.paths import BASE, ROOT
from tests.timing import WAIT_S

PACKAGES = Path(sys.prefix) / "trackers"
"""The packages of tools/environment/trackers.lock, which `make test` installs outside the environment."""

FACTS = """
import io
from PIL import Image

def facts(data):
    image = Image.open(io.BytesIO(data))
    return [*image.size, image.getpixel((0, 0))[0]]
"""
"""Program that reads the width, the height and the red value of an image."""

READERS = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(folder)
found.Reload()
rows = [[e.step, e.value] for e in found.Scalars("reward/mean")]
images = [[e.step, e.width, e.height, *facts(e.encoded_image_string)] for e in found.Images("rollouts/images")]
assert all(image[1:3] == image[3:5] for image in images)
images = [[step, *facts] for step, _, _, *facts in images]
runs = 1
""",
    "wandb": """
import glob, os
from wandb.proto.wandb_internal_pb2 import Record
rows, images, ids = [], [], set()

def records(log, block=32768):  # LevelDB's log format: https://github.com/google/leveldb/blob/main/doc/log_format.md
    place, data = 7, b""
    while place + 7 <= len(log):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        data += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield Record.FromString(data)
            data = b""

for file in sorted(glob.glob(folder + "/wandb/offline-run-*/*.wandb")):
    for record in records(open(file, "rb").read()):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            row = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            if "reward/mean" in row:
                rows.append([row["step"], row["reward/mean"]])
            else:
                media = os.path.join(os.path.dirname(file), "files", row["rollouts/images.path"])
                images.append([row["step"], *facts(open(media, "rb").read())])
runs = len(ids)
""",
    "mlflow": """
from mlflow.tracking import MlflowClient
client = MlflowClient("file://" + folder)
[experiment] = [e for e in client.search_experiments() if e.name == "megarl"]
found = client.search_runs([experiment.experiment_id])
runs = len(found)
assert found[0].data.params["run.name"] == "tiny" and found[0].info.status == "FINISHED"
run_id = found[0].info.run_id
rows = [[m.step, m.value] for m in client.get_metric_history(run_id, "reward/mean")]
images = []
for item in client.list_artifacts(run_id, "images"):
    if item.path.endswith(".png"):
        name, _, step, *_ = item.path.split("+")
        assert name == "images/rollouts~images"
        images.append([int(step), *facts(open(client.download_artifacts(run_id, item.path), "rb").read())])
""",
    "trackio": """
import sqlite3
rows = sqlite3.connect(folder + "/megarl.db").execute("select step, metrics, run_name from metrics").fetchall()
runs = len({name for _, _, name in rows})
rows = [[step, json.loads(metrics)] for step, metrics, _ in rows]
media = [[step, row["rollouts/images"]["file_path"]] for step, row in rows if "rollouts/images" in row]
images = [[step, *facts(open(f"{folder}/media/{path}", "rb").read())] for step, path in media]
rows = [[step, row["reward/mean"]] for step, row in rows if "reward/mean" in row]
""",
}


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not PACKAGES.exists():
        pytest.fail(f"{PACKAGES} is missing. Fix: make {PACKAGES.relative_to(ROOT)}/.installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(PACKAGES), str(ROOT))))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")):
            monkeypatch.delenv(name)


def images_of(folder: Path, step: int) -> dict[str, Path]:
    """Return a step's images. Step 2 has none."""
    if step == 2:
        return {}
    path = folder / f"{step}.png"
    Image.new("RGB", (8 + step, 6), (10 * step, 0, 0)).save(path)
    return {"rollouts/images": path}


def attempt(tracker: str, folder: Path, log: Path, steps: range) -> None:
    overrides = ["run.name=tiny", "model.path=m", "data.source=arithmetic", f"run.trackers=[{tracker}]"]
    if tracker == "wandb":
        overrides.append("trackers.wandb.mode=offline")
    config = load(BASE, overrides).model_dump(mode="json")
    settings = Settings(tracker, "tiny", str(folder), steps[0] - 1, config)
    run = Tracker(settings, log, timeout_s=WAIT_S, images_of=lambda step: images_of(folder.parent, step))
    for step in steps:
        run.write(step, {"reward/mean": step / 4, "reward//a/b.py:f": 1.0, "reward/|x| (é)": 1.0})
    end_all([run], 60)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", exhaustive_but(READERS, "tensorboard"))
def test_resumed_run_continues_the_same_tracker_run(tracker: str, tmp_path: Path, capfd) -> None:
    """The first attempt is killed at step 3. The second resumes from the checkpoint of step 2."""
    folder, log = tmp_path / tracker, tmp_path / "log"
    folder.mkdir()
    attempt(tracker, folder, log, range(1, 4))
    attempt(tracker, folder, log, range(3, 5))
    assert capfd.readouterr() == ("", ""), log.read_text()
    printed = "print('\\n' + json.dumps([runs, rows, images]))"
    code = f"import json\nfolder = {str(folder)!r}\n{FACTS}{READERS[tracker]}\n{printed}"
    environment = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    read = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    num_runs, rows, images = json.loads(read.stdout.splitlines()[-1])
    assert num_runs == 1
    repeated = [] if tracker == "tensorboard" else [[3, 0.75]]  # TensorBoard hides the first attempt's step 3
    assert sorted(rows) == sorted([[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0], *repeated])
    assert sorted(images) == sorted(
        [step, 8 + step, 6, 10 * step] for step in (1, *(step for step, _ in repeated), 3, 4)
    )


def test_tracker_packages_shadow_none_of_the_environment() -> None:
    trackers = {d.metadata["Name"].lower() for d in distributions(path=[str(PACKAGES)])}
    environment = {d.metadata["Name"].lower() for d in distributions(path=[get_path("purelib")])}
    assert trackers and not trackers & environment
