import json

import pytest
from transformers.models.qwen2 import Qwen2Tokenizer

from megarl.core.errors import UserError
from megarl.models.tokenizer import load_tokenizer
from tests.tiny_model import tiny_tokenizer, write_tiny_llama


def test_model_specific_tokenizer_class_is_used(tmp_path):
    write_tiny_llama(tmp_path, model_type="qwen2", num_layers=1)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    assert isinstance(load_tokenizer(tmp_path), Qwen2Tokenizer)


def test_ids_do_not_depend_on_the_class(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    text = "<|user|>What is 7+5?\nNow <eos>"
    ids = load_tokenizer(tmp_path)(text)["input_ids"]
    assert load_tokenizer(tmp_path).decode(ids) == text
    assert Qwen2Tokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def test_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path=.*: the folder has no tokenizer"):
        load_tokenizer(tmp_path)


def test_code_in_the_folder_is_not_executed(tmp_path, monkeypatch):
    """If transformers asked whether to run the code, the answer would be yes."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    executed = tmp_path / "executed"
    (tmp_path / "planted.py").write_text(f"open({str(executed)!r}, 'w').close()\n")
    content = {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": ["planted.Planted", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model\.path=.*: the tokenizer is Python code in the folder"):
        load_tokenizer(tmp_path)
    assert not executed.exists()
