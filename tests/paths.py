"""Paths of folders and recipes in the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
BASE = CONFIGS / "base.yaml"
QUICKSTART = CONFIGS / "quickstart.yaml"
VERIFIERS = ROOT / ".venv" / "verifiers"
"""The verifiers library and its dependencies, installed by the make targets that need them."""
OCR = ROOT / ".venv" / "ocr"
"""ONNX Runtime and the OCR model, installed by the make targets that need them."""
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"
"""Transformer Engine's Python sources, unpacked by the make targets that need them."""
GPU_SOURCES = ROOT / ".venv" / "gpu-sources"
"""Python files of GPU packages, including each supported vLLM release, unpacked by the make targets that need them."""
GPU_SOURCES_LOCK = ROOT / "tools" / "environment" / "gpu-sources.lock"
