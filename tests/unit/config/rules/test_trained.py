from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import GAE, errors, recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [GAE, "critic.optimizer.schedule.min_lr=1e-7"],
            "critic.optimizer.schedule.min_lr=1.0e-07: has no effect unless critic.optimizer.schedule.name=cosine",
        ),
        (
            ["actor.fp8=delayed", "model.dtype=float32"],
            "actor.fp8=delayed: fp8 matrix products need parameters and activations in bfloat16,",
        ),
        (
            [GAE, "critic.optimizer={name: muon}", "actor.optimizer.momentum=0.9"],
            "actor.optimizer.momentum=0.9: has no effect unless actor.optimizer.name=muon. Fix",
        ),
        (
            [
                *(GAE, "critic.optimizer.name=muon"),
                "critic.megatron_overrides.optimizer={use_precision_aware_optimizer: true}",
            ],
            (
                "critic.megatron_overrides.optimizer.use_precision_aware_optimizer=true: the override changes the "
                "dtypes of the optimizer state, but with critic.optimizer.name=muon the momentum must be float32. Fix: "
                "remove the override, or set critic.optimizer.name=adamw"
            ),
        ),
        (
            ["actor.optimizer.schedule.warmup=2.5"],
            (
                "actor.optimizer.schedule.warmup=2.5: a value of 1 or more is a number of updates and must be an "
                "integer. Fix: set an integer, or a fraction"
            ),
        ),
        (
            ["actor.optimizer.schedule.name=wsd"],
            (
                "actor.optimizer.schedule.name=wsd: the length of the decay is not set "
                "(actor.optimizer.schedule.decay=null). Fix: set actor.optimizer.schedule.decay=0.2"
            ),
        ),
        (
            ["actor.optimizer.schedule={name: cosine, decay: 0.2}"],
            "actor.optimizer.schedule.decay=0.2: has no effect unless actor.optimizer.schedule.name=wsd. Fix",
        ),
        (
            ["actor.optimizer.schedule.min_lr=1e-7"],
            "actor.optimizer.schedule.min_lr=1.0e-07: has no effect unless actor.optimizer.schedule.name=cosine. Fix",
        ),
        (
            ["actor.optimizer.schedule={name: linear, min_lr: 1e-3}"],
            (
                "actor.optimizer.schedule.min_lr=0.001: it exceeds the peak learning rate, actor.optimizer.lr=1e-06. "
                "Fix: set actor.optimizer.schedule.min_lr"
            ),
        ),
        (
            ["run.steps=10", "actor.optimizer.schedule={name: wsd, warmup: 6, decay: 0.5}"],
            "actor.optimizer.schedule.warmup=6, decay=0.5: warmup and decay take 6 + 5 = 11 updates, but the run has "
            "only 10. Fix: set both to fractions of the run, for example",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.steps=10", "actor.optimizer.schedule={name: wsd, warmup: 5, decay: 0.5}"],
        ["actor.optimizer.schedule={name: cosine, warmup: 200, min_lr: 1e-6}"],
        ["actor.optimizer={name: muon, momentum: 0.9}"],
        ["actor.megatron_overrides.optimizer={use_precision_aware_optimizer: true}"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
