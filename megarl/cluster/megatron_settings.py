"""The check of a run's settings by Megatron itself, before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys

from megarl.cluster.failure import RunFailure
from megarl.config.model_schema import Trained
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.models.run_models import ModelFolders

PROGRAM = "megarl.megatron.preflight"


def check_megatron_settings(config: Config, models: ModelFolders) -> None:
    """Raises UserError with a line for each of Megatron's dataclasses that does not take the settings of a model, and
    for a number format that this machine does not have.

    The check runs in a process that ends: Megatron's import takes seconds, and memory that the driver has no other use
    for. Where the settings are only those of keys with rules of their own, there is no such process.
    """
    trained = models.trained(config)
    asked = {role: hf_config for role, hf_config in trained.items() if goes_beyond(config.placed(role))}
    if not asked:
        return
    try:
        child = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps({"config": config.model_dump(), "models": asked}),
            capture_output=True,
            text=True,
            timeout=config.cluster.timeouts.start,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailure(f"megatron_overrides and fp8: no answer from {PROGRAM} in {error.timeout:g} s") from None
    if child.returncode:
        [said] = child.stderr.splitlines()[-1:] or ["nothing"]
        raise RunFailure(f"megatron_overrides and fp8: {PROGRAM} ended with status {child.returncode} and said {said}")
    raise_all(json.loads(child.stdout.splitlines()[-1]))


def goes_beyond(trained: Trained) -> bool:
    return trained.fp8 is not None or any(trained.megatron_overrides.model_dump().values())
