"""Resources shared by several files: a series of runs, whose engine keeps running, its model, and a reference run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gated import Recipe
from tests.e2e.series import Series
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    series = Series(tmp_path_factory.mktemp("series"))
    yield series
    series.end()


@pytest.fixture(scope="session")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return Recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="session")
def uninterrupted(gated: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with which interrupted runs are compared."""
    run = gated.finish(tmp_path_factory.mktemp("uninterrupted"))
    assert "starting at the first step" in run.output
    assert not run.left_shared_memory()
    assert not run.left_files()
    return run.folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)
