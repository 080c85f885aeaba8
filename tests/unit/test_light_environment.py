"""What looks at recipes and machines works where nothing is installed but the core: megarl from a wheel, and links to
its own dependencies and to those that they ask for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megarl.config.load import dump, load
from tests.paths import CONFIGS, ROOT
from tests.published_models import CONFIGS as MODELS
from tests.timing import RUN_S, WAIT_S

ABSENT = ("torch", "megatron", "vllm", "ray", "transformers", "pyarrow", "safetensors", "matplotlib")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "megarl", "configs", "launch")


def closure() -> set[str]:
    """Return the names of the distributions that pip would install for megarl without extras."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    waiting, found = [(Requirement(line), "") for line in asked], set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (requirement.name, wanted) in found:
                continue
            found.add((requirement.name, wanted))
            try:
                needs = distribution(requirement.name).requires or []
            except PackageNotFoundError:  # for another system or Python
                continue
            waiting += [(Requirement(line), wanted) for line in needs]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("source"))) as wheel:
        wheel.extractall(site)
    for name in closure():
        try:
            files = distribution(name).files or ()
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    return site


def build_wheel(source: Path) -> Path:
    """Return megarl's wheel, built in a folder to which the checkout is copied: a build leaves files where it runs."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "wheel", ".", *options, "--wheel-dir", "wheels"]
    subprocess.run(command, cwd=source, check=True, timeout=WAIT_S)
    [wheel] = (source / "wheels").iterdir()
    return wheel


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the config.json of a model."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-7B"]))
    return tmp_path


def megarl(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of megarl, with RECIPES for the folder of its recipes, and FOLDER for the one that it runs in."""
    places = {"RECIPES": site / "megarl" / "config" / "recipes", "FOLDER": cwd}
    for word, place in places.items():
        arguments = [argument.replace(word, str(place)) for argument in arguments]
    return run(site, "-m", "megarl.cli", *arguments, cwd=cwd)


def run(site: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Runs may not lie in the folder of temporary files, which that of the tests may be in.
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site), "TMPDIR": "/var/tmp"}
    command = [sys.executable, "-S", *command]  # without the site's packages
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_S)


def test_nothing_else_is_there(site, tmp_path):
    code = f"import importlib.util; print([n for n in {ABSENT} if importlib.util.find_spec(n)])"
    assert run(site, "-c", code, cwd=tmp_path).stdout == "[]\n"
    code = "import megarl; print(megarl.__file__)"
    assert run(site, "-c", code, cwd=tmp_path).stdout == f"{site}/megarl/__init__.py\n"


def test_the_wheel_has_what_the_checkout_has(site):
    """Every file of the package, and the recipes and the script of a job, which are beside it in the checkout."""
    expected = files(ROOT / "megarl")
    expected |= {f"config/recipes/{name}": text for name, text in files(CONFIGS).items()}
    expected["launch/slurm.sbatch"] = (ROOT / "launch" / "slurm.sbatch").read_bytes()
    found = files(site / "megarl")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by their paths in it, without bytecode and what only documents it."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


PLAN = ("plan", "RECIPES/h100/qwen2.5-7b-8xh100-grpo.yaml", "--gpus", "8xH100-80GB", "model.path=FOLDER")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--version",),
        ("config", "show", "RECIPES/quickstart.yaml"),
        ("config", "explain", "RECIPES/quickstart.yaml", "model.path=FOLDER", "actor.layout.last_stage_layers=null"),
        ("algorithms", "rloo"),
        ("reshard", "--model", "FOLDER/config.json", "--from", "tp=2,pp=2", "--to", "vllm:tp=2"),
        PLAN,
        ("launch", "RECIPES/quickstart.yaml", "--nodes=1", "--gpus-per-node=0", "--time=1:00:00", "--dry-run"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_that_look(site, folder, arguments):
    done = megarl(site, *arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_plan_says_what_its_page_needs_before_anything_is_written(site, folder):
    done = megarl(site, *PLAN, "--html", "page.html", "--emit", "recipe.yaml", cwd=folder)
    line = "megarl: error: --html page.html: it needs matplotlib; pip install 'megarl[run]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert [file.name for file in folder.iterdir()] == ["config.json"]


def test_init_writes_a_recipe_that_can_be_shown(site, tmp_path):
    assert megarl(site, "init", cwd=tmp_path).returncode == 0
    [recipe] = tmp_path.glob("*.yaml")
    done = megarl(site, "config", "show", recipe.name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == dump(load(recipe))  # here base.yaml is the checkout's


def test_the_doctor_says_what_is_missing(site, tmp_path):
    done = megarl(site, "doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "to be changed: torch, megatron-core, vllm, ray, transformers" in done.stdout
