"""The schema of the sections `run` and `trackers`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.fields import Section, Text
from megarl.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

HealthWarning = Literal[
    "constant_reward",
    "uninformative_groups",
    "zero_gradient",
    "all_truncated",
    "entropy_collapse",
    "mismatch",
    "rising_mismatch",
]
"""Warnings about a run that cannot learn or is about to diverge; see megarl/run/health.py."""


class Profile(Section):
    steps: Annotated[list[PositiveInt], Field(max_length=8)]
    ranks: Annotated[list[NonNegativeInt], Field(min_length=1)]


class Run(Section):
    name: Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    folder: Text
    seed: NonNegativeInt
    steps: PositiveInt
    export: bool
    replace: bool
    token_samples: NonNegativeInt
    trackers: list[TrackerName]
    profile: Profile
    allow_changes: list[Text]
    stop_on: list[HealthWarning]


class Wandb(Section):
    entity: Text | None
    mode: Literal["online", "offline"]


class Mlflow(Section):
    tracking_uri: Text | None


class Trackio(Section):
    space: Text | None


class Trackers(Section):
    timeout_s: PositiveFloat
    project: Text
    wandb: Wandb
    mlflow: Mlflow
    trackio: Trackio
