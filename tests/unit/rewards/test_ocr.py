"""The OCR reward, with the real OCR model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from megarl.core.errors import UserError, install_extra
from megarl.rewards.ocr import OcrExact
from megarl.rewards.options import configure
from megarl.rewards.pool import FunctionPool
from tests.paths import OCR
from tests.timing import WAIT_S


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide the packages of the extra `ocr` to this process and to the reward processes."""
    if not OCR.exists():
        pytest.skip("the OCR model is not installed: make test-units installs it")
    monkeypatch.syspath_prepend(OCR)
    monkeypatch.setenv("PYTHONPATH", str(OCR))
    yield


def drawn(text: str, width: int = 220, height: int = 40, **colours: str) -> np.ndarray:
    """Return a line of text, uint8 [height, width, 3]."""
    image = Image.new("RGB", (width, height), colours.get("ground", "white"))
    font = ImageFont.load_default(int(0.75 * height))
    ImageDraw.Draw(image).text((10, height // 8), text, fill=colours.get("ink", "black"), font=font)
    return np.asarray(image)


def test_text_is_read(installed):
    reward = OcrExact()
    assert reward.read(drawn("the number 47")) == "the number 47"
    assert reward("", drawn("Hello 47"), "Hello 47") and not reward("", drawn("Hello 47"), "Hello 41")
    assert reward("", drawn("305", 90, 32, ground="black", ink="white"), 305)
    assert not reward("", np.full((16, 24, 3), 128, np.uint8), "47")


def test_spaces_and_width_variants_are_ignored(installed, monkeypatch):
    reward = OcrExact()
    monkeypatch.setattr(reward, "read", lambda image: " ４ 7")
    assert reward("", drawn(""), "47") and not reward("", drawn(""), "4")


def test_characters_limit_what_is_read(installed):
    letters, digits = OcrExact().read(drawn("OPEN")), OcrExact(characters="0123456789").read(drawn("OPEN"))
    assert letters == "OPEN" and set(digits) <= set("0123456789")
    with pytest.raises(UserError, match=r"ocr_exact: options.characters='0☃': cannot read '☃'\. Fix: remove it"):
        configure("ocr_exact", OcrExact, {"characters": "0☃"})


def test_answers_without_text_are_found(installed):
    reward = OcrExact()
    for answer in ("47", 47):
        reward.check_row(answer)
    for answer in (None, "", " "):
        with pytest.raises(ValueError, match=r"ocr_exact: .* has no text\. Fix: "):
            reward.check_row(answer)


def test_reward_processes_load_the_model(installed):
    pool = FunctionPool(["ocr_exact"], None, 1, timeout_s=WAIT_S)
    try:
        assert pool.call("ocr_exact", "", drawn("47", 60), "47").result().value == 1.0
    finally:
        pool.close()


@pytest.mark.parametrize("module", ["onnxruntime", "rapidocr_onnxruntime"])
def test_missing_package_names_its_extra(monkeypatch, module):
    for name in ("onnxruntime", "rapidocr_onnxruntime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if OCR.exists():
        monkeypatch.syspath_prepend(OCR)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    if module == "onnxruntime":
        monkeypatch.setitem(sys.modules, module, None)
    elif not OCR.exists():
        pytest.skip("the OCR model is not installed: make test-units installs it")
    with pytest.raises(UserError) as error:
        configure("ocr_exact", OcrExact, {})
    assert (
        str(error.value) == f"rewards.functions: ocr_exact requires the package {module}. Fix: {install_extra('ocr')}"
    )
