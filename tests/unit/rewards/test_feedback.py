"""Feedback from reward functions reaches the prompts of teachers."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.rewards.feedback import FeedbackPrompts
from megarl.rewards.result import Result
from megarl.rewards.worker import MAX_FEEDBACK, _result
from tests.paths import BASE
from tests.tiny_model import tiny_tokenizer

MESSAGES = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def sample(name: str, *messages: dict[str, str]) -> Sample:
    ids = tiny_tokenizer()(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    prompt = Prompt("p", "", ids, messages=messages)
    return Sample(name, prompt, (7,), (-1.0,), (True,), (VersionRun(0, 1),), "stop", "")


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        ("true", MESSAGES, "<|system|>S<eos><|user|>U\n\nNo.<eos><|assistant|>"),
        ("false", MESSAGES[1:], "U\n\nNo."),
    ],
)
def test_feedback_is_added_to_the_last_message(folder, template, messages, text):
    data = load(BASE, ["model.path=m", "data.source=rows.jsonl", f"data.chat_template={template}"]).data
    prompts = FeedbackPrompts(["check"], data, folder)
    told, silent, other = (sample(name, *messages) for name in "abc")
    texts = {"a": {"check": "No.", "other": "Yes."}, "b": {"check": ""}, "c": {"other": "Yes."}}
    prompts.note([told, silent, other], texts)
    [(function, by_sample)] = prompts.take().items()
    [(name, ids)] = by_sample.items()
    assert (function, name, tiny_tokenizer().decode(ids), ids.dtype) == ("check", "a", text, np.int32)
    assert prompts.take() == {} and messages[-1]["content"] == "U"


@pytest.mark.parametrize("template", ["true", "false"])
def test_quoted_special_tokens_are_text(folder, template):
    data = load(BASE, ["model.path=m", "data.source=rows.jsonl", f"data.chat_template={template}"]).data
    prompts, ends = FeedbackPrompts(["check"], data, folder), []
    for text in ("No.", "<eos>No."):
        prompts.note([sample("a", *MESSAGES[1:])], {"a": {"check": text}})
        ids = prompts.take()["check"]["a"].tolist()
        ends.append(ids.count(tiny_tokenizer().eos_token_id))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ({"reward": True, "feedback": "No."}, Result(1.0, "1.0", feedback="No.")),
        ({"reward": [0.5, 1], "feedback": None}, Result([0.5, 1.0], "a list of 2")),
        ({"reward": "x", "feedback": "No."}, Result(None, "str", feedback="No.")),
        ({"reward": 1, "feedback": 100_000 * "a"}, Result(1.0, "1.0", feedback=MAX_FEEDBACK * "a")),
        ({"reward": 1.0, "feedback": 7}, Result(None, "dict")),
        ({"reward": 1.0}, Result(None, "dict")),
    ],
)
def test_function_may_return_feedback_with_its_reward(value, result):
    assert Result(**_result(value)) == result
