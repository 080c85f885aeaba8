"""Canaries of image models: fixed inputs at which every engine and the trainer compute velocities with the same
weights, so any difference is a mismatch between the two, not an effect of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.groups.engines import ImageEngineGroup
from megarl.cluster.groups.trainers import ImageTrainerGroup
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.latents import VelocityInput, canaries
from megarl.models.denoiser import DenoiserShape
from megarl.models.folder import read_config
from megarl.resharding.verification import regions

LIMITS = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.00625}
"""Largest relative difference that rounding can explain, by dtype. Wrong weights cause differences of 0.1 or more."""

MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class ImageCanaries:
    """The canaries of a run."""

    config: Config
    workers: Workers
    inputs: Sequence[VelocityInput]

    @classmethod
    def of(cls, config: Config, workers: Workers) -> ImageCanaries:
        shape = DenoiserShape.of(read_config(workers.model_folder))
        return cls(config, workers, canaries(shape.channels, shape.caption, shape.patch, shape.pooled))

    @property
    def limit(self) -> float:
        return LIMITS[self.config.model.dtype]

    def measure(self) -> dict[str, float]:
        """Return each engine's difference from the trainer, by engine name; see `largest_difference`."""
        workers, engines, actor = self.workers, self.workers.engines, self.workers.actor
        assert isinstance(engines, ImageEngineGroup) and isinstance(actor, ImageTrainerGroup), "not an image model"
        workers.switch_to_rollout()
        found = engines.velocities(self.inputs).result()
        workers.suspend_engines()
        trained = workers.trained.run({"actor": lambda: actor.velocities(self.inputs)}, parts=("parameters",))["actor"]
        return {name: largest_difference(velocities, trained) for name, velocities in found.items()}

    def explain(self, measured: Mapping[str, float]) -> str:
        """Describe the engine that differs most, and whether its weights equal the trainer's."""
        workers = self.workers
        name = max(measured, key=measured.__getitem__)
        infos = workers.engines.info([]).result()
        workers.trained.stage_actor_for_sync()
        differing = workers.refit.differing()[name]
        workers.suspend_engines()
        count = len(regions(workers.engines.holders))
        if differing:
            cause = f"{len(differing)} of {count} parts of its weights differ: {'; '.join(differing[:MAX_NAMED])}"
        else:
            cause = (
                "its weights equal the trainer's, so their implementations compute different results. Trainer: "
                f"{workers.actor.kernels}. Engine: {infos[name].description}"
            )
        return f"the velocities of {name} differ from the trainer's (relative difference {measured[name]:.1e}): {cause}"


def largest_difference(found: Sequence[NDArray[np.float32]], trained: Sequence[NDArray[np.float32]]) -> float:
    """Return the largest root mean square difference of an input's velocities, divided by the root mean square of the
    trainer's velocities."""
    return max(map(_difference, found, trained))


def _difference(velocity: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    difference = velocity.astype(np.float64) - reference
    return float(np.sqrt(np.square(difference).mean() / np.square(reference.astype(np.float64)).mean()))
