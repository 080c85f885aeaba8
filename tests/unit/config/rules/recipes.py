"""A valid recipe, and the error lines of `check` for invalid changes to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import BASE

RECIPE = (
    "model.path=smollm2",
    "data.source=arithmetic",
    "actor.layout={tp: 1, pp: 2, dp: 1, last_stage_layers: 13}",
    "actor.tokens_per_microbatch=1024",
    "rollout={max_new_tokens: 16, context_length: 256, tp: 1}",
    "batch={prompts_per_step: 16, samples_per_prompt: 8, prompts_per_update: 16}",
)

GAE = "algorithm.advantage.estimator=gae"


def recipe(*overrides: str) -> Config:
    return load(BASE, [*RECIPE, *overrides])


def errors(*overrides: str) -> list[str]:
    """Return the lines of the error, with paths relative to the working directory."""
    with pytest.raises(ValueError) as error:
        recipe(*overrides)
    return str(error.value).replace(f"{Path.cwd()}/", "").splitlines()
