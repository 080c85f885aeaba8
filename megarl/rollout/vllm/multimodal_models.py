"""Load vision-language models, and Qwen3.5's text models, which vLLM defines in the same modules.

The image processors in these modules import torchvision, whose builds on PyPI require CUDA. Without torchvision, the
modules are imported with stand-ins for it. vLLM inspects model classes in a subprocess without these stand-ins, so they
are inspected in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _ModelInfo

from megarl.models.families import TEXT_MODELS
from megarl.rollout.vllm.images import accept_patches, keep_patches

VISION_MODELS = {
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
}
"""vLLM's class of each supported vision-language model -> its module."""

_MODELS = "vllm.model_executor.models."
_TORCHVISION = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class MultimodalModel(_LazyRegisteredModel):
    """A model class in a module that imports torchvision."""

    def inspect_model_cls(self) -> _ModelInfo:
        return super().inspect_model_cls() if _has_torchvision() else _ModelInfo.from_model_cls(self.load_model_cls())

    def load_model_cls(self) -> Any:
        with nullcontext() if _has_torchvision() else _stand_ins():
            model = super().load_model_cls()
        if self.class_name in VISION_MODELS:
            accept_patches(model)
        return model


def install() -> None:
    """Register the text models, their draft models and the vision-language models."""
    keep_patches()
    for name in TEXT_MODELS.values():
        ModelRegistry.models[name] = MultimodalModel(f"{_MODELS}qwen3_5", name)
        draft = name.replace("ForCausalLM", "MTP")
        ModelRegistry.models[draft] = MultimodalModel(f"{_MODELS}qwen3_5_mtp", draft)
    for name, module in VISION_MODELS.items():
        ModelRegistry.models[name] = MultimodalModel(_MODELS + module, name)


@cache
def _has_torchvision() -> bool:
    return find_spec("torchvision") is not None


class _Unused(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def _stand_ins() -> Iterator[None]:
    """Provide stand-ins for torchvision's modules. They are removed again, because transformers would otherwise
    consider torchvision installed."""
    import transformers.image_utils
    import transformers.models.qwen2_vl  # noqa: F401  # both look for torchvision when they are imported

    names = [f"torchvision{name}" for name in _TORCHVISION]
    for name in names:
        module = _Unused(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
