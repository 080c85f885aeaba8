"""Load a Config from YAML files and `a.b=c` overrides, or dump it as YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from megarl.config import document, paths, rules, violations
from megarl.config.algorithm_schema import VARIANTS
from megarl.config.document import Document, Key
from megarl.config.schema import Config
from megarl.core.errors import UserError

SHIPPED = Path(__file__).with_name("recipes").resolve()
"""The directory of megarl's own recipes, including base.yaml. In a checkout, `recipes` is a link to configs/. In an
installed package, it is a copy."""

OPTIONAL = (
    "evaluation",
    "environment",
    "reward_model",
    "implicit_reward",
    "teachers",
    "run.profile",
    "actor.lora",
    "rollout.speculative",
)
"""Sections that are off by default. The value null restores the defaults."""

OVERRIDES = "overrides"
"""Origin, in error messages, of values that were passed through the Python API."""

Overrides = Sequence[str] | Mapping[str, Any]
"""KEY=VALUE strings, or a mapping of dotted keys to values."""

_LIST_INDEX = re.compile(r"\[|\.\d+(?=\.|$)")


def load(path: str | Path, overrides: Overrides = ()) -> Config:
    """Read a recipe: its base files first, then its own keys, then the overrides, as KEY=VALUE or as values by dotted
    key. A base file is looked up next to the recipe that names it, then among megarl's own recipes. All paths become
    absolute, see `megarl.config.paths`. Raise a UserError if the configuration is invalid; the message has one line per
    violation, with origin, key, value and remedy."""
    files = list(_files(Path(path), ()))
    merged = _merged(files, overrides)
    violations.require_encodable(merged, str(path))
    recipe = paths.absolute(merged, _is_shipped)
    try:
        config = Config.model_validate(recipe.values)
    except ValidationError as error:
        raise UserError("\n".join(violations.describe(error, recipe, str(path)))) from None
    rules.check(config, overlay(recipe, files[0]).values)
    return config


def changes_allowed_by(path: str | Path, overrides: Overrides = ()) -> list[Any]:
    """Return the value of run.allow_changes in a recipe. The recipe is not validated."""
    run = _section(_merged(list(_files(Path(path), ())), overrides).values, "run")
    keys = run.get("allow_changes")
    return keys if isinstance(keys, list) else []


def _merged(files: Sequence[Document], overrides: Overrides) -> Document:
    # The overrides are merged first, so that the order of a variant's name and its options does not matter.
    parsed = (
        (_value(name, value, OVERRIDES) for name, value in overrides.items())
        if isinstance(overrides, Mapping)
        else map(_override, overrides)
    )
    command_line = reduce(Document.overlay, map(_expand_null, parsed), Document({}, {}))
    return reduce(overlay, (*files, command_line))


def _is_shipped(file: str) -> bool:
    return Path(file).resolve().is_relative_to(SHIPPED)


def overlay(base: Document, over: Document) -> Document:
    """Lay `over` on top of `base`. If `over` names a different entry for a `Variant` section than `base`, the options
    of the base's entry are dropped and the new entry uses its own defaults. The section's own fields are kept."""
    values = base.values
    for variant in VARIANTS:
        *sections, discriminator = variant.key.split(".")
        below, above = (reduce(_section, sections, document.values) for document in (base, over))
        if discriminator in below and above.get(discriminator, below[discriminator]) != below[discriminator]:
            kept: Any = {name: value for name, value in below.items() if name in variant.model_fields}
            values = _replace(values, sections, kept)
    return Document(values, base.origins).overlay(over)


def _section(values: Any, name: str) -> dict[str, Any]:
    """Return a section of `values`, or an empty mapping if it is missing."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def _replace(values: dict[str, Any], sections: list[str], new: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with `new` in place of the section at this path."""
    name, *inner = sections
    return values | {name: _replace(values[name], inner, new) if inner else new}


def dump(config: Config) -> str:
    """Return all keys as YAML that loads back to an equal Config."""
    return document.render(config.model_dump())


def _files(path: Path, above: tuple[Path, ...]) -> Iterator[Document]:
    """Yield the documents of a file's base recipes, then the file's own. `above` lists the files that inherit from
    it."""
    if path.resolve() in [file.resolve() for file in above]:
        chain = " -> ".join(str(file) for file in (*above, path))
        raise UserError(f"{above[-1]}: the base files form a cycle: {chain}. Fix: remove one of the `base` keys")
    recipe = document.parse(_text(path, above), str(path))
    values = dict(recipe.values)
    if "base" in values:
        base = values.pop("base")
        place = recipe.origins[("base",)]
        if not isinstance(base, str):
            raise UserError(
                f"{place}: base={document.show(base)}: expected a file name, found {document.kind(base)}. Fix: "
                "set it to base.yaml, or to the path of another recipe"
            )
        beside, shipped = path.parent / base, SHIPPED / base
        yield from _files(shipped if shipped.exists() and not beside.exists() else beside, (*above, path))
    yield _expand_null(Document(values, recipe.origins))


def _expand_null(given: Document) -> Document:
    """Replace each optional section whose value is null with the section's defaults."""
    values = given.values
    for key in OPTIONAL:
        *sections, name = key.split(".")
        section = reduce(_section, sections, values)
        if name in section and section[name] is None:
            defaults = document.value_at(document.parse((SHIPPED / "base.yaml").read_text("utf-8"), "").values, key)
            values = _replace(values, [*sections, name], defaults)
    return Document(values, given.origins)


def _text(path: Path, above: tuple[Path, ...]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        named_by = f" (the base of {above[-1]})" if above else ""
        raise UserError(
            f"{path}{named_by}: cannot be read ({error.strerror}). Fix: use the path of a recipe that exists "
            "and is readable"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8. Fix: save the file as UTF-8 text") from None


def _override(text: str) -> Document:
    """Parse one KEY=VALUE argument from the command line."""
    name, equals, value_text = text.partition("=")
    place = violations.COMMAND_LINE
    if not (name and equals):
        raise UserError(f"{place}: {text!r}: expected KEY=VALUE. Fix: write it in this form, such as run.steps=3")
    if index := _LIST_INDEX.search(name):
        whole = name[: index.start()]
        raise UserError(f"{place}: {name}: list indexes are not supported. Fix: set the whole list: {whole}='[...]'")
    if not value_text.strip():
        raise UserError(
            f"{place}: {name}= has no value. Fix: write {name}=null for none, or \"{name}=''\" for empty text"
        )
    try:
        return _value(name, _typed_value(tuple(name.split(".")), value_text), place)
    except ValueError as error:
        raise UserError(f"{place}: {text}: {error}") from None


def _value(name: str, value: Any, place: str) -> Document:
    """Return a document that sets only this dotted key."""
    key = tuple(name.split("."))
    origins = dict.fromkeys(_keys_within(key, value), place)
    for part in reversed(key):
        value = {part: value}
    return Document(value, origins)


def _typed_value(key: Key, text: str) -> Any:
    """Parse the value of a key as YAML. For a text key, parse only null and quoted text, and take other text literally,
    because YAML would drop " # …" and read "a: b" as a mapping."""
    takes_text, plain = _takes_text(key), text.strip()
    is_quoted = plain[0] in "'\""
    if takes_text and plain != "null" and not is_quoted:
        return text
    try:
        value = document.parse_value(text)
    except ValueError:
        if takes_text:
            return text
        raise
    return plain if isinstance(value, str) and not is_quoted and plain.startswith(value) else value


def _takes_text(key: Key) -> bool:
    """Return whether the key's value is text, possibly null."""
    types: list[Any] = [Config]
    for name in key:
        sections = [type_ for type_ in types if hasattr(type_, "model_fields")]
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        types = [type_ for field in fields for type_ in _members(field.annotation)]
    return set(types) - {type(None)} == {str}


def _members(annotation: Any) -> list[Any]:
    """Return the types in an annotation that may be a union or have metadata."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    return (
        [member for part in get_args(annotation) for member in _members(part)]
        if origin in (Union, UnionType)
        else [annotation]
    )


def _keys_within(key: Key, value: Any) -> Iterator[Key]:
    yield key
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in children:
        yield from _keys_within((*key, name), inner)
