"""Validate the run's settings with Megatron's own checks, before any of the run's processes starts."""

from __future__ import annotations

import json
import subprocess
import sys

from megarl.config.model_schema import Trained
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import RunFailure
from megarl.models.run_models import ModelFolders

PROGRAM = "megarl.megatron.preflight"


def check_megatron_settings(config: Config, models: ModelFolders) -> None:
    """Raise a UserError that lists every Megatron dataclass that rejects a model's settings, and any numeric precision
    that this machine does not support. The check runs in a short-lived process, so that the driver need not import
    Megatron. Without megatron_overrides and fp8, there is nothing to check."""
    trained = models.trained(config)
    checked = {role: hf_config for role, hf_config in trained.items() if needs_check(config.placed(role))}
    if not checked:
        return
    try:
        child = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps({"config": config.model_dump(), "models": checked}),
            capture_output=True,
            text=True,
            timeout=config.cluster.timeouts.start,
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailure(
            f"check of megatron_overrides and fp8: no response from {PROGRAM} within {error.timeout:g} s. "
            f"Fix: raise cluster.timeouts.start above {error.timeout:g}"
        ) from None
    if child.returncode:
        [error] = child.stderr.splitlines()[-1:] or ["no output"]
        raise RunFailure(
            f"check of megatron_overrides and fp8: {PROGRAM} exited with status {child.returncode}: {error}. Fix: run "
            "megarl doctor to check the installed packages"
        )
    raise_all(json.loads(child.stdout.splitlines()[-1]))


def needs_check(trained: Trained) -> bool:
    return trained.fp8 is not None or any(trained.megatron_overrides.model_dump().values())
