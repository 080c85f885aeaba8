"""The places of folders and recipes in the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
BASE = CONFIGS / "base.yaml"
QUICKSTART = CONFIGS / "quickstart.yaml"
VERIFIERS = ROOT / ".venv" / "verifiers"
"""The library verifiers and its packages, which `make` puts there before the targets that run it."""
TRANSFORMER_ENGINE = ROOT / ".venv" / "transformer-engine"
"""Transformer Engine's Python sources, which `make` unpacks there before the targets that read them."""
