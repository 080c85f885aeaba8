"""Rollouts in environments in real processes, with a scripted sampler."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.completion import CandidateIds, Completion, VersionRun
from megarl.core.errors import InfrastructureFailure, UserError
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.turns import ChatTokens
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.outcome import Outcome
from megarl.environments.runner import RolloutRequest, RolloutRunner
from megarl.usercode.feedback import MAX_FEEDBACK
from tests.chat_templates import FAMILIES
from tests.paths import QUICKSTART
from tests.timing import LIMIT_S, POLL_S, WAIT_S
from tests.tiny_model import EOS_ID, tiny_tokenizer

WORLDS = Path(__file__).with_name("worlds.py")
TOKENIZER = tiny_tokenizer()


def config(kind: str = "Counter", *overrides: str):
    settings = f"environment={{class: '{WORLDS}:{kind}', timeout_s: {WAIT_S}, tool_timeout_s: {WAIT_S}}}"
    room = ("rollout.max_new_tokens=400", "rollout.context_length=500", "rewards.functions=[]")
    return load(QUICKSTART, [settings, *room, "actor.tokens_per_microbatch=4096", *overrides])


class Says:
    """A sampler that returns the given texts, one per turn, and records its calls. Its log-probs are −1, −2, …"""

    def __init__(self, *texts: str, ends: bool = True, candidates: bool = False, tokenizer=TOKENIZER):
        self.asked: list[dict] = []
        self._texts, self._ends, self._candidates, self._tokenizer = texts, ends, candidates, tokenizer
        self._numbers = count(1)

    async def __call__(
        self, token_ids: Sequence[int], max_new_tokens: int, seed: int, images: Sequence[PromptImage] = ()
    ) -> Completion:
        self.asked.append({"ids": list(token_ids), "room": max_new_tokens, "seed": seed, "images": tuple(images)})
        text = self._texts[(len(self.asked) - 1) % len(self._texts)]
        ids = (self._tokenizer(text)["input_ids"] + [EOS_ID] * self._ends)[:max_new_tokens]
        last = self._tokenizer.added_tokens_decoder.get(ids[-1])
        finish = "stop" if last is not None and last.special else "length"
        kept = CandidateIds.of([[i, i + 1] for i in ids]) if self._candidates else None
        versions = (VersionRun(len(self.asked) // 2, len(ids)),)
        return Completion(ids, [-next(self._numbers) for _ in ids], versions, finish, kept, num_cached_tokens=5)


def play(
    settings,
    sampler: Says,
    *faults: str,
    after: Callable[[RolloutRunner], object] = lambda _: None,
    tokenizer=TOKENIZER,
):
    """Run one rollout per fault concurrently and return their samples."""

    async def run() -> list[list[Sample]]:
        pool = await HostPool.start(host_arguments(settings), 1)
        try:
            runner = RolloutRunner(settings, tokenizer, pool)
            requests = [
                RolloutRequest(f"1.{i}", prompt(fault), seed=11, task_seed=77) for i, fault in enumerate(faults)
            ]
            rollouts = await asyncio.gather(*(runner.run(request, sampler) for request in requests))
            after(pool)
            return rollouts
        finally:
            await pool.close()

    return asyncio.run(run())


def prompt(fault: str) -> Prompt:
    messages = ({"role": "user", "content": fault},)
    ids = TOKENIZER.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return Prompt("p", "", ids, answer="42", messages=messages, columns={"level": 3})


def rendered(*contents: str) -> list[int]:
    """Return the token ids of a conversation with alternating user and assistant messages, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return TOKENIZER.apply_chat_template(messages, return_dict=False)


def test_rollout_tokens_equal_the_rendered_conversation():
    sampler = Says("12", "345", "6")
    [[sample]] = play(config(), sampler, "fine")
    whole = rendered("fine", "12", "1 turns", "345", "2 turns", "6")
    assert sample.token_ids.tolist() == whole
    for asked in sampler.asked:
        assert asked["ids"] == whole[: len(asked["ids"])], "the engine's context must be a prefix of the trained tokens"
    trained = [TOKENIZER.decode([token]) for token in sample.response_ids[sample.response_mask]]
    assert trained == [*"12", "<eos>", *"345", "<eos>", "6", "<eos>"]
    assert sample.response_logprobs[sample.response_mask].tolist() == [-1, -2, -3, -4, -5, -6, -7, -8, -9]
    assert not sample.response_logprobs[~sample.response_mask].any()
    assert sum(run.count for run in sample.versions) == len(sample.response_ids)
    assert [run.version for run in sample.versions] == [0, 1]
    episode = sample.episode
    assert (episode.info.stop_reason, episode.info.num_turns, episode.info.num_samples) == ("done", 3, 1)
    assert episode.rewards == (0.0, 1.0, 1.0) and episode.parts == {"even": 2.0}
    assert episode.info.num_cached_tokens == 10
    assert [message["role"] for message in episode.messages] == ["user", "assistant"] * 3
    assert (sample.rollout_id, sample.text, sample.prompt.answer) == ("1.0", "6", "42")
    seeds = [asked["seed"] for asked in sampler.asked]
    assert seeds[0] == 11 and len(set(seeds)) == 3


WITH_FEEDBACK = "teachers.models=[{name: t, feedback: environment}]"


@pytest.mark.parametrize(
    ("fault", "feedback", "asked"),
    [
        ("feedback", "turn 1\n\nturn 2\n\nend of feedback", ["<|user|>feedback"]),
        ("restart", "end of restart", ["<|user|>restart", "<|user|>restarted"]),
        ("other", "end of other", ["<|user|>begin 42 3 77"]),
    ],
)
def test_feedback_follows_the_last_message_of_each_sample(fault, feedback, asked):
    """The feedback of all turns is joined, and applies to all samples of the rollout."""
    [samples] = play(config("Counter", WITH_FEEDBACK), Says("1"), fault)
    assert [sample.episode.feedback for sample in samples] == [feedback] * len(asked)
    ends = [sample.prompt.token_ids[: sample.episode.message_end] for sample in samples]
    assert [TOKENIZER.decode(ids) for ids in ends] == asked


def test_message_end_is_unknown_for_token_ids():
    [[sample]] = play(config("Counter", WITH_FEEDBACK), Says("1"), "ids")
    assert sample.episode.feedback == "end of ids" and sample.episode.message_end is None


FUNCTION = "rewards.functions=[{function: exact_match}]"
ONE_TURN = "environment.max_turns=1"
"""With this setting, the environment gives no feedback."""


@pytest.mark.parametrize(
    ("overrides", "fault", "is_found"),
    [
        ([], "feedback", False),
        ([WITH_FEEDBACK], "feedback", True),
        ([WITH_FEEDBACK, ONE_TURN], "silent", False),
        (["teachers.models=[{name: t, feedback: exact_match}]", FUNCTION, ONE_TURN], "silent", True),
        (["teachers.models=[{name: t, feedback: exact_match}]", FUNCTION], "raise", False),
    ],
    ids=["no teacher", "feedback", "no feedback", "reward function", "failed"],
)
def test_message_ends_are_found_only_for_feedback(overrides, fault, is_found):
    [[sample]] = play(config("Counter", *overrides), Says("1"), fault)
    assert (sample.episode.message_end is not None) == is_found


def test_truncation_keeps_the_end_of_feedback():
    outcome = Outcome()
    for text in ("first", "", "a" * MAX_FEEDBACK, "last"):
        outcome.add_feedback(text)
    assert outcome.feedback == "a" * (MAX_FEEDBACK - 6) + "\n\nlast"


def test_lone_surrogates_in_observations_are_replaced():
    [[sample]] = play(config(), Says("12", "345", "6"), "half")
    assert sample.token_ids.tolist() == rendered("half", "12", "\ufffd turns", "345", "\ufffd turns", "6")


def test_deep_observation_fails_only_its_rollout():
    [sample], [other] = play(config(), Says("12", "345", "6"), "deep", "fine")
    assert "a message is nested deeper than 50 levels" in sample.episode.failure
    assert other.episode.failure is None


@pytest.mark.parametrize("fault", ["long", "long restart", "long as is", "long opening", "enormous"])
def test_long_observation_ends_rollout_without_blocking(monkeypatch, fault):
    """Long texts are tokenized in threads, and only until they exceed the limit."""
    measured = []

    def tokenize(tokenizer, text, **options):
        if len(text) > 100:
            measured.append(len(text))
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
        return call(tokenizer, text, **options)

    call = type(TOKENIZER).__call__
    monkeypatch.setattr(type(TOKENIZER), "__call__", tokenize)
    [[sample]] = play(config(), Says("12"), fault)
    assert sample.episode.failure is None and sample.episode.info.stop_reason == "max_tokens"
    assert sample.episode.info.num_turns == (fault != "long opening")
    assert 0 < sum(measured) < 200_000


@pytest.mark.parametrize("fault", ["answered", "answers"])
def test_conversation_that_ends_with_an_answer_fails_the_rollout(fault):
    [sample], [other] = play(config(), Says("12", "345", "6"), fault, "fine")
    assert "environment: the conversation ends with an assistant message" in sample.episode.failure
    assert other.episode.failure is None


@pytest.mark.parametrize("method", ["extend", "read"])
def test_error_while_processing_a_turn_fails_only_its_rollout(monkeypatch, method):
    def broken(*_):
        raise TypeError("TextInputSequence must be str")

    monkeypatch.setattr(ChatTokens, method, broken)
    for [sample] in play(config(), Says("12", "345", "6"), "fine", "fine"):
        assert "a turn cannot be processed (TypeError: TextInputSequence must be str)" in sample.episode.failure


def test_truncated_turns_are_closed_by_context():
    sampler = Says("12345", ends=False)
    [[sample]] = play(config("Counter", "environment.turn_tokens=2"), sampler, "fine")
    assert sample.token_ids.tolist() == rendered("fine", "12", "1 turns", "12", "2 turns", "12")[:-1]
    assert TOKENIZER.decode(sample.response_ids[sample.response_mask]) == "121212"


def test_context_tokens_have_no_candidates():
    [[sample]] = play(config(), Says("12", candidates=True), "fine")
    for token, trained, kept in zip(sample.response_ids, sample.response_mask, sample.candidate_ids, strict=True):
        assert kept.tolist() == ([token, token + 1] if trained else [])


def test_as_is_observation_is_appended_without_template():
    [[sample]] = play(config(), Says("12", ends=False), "as is")
    text = TOKENIZER.decode(sample.response_ids)
    assert text == "121 turns122 turns12"


@pytest.mark.parametrize(("fault", "first"), [("other", "begin 42 3 77"), ("restart", "restart")])
def test_reset_and_restart_replace_the_conversation(fault, first):
    sampler = Says("12")
    [samples] = play(config(), sampler, fault)
    assert sampler.asked[0]["ids"] == [*rendered(first), *TOKENIZER("<|assistant|>")["input_ids"]]
    assert [sample.prompt.text for sample in samples] == [
        TOKENIZER.decode(sample.prompt.token_ids) for sample in samples
    ]
    assert first in samples[0].prompt.text
    if fault == "other":
        assert len(samples) == 1
        return
    one, other = samples
    assert one.token_ids.tolist() == rendered("restart", "12")
    assert other.token_ids.tolist() == rendered("restarted", "12", "2 turns", "12")
    assert (one.id, other.id, one.rollout_id, other.rollout_id) == ("1.0", "1.0/1", "1.0", "1.0")
    assert (one.episode.first_turn, other.episode.first_turn) == (0, 1)
    assert (one.episode.is_last, other.episode.is_last) == (False, True)
    assert one.episode.rewards == other.episode.rewards == (None, 0.0, 0.0)


def test_opening_may_consist_of_token_ids():
    sampler = Says("12")
    play(config(), sampler, "ids")
    assert sampler.asked[0]["ids"] == [7, 8, 9]


@pytest.mark.parametrize(
    ("overrides", "reason", "num_turns"),
    [
        (["environment.max_turns=2"], "max_turns", 2),
        (["environment.options={end: 99}", "environment.max_turns=50", "rollout.max_new_tokens=25"], "max_tokens", 2),
        (["environment.options={end: 99}", "environment.max_turns=50", "rollout.context_length=430"], "max_tokens", 30),
    ],
)
def test_rollout_stops_at_its_limits(overrides, reason, num_turns):
    sampler = Says("12")
    settings = config("Counter", *overrides)
    [[sample]] = play(settings, sampler, "fine")
    assert sample.episode.info.stop_reason == reason
    assert sample.episode.info.num_turns == num_turns
    assert len(sample.response_ids) <= settings.rollout.max_new_tokens
    assert sample.num_tokens <= settings.rollout.context_length
    assert sample.response_mask[-1], "context after the last turn must be left out"


FAULTS = {
    "raise": "step raised KeyError: 'broken world'",
    "hang": f"step did not return within {LIMIT_S} s. Fix: make it faster, or raise environment.timeout_s",
    "exit": "the environment's process exited (exit status 3) in each of 3 attempts",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_only_its_rollout(fault):
    """With `exit`, the rollout ends its process in each attempt. Other rollouts in the process start over and do not
    fail.
    """
    settings = config("Counter", f"environment.timeout_s={LIMIT_S if fault == 'hang' else WAIT_S}")
    [failed], *others = play(settings, Says("12"), fault, *["fine"] * 3)
    assert failed.episode.failure == FAULTS[fault]
    assert failed.episode.info.stop_reason == "failed" and failed.episode.info.num_turns == 2
    assert ("worlds.py" in failed.episode.stack) == (fault == "raise")
    assert [other.episode.failure for [other] in others] == [None] * 3
    assert [other.episode.info.num_turns for [other] in others] == [3] * 3
    assert failed.episode.info.num_restarts == (2 if fault == "exit" else 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_suspended_process_loses_no_rollout(number, tmp_path):
    """The first process is killed while it runs 4 rollouts, as the kernel does when memory runs out, or suspended."""
    options = f"environment.options={{flag: {tmp_path / 'signaled'}, number: {number.value}}}"
    timeout_s = LIMIT_S if number == signal.SIGSTOP else WAIT_S
    settings = config("Killed", options, f"environment.timeout_s={timeout_s}")
    rollouts = play(settings, Says("12"), *["fine"] * 4)
    assert [sample.episode.failure for [sample] in rollouts] == [None] * 4
    assert {sample.episode.info.num_restarts for [sample] in rollouts} == {1}
    assert {sample.episode.info.stop_reason for [sample] in rollouts} == {"done"}


def test_repeatedly_lost_rollouts_raise_infrastructure_failure():
    options = ["environment.max_consecutive_failures=2"]
    [[sample]] = play(config("Killed", *options), Says("12"), "fine")
    assert sample.episode.info.stop_reason == "lost" and sample.episode.info.num_restarts == 2
    expected = r"^the environment's process exited \(SIGKILL, environment.memory_mib=16384\) in each of 3 attempts$"
    assert re.match(expected, sample.episode.failure)
    with pytest.raises(
        InfrastructureFailure, match=r"_failures=2: .* were lost\. .*SIGKILL.*The kernel kills .* Fix: "
    ):
        play(config("Killed", *options), Says("12"), "fine", "fine")


def test_lost_rollouts_are_counted_separately_from_failed_ones():
    """Two failed rollouts and one lost rollout do not reach a limit of three."""
    settings = config("Mixed", "environment.max_consecutive_failures=3")
    rollouts = play(settings, Says("12"), "raise", "kill", "raise")
    assert [sample.episode.info.stop_reason for [sample] in rollouts] == ["failed", "lost", "failed"]


def test_memory_limit_fails_only_the_rollout_that_exceeds_it():
    settings = config("Mixed", "environment.memory_mib=1024")
    [failed], *others = play(settings, Says("12"), "allocate", *["fine"] * 4)
    expected = "step raised MemoryError:  (environment.memory_mib=1024) in each of 3 attempts"
    assert " ".join(failed.episode.failure.split()) == " ".join(expected.split())
    assert failed.episode.info.stop_reason == "failed"
    assert [other.episode.failure for [other] in others] == [None] * 4


def test_rollout_waits_for_a_service_that_recovers(monkeypatch, tmp_path):
    monkeypatch.setattr("megarl.core.outage.FIRST_PAUSE_S", POLL_S)
    options = f"environment.options={{flag: {tmp_path / 'called'}, num_refusals: 5}}"
    [[sample]] = play(config("Refused", options), Says("12"), "fine")
    assert sample.episode.failure is None and sample.episode.info.num_restarts == 5


def test_rollout_is_lost_if_a_service_stays_unavailable(tmp_path):
    options = f"environment.options={{flag: {tmp_path / 'called'}, num_refusals: 99}}"
    [[sample]] = play(config("Refused", options, "rewards.outage_s=0"), Says("12"), "fine")
    assert sample.episode.info.stop_reason == "lost" and "ConnectionRefusedError" in sample.episode.stack
    assert sample.episode.failure.endswith("(for longer than rewards.outage_s=0)")


def test_stuck_process_is_replaced():
    settings = config("Counter", "environment.max_consecutive_failures=9", f"environment.timeout_s={LIMIT_S}")

    async def run() -> list[str | None]:
        pool = await HostPool.start(host_arguments(settings), 1)
        runner = RolloutRunner(settings, TOKENIZER, pool)
        failures = []
        for i, fault in enumerate(["block", "fine", "exit", "fine"]):
            [sample] = await runner.run(RolloutRequest(f"{i}", prompt(fault), 1, 2), Says("12"))
            failures.append(sample.episode.failure)
        await pool.close()
        return failures

    block, fine, ended, fine_again = asyncio.run(run())
    assert block == FAULTS["hang"] and ended == FAULTS["exit"]
    assert fine is None and fine_again is None


def test_consecutive_failures_end_the_run():
    with pytest.raises(
        UserError,
        match=r"_failures=3: .*worlds.py:Counter failed\. Fix: .*\. Last failure: .* ValueError: end < 0",
    ):
        play(
            config("Counter", "environment.options={end: -1}", "environment.max_consecutive_failures=3"),
            Says("1"),
            *"abc",
        )


def test_rollout_without_a_turn_gives_an_empty_sample():
    [[sample]] = play(config("Counter", "environment.options={end: -1}"), Says("1"), "fine")
    assert len(sample.response_ids) == 0 and sample.episode.failure.startswith("reset raised ValueError")


def test_step_without_observation_or_done_is_a_failure():
    [[sample]] = play(config("Nothing"), Says("1"), "fine")
    assert "neither an observation nor done" in sample.episode.failure


CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


def test_tool_results_continue_the_conversation():
    sampler = Says(CALL.format("double", '{"number": 4}'), CALL.format("block", "{}"), "<tool_call>{", "8")
    limits = ("rollout.context_length=2000", "rollout.max_new_tokens=1000", f"environment.tool_timeout_s={LIMIT_S}")
    settings = config("Tools", *limits)
    stuck = []
    [[sample]] = play(settings, sampler, "fine", after=lambda pool: stuck.extend(pool._hosts))
    assert sample.episode.info.tool_calls == {"ok": 1, "timed_out": 1, "malformed": 1}
    assert sample.episode.rewards == (None, None, None, 1.0)
    answers = [message["content"] for message in sample.episode.messages if message["role"] == "tool"]
    assert sample.episode.messages[0]["role"] == "system" and "double" in sample.episode.messages[0]["content"]
    assert "double" in sample.prompt.text and sample.prompt.text == TOKENIZER.decode(sample.prompt.token_ids)
    assert answers[0] == "8"
    assert answers[1] == f"error: block did not return within {LIMIT_S} s"
    assert answers[2].startswith("error: this is not a valid tool call")
    assert [host.is_retiring for host in stuck] == [True], "its thread still runs"


OBSERVED = {
    "gpt-oss": "<|start|>functions.{0} to=assistant<|channel|>commentary<|message|>{2}<|end|><|start|>assistant",
    "qwen3-coder": "\n<|im_start|>user\n<tool_response>\n{1}\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
    "glm": "\n<tool_response>\n{1}\n</tool_response><|assistant|>",
}
TURNS = {
    "gpt-oss": (
        "<|channel|>analysis<|message|>Hm, 9?<|end|><|start|>assistant<|channel|>commentary to=functions.double "
        '<|constrain|>json<|message|>{"number": 4}<|call|>',
        "<|channel|>commentary to=functions.double<|message|>4<|call|>",
        "<|channel|>analysis<|message|>It is 8.<|end|><|start|>assistant<|channel|>final<|message|>8<|return|>",
    ),
    "qwen3-coder": (
        "<tool_call>\n<function=double>\n<parameter=number>\n4\n</parameter>\n</function>\n</tool_call><|im_end|>",
        "<tool_call>\n<function=double>\n<parameter=number>\n4\n</tool_call><|im_end|>",
        "8<|im_end|>",
    ),
    "glm": (
        "<tool_call>double\n<arg_key>number</arg_key>\n<arg_value>4</arg_value>\n</tool_call><|observation|>",
        "<tool_call>double\n<arg_key>number</arg_key>\n4\n</tool_call><|observation|>",
        "8<|user|>",
    ),
}
"""Format -> a valid call, a malformed call and the answer, each with the family's stop token."""


@pytest.mark.parametrize("family", TURNS)
def test_families_call_tools_in_their_own_formats(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer()
    sampler = Says(*TURNS[family], ends=False, tokenizer=tokenizer)
    settings = config("Tools", "rollout.context_length=3000", "rollout.max_new_tokens=1500")
    [[sample]] = play(settings, sampler, "fine", tokenizer=tokenizer)
    assert sample.episode.failure is None and sample.episode.info.tool_calls == {"ok": 1, "malformed": 1}
    assert sample.text == "8" and sample.episode.rewards == (None, None, 1.0)
    ids, mask = sample.response_ids, sample.response_mask
    assert tokenizer.decode(ids[mask]) == "".join(TURNS[family])
    result, error = (message["content"] for message in sample.episode.messages if message["role"] == "tool")
    assert result == "8" and error.startswith("error: this is not a valid tool call")
    answers = (("double", result), ("unknown", error))
    written = [OBSERVED[family].format(name, text, json.dumps(text)) for name, text in answers]
    assert tokenizer.decode(ids[~mask]) == "".join(written)
    assert [asked["ids"] for asked in sampler.asked][-1] == sample.token_ids[: len(sampler.asked[-1]["ids"])].tolist()


@pytest.mark.parametrize(("fault", "expected"), [("fine", "1 tu"), ("as is", "1 tu")])
def test_long_observations_are_cut_before_they_are_appended(fault: str, expected: str) -> None:
    [[sample]] = play(config("Counter", "environment.observation_tokens=4"), Says("12", "345", "6"), fault)
    assert sample.episode.failure is None
    context = [token for token, trained in zip(sample.response_ids, sample.response_mask, strict=True) if not trained]
    text = TOKENIZER.decode(context)
    assert expected in text and "turns" not in text


def test_refused_observation_ends_the_rollout_without_a_failure() -> None:
    limit = ("environment.observation_tokens=4", "environment.overlong_observation=refuse")
    settings = config("Counter", *limit, "environment.max_consecutive_failures=1")
    for [sample] in play(settings, Says("12"), "fine", "as is"):
        assert (sample.episode.failure, sample.episode.info.stop_reason) == (None, "max_tokens")
        assert len(sample.episode.rewards) == sample.episode.info.num_turns == 1
        assert all(sample.response_mask) and sample.text == "12"
