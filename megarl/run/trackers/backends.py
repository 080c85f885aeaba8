"""Backends for experiment trackers, one class per library. They run in a separate process, so that failures in a
library cannot affect the run.

Each library is optional, and imported only when its tracker is opened.
"""

from __future__ import annotations

import os
import posixpath
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.files import read_text, replace_text

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
"""Maps each tracker to the package to install. Trackers are named after their Python modules."""

MLFLOW_VALUE_CHARACTERS = 6000
"""Maximum length of parameter values in MLflow, in characters."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One tracker's settings. Its files and run id are in `folder`. The run resumes after `step`; 0: a new run."""

    tracker: str
    name: str
    folder: str
    step: int
    config: Mapping[str, Any]

    @property
    def options(self) -> Mapping[str, Any]:
        return self.config["trackers"][self.tracker]

    @property
    def project(self) -> str:
        return self.config["trackers"]["project"]

    def read_id(self) -> str | None:
        """Return the tracker's run id from an earlier attempt, or None if there is none."""
        file = self._id_file
        return read_text(file) if os.path.lexists(file) else None

    def save_id(self, run_id: str) -> str:
        replace_text(self._id_file, run_id)
        return run_id

    @property
    def _id_file(self) -> Path:
        return Path(self.folder) / "run_id"


class Backend(ABC):
    """A tracker run. If a run is resumed, it continues the same tracker run."""

    @abstractmethod
    def __init__(self, settings: Settings):
        """Open the tracker run."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def write_images(self, step: int, images: Mapping[str, str]) -> None:
        """Log the images of a step after its metrics. images: paths of PNG files, keyed by name."""

    @abstractmethod
    def close(self) -> None:
        """Flush all metrics and finish the tracker run."""


class TensorBoard(Backend):
    def __init__(self, settings: Settings):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportMissingImports]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportMissingImports]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore[reportMissingImports]

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(settings.folder)
        if settings.step:  # hide later steps that an earlier attempt wrote
            self._writer.add_event(Event(step=settings.step + 1, file_version="brain.Event:2"))
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=settings.step + 1, session_log=start, wall_time=time.time()))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()])

    def write_images(self, step: int, images: Mapping[str, str]) -> None:
        self._add(step, [self._summary.Value(tag=name, image=self._image(path)) for name, path in images.items()])

    def _add(self, step: int, values: Sequence[Any]) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def _image(self, path: str) -> Any:
        data = Path(path).read_bytes()
        width, height = (int.from_bytes(data[place : place + 4]) for place in (16, 20))  # byte offsets in a PNG file
        return self._summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)

    def close(self) -> None:
        self._writer.close()


class Wandb(Backend):
    def __init__(self, settings: Settings):
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb, options = wandb, settings.options
        self._run = wandb.init(
            project=settings.project,
            entity=options["entity"],
            mode=options["mode"],
            name=settings.name,
            id=settings.read_id() or settings.save_id(uuid.uuid4().hex[:12]),
            resume="allow",
            dir=settings.folder,
            config=dict(settings.config),
            settings=wandb.Settings(console="off", save_code=False, x_disable_stats=True),
        )
        # Steps in W&B must increase, but a resumed run repeats the steps after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def write_images(self, step: int, images: Mapping[str, str]) -> None:
        self._run.log({"step": step, **{name: self._wandb.Image(path) for name, path in images.items()}})

    def close(self) -> None:
        self._run.finish()


class Mlflow(Backend):
    def __init__(self, settings: Settings):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import Image  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param, RunStatus  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        uri = settings.options["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        self._client, self._metric = MlflowClient(uri or Path(settings.folder).absolute().as_uri()), Metric
        self._image = Image
        self._id = settings.read_id()
        if self._id is not None:
            self._client.update_run(self._id, status=RunStatus.to_string(RunStatus.RUNNING))
            return
        experiment = self._client.get_experiment_by_name(settings.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(settings.project)
        self._id = settings.save_id(self._client.create_run(number, run_name=settings.name).info.run_id)
        values = [Param(key, str(value)[:MLFLOW_VALUE_CHARACTERS]) for key, value in leaves(settings.config)]
        for first in range(0, len(values), 100):  # MLflow accepts 100 per call
            self._client.log_batch(self._id, params=values[first : first + 100])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        values = [self._metric(mlflow_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def write_images(self, step: int, images: Mapping[str, str]) -> None:
        for name, path in images.items():
            self._client.log_image(self._id, self._image(path), key=mlflow_name(name), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Backend):
    def __init__(self, settings: Settings):
        os.environ.setdefault("TRACKIO_DIR", settings.folder)
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio = trackio
        # Trackio resumes runs by name, and an earlier run may have the same name.
        name = settings.read_id() or settings.save_id(f"{settings.name}-{uuid.uuid4().hex[:6]}")
        self._run = trackio.init(
            project=settings.project,
            name=name,
            space_id=settings.options["space"],
            config=dict(settings.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def write_images(self, step: int, images: Mapping[str, str]) -> None:
        self._run.log({name: self._trackio.Image(path) for name, path in images.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


BACKENDS: Mapping[str, type[Backend]] = dict(tensorboard=TensorBoard, wandb=Wandb, mlflow=Mlflow, trackio=Trackio)


def mlflow_name(metric: str) -> str:
    """Return the metric's name with only characters that MLflow allows. Names for custom reward functions contain a
    path."""
    return posixpath.normpath(re.sub(r"[^\w\-./ :]", "_", metric))


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each entry whose value is not a mapping."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
