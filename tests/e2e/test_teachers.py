"""Complete runs with teachers that are larger than the actor, alone and beside rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.run import read_trace
from tests.e2e.test_train import SLEEP, metrics_of, train_in
from tests.tiny_model import tiny_tokenizer, write_tiny_llama

pytestmark = pytest.mark.slow


IDS = {tiny_tokenizer().decode([i]): i for i in range(len(tiny_tokenizer().get_vocab()))}


def distributions(model: torch.nn.Module, row: dict, prompt_text: str | None = None) -> torch.Tensor:
    """Return the log-probs of all tokens at each position of a row's response, [R, V], after `prompt_text` or, by
    default, the row's prompt."""
    prompt = tiny_tokenizer().encode(row["prompt"] if prompt_text is None else prompt_text)
    ids = torch.tensor([prompt + [IDS[text] for text in row["tokens"]]])
    with torch.no_grad():
        return model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def log_probs(model: torch.nn.Module, row: dict, prompt_text: str | None = None) -> torch.Tensor:
    """Return the log-probs of the tokens of a row's response after `prompt_text` or, by default, the row's prompt."""
    ids = torch.tensor([IDS[text] for text in row["tokens"]])
    return distributions(model, row, prompt_text).gather(1, ids[:, None])[:, 0]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    sizes = {"large": dict(hidden_size=128, num_heads=4, num_layers=3), "small": dict(hidden_size=64, num_heads=2)}
    return {
        name: write_tiny_llama(tmp_path_factory.mktemp(name), num_kv_heads=2, seed=i + 1, **keys)
        for i, (name, keys) in enumerate(sizes.items())
    }


def test_run_is_distilled_without_rewards(series, model, teachers, tmp_path):
    """The advantages of the first step equal log p_teacher − log p_student of transformers, summed over teachers with
    their weights. One teacher is the policy with a hint in every second row; another teacher, in vLLM and with a layout
    of its own, sees the same hints."""
    hints = {f"{a}+{a}=": f"{a}+{a}={2 * a}. {a}+{a}=" if a % 2 else None for a in range(8)}
    rows = [{"prompt": prompt, "answer": None, "hint": hint} for prompt, hint in hints.items()]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = (
        f"{{name: large, path: {teachers['large']}}}, {{name: hinted, prompt_column: hint, weight: 2.0}}, "
        f"{{name: small, path: {teachers['small']}, weight: 0.5, prompt_column: hint, engine: vllm, layout: {{}}}}"
    )
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=2", f"teachers.models=[{models}]", "rewards.functions=[]", "batch.samples_per_prompt=2"),
        "teachers={layout: {tp: 2}, tokens_per_microbatch: 256, threads: 1, offload: [parameters], kv_cache_gib: 0.05}",
        *("algorithm.advantage.estimator=policy_gradient", "algorithm.distillation.coefficient=0.5"),
        *(f"data.source={data}", "actor.offload=[optimizer]", SLEEP),
    )
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2]
    assert all(step["policy/grad_norm"] > 0 and 0 < step["teachers/seconds"] < step["time/train"] for step in steps)
    assert all(step["reward/mean"] == step["reward/std"] == 0 for step in steps)
    student, *others = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, *teachers.values()))
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rows) == 16
    for row in rows:
        asked = row["prompt"].removeprefix("<|user|>").removesuffix("<eos><|assistant|>")
        hint = None if hints[asked] is None else f"<|user|>{hints[asked]}<eos><|assistant|>"
        own, large = (log_probs(each, row) for each in (student, others[0]))
        expected = 0.5 * (large - own)
        if hint is not None:
            small, hinted = (log_probs(each, row, hint) for each in (others[1], student))
            expected += 0.5 * (0.5 * (small - own) + 2.0 * (hinted - own))
        assert row["token_advantages"] == pytest.approx(expected.tolist(), abs=2e-3)
        assert row["advantage"] == pytest.approx(expected.mean().item(), abs=2e-3)


@pytest.mark.exhaustive
def test_teacher_adds_to_the_rewards_of_a_group(series, model, teachers, tmp_path):
    """Uses GRPO, so rewards contribute to advantages, and several updates per step. In the second step, the coefficient
    is 0 and the teacher does not run."""
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=2", f"teachers.models=[{{name: large, path: {teachers['large']}}}]", "teachers.threads=1"),
        *("batch.prompts_per_update=4", "batch.epochs=2", "teachers.tokens_per_microbatch=256"),
        *(
            "algorithm.distillation={coefficient: 0.1, placement: loss, anneal_steps: 1}",
            "algorithm.kl.coefficient=0.01",
        ),
    )
    steps = metrics_of(run)
    for step in steps:
        assert step["reward/std"] > 0 and step["policy/grad_norm"] > 0 and step["kl/loss_token_k3"] >= 0
    assert [step["distillation/coefficient"] for step in steps] == [0.1, 0.0]
    assert steps[0]["kl/teacher_large"] > 0.1 and steps[0]["teachers/seconds"] > 0
    assert not {"kl/teacher_large", "teachers/seconds"} & steps[1].keys()


@pytest.mark.exhaustive
def test_exact_divergence_is_a_loss_of_the_run(series, model, teachers, tmp_path):
    """The first step's metric equals the forward KL of transformers' distributions, averaged over all tokens."""
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=2", f"teachers.models=[{{name: large, path: {teachers['large']}}}]", "rewards.functions=[]"),
        *("teachers={layout: {tp: 2}, tokens_per_microbatch: 256, threads: 1}", "batch.samples_per_prompt=2"),
        "actor.layout.dp=2",
        "algorithm={advantage: {estimator: policy_gradient}, distillation: {divergence: forward_kl, placement: loss}}",
    )
    steps = metrics_of(run)
    assert all(step["policy/grad_norm"] > 0 and step["teachers/seconds"] > 0 for step in steps)
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, teachers["large"]))
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    kls = []
    for row in rows:
        p, q = (distributions(each, row) for each in (student, teacher))
        kls.append((q.exp() * (q - p)).sum(-1))
    assert steps[0]["kl/teacher_large"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)


def over_top(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the tokens `ids` [R, k] and of all others together, [R, k + 1]."""
    rest = log_probs.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat((log_probs.gather(1, ids), rest), -1)


@pytest.mark.exhaustive
def test_top_tokens_of_two_engines_are_a_loss_of_the_run(series, model, teachers, tmp_path):
    """The first step's metric equals the reverse KL of transformers' distributions over the teacher's most probable
    tokens and the rest, averaged over all tokens. Both engines of the teacher score samples."""
    entry = f"{{name: large, path: {teachers['large']}, engine: vllm, layout: {{dp: 2}}}}"
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=2", f"teachers.models=[{entry}]", "rewards.functions=[]", "batch.samples_per_prompt=2"),
        "teachers={tokens_per_microbatch: 256, threads: 1, kv_cache_gib: 0.05}",
        "algorithm={advantage: {estimator: policy_gradient}, distillation: {divergence: reverse_kl, placement: loss}}",
        "algorithm.distillation.top_k=5",
    )
    steps = metrics_of(run)
    assert all(step["policy/grad_norm"] > 0 and step["teachers/seconds"] > 0 for step in steps)
    scoring = {span.process for span in read_trace(run / "logs/attempt_1") if span.task == "score"}
    assert scoring >= {"teacher-large-0", "teacher-large-1"}
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, teachers["large"]))
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    kls = []
    for row in rows:
        p, q = (distributions(each, row) for each in (student, teacher))
        ids = q.topk(5).indices
        p, q = over_top(p, ids), over_top(q, ids)
        kls.append((p.exp() * (p - q)).sum(-1))
    assert steps[0]["kl/teacher_large"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nll_coefficient", [1, 0])
def test_fine_tuning_adds_the_divergence_from_a_teacher(series, model, teachers, tmp_path, nll_coefficient):
    """The teacher and the trained model share devices. There are no engines."""
    turns = [
        [{"role": "user", "content": f"{i} + {i} ="}, {"role": "assistant", "content": str(2 * i)}] for i in range(8)
    ]
    data = tmp_path / "conversations.jsonl"
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=8", f"data={{format: messages, source: {data}}}", "batch.samples_per_prompt=1"),
        *("rewards.functions=[]", f"teachers.models=[{{name: large, path: {teachers['large']}}}]"),
        *("teachers={layout: {tp: 2}, tokens_per_microbatch: 256, threads: 1, offload: [parameters]}",),
        f"algorithm.objective={{name: sft, aggregation: token_mean, nll_coefficient: {nll_coefficient}}}",
        "algorithm.distillation={divergence: jsd, placement: loss}",
        "algorithm.distillation={coefficient: 0.0, final_coefficient: 10.0, anneal_steps: 1}",
    )
    unscored, first, *_, last = metrics_of(run)
    assert unscored["distillation/coefficient"] == 0 and not {"kl/teacher_large", "teachers/seconds"} & unscored.keys()
    assert 0 < last["kl/teacher_large"] < 0.9 * first["kl/teacher_large"] and first["teachers/seconds"] > 0
    loss = nll_coefficient * first["policy/nll"] + 10 * first["kl/teacher_large"]
    assert first["policy/loss"] == pytest.approx(loss, rel=1e-4)


def test_self_distillation_trains_on_given_responses(series, model, tmp_path):
    """The metric equals the forward KL between transformers' distributions after either prompt, averaged
    over the tokens of sampled and given responses."""
    hints = {f"{a}+{a}=": f"{a}+{a}={2 * a}. {a}+{a}=" for a in range(8)}
    rows = [{"prompt": p, "answer": None, "hint": hint, "solution": hint[4:6]} for p, hint in hints.items()]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=1", "teachers.models=[{name: hinted, prompt_column: hint}]", "rewards.functions=[]"),
        *(f"data={{source: {data}, response_column: solution}}", "batch.samples_per_prompt=2", SLEEP),
        "algorithm.distillation={divergence: forward_kl, placement: loss, on_policy_share: 0.5}",
        "algorithm.advantage.estimator=policy_gradient",
    )
    [step] = metrics_of(run)
    assert step["mismatch/logprob_abs_max"] < 1e-3, "given responses have no log-probs of an engine"
    student = AutoModelForCausalLM.from_pretrained(model)
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    given = [row for row in rows if row["sample_id"].endswith(".given")]
    assert 0 < len(given) < 8 and len(rows) == len(given) + 2 * (8 - len(given))
    assert step["distillation/on_policy_frac"] == 1 - len(given) / len(rows)
    kls = []
    for row in rows:
        asked = row["prompt"].removeprefix("<|user|>").removesuffix("<eos><|assistant|>")
        if row in given:
            assert row["response"] == hints[asked][4:6]
            row["tokens"] = [*row["response"], "<eos>"]
        q = distributions(student, row, f"<|user|>{hints[asked]}<eos><|assistant|>")
        kls.append((q.exp() * (q - distributions(student, row))).sum(-1))
    assert step["kl/teacher_hinted"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-3)
    assert step["policy/grad_norm"] > 0


CHECK = """
def check(prompt, response, answer):
    return {"reward": 0.0, "feedback": f"Not {response}" if "1" in response else None}
"""


@pytest.mark.exhaustive
def test_feedback_on_continued_prefixes_is_the_hint(series, model, tmp_path):
    """Samples start with a prefix of the given response, which is not trained on. The advantages of the first step
    equal log p_told − log p of transformers, where the teacher sees the feedback on the sample, if any."""
    rows = [{"prompt": f"{a}+{a}=", "answer": None, "solution": f"1{a}2{a}3{a}"} for a in range(8)]
    data, functions = tmp_path / "rows.jsonl", tmp_path / "functions.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    functions.write_text(CHECK)
    run = train_in(
        series,
        tmp_path,
        model,
        *("run.steps=1", "teachers.models=[{name: told, feedback: check}]", "batch.samples_per_prompt=2"),
        *(f"rewards.functions=[{{function: '{functions}:check'}}]", "rewards.processes=1"),
        *(f"data={{source: {data}, response_column: solution}}", "rollout.prefix_share=0.5"),
        "algorithm.advantage.estimator=policy_gradient",
    )
    [step] = metrics_of(run)
    assert step["mismatch/logprob_abs_max"] < 1e-3 and step["policy/grad_norm"] > 0
    student = AutoModelForCausalLM.from_pretrained(model)
    rows = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    lengths = []
    for row in rows:
        prefix = row["mask"][1] if "mask" in row else 0
        lengths.append(prefix)
        asked = row["prompt"].removeprefix("<|user|>").removesuffix("<eos><|assistant|>")
        assert "".join(row["tokens"][:prefix]) == f"1{asked[0]}2"[:prefix]
        expected = torch.zeros(len(row["tokens"]))
        if prefix:
            assert row["feedback"]["check"] == f"Not {row['response']}" and row["response"].startswith("1")
        if "feedback" in row:
            told = f"<|user|>{asked}\n\n{row['feedback']['check']}<eos><|assistant|>"
            expected = log_probs(student, row, told) - log_probs(student, row)
            expected[:prefix] = 0
        assert row["token_advantages"] == pytest.approx(expected.tolist(), abs=2e-3)
    assert len(rows) == 16 and set(lengths) > {0} and max(lengths) <= 3
    assert all(one == other for one, other in zip(lengths[::2], lengths[1::2], strict=True))
