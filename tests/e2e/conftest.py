"""The series and the model shared by complete runs of several files, which therefore share a running engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.series import Series
from tests.tiny_model import write_tiny_llama


@pytest.fixture(scope="session")
def series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Series]:
    series = Series(tmp_path_factory.mktemp("series"))
    yield series
    series.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)
