"""Looks up reward functions by their names in the config."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megarl.core.errors import UserError
from megarl.core.user_file import defined_in_file
from megarl.rewards.choice import choice_match
from megarl.rewards.code import code_stdin_stdout, code_tests
from megarl.rewards.digits import rendered_digits
from megarl.rewards.exact import exact_match
from megarl.rewards.foreign import refuse_foreign
from megarl.rewards.image import AestheticScore, ClipScore, jpeg_compressibility, jpeg_incompressibility
from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.length import CosineLength, SoftOverlong, length_penalty
from megarl.rewards.math_answer import MathMatch
from megarl.rewards.numeric import numeric_match
from megarl.rewards.ocr import OcrExact
from megarl.rewards.options import BATCH, NO_OPTIONS, SINGLE, configure, give_options
from megarl.rewards.reasoning import ReasoningGym
from megarl.rewards.regex_answer import RegexMatch
from megarl.rewards.remote_judge import GenerativeJudge
from megarl.rewards.think_answer import think_answer_format

if TYPE_CHECKING:
    from megarl.config import schema

RewardFunction = Callable[..., Any]
"""A function f(prompt, response, answer) that returns a finite number or a bool, or with per_turn a list with one such
value per turn. The response is a text or, from an image model, an RGB image as uint8 [height, width, 3]. The function
raises an exception if it cannot score the response. Each additional parameter receives the data column with the same
name; `row` receives all columns, and `sandbox` receives the run's sandbox provider (megarl.sandbox.provider).

A function f(prompts, responses, answers) receives lists for all samples in a scoring pass, including lists of column
values. It returns a list with one such result per sample."""

_TEXT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "choice_match": choice_match,
    "regex_match": RegexMatch,
    "math_match": MathMatch,
    "think_answer_format": think_answer_format,
    "knights_knaves": knights_knaves,
    "reasoning_gym": ReasoningGym,
    "code_tests": code_tests,
    "code_stdin_stdout": code_stdin_stdout,
    "length_penalty": length_penalty,
    "soft_overlong": SoftOverlong,
    "cosine_length": CosineLength,
    "generative_judge": GenerativeJudge,
}
IMAGE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
    "clip_score": ClipScore,
    "aesthetic_score": AestheticScore,
    "rendered_digits": rendered_digits,
    "ocr_exact": OcrExact,
}
"""The built-in functions that score images. All other built-in functions score text."""

FUNCTIONS = _TEXT_FUNCTIONS | IMAGE_FUNCTIONS
"""Built-in functions, and built-in classes that are instantiated with the configured options."""


def require_response_kind(functions: Sequence[schema.RewardFunction], engine: Literal["vllm", "diffusers"]) -> None:
    """Raise UserError if a built-in function does not score the responses of rollout.engine, or if a function with
    per_turn scores images, which have no turns."""
    is_image = engine == "diffusers"
    for entry in functions:
        if entry.function in FUNCTIONS and (entry.function in IMAGE_FUNCTIONS) != is_image:
            kinds = ("images", "text") if entry.function in IMAGE_FUNCTIONS else ("text", "images")
            remedy = ", ".join(IMAGE_FUNCTIONS if is_image else _TEXT_FUNCTIONS)
            raise UserError(
                f"rewards.functions: {entry.function} scores {kinds[0]}, but rollout.engine={engine} samples "
                f"{kinds[1]}. Fix: use one of {remedy}, or path/to/file.py:function"
            )
        if is_image and entry.per_turn:
            raise UserError(
                f"rewards.functions: {entry.label}: per_turn=true, but an image has no turns. Fix: set per_turn=false"
            )


def resolve(name: str, options: Mapping[str, Any] = NO_OPTIONS) -> RewardFunction:
    """Return a function from FUNCTIONS or a file with its options bound. Raise UserError if the function or an option
    is unknown."""
    if name in FUNCTIONS:
        if FUNCTIONS[name] is CosineLength and "verifier" in options:
            options = {**options, "verifier": _verifier(name, options["verifier"])}
        return configure(name, FUNCTIONS[name], options)
    if ":" in name:
        function = from_file("rewards.functions", name, SINGLE, refuse_foreign)
        if _first_parameters(function)[:1] == BATCH[:1] and not takes_batches(function):
            raise UserError(
                f"rewards.functions: {name} has the signature {_signature(function)}. Fix: name its first parameters "
                f"({', '.join(BATCH)}) to score whole batches, or ({', '.join(SINGLE)}) to score single samples"
            )
        return give_options(name, function, options)
    if name.endswith(".py"):
        raise UserError(f"rewards.functions: {name} names a file but no function. Fix: use {name}:FUNCTION")
    close = [known for known in FUNCTIONS if known.startswith(name)] or difflib.get_close_matches(name, FUNCTIONS, n=1)
    choices = close[0] if close else f"one of {', '.join(FUNCTIONS)}, or path/to/file.py:function"
    raise UserError(f"rewards.functions: unknown function {name!r}. Fix: use {choices}")


def _verifier(name: str, verifier: Any) -> RewardFunction:
    """Return the function for the option `verifier`: a name as in rewards.functions, or `{function, options}`."""
    entry: dict[str, Any] = {"function": verifier} if isinstance(verifier, str) else dict(verifier)
    key = f"rewards.functions: {name}: options.verifier={verifier!r}"
    if "function" not in entry or entry.keys() - {"function", "options"}:
        raise UserError(f"{key}: expected a function's name or {{function, options}}. Fix: use one of these forms")
    function = resolve(entry["function"], entry.get("options", {}))
    if takes_batches(function):
        raise UserError(
            f"{key}: scores whole batches ({', '.join(BATCH)}). Fix: use a function that scores single samples"
        )
    return function


def from_file(
    key: str, name: str, arguments: Sequence[str], check: Callable[[str, Callable[..., Any]], None] | None = None
) -> Callable[..., Any]:
    """Load the function from `path/to/file.py:function`, the value of a config key. Raise UserError if there is no such
    function, or if it cannot be called with these arguments. check: an additional check, called with name and
    function."""
    path, name_in_file, function = defined_in_file(key, name)
    definition = f"define it as {name_in_file}({', '.join(arguments)})"
    if not callable(function):
        raise UserError(f"{key}: {path} has no function {name_in_file!r}. Fix: {definition}")
    if check is not None:
        check(name, function)
    if (signature := _signature(function)) is not None:
        try:
            columns = column_parameters(function, len(arguments))
            signature.bind(*arguments, **{name: None for name, required in columns.items() if required})
        except TypeError as error:
            raise UserError(f"{key}: {name} has the signature {signature}: {error}. Fix: {definition}") from None
    return function


def takes_batches(function: Callable[..., Any]) -> bool:
    """Return whether a reward function takes whole batches, according to the names of its first parameters."""
    return _first_parameters(function) == BATCH


def _first_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    signature = _signature(function)
    return () if signature is None else tuple(signature.parameters)[: len(BATCH)]


def column_parameters(function: Callable[..., Any], num_arguments: int) -> dict[str, bool]:
    """Map each function parameter after the first `num_arguments` to whether it is required."""
    signature = _signature(function)
    parameters = [] if signature is None else list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    columns = {p.name: p.default is p.empty for p in positional[num_arguments:] if p.kind is not p.POSITIONAL_ONLY}
    return columns | {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the function's signature, or None for a compiled function without one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
