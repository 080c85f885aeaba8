"""Configuration text in YAML (1.2 core schema), with the origin of every key.

PyYAML follows YAML 1.1, where `no` is false, `1e-6` is text, `010` is 8 and `1:30` is 90. In the core schema they are
text, a number, 10 and text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import yaml

from megarl.core.errors import UserError

Key = tuple[str | int, ...]
"""The path of a key from the top level; integers index lists."""

MAX_VALUES = 100_000
"""Maximum number of keys and values in a document. A few nested aliases would expand to billions."""

_KINDS = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class Document:
    """A mapping and the origin of each of its keys at any depth, such as "run.yaml:12"."""

    values: dict[str, Any]
    origins: dict[Key, str]

    def overlay(self, over: Document) -> Document:
        """Lay `over` on top of this document: mappings are merged key by key, lists and scalars replaced."""
        return Document(_merge(self.values, over.values), self.origins | over.origins)

    def origin(self, key: Key, default: str) -> str:
        """Return the origin of the key, or of the innermost mapping or list that contains it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.origins:
                return self.origins[key[:length]]
        return default


@lru_cache
def parse(text: str, name: str) -> Document:
    """Read a YAML mapping. Raise a UserError whose message starts with `name` and, if known, the line and column.

    Documents are cached, because most recipes share a base. Callers must not modify them.
    """
    try:
        node, values = _read(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise UserError(f"{place}: {_reason(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{name}:{line}: {_reason(error)}") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply. Fix: use fewer levels") from None
    if node is None or values is None:
        raise UserError(f"{name}: the file is empty. Fix: start it with `base: base.yaml`")
    if not isinstance(values, dict):
        raise UserError(
            f"{name}:{node.start_mark.line + 1}: expected a mapping (KEY: VALUE), found {kind(values)}"
            ". Fix: start the file with `base: base.yaml`"
        )
    return Document(values, {key: f"{name}:{line}" for key, line in _lines(node)})


def parse_value(text: str) -> Any:
    """Read one YAML value. Raise a UserError with the reason if the text is not valid YAML."""
    try:
        return read(text)
    except yaml.YAMLError as error:
        raise UserError(f"invalid YAML value: {_reason(error)}") from None
    except RecursionError:
        raise UserError("invalid YAML value: nested too deeply. Fix: use fewer levels") from None


def read(text: str) -> Any:
    """Read a YAML value. Raise yaml.YAMLError if the text is not valid YAML, and RecursionError if it is nested too
    deeply."""
    return _read(text)[1]


def render(values: dict[str, Any]) -> str:
    """Return YAML text that `parse` converts back to equal values, in the same order."""
    return yaml.dump(values, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=110)


def one_line(value: Any) -> str:
    """Return the value as one line of YAML."""
    text = yaml.dump(value, Dumper=_CoreDumper, allow_unicode=True, default_flow_style=True, width=float("inf"))
    return " ".join(text.removesuffix("\n...\n").split())


def show(value: Any) -> str:
    """Return the value as one line of YAML, truncated if long."""
    text = one_line(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of every leaf; an empty mapping is a leaf."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings."""
    return reduce(lambda section, name: section[name], key.split("."), values)


def kind(value: Any) -> str:
    """Return the kind of a YAML value in words."""
    return _KINDS[type(value)]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        old = base.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _read(text: str) -> tuple[yaml.Node | None, Any]:
    loader = _CoreLoader(text)
    node = loader.get_single_node()
    if node is not None and _num_values(node, {}) > MAX_VALUES:
        problem = f"aliases expand to more than {MAX_VALUES:,} values. Fix: use fewer aliases"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return node, None if node is None else loader.construct_document(node)


def _num_values(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Return the number of keys and values in a node with expanded aliases. Raise MarkedYAMLError if a node contains
    itself. counted: numbers for the nodes visited so far, None until all children are counted."""
    if id(node) not in counted:
        counted[id(node)] = None
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = [each for child in children for each in (child if isinstance(child, tuple) else (child,))]
        counted[id(node)] = 1 + sum(_num_values(each, counted) for each in nodes)
    number = counted[id(node)]
    if number is None:
        problem = "an alias contains itself. Fix: remove the alias"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return number


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character U+{error.character:04X} is not allowed in YAML. Fix: write it as an escape in double quotes"
    if type(error) is yaml.MarkedYAMLError and error.problem is not None:  # raised here, with a remedy
        return error.problem
    parts = (error.context, error.problem) if isinstance(error, yaml.MarkedYAMLError) else (str(error),)
    return f"{', '.join(part for part in parts if part)}. Fix: check the indentation, quotes and brackets there"


def _lines(node: yaml.Node, key: Key = ()) -> Iterator[tuple[Key, int]]:
    children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for name, start, value in children:
        yield (*key, name), start.start_mark.line + 1
        yield from _lines(value, (*key, name))


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012  (overrides PyYAML's class attribute, to drop the YAML 1.1 patterns)

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if (tag := getattr(event, "tag", None)) is not None:
            problem = f"tag {tag!r} is not supported. Fix: remove the tag"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _CoreDumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Write text with Unicode line breaks escaped: PyYAML writes them unchanged but reads some as line feeds."""
    style = '"' if re.search("[\x85\u2028\u2029]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    try:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    except ValueError:
        problem = f"the integer is too long ({len(text)} digits). Fix: use at most 4,300 digits"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[str, Any]:
    """Build a mapping. Raise an error unless its keys are text and unique."""
    mapping: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for name_node, value_node in node.value:
        name, mark = loader.construct_object(name_node, deep=True), name_node.start_mark
        if not isinstance(name, str):
            problem = f"key {one_line(name)} is not text. Fix: write it as '{one_line(name)}'"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if name in mapping:
            problem = f"duplicate key {name!r}, first set on line {lines[name]}. Fix: remove one of them"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        mapping[name] = loader.construct_object(value_node, deep=True)
        lines[name] = mark.line + 1
    return mapping


_CORE_SCHEMA = {
    "null": r"null|Null|NULL|~|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
for _tag, _pattern in _CORE_SCHEMA.items():
    for _class in (_CoreLoader, _CoreDumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), None)
_CoreDumper.add_representer(str, _represent_str)
_CoreLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_CoreLoader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
