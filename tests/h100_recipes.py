"""The H100 recipes, with the config.json of their models in place of weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.models.multimodal import text_config
from megarl.models.vision import add_vision
from tests.paths import CONFIGS as FOLDER
from tests.published_models import (
    CONFIGS,
    PARAMETERS,
    VISION_CONFIGS,
    VISION_PARAMETERS,
    Z_IMAGE,
    Z_IMAGE_PARAMETERS,
)

WITH_VISION = {f"{name} with images": name for name in VISION_CONFIGS}
"""Key in MODELS of a model with its vision tower -> its key in VISION_CONFIGS."""

MODELS = CONFIGS | {"Z-Image": Z_IMAGE}
MODELS |= {key: add_vision(text_config(VISION_CONFIGS[name])) for key, name in WITH_VISION.items()}


@dataclass(frozen=True)
class H100Recipe:
    """A recipe file, named MODEL-NxH100-ALGORITHM."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def gpus(self) -> int:
        return int(re.search(r"-(\d+)xh100-", self.name)[1])

    @property
    def nodes(self) -> int:
        return self.gpus // 8

    @property
    def algorithm(self) -> str:
        return self.name.partition("xh100-")[2]

    @property
    def model(self) -> str:
        """The model's key in MODELS."""
        prefix = self.name.split(f"-{self.gpus}xh100-")[0]
        prefix += " with images" if self.name.endswith("-images") else ""
        [name] = [key for key in MODELS if key.lower().replace("llama-", "llama") == prefix]
        return name

    @property
    def parameters(self) -> int:
        if self.model in WITH_VISION:
            return VISION_PARAMETERS[WITH_VISION[self.model]]
        return Z_IMAGE_PARAMETERS if self.hf_config is Z_IMAGE else PARAMETERS[self.model]

    @property
    def hf_config(self) -> dict[str, Any]:
        return MODELS[self.model]

    def overrides(self, folder: Path) -> list[str]:
        """Write the model and data files that the planner reads. Return the overrides with their paths."""
        stored = VISION_CONFIGS[WITH_VISION[self.model]] if self.model in WITH_VISION else self.hf_config
        actor, classifier = folder / "model", folder / "classifier"
        labels = {"architectures": ["ForSequenceClassification"], "id2label": {"0": "reward"}}
        weights, tokenizer = actor, actor
        if self.hf_config is Z_IMAGE:
            weights, tokenizer = actor / "transformer", actor / "tokenizer"
            actor.mkdir(exist_ok=True)
            (actor / "model_index.json").touch()
        for path, content in ((weights, stored), (classifier, self.hf_config | labels)):
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(content))
        tokenizer.mkdir(exist_ok=True)
        for path in (weights / "model.safetensors", tokenizer / "tokenizer.json"):
            path.touch()  # `megarl launch` only checks that these files exist
        for needed in ("model.safetensors", "tokenizer.json"):
            (classifier / needed).touch()
        data = folder / "data.jsonl"
        data.touch()
        classifiers = ("critic", "reward_model") if "rlhf" in self.name else ()
        return [f"model.path={actor}", f"data.source={data}", *(f"{role}.path={classifier}" for role in classifiers)]


RECIPES = [H100Recipe(file) for file in sorted((FOLDER / "h100").glob("*xh100-*.yaml"))]
"""All H100 recipes, without the overlays that they share."""
