"""Reward models with a different tokenizer: the text that they read, and the sampled tokens that their steps map to."""

from math import nan

import pytest
from transformers import PreTrainedTokenizerFast

from megarl.config.load import load
from megarl.config.model_schema import RewardModel
from megarl.core.types import Prompt, Sample, VersionRun
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


def test_unreadable_sample_has_a_reason():
    with pytest.raises(Unreadable, match=r"the input has 14 tokens, but the limit is 13\. Fix: raise reward_model"):
        reader("text", longest=13).read(sample("ab.", ACTOR))
    reader("text", longest=14).read(sample("ab.", ACTOR))
    with pytest.raises(Unreadable, match="the chat template rejects the messages: no tools"):
        reader("chat").read(sample("ab.", ACTOR, messages=({"role": "tool", "content": "3"},)))


def reward(response: str, scores: list[float], tokenizer, actor, *overrides: str) -> ModelReward:
    """Return the reward for steps that end with a dot."""
    model_reader = reader("text", tokenizer=tokenizer, actor=actor)
    scored_sample = sample(response, actor)
    keys = ["reward_model.step_end=.", *overrides]
    rule = ClassifierReward("token", settings(*keys), tokenizer, model_reader, rewards_tokens=True)
    return rule.reward(scored_sample, scores, model_reader.read(scored_sample))


def test_steps_are_mapped_to_sampled_tokens():
    """The model reads ab|.c|d|.|e: its first step ends with .c, as does the actor's fourth token.

    The last step ends with the sample's last token, here the EOS token.
    """
    assert PAIRS.tokenize("ab.cd.e") == ["ab", ".c", "d", ".", "e"]
    mapped = reward("ab.cd.e", [1.0, 2.0, 4.0, 8.0, 16.0], PAIRS, CHARACTERS)
    assert mapped == ModelReward(26.0, [nan, nan, nan, 2.0, nan, 8.0, nan, 16.0])


def test_multi_token_characters_end_with_their_last_token():
    assert len(CHARACTERS.tokenize("é€.")) == 6
    mapped = reward("é€.é", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], CHARACTERS, CHARACTERS)
    assert mapped == ModelReward(160.0, [nan] * 5 + [32.0, nan, nan, 128.0])
    ended = merging_tokenizer(". Ã")  # this token ends inside a character
    assert reward("a.é.b", [1.0, 2.0, 4.0, 8.0, 16.0], ended, CHARACTERS).by_token is not None


def test_step_may_end_with_a_multi_token_character():
    assert len(CHARACTERS.tokenize("。")) == 3
    mapped = reward("a。b", [1.0, 2.0, 4.0, 8.0, 16.0], CHARACTERS, CHARACTERS, "reward_model.step_end=。")
    assert mapped == ModelReward(24.0, [nan, nan, nan, 8.0, nan, 16.0])


def test_step_that_ends_inside_a_sampled_token_fails():
    assert PAIRS.tokenize("ab.c") == ["ab", ".c"]
    scores = [1.0, 2.0, 4.0, 8.0]
    refused = reward("ab.c", scores, CHARACTERS, PAIRS)
    assert refused.value is None and refused.by_token is None
    assert refused.failure.startswith("a step ends after 3 characters of the response, inside a sampled")
    # An outcome reward needs no position.
    assert reward("ab.c", scores, CHARACTERS, PAIRS, "reward_model.aggregation=mean") == ModelReward(6.0)
