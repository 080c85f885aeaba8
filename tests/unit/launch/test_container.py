"""The H100 container satisfies megarl's requirements. `make resolve-gpu` checks that its packages are compatible."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.planner.doctor.packages import PACKAGES
from tests.paths import ROOT

CONTAINER = ROOT / "launch" / "container"
DOCKERFILE = (CONTAINER / "Dockerfile").read_text()
LOCK = dict(re.findall(r"^([^#\s]+)==(\S+) --hash", (CONTAINER / "gpu-py312.lock").read_text(), re.M))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ASKED = [Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS["run"], *EXTRAS["gpu"], *EXTRAS["gguf"]]]


@pytest.mark.parametrize("requirement", [one for one in ASKED if one.name != "megarl-trainer"], ids=str)
def test_lock_file_satisfies_the_requirements(requirement: Requirement) -> None:
    assert requirement.specifier.contains(LOCK[canonicalize_name(requirement.name)])


def test_every_package_of_every_lock_file_has_a_hash() -> None:
    locks = [*ROOT.glob("tools/*/*.lock"), *CONTAINER.glob("*.lock")]
    pins = [line for lock in locks for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert len(locks) == 10 and len(pins) > 400
    form = r"[\w.-]+==[\w.+]+( --hash=sha256:[0-9a-f]{64})+( # (any-python|kept|source))?"
    assert [pin for pin in pins if not re.fullmatch(form, pin)] == []


@pytest.mark.parametrize(
    "path",
    [
        "Makefile",
        "tools/environment/build.sh",
        "tools/gpu/kit.sh",
        "tools/gpu/te_kit.sh",
        "launch/container/Dockerfile",
    ],
)
def test_lock_files_are_installed_with_their_hashes(path: str) -> None:
    text = re.sub(r"\\\n\s*", "", (ROOT / path).read_text())
    installs = [line for line in text.splitlines() if "--requirement" in line]
    assert installs and all(re.search(r"--require-hashes|^\t\$\(PIP\)", line) for line in installs)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_lock_file_has_versions_that_doctor_accepts(package) -> None:
    names = [canonicalize_name(name) for name in package.distributions]
    [version] = {LOCK[name] for name in names if name in LOCK}
    assert Requirement(f"p{package.versions}").specifier.contains(version)


def test_transformer_engine_packages_match_each_other_and_cuda() -> None:
    assert LOCK["transformer-engine"] == LOCK["transformer-engine-cu13"]
    assert f"transformer-engine-torch=={LOCK['transformer-engine']} " in DOCKERFILE
    assert re.search(r"^FROM nvidia/cuda:13\.", DOCKERFILE, re.M)
    assert LOCK["cuda-toolkit"].startswith("13.0.")
    assert "nvidia-nccl-cu12" not in LOCK


def test_files_copied_by_the_dockerfile_exist() -> None:
    copied = [source for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.M) for source in line.split()[:-1]]
    assert {"megarl", "pyproject.toml", "launch/container/gpu-py312.lock"} <= set(copied)
    assert all((ROOT / source).exists() for source in copied)


def test_symlinks_of_the_package_resolve_in_the_image(tmp_path: Path) -> None:
    """COPY copies a folder's contents and keeps symlinks. A file keeps its name."""
    for line in re.findall(r"^COPY (.+ /opt/src\b.*)$", DOCKERFILE, re.M):
        *sources, destination = line.split()
        for source in sources:
            target = Path(f"{tmp_path}/{destination}")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, symlinks=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, target)
    links = [path for path in (tmp_path / "opt/src/megarl").rglob("*") if path.is_symlink()]
    assert links and all(link.exists() for link in links)


def test_only_locked_packages_are_installed() -> None:
    """pip must neither resolve dependencies nor download build requirements."""
    commands = DOCKERFILE.replace("\\\n", " ")
    installs = re.findall(r"pip install (.+)", commands)
    assert len(installs) == 4
    assert all("--no-deps" in install for install in installs)
    assert all("--no-build-isolation" in install for install in installs[1:])
    assert {"wheel", "setuptools", "ninja"} <= LOCK.keys()
    assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in commands.partition("transformer-engine-torch==")[0]
    assert re.search(r"^ARG APEX=[0-9a-f]{40}$", DOCKERFILE, re.M)
