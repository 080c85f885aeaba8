"""megarl: reinforcement learning for language models, with training in Megatron-core and rollouts in vLLM.

The names in `__all__` are the public API. They are imported on first use, so `import megarl` is fast. Everything else
may change between versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api.commands import (
        StopTraining,
        TrainingResult,
        convert_to_huggingface,
        convert_to_megatron,
        reshape_checkpoint,
        run_evaluation,
        run_training,
    )
    from megarl.api.functions import (
        compute_advantages,
        compute_token_advantages,
        kl_divergence,
        pack_samples,
        policy_loss,
    )
    from megarl.api.plans import plan_layout, plan_reshard
    from megarl.api.recipes import load_config
    from megarl.api.tables import read_metrics, read_rollouts
    from megarl.config.schema import Config
    from megarl.core.errors import InfrastructureFailure, RunFailure, UserError

__version__ = "0.1.0"

__all__ = [
    "Config",
    "InfrastructureFailure",
    "RunFailure",
    "StopTraining",
    "TrainingResult",
    "UserError",
    "__version__",
    "compute_advantages",
    "compute_token_advantages",
    "convert_to_huggingface",
    "convert_to_megatron",
    "kl_divergence",
    "load_config",
    "pack_samples",
    "plan_layout",
    "plan_reshard",
    "policy_loss",
    "read_metrics",
    "read_rollouts",
    "reshape_checkpoint",
    "run_evaluation",
    "run_training",
]

_MODULES = {
    "Config": "config.schema",
    "InfrastructureFailure": "core.errors",
    "RunFailure": "core.errors",
    "StopTraining": "api.commands",
    "TrainingResult": "api.commands",
    "UserError": "core.errors",
    "compute_advantages": "api.functions",
    "compute_token_advantages": "api.functions",
    "convert_to_huggingface": "api.commands",
    "convert_to_megatron": "api.commands",
    "kl_divergence": "api.functions",
    "load_config": "api.recipes",
    "pack_samples": "api.functions",
    "plan_layout": "api.plans",
    "plan_reshard": "api.plans",
    "policy_loss": "api.functions",
    "read_metrics": "api.tables",
    "read_rollouts": "api.tables",
    "reshape_checkpoint": "api.commands",
    "run_evaluation": "api.commands",
    "run_training": "api.commands",
}
"""The module that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    return getattr(import_module(f"megarl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
