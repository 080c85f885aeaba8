"""Tests that inspection commands work with only the core dependencies. megarl is installed from a wheel, with links to
its transitive dependencies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl.config.load import dump, load
from megarl.core.errors import EXTRAS, install_extra
from tests.paths import CONFIGS, ROOT
from tests.published_models import CONFIGS as MODELS
from tests.timing import RUN_S, WAIT_S

ABSENT = ("torch", "megatron", "vllm", "ray", "transformers", "pyarrow", "safetensors", "matplotlib")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "megarl", "configs", "launch")


def closure() -> set[str]:
    """Return the names of the distributions that pip would install for megarl without extras."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pending, visited = [(Requirement(line), "") for line in dependencies], set()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for requested in ("", *requirement.extras):
            if (requirement.name, requested) in visited:
                continue
            visited.add((requirement.name, requested))
            try:
                requires = distribution(requirement.name).requires or []
            except PackageNotFoundError:  # required only on other systems or Python versions
                continue
            pending += [(Requirement(line), requested) for line in requires]
    return {name for name, _ in visited}


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
    """Build megarl's wheel and return it. The checkout is copied first, because the build leaves files behind."""
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
    """A folder with a model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-7B"]))
    return tmp_path


def megarl(site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a megarl command. RECIPES in its arguments stands for the recipe folder, FOLDER for the working directory."""
    folders = {"RECIPES": site / "megarl" / "config" / "recipes", "FOLDER": cwd}
    for placeholder, path in folders.items():
        arguments = [argument.replace(placeholder, str(path)) for argument in arguments]
    return run(site, "-m", "megarl.cli", *arguments, cwd=cwd)


def run(site: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Set TMPDIR, because run folders must not be inside it, and the tests' folder may be in /tmp.
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site), "TMPDIR": "/var/tmp"}
    command = [sys.executable, "-S", *command]  # without site-packages
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=RUN_S)


def test_heavy_packages_are_absent(site, tmp_path):
    code = f"import importlib.util; print([n for n in {ABSENT} if importlib.util.find_spec(n)])"
    assert run(site, "-c", code, cwd=tmp_path).stdout == "[]\n"
    code = "import megarl; print(megarl.__file__)"
    assert run(site, "-c", code, cwd=tmp_path).stdout == f"{site}/megarl/__init__.py\n"


def test_wheel_contains_package_recipes_and_job_script(site):
    """The recipes and the job script are outside the package in the checkout."""
    expected = files(ROOT / "megarl")
    expected |= {f"config/recipes/{name}": text for name, text in files(CONFIGS).items()}
    expected["launch/slurm.sbatch"] = (ROOT / "launch" / "slurm.sbatch").read_bytes()
    installed = files(site / "megarl")
    assert installed.keys() == expected.keys()
    assert installed["report/uplot/LICENSE"].startswith(b"The MIT License")
    assert [name for name in installed if installed[name] != expected[name]] == []


def files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by relative path, without bytecode and Markdown files."""
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
def test_inspection_commands_succeed(site, folder, arguments):
    done = megarl(site, *arguments, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "RECIPES/quickstart.yaml"),
        ("train", "RECIPES/quickstart.yaml"),
        ("train", "RECIPES/smollm2-cpu-sft.yaml"),
        ("evaluate", "FOLDER", "RECIPES/quickstart.yaml"),
        ("diagnose", "FOLDER/run"),
        ("convert", "hf-to-megatron", "--hf", "FOLDER", "--out", "FOLDER/checkpoint"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands_name_the_missing_package_in_one_line(site, folder, arguments):
    """The recipe trains, the folder has a run with a rollout, and only packages of extras are missing."""
    write_run(folder / "run")
    done = megarl(site, *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("megarl: error: ") and " requires the package " in line
    assert line.endswith(f"Fix: {install_extra('run')}")


@pytest.mark.parametrize("arguments", [("report", "FOLDER/run"), ("watch", "FOLDER"), ("trace", "FOLDER/run")])
def test_other_commands_have_no_traceback(site, folder, arguments):
    write_run(folder / "run")
    done = megarl(site, *arguments, cwd=folder)
    assert done.returncode in (0, 2), done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == (done.returncode == 2) and all(line.startswith("megarl: error: ") for line in lines)


def write_run(folder: Path) -> None:
    """Write the folder of a run with one step."""
    config = load(CONFIGS / "quickstart.yaml", ["model.path=m"])
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(dump(config))
    (folder / "manifest.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    sample = {"id": "0", "token_ids": [1, 2], "response_ids": [2], "response_logprobs": [-1.0]}
    (folder / "rollouts" / "step_000001.jsonl").write_text(json.dumps(sample) + "\n")


def test_extras_list_the_modules_of_their_packages():
    """A module of every distribution in an extra is listed, so that a missing one has a remedy."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules: dict[str, set[str]] = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules.setdefault(canonicalize_name(name), set()).add(module)
    for extra, known in EXTRAS.items():
        names = [canonicalize_name(Requirement(line).name) for line in extras[extra]]
        for name in names:
            assert name not in modules or name == "megarl-trainer" or modules[name] & set(known), name


def test_no_text_installs_the_unrelated_pypi_package():
    """On PyPI, the package named megarl belongs to another project."""
    folders = (ROOT / name for name in ("megarl", "configs", "launch", "tools"))
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in folder.rglob("*.*"))]
    texts = [path for path in files if path.suffix in (".md", ".py", ".yaml", ".toml", ".sh", ".sbatch", ".j2")]
    assert len(texts) > 500
    command = re.compile(r"pip3? install(?: -\S+)* ['\"]?megarl\b(?!-trainer)")
    assert [path for path in texts if command.search(path.read_text())] == []


def test_install_command_finds_the_extra(site):
    """The wheel's name differs from that of the package that it contains."""
    [metadata] = site.glob("megarl_trainer-*.dist-info/METADATA")
    extras = re.findall(r"^Provides-Extra: (.+)$", metadata.read_text(), re.M)
    assert {"run", "rewards", "gguf"} <= set(extras)
    assert install_extra("run").startswith("run pip install '.[run]' in a checkout")


def test_plan_html_and_reports_require_no_extra(site, folder):
    done = megarl(site, *PLAN, "--html", "page.html", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "page.html").read_text().count("<svg") == 2
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    done = megarl(site, "report", ".", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "uPlot" in (folder / "report.html").read_text()


def test_init_writes_a_loadable_recipe(site, tmp_path, monkeypatch):
    assert megarl(site, "init", cwd=tmp_path).returncode == 0
    [recipe] = tmp_path.glob("*.yaml")
    done = megarl(site, "config", "show", recipe.name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir(tmp_path)
    assert done.stdout == dump(load(recipe))  # this process reads base.yaml from the checkout


def test_doctor_lists_missing_packages(site, tmp_path):
    done = megarl(site, "doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problems: torch, megatron-core, vllm, ray, transformers" in done.stdout
