"""Rules for section `sandbox`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.schema import Config


def apptainer_has_an_image(config: Config) -> str | None:
    sandbox = config.sandbox
    if sandbox.provider != "apptainer" or sandbox.image is not None:
        return None
    return (
        "sandbox.image=null: sandbox.provider=apptainer needs an image with a python3. Fix: set it, such as to "
        "the python.sif of `apptainer pull python.sif docker://python:3.11-slim`"
    )


RULES: tuple[Callable[[Config], str | None], ...] = (apptainer_has_an_image,)
