"""Causes are ranked by the evidence for each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.step.causes import Evidence, Verdict, describe, ranked

APART = 0.5
"""A log-prob difference above the limit."""

HELD = Evidence(limit=0.1, greedy=0.01, sampled=0.01, differing=(), num_regions=9, num_texts=4)
"""Evidence for an engine whose log-probs agree and whose weights were compared."""

CASES = {
    "weights": dict(greedy=APART, sampled=APART, differing=("w[0:3] is 1, but 2",)),
    "temperature or truncation": dict(sampled=APART),
    "chat template or tokenization": dict(greedy=APART, sampled=APART, other_tokens=("a prompt",)),
    "dtype of the head's logits": dict(greedy=APART, sampled=APART, head_dtypes=("float32", "bfloat16")),
    "kernels": dict(greedy=APART, sampled=APART, kernels=("torch", "vLLM")),
}


def test_no_cause_is_reported_without_a_difference() -> None:
    assert HELD.agrees
    assert {cause.verdict for cause in ranked(HELD)} == {Verdict.EXCLUDED}


@pytest.mark.parametrize("name", CASES)
def test_broken_component_comes_first(name: str) -> None:
    evidence = replace(HELD, **CASES[name])
    first, *_ = ranked(evidence)
    assert not evidence.agrees and first.name == name and first.verdict >= Verdict.LEFT_OVER
    assert describe(ranked(evidence)).startswith(f"  1. {name}: ")


@pytest.mark.parametrize("has_experts", [False, True])
def test_unchecked_causes_follow_the_found_ones(has_experts: bool) -> None:
    evidence = replace(HELD, greedy=APART, sampled=APART, differing=("w",), has_experts=has_experts)
    names = [cause.name for cause in ranked(evidence) if cause.verdict is not Verdict.EXCLUDED]
    assert names == ["weights", *(["expert routing"] if has_experts else []), "kernels"]
    unknown = replace(evidence, differing=None)
    assert next(cause.name for cause in ranked(unknown)) == "kernels", (
        "kernels are the remaining cause if no other is found"
    )


def test_engine_arguments_come_before_kernels() -> None:
    evidence = replace(HELD, greedy=APART, sampled=APART, overrides=("logits_processors", "block_size"))
    first, second, *_ = ranked(evidence)
    assert first.name == "rollout.vllm_overrides" and "logits_processors, block_size. Fix: remove" in first.evidence
    assert second.name == "kernels" and second.evidence.startswith("a remaining cause")
    assert not any(cause.name == first.name for cause in ranked(replace(evidence, greedy=0.01)))


def test_explaining_temperature_is_named() -> None:
    evidence = replace(HELD, sampled=APART, rescored={"at temperature 1": 0.02, "at temperature 0.49": 0.9})
    assert (
        "match the trainer's at temperature 1 (difference 2.0e-02 instead of 5.0e-01)" in ranked(evidence)[0].evidence
    )


def test_greedy_differences_exclude_sampling_settings() -> None:
    """If greedy tokens differ, settings that only affect sampling are not the cause."""
    by_name = {cause.name: cause for cause in ranked(replace(HELD, greedy=APART, sampled=APART))}
    assert by_name["temperature or truncation"].verdict is Verdict.EXCLUDED
    assert by_name["kernels"].verdict is Verdict.LEFT_OVER
