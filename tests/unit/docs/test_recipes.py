"""The pages beside the recipes: their catalogue, and the keys for verl's names."""

from __future__ import annotations

import re

import yaml

from tests.e2e.learning_cases import CASES
from tests.paths import BASE, CONFIGS
from tests.readme import section, text_of
from tools.benchmarks import figures


def test_the_table_of_papers_has_every_recipe_of_one_and_keys_that_exist():
    table = section("configs/README.md", "Algorithms")
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    recipes = {path.stem for path in CONFIGS.glob("*-*.yaml")} | {"quickstart"}
    assert {recipe.strip().strip("`") for _, recipe in rows} == recipes
    named = re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", " ".join(keys for keys, _ in rows))
    known, values = keys(), {"reinforce"}
    assert [name for name in named if name not in values and not any(f".{k}".endswith(f".{name}") for k in known)] == []


def test_every_case_that_is_seen_to_learn_has_a_result():
    assert figures.result("learning")["runs"].keys() == CASES.keys()


def test_our_names_on_the_page_of_verl_are_keys_of_the_base_recipe():
    """They are in the last column of the first table, and in the first one of the table of defaults."""
    names, defaults = text_of("configs/coming-from-verl.md").split("\n## Defaults that differ\n")
    ours = [*re.findall(r"\|([^|]*)\|$", names, re.MULTILINE), *re.findall(r"^\|([^|]*)\|", defaults, re.MULTILINE)]
    known = keys()
    sections = "|".join(key for key in known if "." not in key)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)[`=:]", " ".join(ours))
    assert len(named) >= 30
    assert [name for name in named if name not in known] == []


def keys() -> set[str]:
    return set(flatten(yaml.safe_load(BASE.read_text())))


def flatten(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
