"""Fixtures of the cluster's tests. Each file has machines of its own, beside those of the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.jobs import write_rewards
from tests.cluster.slurm import Slurm, slurm
from tests.e2e.run import write_recipe


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all machines see, with a recipe and rewards in it."""
    folder = tmp_path_factory.mktemp("shared")
    write_recipe(folder)
    write_rewards(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[Slurm]:
    with slurm(5, shared) as cluster:
        yield cluster
