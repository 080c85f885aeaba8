"""Conversations and preference pairs from files: which tokens are trained on, and which rows are rejected."""

from __future__ import annotations

import pytest

from tests.tiny_model import EOS_ID, merging_tokenizer, tiny_tokenizer
from tests.unit.data.offline import message, read, texts

PREFERENCE = {"prompt": "1+1?", "chosen": "2", "rejected": "eleven"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_all_assistant_turns_are_trained_on(model_folder, tmp_path, suffix):
    messages = [message("user", "a"), message("assistant", "bc"), message("user", "d"), message("assistant", "e")]
    [[sample]] = read(model_folder, tmp_path, "messages", [{"messages": messages}], suffix=suffix).rows
    assert texts(sample) == (
        "<|user|>a<eos><|assistant|>",
        "bc<eos><|user|>d<eos><|assistant|>e<eos>",
        "bc<eos>" + "." * len("<|user|>d<eos><|assistant|>") + "e<eos>",
    )


def test_messages_after_the_last_answer_are_dropped(model_folder, tmp_path):
    messages = [message("user", "a"), message("assistant", "b"), message("user", "thanks")]
    [[sample]] = read(model_folder, tmp_path, "messages", [{"messages": messages}]).rows
    assert texts(sample) == ("<|user|>a<eos><|assistant|>", "b<eos>", "b<eos>")


def test_text_after_the_eos_token_is_not_trained_on(tmp_path):
    """ChatML writes a newline after the EOS token. Between turns, it is kept as context."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    messages = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    [[sample]] = read(tmp_path / "model", tmp_path, "messages", [{"messages": messages}]).rows
    assert texts(sample)[1:] == (
        "b<eos>\n<|user|>c<eos>\n<|assistant|>d<eos>",
        "b<eos>" + "." * len("\n<|user|>c<eos>\n<|assistant|>") + "d<eos>",
    )


def test_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    """Templates that drop earlier reasoning do this."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
        "{{ m['content'] if loop.last else m['content'].split('/')[-1] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    first = [message("user", "a"), message("assistant", "think/b")]
    rows = [{"messages": first}, {"messages": [*first, message("user", "c"), message("assistant", "d")]}]
    with pytest.raises(
        ValueError, match=r"rows.jsonl:2: the tokens up to message 4 do not start with the tokens of the"
    ):
        read(tmp_path / "model", tmp_path, "messages", rows)


def test_both_responses_follow_the_prompt(model_folder, tmp_path):
    rows = read(model_folder, tmp_path, "preferences", [PREFERENCE]).rows
    [[chosen, rejected]] = rows
    assert texts(chosen) == ("<|user|>1+1?<eos><|assistant|>", "2<eos>", "2<eos>")
    assert texts(rejected) == ("<|user|>1+1?<eos><|assistant|>", "eleven<eos>", "eleven<eos>")
    assert chosen.prompt == rejected.prompt and chosen.id != rejected.id


def test_preferences_may_be_messages(model_folder, tmp_path):
    """Answers in the prompt are not trained on; all answers after it are."""
    prompt = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    chosen = [message("assistant", "d"), message("user", "e"), message("assistant", "f")]
    row = {"prompt": prompt, "chosen": chosen, "rejected": [message("assistant", "g")]}
    [[sample, other]] = read(model_folder, tmp_path, "preferences", [row]).rows
    assert texts(sample) == (
        "<|user|>a<eos><|assistant|>b<eos><|user|>c<eos><|assistant|>",
        "d<eos><|user|>e<eos><|assistant|>f<eos>",
        "d<eos>" + "." * len("<|user|>e<eos><|assistant|>") + "f<eos>",
    )
    assert texts(other)[1] == "g<eos>"


def test_reward_model_trains_on_the_last_token(model_folder, tmp_path):
    [[chosen, _]] = read(
        model_folder, tmp_path, "preferences", [PREFERENCE], "algorithm.objective.name=reward_model"
    ).rows
    assert texts(chosen)[1:] == ("2<eos>", ".<eos>")


def test_plain_response_ends_with_the_eos_token(model_folder, tmp_path):
    [[chosen, _]] = read(model_folder, tmp_path, "preferences", [PREFERENCE], "data.chat_template=false").rows
    assert texts(chosen) == ("1+1?", "2<eos>", "2<eos>")
    assert chosen.response_ids[-1] == EOS_ID


def test_plain_response_gets_no_second_eos_token(model_folder, tmp_path):
    rows = [{"prompt": "1+1=", "chosen": "2<eos>", "rejected": "<eos>2"}]
    [pair] = read(model_folder, tmp_path, "preferences", rows, "data.chat_template=false").rows
    assert [texts(sample)[1] for sample in pair] == ["2<eos>", "<eos>2<eos>"]


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("preferences", {"chosen": "2", "rejected": "3"}), ("labels", {"steps": ["2"], "labels": [True]})],
)
def test_prompt_that_ends_with_an_answer_is_refused(model_folder, tmp_path, kind, columns):
    row = {"prompt": [message("user", "1+1?"), message("assistant", "The answer is")], **columns}
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the prompt ends with an assistant message"):
        read(model_folder, tmp_path, kind, [row])


def test_rows_that_are_too_long_are_refused_or_dropped(model_folder, tmp_path):
    rows = [PREFERENCE, PREFERENCE | {"rejected": "x" * 40}, PREFERENCE]
    limit = "rollout.context_length=32"  # the prompt has 7 tokens, and each response ends with an EOS token
    with pytest.raises(
        ValueError, match=r"rows.jsonl:2: the row has 48 tokens, but rollout.context_length=32. Fix: raise .* 48"
    ):
        read(model_folder, tmp_path, "preferences", rows, limit)
    kept = read(model_folder, tmp_path, "preferences", rows, limit, "data.overlong=drop")
    assert (len(kept), kept.num_dropped) == (2, 1)
    assert [row[0].prompt.id for row in kept.rows] == ["rows.jsonl:1", "rows.jsonl:3"]
    with pytest.raises(ValueError, match=r"data.overlong=drop: all 1 rows of .* are too long"):
        read(model_folder, tmp_path, "preferences", rows[1:2], limit, "data.overlong=drop")


def test_data_hash_covers_ids_and_loss_masks(model_folder, tmp_path):
    hashes = {
        read(model_folder, tmp_path, "preferences", [row], f"algorithm.objective.name={name}").data_hash
        for row in (PREFERENCE, PREFERENCE | {"chosen": "3"})
        for name in ("dpo", "ipo", "reward_model")
    }
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("rows", "record", "message_of"),
    [
        (
            "messages",
            {"text": "a"},
            r"rows.jsonl:1: missing column 'messages' \(expected: a list of .*data.messages_column",
        ),
        ("messages", {"messages": "a"}, r"rows.jsonl:1: column 'messages': expected a list of \{role.*, found str 'a'"),
        (
            "messages",
            {"messages": [message("user", "a")]},
            "rows.jsonl:1: the conversation has no assistant tokens to train on",
        ),
        (
            "preferences",
            PREFERENCE | {"chosen": 2},
            r"rows.jsonl:1: column 'chosen': expected text or a.*, found int 2",
        ),
        (
            "preferences",
            {"prompt": "a", "chosen": "b"},
            r"rows.jsonl:1: missing column 'rejected' .* data.rejected_column",
        ),
        (
            "preferences",
            PREFERENCE | {"rejected": [message("user", "a")]},
            (
                "rows.jsonl:1: rejected: the response begins with a message of role 'user'. Fix: begin it with an "
                "assistant message"
            ),
        ),
    ],
)
def test_invalid_row_is_named(model_folder, tmp_path, rows, record, message_of):
    with pytest.raises(ValueError, match=message_of):
        read(model_folder, tmp_path, rows, [record])


def test_messages_without_a_chat_template_are_refused(model_folder, tmp_path):
    row = PREFERENCE | {"chosen": [message("assistant", "a")]}
    with pytest.raises(ValueError, match=r"rows.jsonl:1: chosen: a list of messages requires a chat template"):
        read(model_folder, tmp_path, "preferences", [row], "data.chat_template=false")


def test_tokens_merged_across_turns_are_refused(tmp_path):
    """The prompt ends with a colon and a space, which this tokenizer merges with the following text."""
    tokenizer = merging_tokenizer(": Ġ", ":Ġ a")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"rows.jsonl:1: chosen: the tokens up to message 2 do not start with the tokens"
    ):
        read(tmp_path / "model", tmp_path, "preferences", [PREFERENCE | {"chosen": "a"}])
