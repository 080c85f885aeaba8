from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.document import Document, parse, parse_value, render

CORE_SCALARS = [
    ("true", True),
    ("FALSE", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("010", 10),
    ("-7", -7),
    ("0o17", 15),
    ("0x1F", 31),
    ("1e-6", 1e-6),
    ("1.0E+3", 1000.0),
    (".5", 0.5),
    ("-.inf", -math.inf),
    ("no", "no"),
    ("on", "on"),
    ("Yes", "Yes"),
    ("y", "y"),
    ("1:30", "1:30"),
    ("1_000", "1_000"),
    ("2024-01-01", "2024-01-01"),
    ("0b11", "0b11"),
    ("<<", "<<"),
    ("=", "="),
    ("'1e-6'", "1e-6"),
    ('"true"', "true"),
]


@pytest.mark.parametrize(("text", "value"), CORE_SCALARS)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    read = parse(f"key: {text}", "a.yaml").values["key"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.yaml: the file is empty"),
        ("# only a comment\n", "a.yaml: the file is empty"),
        ("\n- a\n", "a.yaml:2: expected a mapping (KEY: VALUE), found a list"),
        ("42", "a.yaml:1: expected a mapping (KEY: VALUE), found an integer"),
        ("a: 1\nb:\n\t- 2", "a.yaml:3:1: "),
        ("a: 1\nb: [1,\n", "a.yaml:3:1: while parsing a flow node"),
        ("a: 1\n---\nb: 2", "expected a single document"),
        ("a: *other", "a.yaml:1:4: found undefined alias"),
        ("a: &a {b: *a}", "a.yaml:1:4: "),
        ("a: \x01", "a.yaml:1: character U+0001 is not allowed"),
        ("a:\n  b: 1\n  c: 2\n  b: 3", "a.yaml:4:3: duplicate key 'b', first set on line 2"),
        ("a: [{b: 1, b: 2}]", "a.yaml:1:12: duplicate key 'b', first set on line 1"),
        ("a: {1: 2}", "a.yaml:1:5: key 1 is not text"),
        ("a: !!python/name:os.system x", "a.yaml:1:4: tag 'tag:yaml.org,2002:python/name:os.system' is not supported"),
        ("a: !!int x", "a.yaml:1:4: tag"),
    ],
)
def test_invalid_text_is_rejected_with_its_position(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(text, "a.yaml")
    assert message in str(error.value) and "\n" not in str(error.value) and ". Fix: " in str(error.value)


def test_every_key_has_its_line() -> None:
    document = parse("a:\n  b: 1\n  c:\n    - d: 2\n", "a.yaml")
    assert document.origins == {
        ("a",): "a.yaml:1",
        ("a", "b"): "a.yaml:2",
        ("a", "c"): "a.yaml:3",
        ("a", "c", 0): "a.yaml:4",
        ("a", "c", 0, "d"): "a.yaml:4",
    }
    assert document.origin(("a", "b"), "elsewhere") == "a.yaml:2"
    assert document.origin(("a", "z", "y"), "elsewhere") == "a.yaml:1"
    assert document.origin(("z",), "elsewhere") == "elsewhere"


def test_overlay_merges_mappings_and_replaces_the_rest() -> None:
    base = parse("a: {b: 1, c: {d: 2}}\nl: [1, 2]\ns: {t: 1}\n", "base.yaml")
    over = parse("a: {c: {e: 3}}\nl: [3]\ns: 4\nn: {m: 5}\n", "over.yaml")
    merged = base.overlay(over)
    assert merged.values == {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "l": [3], "s": 4, "n": {"m": 5}}
    assert merged.origin(("a", "b"), "") == "base.yaml:1"
    assert merged.origin(("l",), "") == "over.yaml:2"
    assert base.values == {"a": {"b": 1, "c": {"d": 2}}, "l": [1, 2], "s": {"t": 1}}, "the base must not change"


def test_parse_value_error_contains_the_reason() -> None:
    assert parse_value("[1, {a: no}]") == [1, {"a": "no"}]
    with pytest.raises(ValueError, match="invalid YAML value: while parsing a flow sequence"):
        parse_value("[1, 2")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
traps = st.sampled_from(
    [text for text, _ in CORE_SCALARS]
    + ["- a", "a: b", "#", " x ", "x\ny\n", "\ufeff", "\x00", "\x85", "a\u2028b", "\r"]
)
trees = st.recursive(
    scalars | traps,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | traps, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text() | traps, trees, min_size=1, max_size=3))
def test_render_reads_back(values: dict) -> None:
    assert repr(parse(render(values), "a.yaml").values) == repr(values)


def test_shared_values_render_without_aliases() -> None:
    shared = {"x": 1}
    assert parse(render({"a": shared, "b": shared}), "a.yaml") == Document(
        {"a": {"x": 1}, "b": {"x": 1}},
        {("a",): "a.yaml:1", ("a", "x"): "a.yaml:2", ("b",): "a.yaml:3", ("b", "x"): "a.yaml:4"},
    )
