"""Labeled steps from files: which tokens receive labels, and which rows are rejected."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.rewards.process import step_ends
from tests.tiny_model import merging_tokenizer, tiny_tokenizer
from tests.unit.data.offline import read, texts

ROW = {"prompt": "1+1?", "steps": ["1", "so 2"], "labels": [True, 0.25]}
EVERY_TOKEN = "algorithm.objective.name=token_reward_model"


def labels_of(sample) -> list[float | None]:
    return [None if math.isnan(label) else label for label in sample.labels.tolist()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_last_token_of_a_step_has_its_label(model_folder, tmp_path, suffix):
    [[sample]] = read(model_folder, tmp_path, "labels", [ROW | {"labels": [1.0, 0.25]}], suffix=suffix).rows
    assert texts(sample) == ("<|user|>1+1?<eos><|assistant|>", "1\nso 2<eos>", ".\n....<eos>")
    assert labels_of(sample) == [None, 1.0, None, None, None, None, 0.25]


def test_all_tokens_of_a_step_have_its_label(model_folder, tmp_path):
    [[sample]] = read(model_folder, tmp_path, "labels", [ROW], EVERY_TOKEN).rows
    assert labels_of(sample) == [1.0, 1.0, 0.25, 0.25, 0.25, 0.25, 0.25]


def test_step_without_a_label_is_not_trained_on(model_folder, tmp_path):
    [[sample]] = read(model_folder, tmp_path, "labels", [ROW | {"labels": [None, False]}], EVERY_TOKEN).rows
    assert texts(sample)[2] == "..so 2<eos>"
    assert labels_of(sample) == [None, None, 0, 0, 0, 0, 0]


def test_labels_after_special_tokens_typed_in_the_prompt(model_folder, tmp_path):
    [[sample]] = read(model_folder, tmp_path, "labels", [ROW | {"prompt": "a<eos>b<|user|>"}]).rows
    assert texts(sample)[1:] == ("1\nso 2<eos>", ".\n....<eos>")
    assert sample.prompt.token_ids.tolist().count(tiny_tokenizer().eos_token_id) == 1
    assert labels_of(sample) == [None, 1.0, None, None, None, None, 0.25]


@pytest.mark.parametrize("template", ["true", "false"])
def test_labels_with_tokens_of_several_characters(tmp_path, template):
    """A token may span the end of the first step, and a character may consist of several tokens."""
    tokenizer = merging_tokenizer("a b", "2 .", "ab 2.")
    tokenizer.save_pretrained(tmp_path / "model")
    row = {"prompt": "q", "steps": ["ab", "2.é", "ab"], "labels": [0.1, 0.2, 0.3]}
    keys = ("data.step_end=''", f"data.chat_template={template}")
    [[sample]] = read(tmp_path / "model", tmp_path, "labels", [row], *keys).rows
    decoded = [
        tokenizer.decode(sample.response_ids[: end + 1].tolist()) for end in np.flatnonzero(sample.response_mask)
    ]
    header = "assistant: " if template == "true" else ""  # the template has no generation prompt
    assert [text.removesuffix("</s>").removeprefix(header) for text in decoded] == ["ab2.", "ab2.é", "ab2.éab"]
    assert len(sample.response_ids) == len(header) + 5  # ab2., the two bytes of é, ab and the EOS token


def test_labeled_tokens_are_those_that_scoring_reads(model_folder, tmp_path):
    """A run whose reward_model.step_end equals the training's data.step_end scores exactly the labeled tokens."""
    row = {"prompt": "q", "steps": ["a b", "c", "12"], "labels": [1, 0, 0]}
    for end in ("\\n", "; "):
        [[sample]] = read(model_folder, tmp_path, "labels", [row], f'data.step_end="{end}"').rows
        pieces = [tiny_tokenizer().decode([token]) for token in sample.response_ids.tolist()]
        scored = step_ends(pieces, end.replace("\\n", "\n"))
        assert scored == np.flatnonzero(sample.response_mask).tolist() and len(scored) == 3


def test_steps_of_token_ids_are_used_unchanged(model_folder, tmp_path):
    row = {"prompt": "q", "steps": [5, 9, 5], "labels": [0.5, None, True]}
    for keys in ((), (EVERY_TOKEN,)):
        [[sample]] = read(model_folder, tmp_path, "labels", [row], *keys).rows
        assert sample.response_ids.tolist() == [5, 9, 5] and labels_of(sample) == [0.5, None, 1.0]


def test_data_hash_depends_on_labels(model_folder, tmp_path):
    hashes = [
        read(model_folder, tmp_path, "labels", [ROW | {"labels": labels}]).data_hash
        for labels in ([True, 0.25], [1, 0.25], [1, 0.5])
    ]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"labels": [1]}, r"rows.jsonl:1: column 'steps' has 2 steps, but column 'labels' has 1 labels. Fix: add one"),
        (
            {"labels": [1, 2]},
            r"rows.jsonl:1: column 'labels': expected a list with a number from 0.*, found list \[1, 2\]",
        ),
        ({"labels": [None, None]}, r"rows.jsonl:1: column 'labels': expected a list.*, found list \[None, None\]"),
        ({"steps": ["a", ""]}, r"rows.jsonl:1: column 'steps': expected a non-empty list of.*, found list \['a', ''\]"),
        ({"steps": [1, "a"]}, r"rows.jsonl:1: column 'steps': expected a non-empty list of.*, found list \[1, 'a'\]"),
        (
            {"steps": [1, 12345]},
            r"rows.jsonl:1: token id 12345 is outside the tokenizer's vocabulary of \d+\. Fix: use",
        ),
        ({"steps": ["a\n", "b"]}, r"rows.jsonl:1: step 1 contains data.step_end='\\n'\. Fix: if steps include their"),
    ],
)
def test_invalid_row_is_refused(model_folder, tmp_path, change, problem):
    with pytest.raises(ValueError, match=problem):
        read(model_folder, tmp_path, "labels", [ROW | change])


def test_steps_that_end_in_the_same_token_are_refused(tmp_path):
    merging_tokenizer("a b").save_pretrained(tmp_path / "model")
    row = {"prompt": "q", "steps": ["a", "b", "c"], "labels": [1, 1, 0]}
    with pytest.raises(ValueError, match=r"rows.jsonl:1: steps 1 and 2 end in the same token\. Fix: merge them"):
        read(tmp_path / "model", tmp_path, "labels", [row], "data.step_end=''")


def test_template_that_changes_the_response_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'].upper() + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the chat template changes the response, so its steps cannot"):
        read(tmp_path / "model", tmp_path, "labels", [ROW | {"steps": ["a", "b"]}])
