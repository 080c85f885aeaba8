"""Rules for section `sandbox`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def apptainer_has_an_image(config: Config) -> str | None:
    sandbox = config.sandbox
    if sandbox.provider != "apptainer" or sandbox.image is not None:
        return None
    return (
        "sandbox.image=null: sandbox.provider=apptainer needs an image that contains python3. Fix: run `apptainer "
        "pull python.sif docker://python:3.11-slim` and set sandbox.image=python.sif"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (apptainer_has_an_image,)
