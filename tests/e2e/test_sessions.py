"""A whole run whose rollouts are an agent's, which reaches the engines by HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from tests.paths import BASE
from tests.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tiny_llama

pytestmark = pytest.mark.slow

AGENT = Path(__file__).with_name("asker.py")
RECIPE = {
    "base": str(BASE),
    "model": {"dtype": "float32"},
    "actor": {"tokens_per_microbatch": 256},
    "rollout": {"max_new_tokens": 60, "context_length": 100, "kv_cache_gib": 0.01, "replicas": 1, "tp": 1},
    "environment": {"class": f"{AGENT}:Asker", "max_turns": 4, "processes": 1},
    "algorithm": {"advantage": {"estimator": "grpo"}},
    "batch": {"prompts_per_step": 2, "samples_per_prompt": 4, "prompts_per_update": 2},
    "rewards": {"functions": []},
    "checkpoint": {"every_steps": None},
    "cluster": {"object_store_mib": 80},
}


def test_turns_of_an_agent_are_trained_on_as_they_were_sampled(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "model", vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS))  # all of it is text
    rows = [{"prompt": f"{i}", "answer": ""} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        **RECIPE,
        "run": {"name": "tiny", "steps": 2, "folder": str(tmp_path / "runs")},
        "model": RECIPE["model"] | {"path": str(tmp_path / "model")},
        "data": {"source": str(tmp_path / "prompts.jsonl"), "shuffle": False},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given))
    command = [sys.executable, "-m", "megarl.cli", "train", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    run = tmp_path / "runs" / "tiny"
    rollouts = defaultdict(list)
    for file in sorted(run.glob("rollouts/step_*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rollouts[row["rollout_id"]].append(row)
    assert len(rollouts) == 16
    for samples in rollouts.values():
        other, main = sorted(samples, key=lambda row: len(row["mask"]))
        assert (len(other["mask"]), len(main["mask"])) == (1, 3)
        assert all(length <= 8 for row in samples for length in row["mask"][::2])
        for row in samples:
            assert row["num_response_tokens"] == sum(row["mask"]) == len(row["rollout_logprobs"])
            assert row["reward"] == pytest.approx(sum(row["parts"][f"environment_{x}"] for x in ("digits", "bonus")))
            assert row["parts"]["environment_bonus"] == 0.5 and row["stop_reason"] == "done"
        assert [message["content"] for message in main["messages"][::2]] == [main["messages"][0]["content"], "more"]
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["environment/samples_per_rollout"] == 2
        # The trainer reads the ids that the engine sampled, each after the ids that the engine had before it.
        assert step["mismatch/logprob_abs_max"] <= 1e-4
