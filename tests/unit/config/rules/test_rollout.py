from __future__ import annotations

import pytest

from tests.unit.config.rules.recipes import errors, recipe

MTP = ["rollout.speculative.method=mtp", "actor.mtp.loss_coefficient=0.0"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.prefix_share=0.5", "data.source=rows.jsonl"],
            "rollout.prefix_share=0.5: prefixes come from given responses, but data.response_column=null. Fix:",
        ),
        (
            ["rollout.prefix_share=0.5", "data={source: arithmetic, response_column: r}"],
            "data.response_column=r: data.source=arithmetic has no such column. Fix:",
        ),
        (
            ["rollout.prefix_share=0.5", "data={source: r.jsonl, response_column: r}", "environment.class=game.py:G"],
            "rollout.prefix_share=0.5: prefixes require rollouts that consist of a single text response, which",
        ),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9: the trainer needs the candidate tokens of the truncated"),
        (
            ["rollout.quantization=fp8_block", "model.dtype=float32"],
            "rollout.quantization=fp8_block: fp8 engines compute in bfloat16, but model.dtype=float32. Fix: set",
        ),
        (
            ["rollout.quantization=fp8_block", "rollout.vllm_overrides={quantization: fp8}"],
            "rollout.vllm_overrides.quantization=fp8: with rollout.quantization=fp8_block engines already",
        ),
        (
            ["rollout.max_staleness=2", "cluster.placement=disaggregated", "rollout.sleep=true"],
            "rollout.sleep=true: with rollout.max_staleness=2 and cluster.placement=disaggregated engines are never",
        ),
        (
            ["rollout.max_staleness=1", "rollout.sleep=true"],
            "rollout.kv_cache_on_update=keep: with rollout.sleep=true and rollout.max_staleness=1 colocated engines",
        ),
        (
            ["rollout.kv_cache_on_update=recompute"],
            "rollout.kv_cache_on_update=recompute: has no effect unless rollout.max_staleness=1. Fix",
        ),
        (
            ["rollout.max_staleness=1", "cluster.placement=disaggregated", "algorithm.advantage.estimator=remax"],
            "rollout.max_staleness=1: algorithm.advantage.estimator=remax compares each sample with a greedy response",
        ),
        (
            ["rollout.on_stale=drop"],
            "rollout.on_stale=drop: has no effect unless rollout.max_staleness=1 or batch.oversampling=1.25. Fix",
        ),
        (
            ["rollout.speculative.method=draft_model"],
            "rollout.speculative.method=draft_model: rollout.speculative.path=null. Fix: set rollout.speculative.path",
        ),
        (
            ["rollout.speculative={method: draft_model, path: m}", "rollout.sleep=true"],
            "rollout.speculative.method=draft_model: with rollout.sleep=true, engines discard the draft model's",
        ),
        (
            ["rollout.speculative.method=eagle3"],
            "rollout.speculative.method=eagle3: rollout.speculative.path=null. Fix: set rollout.speculative.path",
        ),
        (
            ["rollout.speculative={method: eagle3, path: m}", "rollout.sleep=true"],
            "rollout.speculative.method=eagle3: with rollout.sleep=true, engines discard the draft model's",
        ),
        (
            ["rollout.speculative={method: eagle3, path: m}", "actor.experts.replay_routes=true"],
            "rollout.speculative.method=eagle3: with actor.experts.replay_routes=true, the engines would also report",
        ),
        (
            ["rollout.speculative.method=ngram", "actor.experts.replay_routes=true"],
            "rollout.speculative.method=ngram: with actor.experts.replay_routes=true, the engines would also report",
        ),
        (
            ["rollout.speculative.method=mtp"],
            "rollout.speculative.method=mtp: with actor.mtp.loss_coefficient=null, the MTP layer is not loaded",
        ),
        (
            ["rollout.speculative.tokens=5"],
            "rollout.speculative.tokens=5: has no effect unless rollout.speculative.method=ngram. Fix",
        ),
        (
            ["rollout.speculative={method: ngram, path: m}"],
            "rollout.speculative.path=m: has no effect unless rollout.speculative.method=draft_model. Fix",
        ),
        (
            ["rollout.speculative={method: ngram, tokens: 129}"],
            "rollout.speculative.tokens=129",
        ),
        (
            ["rollout.max_new_tokens=256"],
            "rollout.max_new_tokens=256: 256 - 256 = 0 of rollout.context_length=256 tokens",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.max_new_tokens=255"],
        ["rollout.speculative=null"],
        ["rollout.speculative.method=ngram", "rollout.max_staleness=1", "rollout.top_k=20"],
        ["rollout.speculative={method: draft_model, path: m, tokens: 128}"],
        ["rollout.speculative={method: eagle3, path: m}", "rollout.quantization=fp8_block", "model.dtype=bfloat16"],
        MTP,
        [*MTP, "rollout.quantization=fp8_block", "model.dtype=bfloat16", "actor.lora.rank=8"],
        ["rollout.top_p=0.9", "rollout.top_k=20"],
        ["rollout.top_k=1"],
        ["rollout.max_staleness=1", "cluster.placement=disaggregated"],
        ["rollout.max_staleness=1", "cluster.placement=disaggregated", "rollout.on_stale=drop"],
        ["rollout.on_stale=drop", "batch.oversampling=2", "environment.class=calculator"],
        ["rollout.max_staleness=1"],
        ["rollout.max_staleness=1", "rollout.sleep=true", "rollout.kv_cache_on_update=recompute"],
    ],
)
def test_edge_of_a_rule_is_accepted(overrides: list[str]) -> None:
    recipe(*overrides)
