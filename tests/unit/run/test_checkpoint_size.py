"""Disk space for samples that wait for a later step, and for rollout logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.rewards.rollout_file import append_rollouts
from megarl.rewards.sample_file import save_samples
from megarl.run.checkpoint_size import checkpoint_bytes, log_bytes, saved_bytes
from tests.paths import QUICKSTART
from tests.published_models import CONFIGS

ACTOR = next(config for config in CONFIGS.values() if config["model_type"] == "llama")
SIZES = ["rollout.context_length=4096", "rollout.max_new_tokens=3072", "actor.tokens_per_microbatch=4096"]
BATCH = ["batch.prompts_per_step=4", "batch.prompts_per_update=4", "batch.samples_per_prompt=8"]


def sample(name: str, prompt_tokens: int, tokens: int) -> Sample:
    """Return a sample with one four-letter word per token."""
    prompt = Prompt(f"p{name}", "word " * prompt_tokens, list(range(prompt_tokens)))
    ids, probs = list(range(tokens)), [-1.2345] * tokens
    return Sample(name, prompt, ids, probs, [True] * tokens, (VersionRun(0, tokens),), "stop", "word " * tokens)


@pytest.mark.parametrize(
    ("overrides", "prompts"),
    [
        ([], 0),
        (["rollout.max_staleness=1"], 4),
        (["rollout.max_staleness=2"], 8),
        (["rollout.max_staleness=1", "rollout.on_stale=drop", "batch.oversampling=2.5"], 6),
    ],
)
def test_waiting_samples_count_as_part_of_a_checkpoint(tmp_path: Path, overrides: list[str], prompts: int) -> None:
    config = load(QUICKSTART, [*SIZES, *BATCH, *overrides])
    models = {"actor": ACTOR}
    predicted = saved_bytes(config, models) - checkpoint_bytes(config, models)
    groups = [(row, 0, [sample(f"{row}.{k}", 1024, 3072) for k in range(8)]) for row in range(prompts)]
    if not prompts:
        assert predicted == 0
        return
    save_samples(groups, tmp_path / "waiting.safetensors")
    written = (tmp_path / "waiting.safetensors").stat().st_size
    assert 0.5 * predicted < written <= predicted


def test_rollout_logs_of_all_steps_are_predicted(tmp_path: Path) -> None:
    config = load(QUICKSTART, [*SIZES, *BATCH, "run.steps=50"])
    scored = [(sample(f"1.0.{k}", 200, 3072), Score(1.0, {})) for k in range(32)]
    append_rollouts(tmp_path / "step_000001.jsonl", 1, scored)
    written = (tmp_path / "step_000001.jsonl").stat().st_size
    assert 0.5 * log_bytes(config) < 50 * written <= log_bytes(config)
