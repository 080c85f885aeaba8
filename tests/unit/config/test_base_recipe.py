"""configs/base.yaml is the only place that defines and explains the defaults."""

from __future__ import annotations

import re
from functools import reduce
from operator import getitem

import yaml

from megarl.config.algorithm_schema import VARIANTS
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.model_schema import Teacher
from megarl.config.names import keys
from megarl.config.schema import RewardFunction
from tests.paths import BASE


def nodes(node: yaml.MappingNode, prefix: str = "") -> dict[str, yaml.ScalarNode]:
    """Return the node of each key by dotted key."""
    found = {}
    for name, value in node.value:
        found[prefix + name.value] = name
        for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(inner, yaml.MappingNode):
                found |= nodes(inner, f"{prefix}{name.value}.")
    return found


def test_base_has_exactly_the_keys_of_the_schema() -> None:
    """The lists of evaluation sets and teachers are empty in base.yaml, and a variant section has the options of the
    default entry."""
    written, values_of_base = nodes(yaml.compose(BASE.read_text())), yaml.safe_load(BASE.read_text())
    in_lists = "evaluation.sets.", "teachers.models."
    fields = [key for key in keys() if key not in all_options() and not key.startswith(in_lists)]
    assert [key for key in written if key not in all_options()] == fields
    for variant in VARIANTS:
        section = variant.key.rpartition(".")[0]
        chosen = reduce(getitem, variant.key.split("."), values_of_base)
        values = reduce(getitem, section.split("."), values_of_base)
        assert {key: values[key] for key in variant.entries[chosen].options} == variant.entries[chosen].options
        options = {key for key in written if key in all_options() and key.startswith(f"{section}.")}
        assert options == {f"{section}.{option}" for option in variant.entries[chosen].options}


def all_options() -> set[str]:
    """Return the options of every entry of the variant sections, as dotted keys."""
    return {
        f"{variant.key.rpartition('.')[0]}.{option}"
        for variant in VARIANTS
        for spec in variant.entries.values()
        for option in spec.options
    }


def test_keys_of_a_set_are_explained_at_the_list() -> None:
    text = BASE.read_text()
    comment = text[text.index("\n  sets: []") : text.index("\ncheckpoint:")]
    assert set(re.findall(r"\w+", comment)) >= set(EvaluationSet.model_fields)


def test_keys_of_a_teacher_are_explained_at_the_list() -> None:
    text = BASE.read_text()
    comment, _, _ = text.partition("\n  models: []")[2].partition("\n  layout:")
    assert set(re.findall(r"\w+", comment)) >= set(Teacher.model_fields)


def test_every_default_is_explained_on_its_line() -> None:
    """Keys of list items are explained on the line of the list."""
    lines = BASE.read_text().splitlines()
    names = nodes(yaml.compose(BASE.read_text()))
    of_items = {key for key in names if key.startswith("rewards.functions.")}
    sections = {key.rpartition(".")[0] for key in names}
    explained = {key for key, node in names.items() if " # " in lines[node.start_mark.line]}
    assert [key for key in names if key not in sections | of_items | explained] == []
    assert "rewards.functions" in explained


def test_defaults_of_list_items_match_the_base() -> None:
    [item] = yaml.safe_load(BASE.read_text())["rewards"]["functions"]
    assert RewardFunction(function=item["function"]).model_dump() == item
