"""A whole run whose samples are scored by a reward model in Megatron, beside a function."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.e2e.test_train import metrics_of, train
from tests.tiny_model import tiny_tokenizer, write_tiny_llama

pytestmark = pytest.mark.slow


def test_run_is_rewarded_by_a_model_and_a_function(tmp_path):
    model = write_tiny_llama(tmp_path / "model", num_kv_heads=2)
    reward_model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(reward_model.score.weight, generator=torch.Generator().manual_seed(0))
    reward_model.save_pretrained(tmp_path / "reward")
    tiny_tokenizer().save_pretrained(tmp_path / "reward")
    run = train(
        tmp_path,
        model,
        "run.steps=2",
        f"reward_model.path={tmp_path / 'reward'}",
        "reward_model.weight=0.5",
        "reward_model.layout.pp=2",
        "reward_model.tokens_per_microbatch=256",
    )
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2]
    assert len({step["reward/reward_model"] for step in steps}) == 2
    for file in (run / "rollouts").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len({row["parts"]["reward_model"] for row in rows}) > 32  # of 64 samples
        for row in rows:
            [function] = [value for name, value in row["parts"].items() if name != "reward_model"]
            assert row["reward"] == pytest.approx(function + 0.5 * row["parts"]["reward_model"])
    assert {"reward-model-0", "reward-model-1"} <= {file.stem for file in (run / "logs").glob("**/*.log")}
