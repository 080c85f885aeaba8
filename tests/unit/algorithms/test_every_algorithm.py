"""Every estimator and objective is complete: its SPEC matches its function's arguments and the config keys, and it has
a row in each test table, a recipe, and a mention in the base recipe."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection
from functools import cache

import pytest
import yaml

from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.specs import EstimatorSpec, ObjectiveSpec, PolicyObjective
from megarl.config.document import show
from megarl.config.load import load
from megarl.config.schema import Config
from tests import estimator_reference, objective_cases
from tests.distributed import test_offline_data
from tests.e2e import learning_cases
from tests.paths import BASE, CONFIGS
from tests.unit.config.test_base_recipe import nodes
from tests.unit.megatron import test_denoising_loss

SPECS: list[EstimatorSpec | ObjectiveSpec] = [*ESTIMATORS.values(), *OBJECTIVES.values()]
TENSORS = {
    "margin",
    "better",
    "score",
    "label",
    "log_prob",
    "old",
    "advantage",
    "reward",
    "mask",
    "row_sample",
    "covariance",
    "draw",
}
INPUTS = TENSORS | {"samples", "selected", "value", "group", "groups", "v", "old_v", "x0", "x", "sigma"}
"""Names of function parameters that are inputs, not options."""


def section(spec: EstimatorSpec | ObjectiveSpec) -> str:
    return "algorithm.advantage" if isinstance(spec, EstimatorSpec) else "algorithm.objective"


def key_of_name(spec: EstimatorSpec | ObjectiveSpec) -> str:
    return f"{section(spec)}.{'estimator' if isinstance(spec, EstimatorSpec) else 'name'}"


@cache
def comments() -> dict[str, set[str]]:
    """Return the words of each key's comment in the base recipe: on its line and up to the next key."""
    lines, keys = BASE.read_text().splitlines(), nodes(yaml.compose(BASE.read_text()))
    starts = [*(node.start_mark.line for node in keys.values()), len(lines)]
    texts = {key: lines[start:end] for key, start, end in zip(keys, starts, starts[1:], strict=False)}
    return {key: set(re.findall(r"\w+", " ".join(x.partition("#")[2] for x in text))) for key, text in texts.items()}


@cache
def recipes() -> list[Config]:
    return [load(recipe) for recipe in sorted({*CONFIGS.glob("*.yaml")} - {BASE})]


def learned(pattern: str) -> set[str]:
    return {name for case in learning_cases.CASES.values() for name in re.findall(pattern, " ".join(case.overrides))}


ESTIMATOR_PLACES: dict[str, Callable[[], Collection[str]]] = {
    "CASES of tests/estimator_reference.py": lambda: {case.name for case in estimator_reference.CASES.values()},
    "CASES of tests/e2e/learning_cases.py": lambda: learned(r"algorithm\.advantage\.estimator=(\w+)"),
    "a recipe in configs": lambda: {
        config.algorithm.advantage.estimator
        for config in recipes()
        if config.algorithm.objective.spec.is_policy_objective
    },
    "the comment of estimator in configs/base.yaml": lambda: comments()["algorithm.advantage.estimator"],
}
STEP_OBJECTIVES = [name for name, spec in OBJECTIVES.items() if "tokens" not in spec.actions]
OBJECTIVE_PLACES: dict[str, Callable[[], Collection[str]]] = {
    "CASES of tests/objective_cases.py, or of tests/distributed/test_offline_data.py": lambda: {
        *(case.name for case in objective_cases.CASES.values()),
        *(re.match(r"name: (\w+)", case.objective).group(1) for case in test_offline_data.CASES.values()),
    },
    "CASES of tests/e2e/learning_cases.py": lambda: learned(r"algorithm\.objective(?:\.name=|=\{name: )(\w+)"),
    "a recipe in configs": lambda: {config.algorithm.objective.name for config in recipes()},
    "the comment of name in configs/base.yaml": lambda: comments()["algorithm.objective.name"],
}


@pytest.mark.parametrize("place", ESTIMATOR_PLACES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_has(name, place):
    assert name in ESTIMATOR_PLACES[place]()


@pytest.mark.parametrize("place", OBJECTIVE_PLACES)
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in STEP_OBJECTIVES])
def test_every_objective_has(name, place):
    assert name in OBJECTIVE_PLACES[place]()


@pytest.mark.parametrize("name", STEP_OBJECTIVES)
def test_every_step_objective_is_listed_and_compared(name):
    """tests/unit/megatron/test_denoising_loss.py compares each objective with a reference."""
    assert name in comments()["algorithm.objective.name"]
    compared = {*test_denoising_loss.REFERENCES, *test_denoising_loss.VELOCITY_REFERENCES}
    assert name in compared


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_function_arguments_match_spec(spec):
    """Each option has a function argument of the same name."""
    for function, _, parameters in spec.functions:
        arguments = inspect.signature(function).parameters
        inputs = INPUTS.union(spec.inputs if isinstance(spec, PolicyObjective) else ())
        assert "_" in arguments or arguments.keys() - inputs == parameters.keys()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_options_are_config_keys_with_paper_defaults(spec):
    rows = "prompts" if isinstance(spec, EstimatorSpec) else spec.rows[0]
    keys = ["model.path=m", "data.source=rows.jsonl", f"data.format={rows}", f"{key_of_name(spec)}={spec.name}"]
    if spec.name in STEP_OBJECTIVES:
        keys.append("rollout.engine=diffusers")
    overrides = [f"{section(spec)}.{option}={show(value)}" for option, value in spec.options.items()]
    for config in (load(BASE, keys), load(BASE, [*keys, *overrides])):
        algorithm = config.algorithm.advantage if isinstance(spec, EstimatorSpec) else config.algorithm.objective
        assert algorithm.options() == spec.options
        assert algorithm.options(spec.arguments) == spec.arguments


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_formula_paper_and_docstring_are_present(spec):
    assert spec.formula and spec.paper
    for function, _, _ in spec.functions:
        assert function.__doc__
