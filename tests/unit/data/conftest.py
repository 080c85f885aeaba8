"""A model folder that contains only a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_model import tiny_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return folder
