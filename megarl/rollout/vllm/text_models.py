"""Load Qwen3.5's text models without torchvision.

vLLM defines them in the module of the multimodal models, whose image processors import torchvision. Its builds on PyPI
require CUDA. vLLM also inspects model classes in another process, which would import the module again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel, _ModelInfo

from megarl.models.families import TEXT_MODELS

_MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional")


class TextModel(_LazyRegisteredModel):
    """A model class that is imported and inspected in this process."""

    def inspect_model_cls(self) -> _ModelInfo:
        return _ModelInfo.from_model_cls(self.load_model_cls())

    def load_model_cls(self) -> Any:
        with _without_torchvision():
            return super().load_model_cls()


def install() -> None:
    """Register the text models and their drafting models. No effect if torchvision is installed."""
    if find_spec("torchvision") is None:
        for name in TEXT_MODELS.values():
            ModelRegistry.models[name] = TextModel("vllm.model_executor.models.qwen3_5", name)
            draft = name.replace("ForCausalLM", "MTP")
            ModelRegistry.models[draft] = TextModel("vllm.model_executor.models.qwen3_5_mtp", draft)


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
def _without_torchvision() -> Iterator[None]:
    """Provide stand-ins for torchvision's modules. They are removed again, because transformers would otherwise
    consider torchvision installed."""
    import transformers.image_utils
    import transformers.models.qwen2_vl  # noqa: F401  # both look for torchvision when they are imported

    names = [f"torchvision{name}" for name in _MODULES]
    for name in names:
        module = _Unused(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
