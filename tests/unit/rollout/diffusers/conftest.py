from __future__ import annotations

from pathlib import Path

import pytest

from megarl.rollout.diffusers.engine import DiffusersEngine
from tests.tiny_denoiser import MODELS, TinyDenoiser
from tests.tiny_image_model import load_pipeline, write_tiny_image_model


@pytest.fixture(scope="session", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def tiny(name) -> TinyDenoiser:
    return MODELS[name]


@pytest.fixture(scope="session")
def folder(tmp_path_factory, name) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp("model"), name)


@pytest.fixture(scope="session")
def pipeline(folder):
    return load_pipeline(folder)


@pytest.fixture
def engine(folder) -> DiffusersEngine:
    engine = DiffusersEngine(folder, "float32", max_batch=4, loads_weights=True)
    engine.hold(0)
    return engine
