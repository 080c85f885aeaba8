"""The first words of docstrings: a verb or the noun that the thing is, never a fragment that continues a name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

FRAGMENTS = {
    *("After", "Also", "And", "As", "At", "Before", "Beside", "Between", "But", "By", "For", "From", "If", "In"),
    *("Into", "Not", "Of", "On", "Over", "Per", "So", "Than", "That", "Through", "To", "Under", "Until", "Where"),
    *("Which", "While", "With", "Without"),
}
"""First words that make a fragment, or a sentence whose subject comes late."""


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yields line and text of every string that is a statement: of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", ["megarl", "tests", "tools"])
def test_no_docstring_continues_its_name(folder):
    fragments = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(file)
        if text.split(maxsplit=1)[:1] and text.split(maxsplit=1)[0].rstrip(",:;.") in FRAGMENTS
    ]
    assert not fragments, "docstrings begin with a verb or with a noun:\n" + "\n".join(fragments)
