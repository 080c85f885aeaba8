"""Teachers must be language models with the actor's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.models.run_models import ModelFolders, check_local_models, find_models
from tests.paths import BASE
from tests.tiny_model import merging_tokenizer, tiny_tokenizer, write_tiny_llama


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("actor"))


@pytest.fixture
def teacher(tmp_path) -> Path:
    return write_tiny_llama(tmp_path / "teacher", hidden_size=128, num_layers=3, seed=1)


def find(actor: Path, *teachers: str, layout: str = "{}") -> ModelFolders:
    required = [f"model.path={actor}", "data.source=arithmetic", "rollout={context_length: 64, max_new_tokens: 16}"]
    config = load(BASE, [*required, f"teachers.models=[{', '.join(teachers)}]", f"teachers.layout={layout}"])
    check_local_models(config)
    return find_models(config)


def refused(*arguments: str | Path, **keys: str) -> str:
    with pytest.raises(UserError) as error:
        find(*arguments, **keys)
    return str(error.value)


def test_teachers_of_other_sizes_are_found_by_name(actor, teacher):
    folders = find(actor, f"{{name: large, path: {teacher}}}", f"{{name: self, path: {actor}}}")
    assert folders.teachers == {"large": teacher, "self": actor}
    assert folders.teacher_configs["large"]["hidden_size"] == 128
    identities = folders.identify()
    assert identities.keys() == {"model.path", "teachers.models: large: path"}, "one of them is the actor's model"
    assert identities["teachers.models: large: path"]["folder"] == str(teacher)


@pytest.mark.parametrize("kind", ["other tokens", "another special token", "missing tokens", "a swapped token"])
def test_another_tokenizer_is_refused_by_its_first_id(actor, teacher, kind):
    tokenizer = tiny_tokenizer()
    if kind == "other tokens":
        tokenizer, named = merging_tokenizer(vocab_size=128 + 172), "id 0 is '<s>' instead of '<pad>'"
    elif kind == "another special token":
        tokenizer.add_tokens(["<|tool|>"], special_tokens=True)
        named = "1 of 128 ids differ: id 128 is '<|tool|>' instead of no token"
    elif kind == "missing tokens":
        tokenizer, named = tiny_tokenizer(126), "2 of 128 ids differ: id 126 is no token instead of '<filler126>'"
    else:
        swapped = json.loads(tokenizer.backend_tokenizer.to_str())
        vocab = swapped["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        named = f"2 of 128 ids differ: id {vocab['b']} is 'b' instead of 'a'"
    tokenizer.save_pretrained(teacher)
    if kind == "a swapped token":
        (teacher / "tokenizer.json").write_text(json.dumps(swapped))
    message = refused(actor, f"{{name: math, path: {teacher}}}")
    start = f"teachers.models: math: path={teacher}: its tokenizer differs from the tokenizer of model.path={actor}"
    assert message.startswith(start) and named in message
    assert message.endswith("does not align log-probs between different tokenizations of a text")


def test_classifiers_and_small_vocabularies_are_refused(actor, teacher, tmp_path):
    small = write_tiny_llama(tmp_path / "small", vocab_size=112)
    tiny_tokenizer().save_pretrained(small)
    assert (
        "its vocab_size=112 is smaller than the actor's vocab_size=128, and the tokenizer has token ids up to 127"
        in (refused(actor, f"{{name: math, path: {small}}}"))
    )
    config = json.loads((teacher / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (teacher / "config.json").write_text(json.dumps(config))
    message = refused(actor, f"{{name: math, path: {teacher}}}")
    assert message.startswith(f"teachers.models: math: path={teacher}: its architecture is LlamaForSequence")
    assert "the divergence from a teacher requires a language model" in message


@pytest.mark.parametrize("engine", ["megatron", "vllm"])
def test_teacher_may_have_fewer_rows_than_the_actor(actor, tmp_path, engine):
    """Both models have an embedding for each of the tokenizer's 112 tokens."""
    padded, teacher = write_tiny_llama(tmp_path / "actor"), write_tiny_llama(tmp_path / "teacher", vocab_size=112)
    for folder in (padded, teacher):
        tiny_tokenizer(112).save_pretrained(folder)
    found = find(padded, f"{{name: math, path: {teacher}, engine: {engine}}}")
    assert found.teacher_configs["math"]["vocab_size"] == 112


def test_layout_must_fit_the_teacher(actor, teacher):
    """The teacher has three layers, and the actor two."""
    find(actor, f"{{name: math, path: {teacher}}}", layout="{pp: 3}")
    message = refused(actor, f"{{name: math, path: {teacher}}}", layout="{pp: 2}")
    assert message.startswith("teachers.models: math: teachers.layout.pp=2: 3 layers cannot be split evenly")


def test_revision_requires_a_hub_id(actor, teacher):
    message = refused(actor, f"{{name: math, path: {teacher}, revision: v1}}")
    assert message.startswith(f"teachers.models: math: revision=v1: teachers.models: math: path={teacher} is not a Hub")
