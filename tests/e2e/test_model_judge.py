"""A judge model in vLLM gives the answers that transformers generates, and their ratings become rewards."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.model_reward import model_judge
from megarl.rollout.vllm.environment import environment
from tests.e2e.engine_processes import engine_context
from tests.e2e.test_train import train_in
from tests.parity import config_of
from tests.timing import RUN_S
from tests.tiny_model import tiny_tokenizer, write_tiny_llama

pytestmark = pytest.mark.slow

ANSWER_TOKENS = 6
HIGHEST = 40
KEYS = (
    "reward_model={input_format: question, engine: vllm, context_length: 128, tokens_per_microbatch: 128}",
    "reward_model.kv_cache_gib=0.05",
    f"reward_model.judge={{scale: [0, {HIGHEST}], max_new_tokens: {ANSWER_TOKENS}}}",
    "reward_model.judge.template='Is {response} to {prompt} {answer}?'",
)


def write_judge(folder: Path) -> Path:
    """Write a random model with many rating tokens in its vocabulary, some of them off the scale."""
    write_tiny_llama(folder, vocab_size=160, seed=4)
    tiny_tokenizer(160, [f"[[{number}]]" for number in range(HIGHEST + 10)]).save_pretrained(folder)
    return folder


class Reference:
    """The judge model in transformers."""

    def __init__(self, folder: Path):
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(self, prompt: str, response: str, answer: object) -> list[int]:
        message = {"role": "user", "content": f"Is {response} to {prompt} {answer}?"}
        inputs = self._tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self._model.generate(**inputs, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    def rating(self, answer: list[int]) -> float | None:
        numbers = re.findall(r"\[\[(\d+)\]\]", self._tokenizer.decode(answer))
        return int(numbers[-1]) / HIGHEST if numbers and int(numbers[-1]) <= HIGHEST else None


def sample(number: int) -> Sample:
    question, response = f"{number}+{number * 7}?", "abcdef"[: number % 7] + str(number)
    prompt = Prompt(str(number), question, tiny_tokenizer().encode(question), answer=8 * number)
    return Sample(f"s{number}", prompt, [7], [-1.0], [True], (VersionRun(0, 1),), "stop", response)


def in_vllm(config: Config, folder: Path, questions: list[Sample]) -> list[list[int]]:
    """Return the answers' token ids. Runs in a separate process."""
    os.environ.update(environment(ranks=1, threads=1, index=0))
    from megarl.rollout.vllm.reward_model import VllmJudge, judge_arguments

    engine = VllmJudge(judge_arguments(config, folder), config.reward_model.judge.max_new_tokens)
    return [answer.tolist() for answer in engine.scores(questions)]


def test_judge_answers_and_rates_as_transformers(tmp_path):
    actor, folder = write_tiny_llama(tmp_path / "actor"), write_judge(tmp_path / "judge")
    config = config_of(actor, f"reward_model.path={folder}", *KEYS)
    judge, reference = model_judge(config, folder, actor), Reference(folder)
    samples = [sample(number) for number in range(40)]
    readings = [judge.read(item) for item in samples]
    with ProcessPoolExecutor(1, mp_context=engine_context()) as pool:
        answers = pool.submit(in_vllm, config, folder, [reading.sample for reading in readings]).result(timeout=RUN_S)
    expected = [reference.answer(item.prompt.text, item.text, item.prompt.answer) for item in samples]
    assert answers == expected
    rewards = [judge.reward(*rated) for rated in zip(samples, answers, readings, strict=True)]
    ratings = [None if reward.issues["unrated"] else reward.value for reward in rewards]
    assert ratings == [reference.rating(answer) for answer in expected]
    assert len(set(ratings)) > 4 and None in ratings
    assert all(reward.value == 0 for reward, rating in zip(rewards, ratings, strict=True) if rating is None)


@pytest.mark.exhaustive
def test_run_is_rewarded_by_judge(series, model, tmp_path):
    """Two engines judge. Samples without a rating get the worst one, or fail if they are the majority."""
    folder = write_judge(tmp_path / "judge")
    run = train_in(
        series,
        tmp_path,
        model,
        "run.steps=1",
        "rewards={functions: [], failure_limit: 1.0, max_consecutive_failures: null}",
        f"reward_model.path={folder}",
        "reward_model.layout.dp=2",
        *KEYS,
    )
    lines = [line for file in (run / "rollouts").iterdir() for line in file.read_text().splitlines()]
    rows, reference = [json.loads(line) for line in lines], Reference(folder)
    prompts = [re.sub(r"<\|\w+\|>|<eos>", "", row["prompt"]) for row in rows]
    ratings = [
        reference.rating(reference.answer(prompt, row["response"], row["answer"]))
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    worst = None if ratings.count(None) > len(ratings) / 2 else 0.0
    assert [row["reward"] for row in rows] == [worst if rating is None else rating for rating in ratings]
    assert len({row["reward"] for row in rows}) > 2
    assert {file.stem for file in (run / "logs").glob("**/reward-model-*.log")} == {"reward-model-0", "reward-model-1"}
