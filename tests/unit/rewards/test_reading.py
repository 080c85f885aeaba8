"""The text that a reward model with another tokenizer reads, and the sampled tokens that its steps end with."""

from math import nan

import pytest
from transformers import PreTrainedTokenizerFast

from megarl.config.load import load
from megarl.config.model_schema import RewardModel
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.chat import MARK
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


def reader(reads: str, kind: str = "token", own=PAIRS, actor=ACTOR, longest: int = 100) -> Reader:
    return Reader(kind, settings(f"reward_model.input_format={reads}"), longest, own, actor)


def ids_of(reading) -> list[int]:
    return reading.sample.token_ids.tolist()


def test_text_is_that_of_the_sampled_ids_without_special_tokens():
    reading = reader("text").read(sample("ab.c.", ACTOR))
    assert ids_of(reading) == PAIRS("What is 1+2?ab.c.")["input_ids"]
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == "ab.c."
    assert reading.ends == (2, 4, 5)


def test_chat_is_its_own_template():
    conversation = [QUESTION, {"role": "assistant", "content": "ab.c."}]
    whole = PAIRS.apply_chat_template(conversation, return_dict=False)
    of_sample = reader("chat", "sequence").read(sample("ab.c.", ACTOR))
    assert ids_of(of_sample) == whole
    assert of_sample.sample.response_ids.tolist() == [PAIRS.eos_token_id]
    token_reward_totals = reader("chat").read(sample("ab.c.", ACTOR))
    assert ids_of(token_reward_totals) == whole[:-1]
    assert PAIRS.decode(token_reward_totals.sample.response_ids.tolist()) == "ab.c."


@pytest.mark.parametrize("response", ["s", "assistant", "</s>", "What is 1+2?"])
def test_a_response_is_found_where_it_is_and_not_in_the_template(response):
    reading = reader("chat", own=CHARACTERS).read(sample(response, ACTOR))
    assert CHARACTERS.decode(reading.sample.prompt.token_ids.tolist()).endswith("assistant: ")
    assert CHARACTERS.decode(reading.sample.response_ids.tolist()) == response


def test_a_prompt_may_hold_the_mark():
    asked = ({"role": "user", "content": f"What is {MARK}?"},)
    reading = reader("chat", own=CHARACTERS).read(sample("ab", ACTOR, asked))
    assert CHARACTERS.decode(reading.sample.response_ids.tolist()) == "ab"


def test_what_the_template_trims_does_not_count():
    reading = reader("chat").read(sample("  ab \n", ACTOR))
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == "ab"
    assert reading.ends == (4,)


@pytest.mark.parametrize(("reads", "last"), [("text", "?"), ("chat", "</s>")])
def test_an_empty_response_is_scored_where_it_would_be(reads, last):
    reading = reader(reads).read(sample("", ACTOR))
    assert PAIRS.decode(reading.sample.response_ids.tolist()) == last


def test_what_cannot_be_read_says_why():
    with pytest.raises(Unreadable, match="would read 14 tokens, more than 13; raise reward_model"):
        reader("text", longest=13).read(sample("ab.", ACTOR))
    reader("text", longest=14).read(sample("ab.", ACTOR))
    with pytest.raises(Unreadable, match="has a chat template that refuses the messages: no tools"):
        reader("chat").read(sample("ab.", ACTOR, messages=({"role": "tool", "content": "3"},)))


def reward(response: str, scores: list[float], own, actor, *overrides: str) -> ModelReward:
    """Returns the reward by steps that end with a dot, in an actor that reads and writes with its own tokenizer."""
    read = reader("text", own=own, actor=actor)
    of_sample = sample(response, actor)
    rule = ClassifierReward("token", settings("reward_model.step_end=.", *overrides), own, read, rewards_tokens=True)
    return rule.reward(of_sample, scores, read.read(of_sample))


def test_steps_are_mapped_to_the_sampled_tokens_that_end_with_them():
    """The model reads ab|.c|d|.|e: its first step ends with .c, which the actor's fourth token ends, too. The last step
    is the sample's last token, here the end of the sequence."""
    assert PAIRS.tokenize("ab.cd.e") == ["ab", ".c", "d", ".", "e"]
    mapped = reward("ab.cd.e", [1.0, 2.0, 4.0, 8.0, 16.0], PAIRS, CHARACTERS)
    assert mapped == ModelReward(26.0, [nan, nan, nan, 2.0, nan, 8.0, nan, 16.0])


def test_characters_of_several_tokens_end_with_their_last():
    assert len(CHARACTERS.tokenize("é€.")) == 6
    mapped = reward("é€.é", [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0], CHARACTERS, CHARACTERS)
    assert mapped == ModelReward(160.0, [nan] * 5 + [32.0, nan, nan, 128.0])
    ended = merging_tokenizer(". Ã")  # a token that ends inside of a character
    assert reward("a.é.b", [1.0, 2.0, 4.0, 8.0, 16.0], ended, CHARACTERS).by_token is not None


def test_a_step_may_end_with_a_character_of_several_tokens():
    assert len(CHARACTERS.tokenize("。")) == 3
    mapped = reward("a。b", [1.0, 2.0, 4.0, 8.0, 16.0], CHARACTERS, CHARACTERS, "reward_model.step_end=。")
    assert mapped == ModelReward(24.0, [nan, nan, nan, 8.0, nan, 16.0])


def test_a_step_that_ends_inside_of_a_sampled_token_is_refused():
    assert PAIRS.tokenize("ab.c") == ["ab", ".c"]
    scores = [1.0, 2.0, 4.0, 8.0]
    refused = reward("ab.c", scores, CHARACTERS, PAIRS)
    assert refused.value is None and refused.by_token is None
    assert refused.failure.startswith("scores a step that ends after 3 characters of the response, where no sampled")
    # As an outcome it needs no place.
    assert reward("ab.c", scores, CHARACTERS, PAIRS, "reward_model.aggregation=mean") == ModelReward(6.0)
