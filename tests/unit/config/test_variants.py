"""Sections that name a registry entry or a spec in a user's file, and hold its options."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.algorithm_schema import Objective
from megarl.config.algorithms import describe_one
from megarl.config.load import dump, load
from megarl.config.saved import validated
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT
from megarl.core.errors import UserError
from megarl.launch.named_files import named_files
from megarl.run.folder import RunFolder
from tests.paths import BASE, CONFIGS

ON_BASE = "base: base.yaml\nmodel: {path: m}\ndata: {source: arithmetic}\n"
FILE = """
from megarl.algorithms.policy_loss import PolicyLoss, policy_ratio
from megarl.algorithms.specs import GroupEstimator, PolicyObjective
from megarl.algorithms.specs import VelocityObjective
from megarl.core.score import Baseline


def squared(log_prob, old, advantage, scale):
    ratio = policy_ratio(log_prob, old, advantage)
    return PolicyLoss.of(-scale * ratio.square() * advantage, ratio)


def against_the_best(group):
    return [Baseline(max(member.reward for member in group))] * len(group)


PARTS = dict(formula="f", paper="mine")
SQUARED = PolicyObjective(name="squared", loss=squared, parameters={"scale": (float, 1.0)}, **PARTS)
BEST = GroupEstimator(name="best", compare=against_the_best, **PARTS)
WRONG = PolicyObjective(name="wrong", loss=squared, **PARTS)
SCALE = {"scale": (float, 1.0)}
CLASH = PolicyObjective(
    name="clash", loss=squared, parameters=SCALE, step_parameters={"aggregation": (str, "")}, **PARTS
)
"""


def recipe(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def code(tmp_path) -> Path:
    return written(tmp_path, "mine.py", FILE)


def test_omitted_options_have_the_defaults_of_the_spec():
    for name, spec in OBJECTIVES.items():
        engine = "vllm" if "tokens" in spec.actions else "diffusers"
        keys = f"data.format={spec.rows[0]}", "data.source=rows.jsonl", f"rollout.engine={engine}"
        config = recipe(f"algorithm.objective.name={name}", *keys)
        assert config.algorithm.objective.options() == spec.options
        assert config.algorithm.objective.model_dump().keys() == Objective.model_fields.keys() | spec.options.keys()


def test_different_entry_drops_the_options_of_the_base(tmp_path):
    written(tmp_path, "clip.yaml", ON_BASE + "algorithm: {objective: {dual_clip: 3, aggregation: token_mean}}")
    path = written(tmp_path, "gspo.yaml", "base: clip.yaml\nalgorithm: {objective: {name: gspo, clip_high: 0.5}}")
    objective = load(path).algorithm.objective
    assert objective.options() == {"clip_low": 3e-4, "clip_high": 0.5}
    assert objective.aggregation == "token_mean", "aggregation is a field of the section, not an option of clip"
    back = written(tmp_path, "back.yaml", "base: gspo.yaml\nalgorithm: {objective: {name: clip}}")
    assert load(back).algorithm.objective.options() == OBJECTIVES["clip"].options


def test_same_entry_keeps_the_options_of_the_base(tmp_path):
    path = written(tmp_path, "a.yaml", ON_BASE + "algorithm: {objective: {dual_clip: 3}}")
    assert load(path, ["algorithm.objective.name=clip"]).algorithm.objective.option("dual_clip") == 3


@pytest.mark.parametrize("order", [1, -1])
def test_overrides_may_come_in_any_order(order):
    overrides = ["algorithm.objective.clip_low=0.01", "algorithm.objective.name=gspo"][::order]
    assert recipe(*overrides).algorithm.objective.option("clip_low") == 0.01


def test_options_of_another_entry_are_rejected_in_any_order():
    overrides = ["algorithm.objective.dual_clip=3", "algorithm.objective.name=gspo"]
    for ordered in (overrides, overrides[::-1]):
        with pytest.raises(UserError, match=r"dual_clip: unknown key; .* dual_clip is an option of clip"):
            recipe(*ordered)


def test_resolved_configuration_loads_back(tmp_path):
    config = recipe("algorithm.advantage.estimator=gae", "algorithm.objective.name=cispo")
    flat = written(tmp_path, "flat.yaml", dump(config))
    assert load(flat) == config
    assert "dual_clip" not in flat.read_text() and "group_of_one" not in flat.read_text()


def test_user_entries_are_validated_and_have_options(code):
    names = (f"algorithm.objective.name={code}:SQUARED", f"algorithm.advantage.estimator={code}:BEST")
    config = recipe(*names, "algorithm.objective.scale=0.5")
    algorithm = config.algorithm
    assert algorithm.objective.options() == {"scale": 0.5}
    assert algorithm.objective.spec.name == "squared" and algorithm.advantage.spec.name == "best"
    assert algorithm.advantage.option("group_of_one") == "zero"
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config and copied.algorithm.objective.spec is algorithm.objective.spec
    assert {named.key for named in named_files(config)} == {"algorithm.objective.name", "algorithm.advantage.estimator"}
    assert "    # scale: 1.0" in describe_one(f"{code}:SQUARED").splitlines()


def test_relative_path_is_independent_of_the_workers_folder(code, monkeypatch, tmp_path):
    monkeypatch.chdir(code.parent)
    config = recipe("algorithm.objective.name=mine.py:SQUARED")
    monkeypatch.chdir(tmp_path.parent)
    assert config.algorithm.objective.spec.name == "squared"


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("mine.py:NOTHING", "defines no NOTHING of type ObjectiveSpec. Fix: define NOTHING as a PolicyObjective or"),
        ("mine.py:BEST", "defines no BEST of type ObjectiveSpec"),
        (
            "mine.py:WRONG",
            "megarl calls squared(log_prob, old, advantage, scale) with 3 positional arguments and no keyword",
        ),
        ("mine.py:CLASH", "option aggregation has the name of another key in the section. Fix: rename the option"),
        ("other.py:A", "other.py is not a Python file. Fix: use"),
        ("broken.py:A", "broken.py raised ZeroDivisionError: division by zero. Fix: resolve this error in the file"),
    ],
)
def test_invalid_file_is_rejected_before_the_run(code, entry, line):
    written(code.parent, "broken.py", "1 / 0")
    with pytest.raises(UserError) as error:
        recipe(f"algorithm.objective.name={code.parent}/{entry}")
    assert line in str(error.value) and str(error.value).startswith("algorithm.objective.name")


def test_run_folder_has_the_file_and_rejects_changes(code, tmp_path):
    config = recipe(f"algorithm.objective.name={code}:SQUARED", f"run.folder={tmp_path}")
    folder = RunFolder.create(config)
    content = config.algorithm.objective.option("sha256")
    assert [file.read_text() for file in folder.code.iterdir()] == [FILE]
    assert [file.name for file in folder.code.iterdir()] == [f"{content[:12]}-mine.py"]
    assert load(folder.config) == config
    stale = folder.config.read_text().replace(content, "0" * 64)
    folder.config.write_text(stale)
    with pytest.raises(UserError, match=f"algorithm.objective.sha256=0.*: expected '{content}'"):
        load(folder.config)


def test_worker_rejects_a_changed_file(code):
    objective = recipe(f"algorithm.objective.name={code}:SQUARED").algorithm.objective
    changed = objective.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(UserError, match="the file has changed since the run started"):
        _ = changed.spec


def test_reading_a_checkpoint_executes_no_file(code, tmp_path):
    saved = recipe(f"algorithm.objective={{name: {code}:SQUARED, aggregation: token_mean}}").model_dump()
    saved["algorithm"]["objective"]["name"] = f"{tmp_path}/raises.py:A"
    written(tmp_path, "raises.py", "raise SystemExit")
    objective = validated(saved, FORMAT, Path("manifest.json")).algorithm.objective
    assert (objective.name, objective.aggregation) == ("clip", "token_mean")


def test_recipes_contain_only_options_of_their_entry():
    assert all(load(path) for path in CONFIGS.glob("smollm2-cpu-*.yaml"))
