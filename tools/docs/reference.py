"""Reference pages in Markdown, generated from base.yaml, the schema, the command line and the tables in the code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

import megarl
from megarl import cli
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.config.document import show
from megarl.config.schema import Config
from megarl.core.metric_names import METRICS

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
LINE = re.compile(r"^( *)([a-z_0-9]+):([^#\"]*|[^#]*\"[^\"]*\"[^#]*)(?:# (.*))?$")
"""Matches the indentation, key, value and comment of a line in base.yaml."""


def keys() -> dict[str, tuple[str, str]]:
    """Return each key in base.yaml, such as `actor.layout.tp`, with its value as written there and its comment. Keys of
    an aliased section are not repeated."""
    found: dict[str, tuple[str, str]] = {}
    path: list[tuple[int, str]] = []
    for line in BASE.read_text(encoding="utf-8").splitlines():
        if match := LINE.match(line):
            indent, key, value, comment = match.groups()
            path = [*(part for part in path if part[0] < len(indent)), (len(indent), key)]
            found[".".join(name for _, name in path)] = re.sub(r"^[&*]\w+", "", value.strip()), (comment or "").strip()
        elif path and line.lstrip().startswith("#"):
            key = ".".join(name for _, name in path)
            value, comment = found[key]
            found[key] = value, f"{comment} {line.strip().removeprefix('#').strip()}".strip()
        elif path and line.lstrip().startswith("- "):  # the only list that is written over several lines
            key = ".".join(name for _, name in path)
            found[key] = "[" + line.partition("#")[0].strip().removeprefix("- ") + "]", found[key][1]
    return found


def describe_type(annotation: Any) -> str:
    """Return the values that a key accepts, such as `int | null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe_type(arguments[0])
    if origin is Literal:
        return " | ".join("null" if value is None else show(value) for value in arguments)
    if origin in (Union, UnionType):
        return " | ".join(describe_type(part) for part in arguments)
    if origin in (list, tuple, frozenset):
        element = describe_type(arguments[0]) if arguments else ""
        return f"list of ({element})" if "|" in element else f"list of {element}"
    if origin in (dict, Mapping):
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    names = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null"}
    return names.get(annotation, "")


def annotation_of(key: str) -> Any:
    """Return the schema's annotation of a key, or None if the section's keys depend on another key."""
    section: Any = Config
    for name in key.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)) or name not in section.model_fields:
            return None
        section = section.model_fields[name].annotation
    return section


def config_page() -> str:
    """Return the page of all config keys: types from the schema, defaults and comments from base.yaml."""
    lines = [
        "# Configuration keys",
        "",
        "Every key with its type, default and meaning, from `base.yaml` and the schema. Sections that have the same",
        "keys as in `actor`, such as `critic.layout`, are listed without their keys.",
    ]
    section = None
    for key, (default, comment) in keys().items():
        top = key.split(".")[0]
        if top != section:
            section = top
            lines += ["", f"## {top}", ""]
            if not default and comment:
                lines += [comment[:1].upper() + comment[1:] + ".", ""]
            lines += ["| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        if key != top or default:
            kind = describe_type(annotation_of(key))
            shown = code(default) if default else ""
            lines.append(f"| `{key}` | {code(kind) if kind else ''} | {shown} | {cell(comment)} |")
    for title, prefix, specs in (
        ("Options of estimators", "algorithm.advantage", ESTIMATORS),
        ("Options of objectives", "algorithm.objective", OBJECTIVES),
    ):
        name = "estimator" if specs is ESTIMATORS else "name"
        lines += [
            "",
            f"## {title}",
            "",
            f"| `{prefix}.{name}` | Options with their defaults | Paper |",
            "|---|---|---|",
        ]
        for entry, spec in specs.items():
            options = ", ".join(f"`{option}={show(value)}`" for option, value in spec.options.items()) or "none"
            lines.append(f"| `{entry}` | {options} | {cell(spec.paper)} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Return the page of all commands with their arguments and options."""
    root = typer.main.get_command(cli.app)
    lines = ["# Command line", "", cell(root.help or ""), ""]
    for name, command in commands(root, "megarl"):
        lines += ["", f"## {name}", "", *(cell(part) + "\n" for part in (command.help or "").split("\n\n"))]
        context = typer.Context(command)
        lines += ["```", " ".join([name, *command.collect_usage_pieces(context)]), "```", ""]
        records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
        lines += ["| Argument or option | Meaning |", "|---|---|"] if records else []
        for names, meaning in records:
            shown = re.sub(r"^(\S+) <.*", r"\1", names) if not names.startswith("-") else names
            lines.append(f"| {code(shown)} | {cell(meaning)} |")
    return "\n".join(lines) + "\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that has no subcommands, with its full name."""
    if subcommands := getattr(command, "commands", None):
        for child, subcommand in subcommands.items():
            yield from commands(subcommand, f"{name} {child}")
    else:
        yield name, command


def metrics_page() -> str:
    """Return the page of all metrics by section."""
    lines = [
        "# Metrics",
        "",
        "Each line of `metrics.jsonl` has the metrics of one step. A fraction is a number from 0 to 1. NaN and",
        "infinities are `null`, and these metrics are listed under `nonfinite`. In names, ROLE is `actor`, `critic`",
        "or `implicit_reward`, and MODEL is `policy` (the actor), `value` (the critic), `implicit_reward` or",
        "`reward_model`.",
    ]
    section = None
    for metric in METRICS:
        if metric.name.split("/")[0] != section:
            section = metric.name.split("/")[0]
            lines += ["", f"## {section}", "", "| Metric | Meaning | Unit | Present |", "|---|---|---|---|"]
        cells = f"{cell(metric.meaning)} | {metric.unit} | {cell(metric.present) or 'always'}"
        lines.append(f"| `{metric.name}` | {cells} |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Return the page of the Python API: signatures and docstrings of the public names."""
    lines = ["# Python API", "", *paragraphs(megarl.__doc__ or "")]
    for name in megarl.__all__:
        if name.startswith("__"):
            continue
        entry = getattr(megarl, name)
        is_model = isinstance(entry, type) and issubclass(entry, (BaseModel, Exception))
        lines += ["", f"## {name}", ""]
        if not is_model:
            lines += ["```python", f"{name}{format_signature(entry)}", "```", ""]
        lines += paragraphs(inspect.getdoc(entry) or "")
    return "\n".join(lines) + "\n"


def format_signature(entry: Any) -> str:
    """Return a signature with one parameter per line. All annotations must be strings."""
    shown = inspect.signature(entry)
    parts: list[str] = []
    for parameter in shown.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*," not in parts:
            parts.append("*,")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{default},")
    result = "" if isinstance(entry, type) else f" -> {shown.return_annotation}"
    return "(" + "".join(f"\n    {part}" for part in parts) + ("\n)" if parts else ")") + result


def paragraphs(docstring: str) -> list[str]:
    """Return the lines of a docstring in Markdown. The entries of Args: and similar sections become lists."""
    lines: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        if line in ("Args:", "Attributes:", "Returns:", "Raises:"):
            lines += [f"**{line}**", ""]
        elif match := re.match(r"    (\w+(?:, \w+)*): (.*)", line):
            lines.append(f"- `{match[1]}`: {match[2]}")
        else:
            lines.append(re.sub(r"^ {4,}", "  ", line))
    return lines


def code(text: str) -> str:
    """Return code for one cell of a table. Python-Markdown does not split cells at vertical bars in code."""
    return f"`{text}`"


def cell(text: str) -> str:
    """Escape text for one cell of a table."""
    return " ".join(text.replace("|", "\\|").split())


PAGES = {
    "reference/configuration.md": config_page,
    "reference/cli.md": cli_page,
    "reference/metrics.md": metrics_page,
    "reference/python-api.md": api_page,
}
"""Path on the site -> function that generates the page."""
