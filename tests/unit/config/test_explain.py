from __future__ import annotations

from megarl.config.explain import explain
from megarl.config.load import load
from tests.paths import BASE

RECIPE = (
    "run.steps=14",
    "model.path=m",
    "data.source=arithmetic",
    "actor.layout={pp: 2, dp: 1}",
    "actor.tokens_per_microbatch=1024",
    "rollout={max_new_tokens: 16, context_length: 256, replicas: 1}",
    "batch={prompts_per_step: 16, samples_per_prompt: 8, prompts_per_update: 16}",
)


def test_explanation_contains_the_arithmetic() -> None:
    assert explain(load(BASE, RECIPE)).splitlines() == [
        "run         14 steps",
        "step        16 prompts x 8 samples = 128 samples",
        "updates     16 / 16 prompts = 1 per step",
        "update      16 prompts x 8 samples = 128 samples, 128 / dp 1 = 128 per data-parallel rank",
        "rate        constant, 1e-06 at the first of 14 updates, at most 1e-06, 1e-06 at the last",
        "microbatch  samples packed up to 1,024 tokens per rank, never split",
        "tokens      at most 128 samples x 256 = 32,768 per step, including 128 x 16 = 2,048 sampled",
        "trainer     tp 1 x pp 2 x cp 1 x dp 1 = world size 2",
        "rollout     replicas 1 x tp 1 = world size 1",
    ]


def test_uneven_shares_and_several_updates_are_explained() -> None:
    text = explain(load(BASE, [*RECIPE, "batch.prompts_per_update=4", "actor.layout.dp=3", "rollout.replicas=2"]))
    assert "16 / 4 prompts = 4 per step" in text
    assert "4 prompts x 8 samples = 32 samples, 32 / dp 3 = 10 to 11 per data-parallel rank" in text
    assert "tp 1 x pp 2 x cp 1 x dp 3 = world size 6" in text
    assert "replicas 2 x tp 1 = world size 2" in text


def test_ranks_of_the_teachers_are_explained() -> None:
    models = "teachers.models=[{name: math, path: x}, {name: code, path: y}]"
    lines = explain(load(BASE, [*RECIPE, models, "teachers.layout={tp: 2, dp: 3}"])).splitlines()
    assert "teachers    tp 2 x pp 1 x cp 1 x dp 3 = world size 6 each: math, code" in lines


def test_epochs_are_explained() -> None:
    text = explain(load(BASE, [*RECIPE, "batch.prompts_per_update=4", "batch.epochs=3"]))
    assert "updates     16 / 4 prompts = 4 per step, in each of 3 epochs" in text
    assert "at the first of 168 updates" in text


def test_pairs_of_rows_and_of_samples_are_explained() -> None:
    lines = explain(
        load(BASE, [*RECIPE, "data={format: preferences, source: rows.jsonl}", "algorithm.objective.name=dpo"])
    ).splitlines()
    assert "step        16 rows x 2 samples = 32 samples" in lines
    assert "tokens      at most 32 samples x 256 = 8,192 per step" in lines
    assert not any(line.startswith("rollout") for line in lines)
    online = explain(load(BASE, [*RECIPE, "algorithm.objective.name=dpo"])).splitlines()
    assert "step        16 prompts x 8 samples = 128 samples" in online
    assert "update      16 prompts x 2 samples = 32 samples, 32 / dp 1 = 32 per data-parallel rank" in online


def test_learning_rates_of_a_schedule_are_explained() -> None:
    text = explain(load(BASE, [*RECIPE, "actor.optimizer.schedule={name: linear, warmup: 4}"]))
    assert "rate        linear, 2.5e-07 at the first of 14 updates, at most 1e-06, 1e-07 at the last" in text
