"""Enforces the package's import rules: modules import only from their own layer and lower ones, and each heavy library
has one owner.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.paths import ROOT

FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "megarl").rglob("*.py"))

TENSOR_RESHARDING = (
    *("resharding/execute.py", "resharding/folder.py", "resharding/peft_folder.py", "resharding/quantized_copy.py"),
    "resharding/verification.py",
    "resharding/transports",
)

LAYERS = (
    ("core",),
    ("usercode",),
    ("algorithms",),
    ("config",),
    ("models", "sandbox"),
    ("ops", "data", "rewards", "environments", "resharding"),
    ("megatron", "rollout", *TENSOR_RESHARDING),
    ("cluster",),
    ("step",),
    ("run",),
    ("report",),
    ("planner",),
    ("launch",),
    ("api", "train.py", "finetune.py"),
    ("cli.py", "__main__.py"),
)
"""The layers from bottom to top, as folders and files of megarl/. A module may import from its own layer and from lower
ones. The longest matching path determines a module's layer. The config is above algorithms, because their SPECs define
its options."""

FORBIDDEN = {
    ("megatron", "rollout"),
    ("rollout", "megatron"),
    ("rewards", "environments"),
    ("train", "planner"),
    ("finetune", "planner"),
}
"""Pairs (importer, imported) that are forbidden although the layers would allow them."""

OWNERS = {"megatron": "megatron", "vllm": "rollout", "diffusers": "rollout", "ray": "cluster"}
"""Maps each library to the only top-level package that imports it."""

HEAVY = {"torch", "megatron", "vllm", "diffusers", "ray", "transformers"}

LIGHT = (
    "api",
    "cli.py",
    "__main__.py",
    "core",
    "usercode",
    "algorithms",
    "config",
    "models",
    "resharding",
    "sandbox",
    "rewards",
    "environments",
    "ops/tile.py",
    "rollout/diffusers/request.py",
    "rollout/router.py",
    "rollout/schedule.py",
    "run/audit",
    "cluster/memory",
    "cluster/object_store.py",
    "step/needed_passes.py",
    "planner",
    "launch",
)
"""The parts without heavy imports at module level, except for TENSOR_RESHARDING."""

DEVICE_FILES = (
    "megarl/core/device.py",
    "megarl/megatron/cpu_support.py",
    "megarl/ops/*triton*.py",
    "megarl/resharding/transports/*.py",
)
"""Files that may name a device or a communication library."""


def violations(file: str, source: str) -> list[str]:
    """Return the rule violations in a file. `file` is its path from the root, such as megarl/ops/linear_head.py."""
    module = module_of(file)
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    tree = ast.parse(source)
    problems: list[tuple[int, str]] = []
    if layer(module) is None:
        problems.append((1, f"{module} belongs to no layer"))
    # In the package's root, ignore imports for type checkers, because it imports public names lazily.
    nodes = [*ast.walk(tree)]
    for line, target in imports(run(tree) if module == "megarl" else nodes, package):
        problems += [(line, problem) for problem in import_problems(module, target)]
    if is_light(module):
        top_level = imports(run_at_import(tree), package)
        problems += [(line, f"loads {name} at module level") for line, name in top_level if name.split(".")[0] in HEAVY]
    if not any(fnmatch(file, pattern) for pattern in DEVICE_FILES):
        problems += [(line, f"names a device: {text}") for line, text in devices(nodes, package)]
    return [f"{file}:{line}: {problem}" for line, problem in problems]


def import_problems(module: str, target: str) -> Iterator[str]:
    top = target.split(".")[0]
    if top in OWNERS and OWNERS[top] != room(module):
        yield f"{target} may be imported in megarl.{OWNERS[top]} only"
    if top != "megarl" or layer(target) is None:
        return
    if (layer(module) or 0) < layer(target):
        yield f"{target} is in a layer above"
    if (room(module), room(target)) in FORBIDDEN:
        yield f"{target}: the rooms do not import each other"


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of every import. `from a import b` yields a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes outside functions and `if TYPE_CHECKING` blocks."""
    return run(tree, in_functions=False)


def run(tree: ast.AST, in_functions: bool = True) -> Iterator[ast.AST]:
    """Yield the nodes outside `if TYPE_CHECKING` blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not in_functions:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            node = ast.Module(node.orelse, [])
        yield node
        yield from run(node, in_functions)


def devices(nodes: Iterable[ast.AST], package: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of literals such as "cuda:0" or "nccl", of every `.cuda`, and of imports from torch.cuda."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = set(re.split("[:,]", node.value))
            if words & {"cuda", "nccl", "gloo"} and not re.search(r"\s", node.value):
                yield node.lineno, repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield node.lineno, ast.unparse(node)
    for line, name in imports(nodes, package):
        if f"{name}.".startswith("torch.cuda."):
            yield line, name


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room(module: str) -> str:
    return f"{module}.".split(".")[1]


def place(module: str) -> str:
    """Return the module's path in megarl/, such as ops/linear_head."""
    return module.removeprefix("megarl").removeprefix(".").replace(".", "/")


def is_in(module: str, part: str) -> bool:
    """Return whether the module is in `part`, a folder or file of megarl/."""
    return f"{place(module)}/".startswith(part.removesuffix(".py") + "/")


@cache
def layer(module: str) -> int | None:
    """Return the module's layer from 0, None if LAYERS does not list it."""
    if module == "megarl":
        return 0
    known = [(len(part), height) for height, parts in enumerate(LAYERS) for part in parts if is_in(module, part)]
    return max(known)[1] if known else None


def is_light(module: str) -> bool:
    if any(is_in(module, part) for part in TENSOR_RESHARDING):
        return False
    return module == "megarl" or any(is_in(module, part) for part in LIGHT)


def test_paths_in_the_rules_exist() -> None:
    named = [part for parts in LAYERS for part in parts]
    assert [part for part in (*named, *LIGHT, *TENSOR_RESHARDING) if not (ROOT / "megarl" / part).exists()] == []
    assert [pattern for pattern in DEVICE_FILES if not any(fnmatch(file, pattern) for file in FILES)] == []


def test_root_contains_only_the_entry_points() -> None:
    root_files = {path.name for path in (ROOT / "megarl").glob("*.py")}
    assert root_files == {"__init__.py", "__main__.py", "cli.py", "train.py", "finetune.py"}


def test_sources_follow_the_import_rules() -> None:
    assert [line for file in FILES for line in violations(file, (ROOT / file).read_text(encoding="utf-8"))] == []


def test_there_are_no_circular_imports() -> None:
    """Imports inside functions count, because they can hide cycles. Imports for type checking do not count."""
    assert import_cycles({file: (ROOT / file).read_text(encoding="utf-8") for file in FILES}) == []


def import_cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return the modules of an import cycle if there is one. `sources` maps paths to text."""
    modules = {module_of(file): file for file in sources}
    graph = TopologicalSorter()
    for module, file in modules.items():
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        targets = (target for _, target in imports(run(ast.parse(sources[file])), package))
        graph.add(module, *{name for target in targets if (name := known(target, modules)) not in (None, module)})
    try:
        graph.prepare()
    except CycleError as error:
        return [sorted(set(error.args[1]))]
    return []


def known(target: str, modules: Collection[str]) -> str | None:
    """Return the module that an imported name refers to or is defined in."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


PLANTED = [
    # file, source, expected problem
    ("megarl/ops/a.py", "import megarl.train", "megarl.train is in a layer above"),
    ("megarl/ops/a.py", "from megarl import cluster", "megarl.cluster is in a layer above"),
    ("megarl/ops/a.py", "def f():\n    from megarl.cluster.session import Session", "in a layer above"),
    ("megarl/usercode/a.py", "from megarl.config import schema", "megarl.config.schema is in a layer above"),
    ("megarl/config/a.py", "from ..data import packing", "megarl.data.packing is in a layer above"),
    ("megarl/config/__init__.py", "from ..data import packing", "megarl.data.packing is in a layer above"),
    ("megarl/__init__.py", "from . import data", "megarl.data is in a layer above"),
    (
        "megarl/resharding/planning/plan.py",
        "from megarl.resharding import execute",
        "resharding.execute is in a layer above",
    ),
    ("megarl/resharding/families/a.py", "from ..transports.local import X", "is in a layer above"),
    ("megarl/megatron/a.py", "def f():\n    import megarl.rollout.engine", "do not import each other"),
    ("megarl/rollout/a.py", "from megarl import megatron", "do not import each other"),
    ("megarl/models/a.py", "from megarl.resharding.piece import Piece", "resharding.piece.Piece is in a layer above"),
    ("megarl/cluster/a.py", "from megarl.planner import plan", "planner.plan is in a layer above"),
    ("megarl/run/a.py", "from megarl import report", "megarl.report is in a layer above"),
    ("megarl/step/a.py", "def f():\n    import megarl.run.resume", "megarl.run.resume is in a layer above"),
    ("megarl/train.py", "from megarl.planner.plan import plan_recipe", "do not import each other"),
    ("megarl/train.py", "from megatron.core import parallel_state", "in megarl.megatron only"),
    ("megarl/train.py", "from megatron import core", "in megarl.megatron only"),
    ("megarl/megatron/a.py", "def f():\n    import vllm.config", "in megarl.rollout only"),
    ("megarl/megatron/a.py", "def f():\n    import diffusers", "in megarl.rollout only"),
    ("megarl/rollout/a.py", "import ray", "in megarl.cluster only"),
    ("megarl/algorithms/a.py", "from megarl.config.schema import Advantage", "schema.Advantage is in a layer above"),
    ("megarl/algorithms/objectives/a.py", "import torch", "loads torch at module level"),
    ("megarl/config/a.py", "import torch.nn as nn", "loads torch.nn at module level"),
    ("megarl/cli.py", "try:\n    from transformers import AutoConfig\nfinally:\n    pass", "loads transformers"),
    ("megarl/core/sample.py", "class A:\n    import torch", "loads torch at module level"),
    (
        "megarl/core/metrics.py",
        "if TYPE_CHECKING:\n    import os\nelse:\n    import torch",
        "loads torch at module level",
    ),
    ("megarl/resharding/planning/check.py", "import torch", "loads torch at module level"),
    ("megarl/rewards/registry.py", "import torch", "loads torch at module level"),
    ("megarl/utils.py", "", "megarl.utils belongs to no layer"),
    ("megarl/ops/a.py", "x.to('cuda')", "names a device: 'cuda'"),
    ("megarl/ops/a.py", "x.to(f'cuda:{rank}')", "names a device: 'cuda:'"),
    ("megarl/cluster/a.py", "init('cpu:gloo,cuda:nccl')", "names a device: 'cpu:gloo,cuda:nccl'"),
    ("megarl/megatron/a.py", "torch.cuda.synchronize()", "names a device: torch.cuda"),
    ("megarl/megatron/a.py", "x.cuda()", "names a device: x.cuda"),
    ("megarl/megatron/a.py", "from torch.cuda import Stream", "names a device: torch.cuda.Stream"),
]


@pytest.mark.parametrize(("file", "source", "problem"), PLANTED)
def test_checker_detects_a_planted_violation(file: str, source: str, problem: str) -> None:
    [violation] = violations(file, source)
    assert violation.startswith(f"{file}:") and problem in violation


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "megarl/cluster/a.py",
            "import ray\nfrom megarl.megatron.workers.trainer import Worker\nfrom megarl import rollout",
        ),
        ("megarl/megatron/a.py", "import torch\nfrom megatron.core import x\nfrom megarl.resharding import execute"),
        ("megarl/resharding/transports/a.py", "import torch\ntorch.cuda.synchronize()\nb = 'nccl'"),
        ("megarl/resharding/execute.py", "import torch\nfrom megarl.resharding.planning.plan import Plan"),
        ("megarl/core/sample.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("megarl/config/a.py", "def f():\n    import torch"),
        ("megarl/cli.py", "def f():\n    import megarl.train"),
        ("megarl/ops/a.py", '"""On cuda: nccl, on CPU: gloo."""\nfrom megarl import __version__, device'),
    ],
)
def test_checker_accepts_allowed_imports(file: str, source: str) -> None:
    assert violations(file, source) == []


CYCLE = {
    "megarl/data/__init__.py": "",
    "megarl/data/a.py": "from megarl.data import b",
    "megarl/data/b.py": "def f():\n    from megarl.data.c import x",
    "megarl/data/c.py": "import megarl.data.a",
}


def test_circles_through_functions_are_detected() -> None:
    assert import_cycles(CYCLE) == [["megarl.data.a", "megarl.data.b", "megarl.data.c"]]
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import megarl.data.a"
    assert import_cycles({**CYCLE, "megarl/data/c.py": for_types}) == []


def test_light_modules_have_no_heavy_transitive_imports() -> None:
    """The source of a single file does not show transitive imports."""
    modules = [module_of(file) for file in FILES if is_light(module_of(file))]
    assert {"megarl", "megarl.cli", "megarl.config.load"} <= set(modules)
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(list(sys.modules)))"
    )
    command = [sys.executable, "-c", code, json.dumps(modules)]
    loaded = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    assert HEAVY.isdisjoint(loaded)


def test_reward_process_starts_without_torch() -> None:
    """Importing torch would double its startup time. Custom reward functions may still import it."""
    code = "import sys, megarl.cluster.groups.rewards; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "ray" in loaded.split() and {"torch", "vllm", "transformers"}.isdisjoint(loaded.split())


def test_processes_of_user_code_import_no_config() -> None:
    """Building the config's models would double their startup time."""
    code = "import sys, megarl.environments.host, megarl.rewards.worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "megarl.rewards.registry" in loaded.split() and "megarl.config" not in loaded.split()


def test_trainer_rank_imports_neither_ray_vllm_nor_compiler() -> None:
    """A single rank must run on a machine that has only torch and megatron-core."""
    code = (
        "import sys, torch; compiler = torch.compile\n"
        "import megarl.megatron.workers.actor, megarl.megatron.workers.reward_model\n"
        "import megarl.step.dispatch, megarl.step.baselines\n"
        "assert torch.compile is compiler\n"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "torch" in loaded.split() and {"ray", "vllm", "torch._inductor"}.isdisjoint(loaded.split())


DISTRIBUTIONS = {
    "PIL": "pillow",
    "antlr4": "antlr4-python3-runtime",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "triton": "torch",
    "yaml": "pyyaml",
}
"""Maps packages to their distributions where the names differ."""


OTHER_PYTHONS = {"megarl/environments/sessions/verifiers_program.py"}
"""Programs that run in a separate Python environment with their own dependencies."""


def test_imported_packages_are_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("run", "gpu", "images", "ocr", "rewards", "trackers")
    requirements = [*project["dependencies"], *(line for extra in names for line in extras[extra])]
    declared = {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}
    trees = (ast.parse((ROOT / file).read_text(encoding="utf-8")) for file in FILES if file not in OTHER_PYTHONS)
    packages = {name.split(".")[0] for tree in trees for _, name in imports(ast.walk(tree), "megarl")}
    third_party = packages - {"megarl"} - sys.stdlib_module_names
    assert {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in third_party} - declared == set()
