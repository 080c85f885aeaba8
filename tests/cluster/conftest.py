"""Fixtures of the cluster tests. Each file has its own machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import write_rewards
from tests.cluster.machines import Machine, Machines
from tests.cluster.slurm import Slurm, slurm
from tests.e2e.run import write_recipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder shared by all machines, with a recipe and rewards."""
    folder = tmp_path_factory.mktemp("shared")
    write_recipe(folder)
    write_rewards(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Slurm]:
    with slurm(5, shared) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def machines(shared: Path) -> Iterator[list[Machine]]:
    with Machines(3, shared) as all_machines:
        yield all_machines
