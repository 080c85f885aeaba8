"""Reward models whose tokenizer does not fit their input format are rejected before any process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from megarl.config.load import load
from megarl.models.run_models import find_models
from tests.paths import BASE
from tests.tiny_model import merging_tokenizer, tiny_tokenizer, write_tiny_llama


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("actor"), vocab_size=300)


def find(actor: Path, folder: Path, tokenizer: PreTrainedTokenizerFast, reads: str) -> Path | None:
    """Write a reward model with the actor's shapes and this tokenizer, and return the folder that find_models returns
    for it.
    """
    config = json.loads((actor / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    required = [f"model.path={actor}", "data.source=arithmetic", "rollout.context_length=64"]
    keys = ["rollout.max_new_tokens=16", f"reward_model.path={folder}", f"reward_model.input_format={reads}"]
    return find_models(load(BASE, [*required, *keys])).reward_model


def test_input_format_ids_requires_the_actors_tokenizer(actor, tmp_path):
    assert find(actor, tmp_path, tiny_tokenizer(300), "ids") == tmp_path
    with pytest.raises(
        ValueError, match=r"tokenizer differs from the tokenizer of .* set reward_model.input_format=text"
    ):
        find(actor, tmp_path, merging_tokenizer(), "ids")


def test_input_formats_text_and_chat_accept_any_tokenizer(actor, tmp_path):
    for reads in ("text", "chat"):
        assert find(actor, tmp_path, merging_tokenizer(), reads) == tmp_path


def test_input_format_chat_requires_a_chat_template(actor, tmp_path):
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template. Fix: set reward_model.input_format=text"):
        find(actor, tmp_path, tokenizer, "chat")
    assert find(actor, tmp_path, tokenizer, "text") == tmp_path


def test_judge_requires_a_chat_template(actor, tmp_path):
    required = [f"model.path={actor}", "data.source=arithmetic", f"reward_model.path={tmp_path}"]
    keys = ["reward_model={engine: vllm, input_format: question, judge: {max_new_tokens: 16}}"]
    config = load(BASE, [*required, "rollout={context_length: 64, max_new_tokens: 16}", *keys])
    (tmp_path / "config.json").write_text((actor / "config.json").read_text())
    tokenizer = merging_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert find_models(config).reward_model == tmp_path
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"=question: the tokenizer of .* has no chat template. Fix: use an ins"):
        find_models(config)
