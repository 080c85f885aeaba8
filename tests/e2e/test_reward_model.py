"""Complete runs, some of them with a critic, with a reward model in Megatron or vLLM, alone or with a function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.test_reward_model import write_classifier
from tests.e2e.test_train import SLEEP, metrics_of, train_in
from tests.tiny_model import EOS_ID, merging_tokenizer, tiny_tokenizer, write_tiny_llama

pytestmark = pytest.mark.slow


def scores_of(model: torch.nn.Module, row: dict) -> list[float]:
    """Return the scores of a row's response tokens; a sequence classifier has one, at the last token.

    The ids are recovered by encoding the text, and the end-of-sequence token from the finish reason.
    """
    prompt, response = (tiny_tokenizer().encode(row[part]) for part in ("prompt", "response"))
    response += [EOS_ID] * (row["finish_reason"] == "stop")
    assert len(response) == row["num_response_tokens"]
    with torch.no_grad():
        return model(torch.tensor([prompt + response])).logits.flatten()[-len(response) :].tolist()


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for file in (run / "rollouts").iterdir() for line in file.read_text().splitlines()]


def readable(row: dict) -> bool:
    """Return whether encoding the text recovers the ids: only the last token may be a special token."""
    ids = tiny_tokenizer().encode(row["response"])
    return len(ids) + (row["finish_reason"] == "stop") == row["num_response_tokens"]


def test_ppo_run_is_rewarded_by_a_model_and_a_function(series, model, tmp_path):
    write_classifier(tmp_path / "reward", model, "sequence")
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=2",
        f"reward_model.path={tmp_path / 'reward'}",
        "reward_model.weight=0.5",
        "reward_model.layout.pp=2",
        "reward_model.offload=[parameters]",
        SLEEP,
        "reward_model={tokens_per_microbatch: 256, threads: 1}",
        "algorithm.advantage={estimator: gae, gae_lambda: 1.0}",
        "critic.optimizer.lr=0.003",
        "critic={tokens_per_microbatch: 512, threads: 1}",
    )
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2]
    assert all(step["value/grad_norm"] > 0 and step["policy/grad_norm"] > 0 for step in steps)
    assert steps[0]["value/mean"] == 0 != steps[1]["value/mean"], "the critic has not changed"
    assert len({step["reward/reward_model"] for step in steps}) == 2
    for step, file in zip(steps, sorted((run / "rollouts").iterdir()), strict=True):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        # With gae_lambda=1, the critic's target at every token is the reward of the rollout.
        lengths = [row["num_response_tokens"] for row in rows]
        returns = sum(n * row["reward"] for n, row in zip(lengths, rows, strict=True)) / sum(lengths)
        assert step["value/return_mean"] == pytest.approx(returns, rel=1e-4, abs=1e-5)
        assert len({row["parts"]["reward_model"] for row in rows}) > 32  # of 64 samples
        for row in rows:
            [function] = [value for name, value in row["parts"].items() if name != "reward_model"]
            assert row["reward"] == pytest.approx(function + 0.5 * row["parts"]["reward_model"])
    assert {"reward-model-0", "reward-model-1", "critic-0"} <= {file.stem for file in (run / "logs").glob("**/*.log")}


@pytest.mark.parametrize(("kind", "layout"), [("sequence", "dp"), ("token", "tp")])
@pytest.mark.exhaustive
def test_reward_model_in_vllm_scores_as_transformers(series, model, tmp_path, kind, layout):
    """Two engines score, or one with two ranks. GRPO sums a token classifier's scores into rewards."""
    classifier = write_classifier(tmp_path / "reward", model, kind)
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=2",
        "rewards.functions=[]",
        f"reward_model.path={tmp_path / 'reward'}",
        "reward_model.engine=vllm",
        f"reward_model.layout.{layout}=2",
        "reward_model.kv_cache_gib=0.05",
    )
    rows = [row for row in rows_of(run) if readable(row)]
    assert len(rows) > 16  # of 128 samples
    for row in rows:
        scores = scores_of(classifier, row)
        assert row["reward"] == pytest.approx(sum(scores) if kind == "token" else scores[-1], rel=1e-5, abs=1e-4)
    logs = {file.stem for file in (run / "logs").glob("**/reward-model-*.log")}
    assert logs == {"reward-model-0"} | ({"reward-model-1"} if layout == "dp" else set())


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
@pytest.mark.exhaustive
def test_reward_model_uses_its_own_chat_template(series, model, tmp_path, engine):
    """Its vocabulary differs from the actor's, and its inputs are longer than the actor's samples."""
    trunk = write_tiny_llama(tmp_path / "trunk", num_kv_heads=2, vocab_size=300, seed=1)
    classifier = write_classifier(tmp_path / "reward", trunk, "sequence")
    tokenizer = merging_tokenizer("a b", "1 2", ": Ġ")
    tokenizer.save_pretrained(tmp_path / "reward")
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=1",
        "rewards.functions=[]",
        f"reward_model.path={tmp_path / 'reward'}",
        f"reward_model.engine={engine}",
        "reward_model={input_format: chat, context_length: 200, tokens_per_microbatch: 256, kv_cache_gib: 0.05}",
    )
    rows = rows_of(run)
    assert len(rows) == 64
    for row in rows:
        question = row["prompt"].removeprefix("<|user|>").removesuffix("<eos><|assistant|>")
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["response"]}]
        with torch.no_grad():
            scores = classifier(tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)).logits
        assert row["reward"] == pytest.approx(scores.item(), rel=1e-5, abs=1e-4)


@pytest.mark.exhaustive
def test_critic_learns_returns_of_token_scores(series, model, tmp_path):
    """Check the critic's first targets. Its values start at zero and rewards are not discounted, so the targets are the
    rewards to go.

    The classifier gives all tokens the same score, so the rewards to go follow from the lengths alone.
    """
    classifier = write_classifier(tmp_path / "reward", model, "token")
    torch.nn.init.zeros_(classifier.score.weight)
    torch.nn.init.constant_(classifier.score.bias, 0.5)
    classifier.save_pretrained(tmp_path / "reward")
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=1",
        "algorithm.advantage={estimator: gae, gae_lambda: 1.0}",
        "reward_model={weight: 0.25, tokens_per_microbatch: 256}",
        f"reward_model.path={tmp_path / 'reward'}",
        "critic.tokens_per_microbatch=256",
    )
    [step], rows = metrics_of(run), rows_of(run)
    lengths = [row["num_response_tokens"] for row in rows]
    functions = [row["reward"] - 0.25 * row["parts"]["reward_model"] for row in rows]
    assert [row["parts"]["reward_model"] for row in rows] == pytest.approx([0.5 * n for n in lengths])
    rewards_to_go = [n * f + 0.125 * n * (n + 1) / 2 for n, f in zip(lengths, functions, strict=True)]
    assert step["value/return_mean"] == pytest.approx(sum(rewards_to_go) / sum(lengths), rel=1e-5)
