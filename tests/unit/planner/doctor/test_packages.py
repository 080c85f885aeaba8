"""Checks of installed packages against the tested ranges."""

from __future__ import annotations

import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megarl.planner.doctor import packages
from megarl.planner.doctor.packages import (
    PACKAGES,
    PYTHON,
    Package,
    apex,
    check_package,
    check_packages,
    installed,
    python,
)
from tests.paths import ROOT

TESTED = {tested.name: tested for tested in PACKAGES}


@pytest.mark.parametrize("name", [tested.name for tested in PACKAGES if not tested.on_gpu])
def test_installed_versions_are_in_the_tested_ranges(name):
    found = check_package(TESTED[name], has_gpu=False)
    assert found.state == "ok"
    assert found.found == version(next(d for d in TESTED[name].distributions if installed((d,))))


def test_pyproject_requires_the_tested_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {r.name: r.specifier for r in map(Requirement, (*extras["run"], *extras["gpu"]))}
    named = [tested for tested in PACKAGES if tested.name in asked]
    assert len(named) == 7
    assert {tested.name: asked[tested.name] for tested in named} == {t.name: SpecifierSet(t.versions) for t in named}
    assert Requirement(f"python{project['requires-python']}").specifier.contains("3.12")
    assert SpecifierSet(PYTHON).contains("3.12.9")


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ("1.9", "problem"),
        ("2.0", "ok"),
        ("2.1.3+cu130", "ok"),
        ("2.2.0.dev20261101", "ok"),
        ("3.0", "problem"),
        (None, "problem"),
    ],
)
def test_version_is_compared_with_the_tested_range(monkeypatch, found, state):
    monkeypatch.setattr(packages, "installed", lambda names: found)
    finding = check_package(Package("thing", ">=2.0,<3", ("thing",), "pip install thing"), has_gpu=False)
    assert (finding.state, finding.fix) == (state, "" if state == "ok" else "pip install thing")
    assert finding.found == (found or "not installed")


@pytest.mark.parametrize(("has_gpu", "state"), [(True, "problem"), (False, "note")])
def test_missing_gpu_package_is_a_problem_only_with_gpus(has_gpu, state):
    finding = check_package(Package("kernels", ">=1", ("no-such-thing",), "build them", on_gpu=True), has_gpu)
    assert finding.state == state
    assert bool(finding.fix) == has_gpu


def test_missing_package_of_some_models_is_a_note():
    package = Package("kernels", ">=1", ("no-such-thing",), "build them", on_gpu=True, only_for="Some and Others")
    finding = check_package(package, has_gpu=True)
    assert (finding.state, finding.found) == ("note", "not installed; needed on GPUs for Some and Others")


@pytest.mark.parametrize(
    ("file", "state"),
    [
        (None, "problem"),
        ("kernels/of_torch.py", "problem"),
        ("of_torch.cpython-312-x86_64-linux-gnu.so", "ok"),
        ("kernels/wheel_lib/of_torch.cpython-312-x86_64-linux-gnu.so", "ok"),
    ],
    ids=["missing", "not compiled", "beside it", "in it"],
)
def test_missing_compiled_module_is_a_problem(tmp_path, monkeypatch, file, state):
    """The compiled module is next to the package, as a separate wheel installs it, or inside the package, as a build
    from source does."""
    suffix = next(suffix for suffix in EXTENSION_SUFFIXES if suffix.startswith(".cpython"))
    for name in ("kernels/__init__.py", *([file.replace(".cpython-312-x86_64-linux-gnu.so", suffix)] if file else [])):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packages, "installed", lambda names: "1.2")
    tested = Package("kernels", ">=1", ("kernels",), "build it", on_gpu=True, compiled=("kernels", "of_torch"))
    finding = check_package(tested, has_gpu=True)
    assert (finding.state, finding.fix) == (state, "" if state == "ok" else "build it")
    assert finding.found == ("1.2" if state == "ok" else "1.2 without of_torch")


@pytest.mark.parametrize(("found", "state"), [("3.10.14", "problem"), ("3.12.1", "ok"), ("3.13.0", "problem")])
def test_python_version_is_compared_with_the_range(found, state):
    assert python(found).state == state


@pytest.mark.parametrize(
    ("folders", "metadata", "state", "found"),
    [
        (["optimizers"], "0.1", "ok", "0.1"),
        ([], "0.9.10.dev0", "problem", "a different project named apex, 0.9.10.dev0"),
        ([], None, "problem", "a different module named apex"),
        (["optimizers"], None, "ok", "built from source"),
    ],
    ids=["NVIDIA's", "PyPI's", "a local folder", "NVIDIA's without metadata"],
)
def test_pypi_apex_is_distinguished_from_nvidias(tmp_path, monkeypatch, folders, metadata, state, found):
    """Both packages are laid out as pip would install them."""
    for folder in ("apex", *(f"apex/{name}" for name in folders)):
        (tmp_path / folder).mkdir()
    (tmp_path / "apex/__init__.py").touch()
    if metadata:
        information = tmp_path / f"apex-{metadata}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {metadata}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = apex(has_gpu=True)
    assert (finding.state, finding.found) == (state, found)
    assert ("pip uninstall apex" in finding.fix) == (state == "problem")
    sys.modules.pop("apex", None)


def test_missing_apex_is_a_note():
    assert apex(has_gpu=False).state == apex(has_gpu=True).state == "note"


def test_package_checks_import_none_of_the_packages(monkeypatch):
    before = set(sys.modules)
    check_packages(has_gpu=True)
    assert {name.partition(".")[0] for name in set(sys.modules) - before}.isdisjoint(
        {"torch", "vllm", "ray", "megatron", "transformers", "apex"}
    )


def test_fixes_name_the_tested_range():
    for tested in PACKAGES:
        assert tested.versions in tested.fix or tested.name == "NCCL"
    assert Path(packages.__file__).parent.name == "doctor"
