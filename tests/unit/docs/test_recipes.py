"""The pages about recipes: tables of algorithms and predictions, and verl's defaults."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby

import pytest
import yaml

from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.config.load import OPTIONAL
from tests.e2e.learning_cases import CASES
from tests.paths import BASE, CONFIGS
from tests.readme import section, text_of
from tools.benchmarks import figures, predictions


def test_table_of_papers_has_every_recipe_and_existing_keys():
    table = section("configs/README.md", "Algorithms")
    rows = [line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")][1:]
    recipes = {path.stem for path in CONFIGS.glob("*-*.yaml")} | {"quickstart"}
    assert {recipe.strip().strip("`") for _, recipe in rows} == recipes
    named = re.findall(r"`([a-z_.]+)(?:=[^`]*)?`", " ".join(keys for keys, _ in rows))
    known, values = keys(), {"reinforce"}
    assert [name for name in named if name not in values and not any(f".{k}".endswith(f".{name}") for k in known)] == []


def test_page_lists_the_sections_that_null_disables():
    listed = re.search(r"empty string\. (.+?) disable the section", text_of("configs/README.md"), re.DOTALL)[1]
    assert sorted(re.findall(r"`(.+?)=null`", listed)) == sorted(OPTIONAL)


def test_every_learning_case_has_a_result():
    assert figures.result("learning")["runs"].keys() == CASES.keys()


def test_scaling_has_every_published_run_and_h100_recipe():
    lines = [line for line in section("configs/README.md", "Scaling").splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    published = [row for row in rows if row[2].startswith(("NeMo-RL", "verl"))]
    recipes = [row for row in rows if "(h100/" in row[2]]
    assert len(published) + len(recipes) == len(rows) - 2  # without the headers
    shown = Counter((row[2].partition(",")[0], row[0], row[1].replace(" × ", "x"), row[5]) for row in published)
    assert shown == Counter((case.who, case.model, case.gpus, f"{case.seconds:.0f} s") for case in predictions.CASES)
    for row in published:
        seconds, predicted = (float(cell.removesuffix(" s")) for cell in row[5:7])
        assert float(row[8].split()[0]) == pytest.approx(predicted / seconds, abs=0.015)
    missed = [row for row in published if row[8].endswith("(missed)")]
    assert {(row[2], row[0], row[1].replace(" × ", "x")) for row in missed} == set(predictions.MISSES)
    files = {path.name for path in (CONFIGS / "h100").glob("*-*xh100-*.yaml")}
    assert {row[2].rpartition("/")[2].rstrip(")") for row in recipes} == files
    for table in (published, recipes):
        models = [model for model, _ in groupby(row[0] for row in table)]
        assert len(models) == len(set(models)), "rows of a model must be adjacent"


def test_defaults_that_differ_from_verl_have_existing_keys():
    defaults = text_of("configs/coming-from-verl.md").split("\n## Defaults that differ\n")[1]
    known = keys()
    sections = "|".join(key for key in known if "." not in key)
    named = re.findall(
        rf"`((?:{sections})\.[a-z_.]+)[`=:]", " ".join(re.findall(r"^\|([^|]*)\|", defaults, re.MULTILINE))
    )
    assert len(named) >= 5
    assert [name for name in named if name not in known] == []


def keys() -> set[str]:
    """Return the keys of base.yaml and the options of all estimators and objectives."""
    known = set(flatten(yaml.safe_load(BASE.read_text())))
    for section_key, specs in (("advantage", ESTIMATORS), ("objective", OBJECTIVES)):
        known |= {f"algorithm.{section_key}.{option}" for spec in specs.values() for option in spec.options}
    return known


def flatten(tree: dict, prefix: str = ""):
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
