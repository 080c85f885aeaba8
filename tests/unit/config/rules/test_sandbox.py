from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.rules.recipes import errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sandbox.provider=apptainer"],
            "sandbox.image=null: sandbox.provider=apptainer needs an image that contains python3. Fix: run `apptainer",
        ),
        (
            ["sandbox.provider=bubblewrap", "sandbox.image=python.sif"],
            "sandbox.image=python.sif: has no effect unless sandbox.provider=apptainer. Fix",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


def test_images_require_apptainer() -> None:
    for provider in ("auto", "apptainer"):
        assert (
            recipe(f"sandbox.provider={provider}", "sandbox.image=python.sif").sandbox.image
            == f"{Path.cwd()}/python.sif"
        )
