"""Names that megarl imports from Megatron's Transformer Engine layers, and Megatron from Transformer Engine, exist in
the sources. Megatron silently falls back to other code if a name is missing."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.paths import ROOT, TRANSFORMER_ENGINE

MEGATRON = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))) / "core"
LAYERS = "megatron.core.extensions.transformer_engine"
READERS = ("extensions/transformer_engine.py", "fp8_utils.py", "optimizer/__init__.py", "optimizer/clip_grads.py")
READERS += ("optimizer/distrib_optimizer.py", "optimizer/optimizer.py")
MISSING = {
    "transformer_engine.pytorch.attention._SplitAlongDim",  # torch.split instead
    "transformer_engine.pytorch.attention.apply_rotary_pos_emb",  # older versions only
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",  # older versions only
    "transformer_engine.pytorch.module.base.get_workspace",  # older versions only
}
"""Names that this version of Transformer Engine lacks, but that Megatron does not need with it."""


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path, package: str) -> set[str]:
    """Return the dotted names that a file imports from a package's modules, at any depth."""
    if package not in file.read_text(encoding="utf-8"):
        return set()
    nodes = [node for node in ast.walk(tree(file)) if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {f"{n.module}.{a.name}" for n in nodes if f"{n.module}.".startswith(f"{package}.") for a in n.names}


def source(module: str) -> Path | None:
    """Return the source file of a Transformer Engine module, if any."""
    place = TRANSFORMER_ENGINE / module.replace(".", "/")
    files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    return files[0] if files else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including those in conditionals and try blocks."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            handlers = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
            yield from statements([*node.body, *handlers, *node.orelse])


def defined(file: Path) -> set[str]:
    names = set()
    for node in statements(tree(file).body):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                names.add(node.name)
            case ast.Assign():
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.ImportFrom(names=[ast.alias(name="*")], level=1):
                names |= defined(source_beside(file, node.module))
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def source_beside(file: Path, module: str) -> Path:
    return next(path for path in (file.parent / module / "__init__.py", file.parent / f"{module}.py") if path.is_file())


def exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    file = source(module)
    return source(name) is not None or (file is not None and attribute in defined(file))


def test_megatron_defines_layers_imported_by_megarl() -> None:
    imported_names = set().union(*(imported(file, LAYERS) for file in (ROOT / "megarl").rglob("*.py")))
    assert f"{LAYERS}.TENorm" in imported_names
    assert {name.rpartition(".")[2] for name in imported_names} <= defined(
        MEGATRON / "extensions/transformer_engine.py"
    )


def test_transformer_engine_defines_names_megatron_uses() -> None:
    imported_names = set().union(*(imported(MEGATRON / file, "transformer_engine") for file in READERS))
    assert "transformer_engine.pytorch.optimizers.FusedAdam" in imported_names
    assert {name for name in imported_names if not exists(name)} == MISSING
