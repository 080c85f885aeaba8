"""Feedback on samples reaches the prompts of teachers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from megarl.config.load import load
from megarl.config.model_schema import Teacher
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.environments.host import _rewards
from megarl.rewards.feedback import FeedbackPrompts, feedback_on
from megarl.rewards.result import Result
from megarl.rewards.worker import _result
from megarl.usercode.feedback import MAX_FEEDBACK, split_feedback
from tests.paths import BASE
from tests.tiny_model import tiny_tokenizer

MESSAGES = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})
CHECKED = [Teacher(name="t", feedback="check")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return with_vocab(folder, len(tiny_tokenizer()))


def with_vocab(folder, vocab_size):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocab_size}))
    return folder


def data(template: str = "true"):
    return load(BASE, ["model.path=m", "data.source=rows.jsonl", f"data.chat_template={template}"]).data


def sample(name: str, *messages: dict[str, str]) -> Sample:
    ids = tiny_tokenizer()(messages[-1]["content"], add_special_tokens=False)["input_ids"]
    prompt = Prompt("p", "", ids, messages=messages)
    return Sample(name, prompt, (7,), (-1.0,), (True,), (VersionRun(0, 1),), "stop", "")


def played(name: str, text: str, message_end: int | None, feedback: str = "", failure: str | None = None) -> Sample:
    """Return a sample of an environment with this prompt."""
    info = RolloutInfo("done", 1, 1, {}, 0, 0)
    episode = Episode(info, (), {}, failure, (), 0, True, feedback=feedback, message_end=message_end)
    ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    own = sample(name, *MESSAGES)
    return replace(own, prompt=replace(own.prompt, token_ids=ids), episode=episode)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        ("true", MESSAGES, "<|system|>S<eos><|user|>U\n\nNo.<eos><|assistant|>"),
        ("false", MESSAGES[1:], "U\n\nNo."),
    ],
)
def test_feedback_is_added_to_the_last_message(folder, template, messages, text):
    prompts = FeedbackPrompts(CHECKED, data(template), folder)
    shown, silent, other = (sample(name, *messages) for name in "abc")
    texts = {"a": {"check": "No.", "other": "Yes."}, "b": {"check": ""}, "c": {"other": "Yes."}}
    prompts.note([shown, silent, other], texts)
    [(teacher, by_sample)] = prompts.take().items()
    [(name, ids)] = by_sample.items()
    assert (teacher, name, tiny_tokenizer().decode(ids), ids.dtype) == ("t", "a", text, np.int32)
    assert prompts.take() == {} and messages[-1]["content"] == "U"


def test_each_teacher_sees_its_sources_in_order(folder):
    sources = {"a": ["environment", "check"], "b": ["check", "environment"], "c": ["other"]}
    prompts = FeedbackPrompts([Teacher(name=n, feedback=names) for n, names in sources.items()], data(), folder)
    text = "<|user|>go<eos><|assistant|>"
    rollout = played("s", text, 3, feedback="E")
    results = {"check": Result(1.0, "1.0", feedback="C"), "f": Result(0.0, "0")}
    prompts.note([rollout], {"s": feedback_on(rollout, results)})
    decoded = {name: tiny_tokenizer().decode(ids["s"]) for name, ids in prompts.take().items()}
    assert decoded == {n: text.replace("go", f"go\n\n{added}") for n, added in (("a", "E\n\nC"), ("b", "C\n\nE"))}


def test_failed_rollout_has_no_environment_feedback():
    results = {"check": Result(1.0, "1.0", feedback="C")}
    assert feedback_on(played("s", "go", 1, feedback="E", failure="broken"), results) == {"check": "C"}
    assert feedback_on(played("s", "go", 1, feedback=""), {}) == feedback_on(sample("a", *MESSAGES), {}) == {}


def test_sample_with_unknown_message_end_is_skipped(folder):
    prompts = FeedbackPrompts(CHECKED, data(), folder)
    prompts.note([played("s", "go", None)], {"s": {"check": "No."}})
    assert prompts.take() == {}


def test_teachers_with_equal_sources_share_prompts(folder):
    teachers = [Teacher(name=name, feedback=names) for name, names in {"a": "check", "b": ["check"]}.items()]
    prompts = FeedbackPrompts(teachers, data(), folder)
    prompts.note([sample("s", *MESSAGES)], {"s": {"check": "No."}})
    taken = prompts.take()
    assert taken["a"]["s"] is taken["b"]["s"]


def test_first_step_without_extended_prompts_is_reported(folder, capsys):
    prompts = FeedbackPrompts([*CHECKED, Teacher(name="o", feedback="other")], data(), folder)
    for ends in ([None, 1], [None, None], [None]):
        rollouts = [played(str(i), "go", end) for i, end in enumerate(ends)]
        prompts.note(rollouts, {rollout.id: {"check": "No."} for rollout in rollouts})
        prompts.take()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("megarl: warning: teachers.models: t with feedback=[check]: none of the 2 prompts of this")


def test_tokens_without_an_embedding_skip_the_sample(folder, tmp_path):
    """The tokenizer has tokens for which the model has no embedding."""
    tiny_tokenizer().save_pretrained(tmp_path)
    [last] = tiny_tokenizer()("b", add_special_tokens=False)["input_ids"]
    prompts = FeedbackPrompts(CHECKED, data("false"), with_vocab(tmp_path, last))
    [newline] = set(tiny_tokenizer()("\n", add_special_tokens=False)["input_ids"])
    assert newline < last
    texts = {"s": {"check": "a"}, "r": {"check": "b"}}
    prompts.note([played("s", "a", 1), played("r", "a", 1)], texts)
    assert prompts.take()["t"].keys() == {"s"}


@pytest.mark.parametrize("template", ["true", "false"])
@pytest.mark.parametrize("in_environment", [False, True])
def test_quoted_special_tokens_are_text(folder, template, in_environment):
    prompts, ends = FeedbackPrompts(CHECKED, data(template), folder), []
    for text in ("No.", "<eos>No."):
        shown = played("a", "<|user|>go<eos><|assistant|>", 3) if in_environment else sample("a", *MESSAGES[1:])
        prompts.note([shown], {"a": {"check": text}})
        ids = prompts.take()["t"]["a"].tolist()
        ends.append(ids.count(tiny_tokenizer().eos_token_id))
    assert ends[0] == ends[1]


def test_lone_surrogates_in_feedback_are_replaced():
    assert split_feedback({"reward": 1.0, "feedback": "a\ud83d"}) == (1.0, "a\ufffd")


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ({"reward": True, "feedback": "No."}, Result(1.0, "1.0", feedback="No.")),
        ({"reward": [0.5, 1], "feedback": None}, Result([0.5, 1.0], "a list of 2")),
        ({"reward": "x", "feedback": "No."}, Result(None, "str", feedback="No.")),
        ({"reward": 1, "feedback": 100_000 * "a"}, Result(1.0, "1.0", feedback=MAX_FEEDBACK * "a")),
        (MappingProxyType({"reward": 1, "feedback": "No."}), Result(1.0, "1.0", feedback="No.")),
        ({"reward": 1.0, "feedback": np.float32(7)}, Result(None, "dict")),
        ({"reward": 1.0}, Result(None, "dict")),
    ],
)
def test_function_may_return_feedback_with_its_reward(value, result):
    assert Result(**_result(value)) == result


def test_feedback_that_is_not_text_fails():
    failure = "feedback is a list. Fix: return text or None"
    assert Result(**_result({"reward": 1, "feedback": ["No."]})).failure == f"raised TypeError: {failure}"
    with pytest.raises(TypeError, match=failure):
        _rewards({"reward": 1, "feedback": ["No."]})
    assert _rewards({"reward": 1, "feedback": 2})["rewards"] == {"reward": 1.0, "feedback": 2.0}
