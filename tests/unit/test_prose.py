"""The first words of docstrings: a verb or the noun that the thing is, never a fragment that continues a name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import megarl

PACKAGE = Path(megarl.__file__).parent
FRAGMENTS = {"Of", "If", "With", "As", "So", "Where", "And", "But", "Beside"}


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of every string that is a statement: of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def test_no_docstring_continues_its_name():
    fragments = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(file)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0].rstrip(",:;.") in FRAGMENTS
    ]
    assert not fragments, "docstrings begin with a verb or with a noun:\n" + "\n".join(fragments)
