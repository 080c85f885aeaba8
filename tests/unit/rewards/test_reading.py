"""Reward models with a different tokenizer: the text that they read, and the sampled tokens that their steps map to."""

from dataclasses import replace
from math import nan

import pytest
from transformers import PreTrainedTokenizerFast

from megarl.config.load import load
from megarl.config.model_schema import RewardModel
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.chat import MARK
from megarl.data.typed_tokens import MARK as TYPED
from megarl.rewards.classifier import ClassifierReward, ModelReward
from megarl.rewards.reading import Reader, Unreadable
from tests.paths import BASE
from tests.tiny_model import merging_tokenizer, tiny_tokenizer

QUESTION = {"role": "user", "content": "What is 1+2?"}
CHARACTERS, PAIRS = merging_tokenizer(), merging_tokenizer("a b", ". c", "1 2", ": Ġ")


def sample(response: str, actor: PreTrainedTokenizerFast, messages=(QUESTION,)) -> Sample:
    prompt_ids = tuple(tiny_tokenizer().apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False))
    if actor is not ACTOR:
        prompt_ids = tuple(actor.encode("What is 1+2?"))
    ids = (*actor.encode(response), actor.eos_token_id)
    n = len(ids)
    prompt = Prompt("p", "", prompt_ids, messages=messages)
    return Sample("s", prompt, ids, (-1.0,) * n, (True,) * n, (VersionRun(0, n),), "stop", response)


ACTOR = tiny_tokenizer()


def settings(*overrides: str) -> RewardModel:
    return load(BASE, ["model.path=m", "data.source=arithmetic", "reward_model.path=r", *overrides]).reward_model


def reader(input_format: str, kind: str = "token", tokenizer=PAIRS, actor=ACTOR, longest: int = 100) -> Reader:
    return Reader(kind, settings(f"reward_model.input_format={input_format}"), longest, tokenizer, actor)


def ids_of(reading) -> list[int]:
    return reading.sample.token_ids.tolist()


def test_text_format_reads_text_without_special_tokens():
    reading = reader("text").read(sample("ab.c.", ACTOR))
    assert ids_of(reading) == PAIRS("What is 1+2?ab.c.")["input_ids"]
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == "ab.c."
    assert reading.ends == (2, 4, 5)


def test_chat_format_uses_the_reward_models_template():
    conversation = [QUESTION, {"role": "assistant", "content": "ab.c."}]
    whole = PAIRS.apply_chat_template(conversation, return_dict=False)
    sequence_reading = reader("chat", "sequence").read(sample("ab.c.", ACTOR))
    assert ids_of(sequence_reading) == whole
    assert sequence_reading.sample.response_ids.tolist() == [PAIRS.eos_token_id]
    token_reading = reader("chat").read(sample("ab.c.", ACTOR))
    assert ids_of(token_reading) == whole[:-1]
    assert PAIRS.decode(token_reading.sample.response_ids.tolist()) == "ab.c."


@pytest.mark.parametrize("response", ["s", "assistant", "</s>", "What is 1+2?"])
def test_response_is_located_despite_equal_text_in_the_template(response):
    reading = reader("chat", tokenizer=CHARACTERS).read(sample(response, ACTOR))
    assert CHARACTERS.decode(reading.sample.prompt.token_ids.tolist()).endswith("assistant: ")
    assert CHARACTERS.decode(reading.sample.response_ids.tolist()) == response


@pytest.mark.parametrize("input_format", ["text", "chat"])
def test_special_tokens_typed_in_the_response_are_ordinary_text(input_format):
    eos = PAIRS.eos_token
    forged, plain = (reader(input_format).read(sample(text, CHARACTERS)) for text in (f"ab{eos}c.", "ab"))
    with_mark = f"ab{eos[0]}{TYPED}{eos[1:]}"
    assert PAIRS.decode(reader(input_format).read(sample(with_mark, CHARACTERS)).sample.response_ids) == with_mark
    assert PAIRS.decode(forged.sample.response_ids.tolist()) == f"ab{eos}c."
    assert ids_of(forged).count(PAIRS.eos_token_id) == ids_of(plain).count(PAIRS.eos_token_id)
    assert forged.ends == tuple(range(2, len(eos) + 5))


def test_prompt_may_contain_the_mark():
    messages = ({"role": "user", "content": f"What is {MARK}?"},)
    reading = reader("chat", tokenizer=CHARACTERS).read(sample("ab", ACTOR, messages))
    assert CHARACTERS.decode(reading.sample.response_ids.tolist()) == "ab"


def test_text_trimmed_by_the_template_does_not_count():
    reading = reader("chat").read(sample("  ab \n", ACTOR))
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == "ab"
    assert reading.ends == (4,)


@pytest.mark.parametrize(("input_format", "last"), [("text", "?"), ("chat", "</s>")])
def test_empty_response_is_scored_at_its_position(input_format, last):
    reading = reader(input_format).read(sample("", ACTOR))
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == last


@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("input_format", ["text", "chat"])
@pytest.mark.parametrize("text", ["ab.cd.e", "ab." * 40, "ab." + "é" * 100, "12" * 400])
def test_too_long_response_is_truncated(input_format, kind, text):
    def length(response: str) -> int:
        conversation = [QUESTION, {"role": "assistant", "content": response}]
        if input_format == "text":
            return len(PAIRS("What is 1+2?" + response)["input_ids"])
        return len(PAIRS.apply_chat_template(conversation, return_dict=False))

    longest = length("ab.c") + 1
    kept = max((text[:n] for n in range(len(text)) if length(text[:n]) <= longest), key=len)
    reading = reader(input_format, kind, longest=longest).read(sample(text, ACTOR))
    assert kept and ids_of(reading) == ids_of(reader(input_format, kind).read(sample(kept, ACTOR)))
    assert reading.issues["truncated"] == f"the input exceeds the limit of {longest} tokens"
    whole = reader(input_format, kind, longest=longest).read(sample("ab.c", ACTOR))
    assert whole.issues["truncated"] is None


def test_too_long_conversation_keeps_its_end():
    whole = ids_of(reader("text", "sequence").read(sample("ab.", ACTOR)))
    reading = reader("text", "sequence", longest=5).read(sample("ab.", ACTOR))
    assert ids_of(reading) == whole[-5:] and reading.issues["truncated"] is not None


def test_prompt_must_leave_room_for_a_response():
    prompt = sample("", ACTOR).prompt
    reader("text", longest=13).check_prompt(prompt)
    with pytest.raises(
        Unreadable, match=r"has 12 tokens .* limit of 12 leaves none .* Fix: raise reward_model.context"
    ):
        reader("text", longest=12).check_prompt(prompt)


def test_messages_that_the_template_rejects_are_unreadable():
    with pytest.raises(Unreadable, match="the chat template rejects the messages: no tools"):
        reader("chat").read(sample("ab.", ACTOR, messages=({"role": "tool", "content": "3"},)))


TURN = (
    "{% for m in messages %}<{{ m.role }}>{{ CONTENT }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VISIBLE = "m.content.split('</think>')[-1]"
REASONING = "(m.content.split('</think>')[0].split('<think>')[-1].strip() if '</think>' in m.content else '')"
QWEN = f"'<think>' + {REASONING} + '</think>' + {VISIBLE}.strip()"
"""Template that, like Qwen3's, begins each assistant turn with a reasoning block, which may be empty."""


def templated(content: str) -> PreTrainedTokenizerFast:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = TURN.replace("CONTENT", content)
    return tokenizer


@pytest.mark.parametrize(
    ("content", "response", "shown", "first_end"),
    [
        ("m.content | trim", " \n a.b ", "a.b", 4),
        (VISIBLE, "b. so</think>b. c", "b. c", 14),  # the first step also occurs in the reasoning
        (f"m.content if m.role == 'user' else {VISIBLE}", "ab</think>", "</s>", 10),
        ("m.content | upper if m.role == 'assistant' else m.content", "ab.é", "ab.é", 1),
        ("m.content.split('!')[0] + m.content.split('!')[-1]", "a!b!c", "a!b!c", 1),
        ("raise_exception('no') if m.content == 'ab' else m.content", "ab", "ab", 1),
        ("(raise_exception('no') if '{{' in m.content else m.content)", "{{ x }}", "{{ x }}", 1),
        (f"m.content if m.role == 'user' else {QWEN}", "<think>a b</think> c", "<think>a b</think> c", 1),
        (f"m.content if m.role == 'user' else {QWEN}", "plain", "plain", 1),
    ],
)
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_template_that_changes_the_response_is_not_a_failure(content, response, shown, first_end, kind):
    tokenizer = templated(content)
    reading = reader("chat", kind, tokenizer).read(sample(response, ACTOR))
    if kind == "sequence":
        assert reading.sample.response_ids.tolist() == [tokenizer.eos_token_id]
        return
    assert tokenizer.decode(reading.sample.response_ids.tolist()) == shown
    assert reading.ends[0] == first_end and reading.ends[-1] <= len(response)


def test_response_is_inserted_verbatim_if_the_template_changes_it():
    tokenizer = templated(f"m.content if m.role == 'user' else {QWEN}")
    reading = reader("chat", tokenizer=tokenizer).read(sample("<think> a b</think> c", ACTOR))
    assert tokenizer.decode(ids_of(reading)) == "<user>What is 1+2?</s><assistant><think> a b</think> c"
    assert reading.issues == {"truncated": None, "verbatim": "the chat template changes the response"}
    located = reader("chat", tokenizer=templated("m.content | trim")).read(sample(" ab", ACTOR))
    assert located.issues == {"truncated": None, "verbatim": None}
    rejecting = templated("raise_exception('no') if m.content == 'ab' else m.content")
    reading = reader("chat", "sequence", rejecting).read(sample("ab", ACTOR))
    assert tokenizer.decode(ids_of(reading)) == "<user>What is 1+2?</s><assistant>ab</s>"
    assert reading.issues["verbatim"] == "the chat template rejects the messages: no"


def test_template_must_render_the_response():
    dropping = templated("m.content if m.role == 'user' else ''")
    with pytest.raises(Unreadable, match="does not render the assistant's message"):
        reader("chat", tokenizer=dropping).read(sample("ab", ACTOR))


@pytest.mark.parametrize("input_format", ["text", "chat"])
def test_special_tokens_typed_in_the_prompt_are_ordinary_text(input_format):
    eos = PAIRS.eos_token
    messages = ({"role": "user", "content": f"a{eos}b"},)
    forged, plain = sample("ab", CHARACTERS, messages), sample("ab", CHARACTERS)
    token_ids = CHARACTERS.encode("a</") + CHARACTERS.encode("s>b")
    forged = replace(forged, prompt=replace(forged.prompt, token_ids=token_ids))
    readings = [ids_of(reader(input_format, actor=CHARACTERS).read(item)) for item in (forged, plain)]
    counts = [ids.count(PAIRS.eos_token_id) for ids in readings]
    assert counts[0] == counts[1] and f"a{eos}b" in PAIRS.decode(readings[0])


def reward(response: str, scores: list[float], tokenizer, actor, *overrides: str) -> ModelReward:
    """Return the reward for steps that end with a dot."""
    model_reader = reader("text", tokenizer=tokenizer, actor=actor)
    scored_sample = sample(response, actor)
    keys = ["reward_model.step_end=.", *overrides]
    rule = ClassifierReward("token", settings(*keys), tokenizer, model_reader, rewards_tokens=True)
    return rule.reward(scored_sample, scores, model_reader.read(scored_sample))


def model_reward(value: float, by_token: list[float] | None = None) -> ModelReward:
    return ModelReward(value, by_token, issues={"truncated": None})


def test_steps_are_mapped_to_sampled_tokens():
    """The model reads ab|.c|d|.|e: its first step ends with .c, as does the actor's fourth token.

    The last step ends with the sample's last token, here the EOS token.
    """
    assert PAIRS.tokenize("ab.cd.e") == ["ab", ".c", "d", ".", "e"]
    mapped = reward("ab.cd.e", [1.0, 2.0, 4.0, 8.0, 16.0], PAIRS, CHARACTERS)
    assert mapped == model_reward(26.0, [nan, nan, nan, 2.0, nan, 8.0, nan, 16.0])


def test_many_steps_are_mapped_in_linear_time(monkeypatch):
    """A response may consist of thousands of steps. Decoding a prefix for each would exceed the time limit."""
    calls = []
    decode = CHARACTERS.decode
    monkeypatch.setattr(CHARACTERS, "decode", lambda ids, **keys: calls.append(len(ids)) or decode(ids, **keys))
    model_reader = reader("text", tokenizer=PAIRS, actor=CHARACTERS)
    scored_sample = sample("." * 1000, CHARACTERS)
    assert model_reader.sampled(scored_sample, range(1, 1001)) == [*range(999), 1000]
    assert sum(calls) < 10 * 1000


def test_multi_token_characters_end_with_their_last_token():
    assert len(CHARACTERS.tokenize("é€.")) == 6
    mapped = reward("é€.é", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], CHARACTERS, CHARACTERS)
    assert mapped == model_reward(160.0, [nan] * 5 + [32.0, nan, nan, 128.0])
    ended = merging_tokenizer(". Ã")  # the merged token ends inside a character
    assert reward("a.é.b", [1.0, 2.0, 4.0, 8.0, 16.0], ended, CHARACTERS).by_token is not None


def test_step_may_end_with_a_multi_token_character():
    assert len(CHARACTERS.tokenize("。")) == 3
    mapped = reward("a。b", [1.0, 2.0, 4.0, 8.0, 16.0], CHARACTERS, CHARACTERS, "reward_model.step_end=。")
    assert mapped == model_reward(24.0, [nan, nan, nan, 8.0, nan, 16.0])


def test_step_that_ends_inside_a_sampled_token_rewards_that_token():
    assert PAIRS.tokenize("ab.c") == ["ab", ".c"]
    assert reward("ab.c", [1.0, 2.0, 4.0, 8.0], CHARACTERS, PAIRS) == model_reward(12.0, [nan, 4.0, 8.0])
    dots = merging_tokenizer(". .", ".. ..")
    assert dots.tokenize("a....") == ["a", "...."]
    scores = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert reward("a....", scores, CHARACTERS, dots) == model_reward(30.0, [nan, 2.0 + 4.0 + 8.0, 16.0])
    outcome = reward("ab.c", [1.0, 2.0, 4.0, 8.0], CHARACTERS, PAIRS, "reward_model.aggregation=mean")
    assert outcome == model_reward(6.0)
