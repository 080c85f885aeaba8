"""Complete runs of three-turn rollouts, some of which fail: in an environment, and by an agent over the OpenAI API."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl import report
from tests.e2e.series import Series
from tests.paths import BASE
from tests.tiny_model import CHARACTERS, SPECIAL_TOKENS, write_tiny_llama

pytestmark = pytest.mark.slow

WORLD = Path(__file__).with_name("turns.py")
MODES = ("fine", "restarts", "raises", "as_is")
RECIPE = {
    "base": str(BASE),
    "run": {"name": "tiny", "steps": 2},
    "model": {"dtype": "float32"},
    "actor": {"tokens_per_microbatch": 256, "threads": 1},
    "rollout": {"max_new_tokens": 60, "context_length": 100, "kv_cache_gib": 0.01, "threads": 1},
    "environment": {"class": f"{WORLD}:Echo", "turn_tokens": 12},
    "algorithm": {"advantage": {"estimator": "grpo"}},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "prompts_per_update": 4},
    "data": {"shuffle": False},
    "rewards": {"functions": []},
    "checkpoint": {"every_steps": None},
    "cluster": {"object_store_mib": 80},
}


EVALUATION = (
    "evaluation.sets=[{name: greedy, size: 4}, {name: sampled, size: 4, samples_per_prompt: 2, temperature: 0.7, "
    "success_above: 0.9}]"
)


WITH_FEEDBACK = (
    "teachers.models=[{name: t, feedback: environment}]",
    "algorithm.distillation={placement: loss, coefficient: 0.1}",
)
"""The policy is its own teacher, which also sees the environment's feedback."""


@pytest.fixture(scope="module")
def run(series, tmp_path_factory) -> Path:
    overrides = "environment.options={marks: '?'}", EVALUATION, *WITH_FEEDBACK
    return train(series, tmp_path_factory.mktemp("environments"), *overrides)


def train(series: Series, folder: Path, *overrides: str) -> Path:
    write_tiny_llama(folder / "model", vocab_size=len(SPECIAL_TOKENS) + len(CHARACTERS))  # every token decodes to text
    rows = [{"prompt": f"{i}", "answer": "", "mode": MODES[i % 4]} for i in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **RECIPE,
        "run": RECIPE["run"] | {"folder": str(folder / "runs")},
        "model": RECIPE["model"] | {"path": str(folder / "model")},
        "data": RECIPE["data"] | {"source": str(folder / "prompts.jsonl")},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    series.train(folder / "recipe.yaml", *overrides)
    return folder / "runs" / "tiny"


def rows_of(run: Path) -> list[dict]:
    files = sorted(run.glob("rollouts/step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_rollouts_have_expected_samples_and_rewards(run):
    rollouts = defaultdict(list)
    for row in rows_of(run):
        rollouts[row["rollout_id"]].append(row)
    assert len(rollouts) == 32
    modes = {name: MODES[int(name.split(".")[1])] for name in rollouts}
    for name, rows in rollouts.items():
        mode = modes[name]
        assert len(rows) == (2 if mode == "restarts" else 1)
        for row in rows:
            assert row["num_response_tokens"] == sum(row["mask"]) == len(row["rollout_logprobs"])
            assert sum(run["count"] for run in row["version"]) == row["num_response_tokens"]
        if mode == "raises":
            assert rows[0]["reward"] is None and rows[0]["advantage"] is None
            assert rows[0]["failure"] == "environment: step raised KeyError: 'broken world'"
            assert rows[0]["stop_reason"] == "failed" and "turns.py" in rows[0]["stack"]
            continue
        assert [len(row["mask"]) for row in rows] == ([1, 3] if mode == "restarts" else [5])
        assert all(length <= 12 for row in rows for length in row["mask"][::2])
        turns = [message["content"] for message in rows[0]["messages"] if message["role"] == "assistant"]
        assert len(turns) == 3 and rows[0]["stop_reason"] == "done"
        for row in rows:
            assert row["reward"] == pytest.approx(sum(row["turn_rewards"]))
            assert row["parts"]["environment_bonus"] == pytest.approx(0.75)
            assert row["turn_rewards"][-1] == pytest.approx(0.25 + row["parts"]["environment_digits"] - digits(row))


def digits(row: dict) -> float:
    """Return the total digit reward of all turns but the last, without the bonus per turn."""
    return sum(row["turn_rewards"][:-1]) - 0.25 * (len(row["turn_rewards"]) - 1)


def test_advantages_are_grpo_over_rollouts(run):
    groups = defaultdict(dict)
    for row in rows_of(run):
        if row["reward"] is not None:
            groups[row["rollout_id"].rsplit(".", 1)[0]][row["rollout_id"]] = row["reward"]
    checked = 0
    for row in rows_of(run):
        if row["reward"] is not None:
            rewards = list(groups[row["rollout_id"].rsplit(".", 1)[0]].values())
            expected = (row["reward"] - fmean(rewards)) / (stdev(rewards) + 1e-6)
            assert row["advantage"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            checked += 1
    assert checked == 2 * (4 + 8 + 4)


def test_engine_logprobs_equal_transformers(run):
    """The log-probs of every turn, given its context, match a plain forward pass of the initial model."""
    fine = [row for row in rows_of(run) if row["step"] == 1 and row["rollout_id"].startswith("1.0.")]
    assert len(fine) == 4
    for row in fine:
        for start, said, logprobs in turns_of(run, row):
            expected = logprobs.gather(1, said[:, None])[:, 0].tolist()
            assert row["rollout_logprobs"][start : start + len(said)] == pytest.approx(expected, abs=2e-4)


def test_teacher_sees_the_feedback_of_the_environment(run):
    """The metric equals the mean of log p − log p_t in transformers. The teacher sees feedback in the prompts of all
    samples, including those after a restart, except in failed rollouts."""
    tokenizer = AutoTokenizer.from_pretrained(run.parents[1] / "model")
    model = AutoModelForCausalLM.from_pretrained(run.parents[1] / "model")
    differences = []
    for row in rows_of(run):
        if row["step"] > 1 or "feedback" not in row:
            assert row["step"] > 1 or row["stop_reason"] == "failed"
            continue
        feedback = row["feedback"]["environment"]
        assert re.fullmatch(r"No, \d+\.", feedback)
        before = row["prompt"].removesuffix("<eos><|assistant|>")
        prompts = row["prompt"], f"{before}\n\n{feedback}<eos><|assistant|>"
        mask = [k % 2 == 0 for k, length in enumerate(row["mask"]) for _ in range(length)]
        own, with_feedback = (
            logprobs_after(model, tokenizer(prompt)["input_ids"], row["response_ids"])[: len(mask)][mask]
            for prompt in prompts
        )
        differences.append(own - with_feedback)
    assert len(differences) == 4 * (1 + 2 + 1)
    expected = torch.cat(differences).mean().item()
    assert abs(expected) > 1e-4
    assert metrics_of(run)[1]["kl/teacher_t"] == pytest.approx(expected, rel=1e-2, abs=1e-5)


def logprobs_after(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Return the log-probs of the response's tokens after the prompt, [R]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def turns_of(run: Path, row: dict) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Run a plain forward pass of the initial model over a rollout with a single conversation.

    Returns:
        For each turn its offset in the response, its tokens (int64 [R]), and the log-probs of all tokens ([R, V]).
    """
    folder = run.parents[1]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    texts = [f"<|{message['role']}|>{message['content']}<eos>" for message in row["messages"]]
    ids = tokenizer("".join(texts), return_tensors="pt")["input_ids"]
    logprobs = torch.log_softmax(model(ids).logits.float(), -1)[0, :-1]
    begin = len(tokenizer("".join(texts[:2]))["input_ids"])  # index of the token after <|assistant|> among the targets
    ends = [sum(row["mask"][: k + 1]) for k in range(len(row["mask"]))]
    spans = list(zip([0, *ends], ends, strict=False))[::2]
    return [(a, ids[0, 1:][begin + a : begin + b], logprobs[begin + a : begin + b]) for a, b in spans]


def test_evaluations_are_greedy_and_repeat_the_same_tasks(run):
    before, after = (evaluated(run, "greedy", step) for step in (0, 2))
    turns = turns_of(run, before["greedy.0.0"][0])
    assert len(turns) == 3
    for _, said, logprobs in turns:
        assert said.tolist() == logprobs.argmax(-1).tolist()
    assert before.keys() == after.keys() == {f"greedy.{i}.0" for i in range(4)}
    for name in before:
        assert [rows[name][0]["messages"][:2] for rows in (before, after)] == [before[name][0]["messages"][:2]] * 2
        assert after[name][0]["messages"][1]["content"].startswith("go ")
    versions = {run["version"] for rows in after.values() for row in rows for run in row["version"]}
    assert versions == {2}


def test_evaluation_metrics_count_failed_rollouts_separately(run):
    lines = {line["step"]: line for line in metrics_of(run)}
    for name, k in (("greedy", 1), ("sampled", 2)):
        for step in (0, 2):
            line, rollouts = lines[step], evaluated(run, name, step)
            modes = {rollout: MODES[int(rollout.split(".")[1])] for rollout in rollouts}
            assert {modes[rollout]: len(rows) for rollout, rows in rollouts.items()} == dict.fromkeys(MODES, 1) | {
                "restarts": 2
            }
            values = [
                [rows[0]["reward"] for rollout, rows in rollouts.items() if modes[rollout] == mode] for mode in MODES
            ]
            assert values.pop(MODES.index("raises")) == [None] * k
            assert line[f"evaluation/{name}/avg@{k}"] == pytest.approx(fmean(map(fmean, values)))
            pass_rate = fmean(max(group) > (0.5 if k == 1 else 0.9) for group in values)
            assert line[f"evaluation/{name}/pass@{k}"] == pytest.approx(pass_rate)
            assert line[f"evaluation/{name}/failed_frac"] == 0.25 and line[f"evaluation/{name}/turns_mean"] == 3
    section = report.write(run).read_text().partition('id="evaluations"')[2].partition("</section>")[0]
    assert "environment: step raised KeyError" in section and 'class="block role-assistant"' in section


def evaluated(run: Path, name: str, step: int) -> dict[str, list[dict]]:
    """Return the rows of an evaluation by rollout id."""
    rollouts = defaultdict(list)
    for line in (run / f"evaluations/{name}/step_{step:06d}.jsonl").read_text().splitlines():
        row = json.loads(line)
        rollouts[row["rollout_id"]].append(row)
    return rollouts


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_environment_metrics(run):
    for step in metrics_of(run)[1:]:
        assert step["environment/stop_failed"] == pytest.approx(0.25)
        assert step["environment/samples_per_rollout"] == pytest.approx(1.25)
        assert step["reward/failed_frac"] == pytest.approx(0.25)
        assert step["mismatch/logprob_abs_max"] <= 1e-4


@pytest.mark.exhaustive
def test_agent_is_trained_on_its_http_completions(series, tmp_path):
    run = train(
        series,
        tmp_path,
        f"environment={{class: '{WORLD}:Client', turn_tokens: null}}",
        "run.steps=1",
        "rollout.replicas=2",
        "actor.layout.pp=2",
        "batch={prompts_per_step: 3, prompts_per_update: 3}",
    )
    [metrics] = metrics_of(run)
    assert metrics["mismatch/logprob_abs_max"] <= 1e-4 and metrics["policy/grad_norm"] > 0
    rollouts = defaultdict(list)
    for row in rows_of(run):
        rollouts[row["rollout_id"]].append(row)
    assert len(rollouts) == 12
    for name, rows in rollouts.items():
        if MODES[int(name.split(".")[1])] == "raises":
            assert [row["failure"] for row in rows] == ["environment: run raised RuntimeError: no agent"]
            continue
        assert [len(row["mask"]) for row in rows] == [3, 1]
        assert all(length <= 8 for row in rows for length in row["mask"][::2])
        assert len({row["reward"] for row in rows}) == 1 and rows[0]["reward"] == rows[0]["parts"]["environment_digits"]
        assert len({row["advantage"] for row in rows}) == 1
        assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant", "user", "assistant"]
        assert rows[1]["messages"][0]["content"] == "a new agent"
