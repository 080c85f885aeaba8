"""Tests that inspection commands work with only the core dependencies. megarl is installed from a wheel, with links to
its transitive dependencies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
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
    build = "from setuptools import build_meta; build_meta.build_wheel('wheels')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=WAIT_S)
    [wheel] = (source / "wheels").iterdir()
    return wheel


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a model's config.json."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen2.5-7B"]))
    return tmp_path


FORK = """
import json, os, sys
import megarl.cli, megarl.config.load, megarl.planner.plan, megarl.run.beginning
megarl.config.load.load(sys.argv[1])  # caches base.yaml
for line in sys.stdin:
    sys.argv[1:], folder, *files = json.loads(line)
    if not (child := os.fork()):
        for descriptor, file in enumerate(files, start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
        os.chdir(folder)
        megarl.cli.main()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def megarl(site: Path) -> Iterator[Command]:
    """A function that runs a megarl command in a fork of a process that has imported modules of most commands. RECIPES
    in its arguments stands for the recipe folder, FOLDER for the working directory."""
    recipes = site / "megarl" / "config" / "recipes"
    command = [*PYTHON, "-c", FORK, str(recipes / "quickstart.yaml")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(site), text=True, **pipes) as parent:

        def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
            for placeholder, path in {"RECIPES": recipes, "FOLDER": cwd}.items():
                arguments = tuple(argument.replace(placeholder, str(path)) for argument in arguments)
            with tempfile.TemporaryDirectory() as folder:
                files = [Path(folder, name) for name in ("stdout", "stderr")]
                print(json.dumps([arguments, str(cwd), *map(str, files)]), file=parent.stdin, flush=True)
                code = int(parent.stdout.readline())
                return subprocess.CompletedProcess(arguments, code, *(file.read_text() for file in files))

        yield run


PYTHON = (sys.executable, "-S")
"""Python without site-packages."""


def environment(site: Path) -> dict[str, str]:
    # Set TMPDIR, because run folders must not be inside it, and the tests' folder may be in /tmp.
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "HOME": str(site), "TMPDIR": "/var/tmp"}


def output(site: Path, code: str, cwd: Path) -> str:
    return subprocess.check_output([*PYTHON, "-c", code], cwd=cwd, env=environment(site), text=True, timeout=RUN_S)


def test_heavy_packages_are_absent(site, tmp_path):
    code = f"import importlib.util; print([n for n in {ABSENT} if importlib.util.find_spec(n)])"
    assert output(site, code, tmp_path) == "[]\n"
    code = "import megarl; print(megarl.__file__)"
    assert output(site, code, tmp_path) == f"{site}/megarl/__init__.py\n"


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
        ("launch", "RECIPES/quickstart.yaml", "--nodes=1", "--gpus-per-node=0", "--time=1:00:00", "--dry-run"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_inspection_commands_succeed(megarl, folder, arguments):
    done = megarl(*arguments, cwd=folder)
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
def test_commands_name_the_missing_package_in_one_line(megarl, folder, arguments):
    """The recipe trains, the folder has a run with a rollout, and only packages of extras are missing."""
    write_run(folder / "run")
    done = megarl(*arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("megarl: error: ") and " requires the package " in line
    assert line.endswith(f"Fix: {install_extra('run')}")


@pytest.mark.parametrize("arguments", [("report", "FOLDER/run"), ("watch", "FOLDER"), ("trace", "FOLDER/run")])
def test_other_commands_have_no_traceback(megarl, folder, arguments):
    write_run(folder / "run")
    done = megarl(*arguments, cwd=folder)
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


def test_plan_html_and_reports_require_no_extra(megarl, folder):
    done = megarl(*PLAN, "--html", "page.html", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    assert (folder / "page.html").read_text().count("<svg") == 2
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    done = megarl("report", ".", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "uPlot" in (folder / "report.html").read_text()


def test_init_writes_a_loadable_recipe(megarl, tmp_path, monkeypatch):
    assert megarl("init", cwd=tmp_path).returncode == 0
    [recipe] = tmp_path.glob("*.yaml")
    done = megarl("config", "show", recipe.name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    monkeypatch.chdir(tmp_path)
    assert done.stdout == dump(load(recipe))  # this process reads base.yaml from the checkout


def test_doctor_lists_missing_packages(megarl, tmp_path):
    done = megarl("doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problems: torch, megatron-core, vllm, ray, transformers" in done.stdout
