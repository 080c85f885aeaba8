"""Adding an estimator and an objective: one file each, and the tests name all missing pieces."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.algorithms.specs import (
    GroupEstimator,
    LabelObjective,
    PairObjective,
    PolicyObjective,
    SampleEstimator,
    TokenEstimator,
)
from tests.paths import ROOT
from tests.readme import text_of
from tests.unit.algorithms.test_every_algorithm import ESTIMATOR_PLACES, OBJECTIVE_PLACES

KINDS = (GroupEstimator, SampleEstimator, TokenEstimator, PolicyObjective, PairObjective, LabelObjective)

MEDIAN = '''
"""Rewards minus the group median."""
from statistics import median

from megarl.algorithms.specs import GroupEstimator
from megarl.core.score import Baseline


def group_median(group, sharpness):
    """b = median(r)."""
    return [Baseline(median([member.reward for member in group]), 1 / sharpness)] * len(group)


SPEC = GroupEstimator(
    name="group_median",
    formula="r_i − median(r)",
    paper="none",
    compare=group_median,
    parameters={"sharpness": (float, 1.0)},
)
'''
SQUARED = '''
"""A squared ratio instead of a clip."""
from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import PolicyObjective


def squared(log_prob, old, advantage, clip_low):
    """ℓ = −ρ²·A."""
    ratio = policy_ratio(log_prob, old, advantage)
    return PolicyLoss.of(-ratio.square() * advantage, ratio)


def clip_is_not_half(options):
    return "clip_low=0.5: not that" if options["clip_low"] == 0.5 else None


SPEC = PolicyObjective(
    name="squared",
    formula="−ρ²·A",
    paper="none",
    loss=squared,
    parameters={"clip_low": (float, 0.1)},
    rules=(clip_is_not_half,),
)
'''
ADDED = """
import sys
from megarl.algorithms import advantages, objectives
advantages.__path__.append(sys.argv[1])
objectives.__path__.append(sys.argv[2])
"""
LIST = "from megarl.config.algorithms import describe; print(describe())"
LOAD = """
from megarl.config.load import load
keys = ["algorithm.advantage.estimator=group_median", "algorithm.objective={name: squared, clip_low: 0.3}"]
algorithm = load("configs/base.yaml", ["model.path=m", "data.source=arithmetic", *keys]).algorithm
print(algorithm.advantage.spec.name, algorithm.objective.options())
"""
REFUSED = """
from megarl.config.load import load
try:
    keys = ["model.path=m", "data.source=arithmetic", "algorithm.objective={name: squared, clip_low: 0.5}"]
    load("configs/base.yaml", keys)
except ValueError as error:
    print(error)
"""
BETWEEN = "---- next ----\n"
TEST = "import pytest; pytest.main(['tests/unit/algorithms/test_every_algorithm.py', '-q', '-p', 'no:cacheprovider'])"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    added = [tmp_path_factory.mktemp(name) for name in ("advantages", "objectives")]
    for folder, name, text in zip(added, ("group_median", "squared"), (MEDIAN, SQUARED), strict=True):
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return added


@pytest.fixture(scope="module")
def printed(folders) -> dict[str, str]:
    """The output of each of these programs. One process runs them all, because importing takes longer than running."""
    codes = (LOAD, REFUSED, LIST)
    between = f"\nprint({BETWEEN!r}, end='')\n"
    return dict(zip(codes, run(folders, between.join(codes)).split(BETWEEN), strict=True))


def run(folders: list[Path], code: str) -> str:
    """Return the output of the code with both added files registered."""
    command = [sys.executable, "-c", ADDED + code, *map(str, folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_recipe_can_use_added_algorithms(printed):
    assert printed[LOAD] == "group_median {'clip_low': 0.3}\n"


def test_rules_of_added_objective_are_checked(printed):
    assert printed[REFUSED] == "clip_low=0.5: not that\n"


def test_added_algorithms_are_listed(printed):
    lines = printed[LIST].splitlines()
    index = lines.index("  group_median: r_i − median(r)")
    assert lines[index + 1].startswith("    none; the group's rewards")
    assert lines[index + 2].startswith("    sharpness=1.0, ")
    assert "  squared: −ρ²·A" in lines


@pytest.mark.exhaustive
def test_missing_pieces_of_added_algorithms_fail(folders):
    """Exactly the checks for missing table rows, keys, recipes and comments fail, and only for the added algorithms."""
    failed = re.findall(r"^FAILED \S*::(\w+\[.*?\])(?: - |$)", run(folders, TEST), re.MULTILINE)
    assert set(failed) == {
        *(f"test_every_estimator_has[group_median-{place}]" for place in ESTIMATOR_PLACES),
        *(f"test_every_objective_has[squared-{place}]" for place in OBJECTIVE_PLACES),
    }


def test_readme_names_existing_files_and_all_tables():
    page = text_of("megarl/algorithms/README.md")
    named = set(re.findall(r"`((?:megarl|tests|configs)[a-z_0-9/]*(?:\.py|\.md|\.yaml)?)`", page))
    assert [name for name in named if not (ROOT / name).exists()] == []
    examples = re.findall(r"[(; ]`(\w+\.py)`", page)
    assert [name for name in examples if not list((ROOT / "megarl/algorithms").glob(f"*/{name}"))] == []
    places = " ".join((*ESTIMATOR_PLACES, *OBJECTIVE_PLACES))
    assert set(re.findall(r"(?:tests|configs)/[a-z_0-9/]+\.(?:py|yaml)", places)) <= named
    assert [kind.__name__ for kind in KINDS if f"`{kind.__name__}`" not in page] == []
