"""Megatron's calls to flash-linear-attention, whose kernels need a GPU, fit the functions in the package's sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from megatron.core.ssm.gated_delta_net import common, gdn

from tests.paths import GPU_SOURCES, GPU_SOURCES_LOCK

[VERSION] = re.findall(r"^fla-core==(\S+)", GPU_SOURCES_LOCK.read_text(), re.MULTILINE)
SOURCES = GPU_SOURCES / f"fla-core-{VERSION}"


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, package: str = "") -> dict[str, str]:
    """Return the names that a file of the package imports from modules, each with its module."""
    nodes = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ImportFrom)]
    modules = {node: f"{package}.{node.module}" if node.level else node.module for node in nodes}
    return {alias.name: module for node, module in modules.items() for alias in node.names}


def definition(module: str, name: str) -> ast.FunctionDef:
    """Return a function's definition. Packages import it from their modules."""
    path = SOURCES.joinpath(*module.split("."))
    is_package = path.is_dir()
    file = path / "__init__.py" if is_package else path.with_suffix(".py")
    functions = [node for node in tree(file).body if isinstance(node, ast.FunctionDef) and node.name == name]
    package = module if is_package else module.rpartition(".")[0]
    return functions[0] if functions else definition(imports(file, package)[name], name)


def calls(function: str) -> list[ast.Call]:
    """Return Megatron's calls of the function. A layer calls the rule through an attribute."""
    names = {function, f"self.{function.removeprefix('chunk_')}"}
    nodes = [node for module in (common, gdn) for node in ast.walk(tree(Path(module.__file__)))]
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


@pytest.mark.parametrize("function", ["causal_conv1d", "chunk_gated_delta_rule"])
def test_calls_fit_the_sources(function: str) -> None:
    assert SOURCES.is_dir(), f"{SOURCES} is missing. Fix: make .venv/gpu-sources/.installed"
    arguments = definition(imports(Path(common.__file__))[function], function).args
    parameters = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    found = calls(function)
    assert found
    for call in found:
        assert {keyword.arg for keyword in call.keywords} <= {*parameters[len(call.args) :]}


def test_norm_without_options_exists() -> None:
    [norm, *_] = [call for call in calls("l2norm") if not call.keywords]
    arguments = definition(imports(Path(common.__file__))["l2norm"], "l2norm").args
    assert len(norm.args) == 1 == len(arguments.args) - len(arguments.defaults)
