"""Reward for images that show a line of text, read by an optional OCR model."""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.rewards.image import checked

HEIGHT = 48
"""Height in pixels of the recognizer's input."""


class OcrExact:
    """Reward 1 if the text in the image equals the answer, else 0. The text is read by PP-OCRv4's recognizer
    (https://github.com/PaddlePaddle/PaddleOCR) from the package rapidocr-onnxruntime.

    Text and answer are compared without spaces and after Unicode's compatibility normalization. A single line of text
    must fill the image, because the recognizer does not locate text.
    """

    def __init__(self, characters: str | None = None):
        """characters: the characters that the recognizer may return, such as "0123456789" to exclude the letter O; None
        allows all."""
        import onnxruntime  # pyright: ignore[reportMissingImports]

        # Do not import the package: it imports OpenCV, whose wheel requires graphics libraries.
        package = importlib.util.find_spec("rapidocr_onnxruntime")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'rapidocr_onnxruntime'", name="rapidocr_onnxruntime")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1  # the pool already has a process per core
        model = Path(package.origin).parent / "models" / "ch_PP-OCRv4_rec_infer.onnx"
        self._session = onnxruntime.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
        known = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *known, " "]
        """Character of each output class. Class 0 is CTC's blank."""
        unknown = sorted({*(characters or "")} - {*self._characters})
        if unknown:
            raise ValueError(f"options.characters={characters!r}: cannot read {unknown[0]!r}. Fix: remove it")
        allowed = self._characters if characters is None else ["", *characters]
        self._excluded = ~np.isin(self._characters, allowed)

    def check_row(self, answer: Any) -> None:
        """Raise ValueError if the answer contains no text."""
        if answer is None or not _plain(str(answer)):
            raise ValueError(f"ocr_exact: the answer {answer!r} has no text. Fix: use the text that images must show")

    def __call__(self, prompt: str, response: NDArray[np.uint8], answer: Any) -> bool:
        return _plain(self.read(response)) == _plain(str(answer))

    def read(self, image: NDArray[np.uint8]) -> str:
        """Return the text in the image."""
        from PIL import Image

        height, width, _ = checked(image).shape
        size = max(1, round(width * HEIGHT / height)), HEIGHT
        pixels = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC), np.float32) / 127.5 - 1
        [scores] = self._session.run(None, {"x": pixels.transpose(2, 0, 1)[None]})
        classes = np.where(self._excluded, -np.inf, scores[0]).argmax(-1)
        starts = np.diff(classes, prepend=0) != 0  # a character may span several positions
        return "".join(self._characters[number] for number in classes[starts])


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())
