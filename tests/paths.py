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
VLLM_GPU = ROOT / ".venv" / "vllm-gpu"
"""The Python files of each supported vLLM release for GPUs, unpacked by the make targets that need them."""
VLLM_LOCK = ROOT / "tools" / "environment" / "vllm-gpu.lock"
