"""Configuration changes that a resumed run rejects."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megarl.config.continuation import Change, allowed_changes, check_continues
from megarl.config.load import load
from megarl.config.schema import Config
from tests.paths import BASE


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])


def violations(*overrides: str, given: Sequence[str] = (), step: int = 10, saved: dict | None = None) -> list[str]:
    try:
        check_continues(config(*overrides), config(*given).model_dump() if saved is None else saved, step, "ck")
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.steps=500", "run.export=false", "run.name=other", "run.folder=/elsewhere", "resume=auto"],
        ["actor.layout.pp=2", "actor.layout.dp=4", "actor.threads=3", "actor.tokens_per_microbatch=8192"],
        [
            "actor.recompute=full",
            "actor.offload=[optimizer]",
            "actor.overlap_communication=false",
        ],
        ["rollout.tp=2", "rollout.replicas=2", "rollout.kv_cache_gib=3.5", "rollout.vllm_overrides.block_size=32"],
        ["checkpoint.every_steps=null", "checkpoint.keep=9", "cluster.timeouts.update=7", "rewards.failure_limit=0.1"],
    ],
)
def test_placement_and_duration_may_change(overrides: list[str]) -> None:
    assert violations(*overrides) == []


def test_placement_of_other_models_may_change() -> None:
    gae = "algorithm.advantage.estimator=gae"
    assert violations(gae, "critic.offload=[optimizer]", "critic.layout.tp=2", given=[gae]) == []


def test_engines_and_layouts_of_teachers_may_change() -> None:
    plain, moved, weighted = (
        f"teachers.models=[{{name: t, path: x{keys}}}]"
        for keys in ("", ", engine: vllm, layout: {tp: 2}", ", weight: 2")
    )
    assert violations(moved, given=[plain]) == violations(plain, given=[moved]) == []
    assert len(violations(weighted, given=[plain])) == 1


def test_feedback_may_be_saved_as_text() -> None:
    shown, other = (f"teachers.models=[{{name: t, feedback: {name}}}]" for name in ("exact_match", "boxed"))
    functions = "rewards.functions=[{function: exact_match}, {function: boxed}]"
    saved = config(shown, functions).model_dump()
    saved["teachers"]["models"][0]["feedback"] = "exact_match"
    assert violations(shown, functions, saved=saved) == []
    assert len(violations(other, functions, saved=saved)) == 1


@pytest.mark.parametrize(
    ("override", "now", "then"),
    [
        ("run.seed=1", "run.seed=1", "0"),
        ("actor.optimizer.lr=1e-5", "actor.optimizer.lr=1.0e-05", "1.0e-06"),
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.coefficient=0.1", "0.0"),
        ("batch.samples_per_prompt=4", "batch.samples_per_prompt=4", "8"),
        ("model.path=other", "model.path=other", "m"),
        ("rollout.temperature=0.5", "rollout.temperature=0.5", "1.0"),
        (
            "rewards.functions=[{function: numeric_match}]",
            "rewards.functions=[{function: numeric_match, name: null, options: {}, per_turn: false, sources: null, "
            "weight: 1.0}]",
            "[{function: exact_match, name: null, options: {}, per_turn: false, sources: null, weight: 1.0}]",
        ),
        (
            "actor.megatron_overrides.model.attention_dropout=0.1",
            "actor.megatron_overrides.model.attention_dropout=0.1",
            "(not set)",
        ),
    ],
)
def test_keys_that_affect_results_may_not_change(override: str, now: str, then: str) -> None:
    key = now.partition("=")[0]
    fixed = key in ("run.seed", "model.path", "actor.megatron_overrides.model.attention_dropout")
    allow = "" if fixed else f"allow the change with --allow-changes {key}, "
    line = (
        f"{now}: ck was saved with {then}. Fix: restore this value, {allow}or start a new run with resume=never and a "
        "new run.name"
    )
    assert line in violations(override)


@pytest.mark.parametrize(
    ("allowed", "overrides", "changes"),
    [
        ("actor.optimizer.lr", ["actor.optimizer.lr=1e-5"], [Change("actor.optimizer.lr", 1e-6, 1e-5)]),
        (
            "algorithm.kl,rollout",
            ["algorithm.kl={coefficient: 0.1, limit: 9}", "rollout.temperature=0.5"],
            [
                Change("rollout.temperature", 1.0, 0.5),
                Change("algorithm.kl.limit", None, 9.0),
                Change("algorithm.kl.coefficient", 0.0, 0.1),
            ],
        ),
        ("batch", ["batch.samples_per_prompt=4"], [Change("batch.samples_per_prompt", 8, 4)]),
        (
            "algorithm.objective",
            ["algorithm.objective.clip_high=0.28"],
            [Change("algorithm.objective.clip_high", 0.2, 0.28)],
        ),
        ("actor.optimizer.lr", [], []),
    ],
)
def test_listed_keys_may_change(allowed: str, overrides: list[str], changes: list[Change]) -> None:
    overrides = [*overrides, f"run.allow_changes=[{allowed}]"]
    assert violations(*overrides) == []
    assert allowed_changes(config(*overrides), config().model_dump()) == changes


@pytest.mark.parametrize(
    ("allowed", "override"),
    [
        ("actor.optimizer", "actor.optimizer.beta1=0.8"),  # a checkpoint restores Adam's options
        ("actor.optimizer", "actor.optimizer.name=muon"),
        ("actor.optimizer.lr", "rollout.temperature=0.5"),
        ("rollout.top_p", "rollout.top_k=3"),
        ("algorithm", "algorithm.advantage.estimator=gae"),
        ("algorithm.kl", "algorithm.kl={coefficient: 0.1, renew_steps: 3}"),
    ],
)
def test_other_keys_may_not_change(allowed: str, override: str) -> None:
    key = override.partition("=")[0]
    assert any(line.startswith(key) for line in violations(override, f"run.allow_changes=[{allowed}]"))


def test_long_values_that_differ_at_the_end_are_shown() -> None:
    paths = [f"/models/{'x' * 60}/{name}" for name in ("one", "two")]
    given, override = (f"model.path={path}" for path in paths)
    [line] = violations(override, given=[given])
    assert line.startswith(f"model.path={paths[1]}: ck was saved with {paths[0]}. Fix: restore this value")


def test_error_has_a_line_for_every_changed_key() -> None:
    assert len(violations("run.seed=1", "rollout.temperature=0.5", "run.steps=500")) == 2


def test_fewer_steps_than_completed_are_rejected() -> None:
    assert violations("run.steps=10") == []
    assert violations("run.steps=9") == ["run.steps=9: ck was saved after step 10. Fix: set run.steps to at least 10"]


COSINE = "actor.optimizer.schedule.name=cosine"
WSD = "actor.optimizer.schedule={name: wsd, warmup: 5, decay: 20}"
SHARE = "actor.optimizer.schedule.warmup=0.1"
COUNT = "actor.optimizer.schedule.warmup=10"


@pytest.mark.parametrize(
    ("schedule", "step", "steps", "resumes"),
    # The saved run has 100 steps with one update each.
    [
        ([], 100, 200, True),
        ([COUNT], 5, 200, True),
        ([COSINE], 100, 200, False),
        ([COSINE], 50, 60, False),
        ([COSINE], 50, 100, True),
        ([SHARE], 1, 200, False),
        ([WSD], 80, 200, True),
        ([WSD], 82, 200, False),
        ([WSD], 60, 70, False),
    ],
)
def test_steps_may_change_unless_past_rates_depend_on_them(schedule, step, steps, resumes) -> None:
    sizes = ["batch.prompts_per_step=8", "batch.prompts_per_update=8"]
    saved = config(*schedule, *sizes).model_dump()
    line = (
        f"run.steps={steps}: ck was saved with run.steps=100, and the learning rates of its {step} updates depend on "
        "run.steps (actor.optimizer.schedule.name="
    )
    found = violations(*schedule, *sizes, f"run.steps={steps}", step=step, saved=saved)
    assert [line in problem for problem in found] == ([] if resumes else [True])


def test_steps_may_change_past_rates_if_listed() -> None:
    saved = config(COSINE).model_dump()
    assert "allow the change with --allow-changes run.steps, " in violations(COSINE, "run.steps=200", saved=saved)[0]
    assert violations(COSINE, "run.steps=200", "run.allow_changes=[run.steps]", saved=saved) == []


def test_learning_rates_of_the_critic_are_checked() -> None:
    """The critic's schedule counts its own updates, including those of its warm-up steps."""
    settings = ["algorithm.advantage.estimator=gae", "critic.warmup_steps=10", "critic.optimizer.schedule.name=linear"]
    [line] = violations(*settings, "run.steps=200", step=10, saved=config(*settings).model_dump())
    assert (
        line.startswith("run.steps=200: ck was saved with run.steps=100, and the")
        and "critic.optimizer.schedule" in line
    )
    settings[-1] = COSINE
    assert violations(*settings, "run.steps=200", step=10, saved=config(*settings).model_dump()) == []


def test_keys_of_another_version_are_named() -> None:
    saved = config().model_dump()
    saved["algorithm"]["spare"] = 3
    del saved["batch"]["prompts_per_step"]
    assert [line.partition(":")[0] for line in violations(saved=saved)] == [
        "batch.prompts_per_step=64",
        "algorithm.spare=(not set)",
    ]
