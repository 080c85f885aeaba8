from __future__ import annotations

from tests.unit.config.rules.recipes import errors


def test_all_broken_rules_are_reported_together() -> None:
    assert len(errors("rollout.top_p=0.9", "actor.layout.ep=2", "batch.samples_per_prompt=1")) == 3
