"""Make reasoning-gym's verifiers safe for text that a policy generated.

Some of them call Python's `eval` or SymPy's `parse_expr` on a response. Both can run arbitrary code, which could modify
the verifier, so they are replaced: `eval` with a literal parser, and `parse_expr` with a parser that accepts only
formulas.
"""

from __future__ import annotations

import ast
import importlib
import re
from typing import Any

LITERALS = ("string_insertion", "spiral_matrix", "number_sorting", "binary_matrix", "n_queens")
"""Tasks whose verifiers call `eval` on a response."""

FORMULAS = (*("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),)
"""Tasks whose verifiers call `parse_expr` on a response."""

_FORMULA = re.compile(r"(?:(?!\.\s*[^\W\d])[\w\s+\-*/().,^=!<>|])*")
"""Text without string literals, attribute accesses, subscripts or braces."""

_NAME = re.compile(r"[^\W\d]\w*")
_VARIABLE = re.compile(r"[A-Za-z][0-9]*")

FUNCTIONS = {
    *("sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "abs", "sign", "factorial", "gamma", "erf", "Integral", "pi"),
    *(
        f"{prefix}{name}{suffix}"
        for prefix in ("", "a")
        for name in ("sin", "cos", "tan", "sec", "csc", "cot")
        for suffix in ("", "h")
    ),
}
"""Names that a formula may contain besides variables. Other names are rejected, because SymPy would also evaluate
builtins such as `exec`, whose argument can be built from `chr` and `+` without quotes."""


def make_safe(factory: Any) -> None:
    """Replace `eval` and `parse_expr` in the tasks' modules. `factory` is reasoning_gym.factory."""
    import sympy

    class Formulas:
        """A stand-in for the sympy module with a safe `parse_expr`."""

        parse_expr = staticmethod(parse_formula)

        def __getattr__(self, name: str) -> Any:
            return getattr(sympy, name)

    replacements = {"eval": ast.literal_eval, "parse_expr": parse_formula, "sympy": Formulas(), "sp": Formulas()}
    for task in (*LITERALS, *FORMULAS):
        module = importlib.import_module(factory.DATASETS[task][0].__module__)
        names = ("eval",) if task in LITERALS else tuple(name for name in replacements if hasattr(module, name))
        for name in names:
            setattr(module, name, replacements[name])


def parse_formula(text: str, **options: Any) -> Any:
    from sympy.parsing.sympy_parser import parse_expr

    names = set(_NAME.findall(text)) - FUNCTIONS
    if not _FORMULA.fullmatch(text) or not all(map(_VARIABLE.fullmatch, names)):
        raise ValueError("not a formula")
    return parse_expr(text, **options)
