"""The passes of a run, and the reasons that it logs for them."""

import pytest

from megarl.config.load import load
from megarl.step import passes
from tests.paths import BASE

GAE = "algorithm.advantage.estimator=gae"
TEACHERS = "teachers.models=[{name: a, path: x}, {name: b, path: y}]"
BATCH = ("batch.prompts_per_step=8", "batch.prompts_per_update=8")


def config(*overrides: str):
    return load(BASE, ["model.path=m", "data.source=arithmetic", *BATCH, *overrides])


@pytest.mark.parametrize(
    ("overrides", "name", "needed", "reason"),
    [
        (["batch.prompts_per_update=8"], "old log-probs", False, "one update per step"),
        (["batch.prompts_per_update=4"], "old log-probs", True, "2 updates per step"),
        (["batch.epochs=2"], "old log-probs", True, "one update per step in each of 2 epochs: the policy moves"),
        (
            ["batch.prompts_per_update=4", "algorithm.correction.old=rollout"],
            "old log-probs",
            False,
            "the engine's log-probs approximate them",
        ),
        (
            ["algorithm.trust_region.kl_limit=0.01", "algorithm.objective.name=unclipped", "model.dtype=float32"],
            "old log-probs",
            True,
            "the update compares trial steps with the old policy",
        ),
        (
            ["batch.prompts_per_update=8", "algorithm.objective.name=kl_cov"],
            "old log-probs",
            True,
            "kl_cov: the objective selects",
        ),
        (
            ["batch.prompts_per_update=4", "algorithm.objective.name=dpo"],
            "old log-probs",
            False,
            "name=dpo: the objective has no ratio to an old policy",
        ),
        (
            ["algorithm.objective.name=dpo"],
            "reference log-probs",
            True,
            "name=dpo; the reference is the model that the",
        ),
        (
            ["algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"],
            "reference log-probs",
            False,
            "name=sft: no term uses them",
        ),
        (
            ["algorithm.objective.name=diffusion_nft", "rollout.engine=diffusers"],
            "old log-probs",
            False,
            "one update per step: the updated policy is the old policy); ",
        ),
        (
            ["algorithm.objective.name=diffusion_nft", "rollout.engine=diffusers", "batch.prompts_per_update=4"],
            "old log-probs",
            True,
            "2 updates per step: the policy moves",
        ),
        (["algorithm.objective.name=dpo"], "critic values", False, "name=dpo: the objective has no advantages"),
        (["batch.prompts_per_update=8"], "reference log-probs", False, "coefficient=0"),
        (["batch.prompts_per_update=8", "algorithm.kl.coefficient=0.01"], "reference log-probs", True, "0.01"),
        (
            ["batch.prompts_per_update=8", "algorithm.kl={coefficient: 0.01, renew_steps: 5, renew_share: 0.3}"],
            "reference log-probs",
            True,
            "the reference moves 0.3 of the way to the policy every 5 steps",
        ),
        (["batch.prompts_per_update=8"], "critic values", False, "grpo uses the group's rewards"),
        (["batch.prompts_per_update=8", GAE], "critic values", True, "gae uses a critic's values"),
        (
            ["batch.prompts_per_update=8", GAE, "critic.shared_backbone=true"],
            "critic values",
            False,
            "the pass for old log-probs computes them",
        ),
        (
            ["batch.prompts_per_update=8", GAE, "critic.shared_backbone=true"],
            "old log-probs",
            True,
            "same pass computes the critic's values",
        ),
        (
            ["batch.prompts_per_update=8", "algorithm.kl={placement: reward, coefficient: 0.1}"],
            "old log-probs",
            True,
            "the rewards include a KL term",
        ),
        (
            [TEACHERS, "algorithm.distillation.coefficient=0.5"],
            "teacher log-probs",
            True,
            "algorithm.distillation.coefficient=0.5; teachers: a, b",
        ),
        ([TEACHERS, "algorithm.distillation.coefficient=0"], "teacher log-probs", False, "coefficient=0"),
        (
            [TEACHERS, "algorithm.distillation={divergence: jsd, placement: loss}"],
            "teacher hidden states",
            True,
            "algorithm.distillation.coefficient=1; teachers: a, b",
        ),
        (
            [TEACHERS, "algorithm.distillation.anneal_steps=10"],
            "teacher log-probs",
            True,
            "algorithm.distillation.coefficient=1, annealed to 0 over 10 steps; teachers: a, b",
        ),
        (
            ["teachers.models=[{name: a, prompt_column: hint}]", "data.source=rows.jsonl"],
            "teacher log-probs",
            True,
            "algorithm.distillation.coefficient=1; teachers: a [the policy with privileged prompts]",
        ),
        ([TEACHERS], "old log-probs", True, "the advantages include the KL to the teachers"),
        ([TEACHERS, "algorithm.distillation.placement=loss"], "old log-probs", False, "one update per step"),
        ([TEACHERS, "algorithm.correction.old=rollout"], "old log-probs", False, "the engine's log-probs approximate"),
        (["batch.prompts_per_update=8"], "implicit rewards", False, "coefficient=0"),
        (
            ["batch.prompts_per_update=8", GAE, "implicit_reward.coefficient=2"],
            "implicit rewards",
            True,
            "coefficient=2",
        ),
    ],
)
def test_passes(overrides, name, needed, reason):
    made = config(*overrides)
    assert passes.needed(made, name) == needed
    [line] = [line for line in passes.describe(made) if f" {name} (" in line]
    assert line.startswith("passes: " if needed else "skipped passes: ")
    assert reason in line.partition(f" {name} (")[2].partition(" (")[0]


def test_description_has_a_line_for_made_and_omitted_passes():
    one, two = passes.describe(config("algorithm.kl.coefficient=0.01"))
    assert one == (
        "passes: reference log-probs (algorithm.kl.coefficient=0.01; the reference is the model that the run starts "
        "from)"
    )
    assert two.count(");") == 2
    [alone] = passes.describe(config())
    assert alone.startswith("skipped passes: old log-probs (one update per step")
