import hashlib
import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml
from transformers import AutoTokenizer

from megarl.config.evaluation import config_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.data.prompts import load_prompts
from megarl.data.turns import ChatTokens
from megarl.models.tokenizer import load_tokenizer, opening_ids
from tests.paths import BASE
from tests.tiny_model import tiny_tokenizer


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def config_of(source, max_new_tokens=16, context_length=256, seed=0, **data) -> Config:
    document = yaml.load(BASE.read_text(), yaml.CSafeLoader)
    document["run"]["seed"] = seed
    document["model"]["path"] = "unused"
    document["rollout"].update(max_new_tokens=max_new_tokens, context_length=context_length)
    document["data"].update(source=str(source), **data)
    return Config.model_validate(document)


def jsonl(folder, *prompts):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": i}) + "\n" for i, p in enumerate(prompts)))
    return path


def test_text_becomes_one_user_message_in_the_chat_template(model_folder, tmp_path):
    prompt = load_prompts(config_of(jsonl(tmp_path, "Hi you")), model_folder)[0]
    assert prompt.text == "<|user|>Hi you<eos><|assistant|>"
    assert prompt.id == "train.jsonl:1"
    assert prompt.answer == 0
    reference = AutoTokenizer.from_pretrained(model_folder)
    assert prompt.token_ids.tolist() == reference(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids.dtype == np.int32


def test_messages_keep_their_roles(model_folder, tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    prompt = load_prompts(config_of(jsonl(tmp_path, messages)), model_folder)[0]
    assert prompt.text == "<|system|>S<eos><|user|>U<eos><|assistant|>"


def test_captions_are_not_tokenized(tmp_path):
    """The model folder has no tokenizer, and a caption may be longer than rollout.context_length."""
    texts = "two red cats", "  é <|user|>\n", "long " * 1000
    prompts = load_prompts(images(config_of(jsonl(tmp_path, *texts))), tmp_path)
    assert [prompt.text for prompt in prompts.prompts] == [*texts]
    assert [(prompt.id, prompt.answer) for prompt in prompts.prompts] == [(f"train.jsonl:{i + 1}", i) for i in range(3)]
    assert not any(len(prompt.token_ids) for prompt in prompts.prompts) and prompts.num_dropped == 0


def test_data_hash_covers_captions(tmp_path):
    hashes = [load_prompts(images(config_of(jsonl(tmp_path, text))), tmp_path).data_hash for text in ("a", "b", "a")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_messages_are_not_captions(tmp_path):
    file = jsonl(tmp_path, "a cat", [{"role": "user", "content": "a cat"}])
    with pytest.raises(
        UserError, match=r"train\.jsonl:2: column 'prompt' \(data\.prompt_column\) contains messages, but a"
    ):
        load_prompts(images(config_of(file)), tmp_path)


def images(config: Config) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "diffusers"})})


def test_text_without_a_chat_template_is_tokenized_unchanged(model_folder, tmp_path):
    prompt = load_prompts(config_of(jsonl(tmp_path, "Hi you"), chat_template=False), model_folder)[0]
    assert prompt.text == "Hi you"
    assert len(prompt.token_ids) == 6


def test_arithmetic_prompts_are_rendered_with_answers(model_folder):
    prompts = load_prompts(config_of("arithmetic", size=50), model_folder)
    assert len(prompts) == 50
    assert len({prompt.id for prompt in prompts.prompts}) == 50
    assert prompts[0].text == "<|user|>What is 6+3? Answer with just the number.<eos><|assistant|>"
    assert prompts[0].answer == "9"


def test_size_takes_the_first_rows(model_folder, tmp_path):
    prompts = load_prompts(config_of(jsonl(tmp_path, "a", "b", "c"), size=2), model_folder)
    assert [prompt.id for prompt in prompts.prompts] == ["train.jsonl:1", "train.jsonl:2"]


def test_data_hash_covers_ids_and_answers_in_order(model_folder, tmp_path):
    prompts = load_prompts(config_of(jsonl(tmp_path, "a", "b")), model_folder)
    lines = "".join(json.dumps([p.token_ids.tolist(), p.answer]) + "\n" for p in prompts.prompts)
    assert prompts.data_hash == hashlib.sha256(lines.encode()).hexdigest()
    hashes = {load_prompts(config_of("arithmetic", size=9, seed=seed), model_folder).data_hash for seed in (0, 0, 1)}
    assert len(hashes) == 2


def test_requested_columns_survive_pickling(model_folder, tmp_path):
    config = config_of(jsonl(tmp_path, "a", "b"))
    with_columns = load_prompts(config, model_folder, {"row": None})
    assert with_columns[1].columns == {"prompt": "b", "answer": 1}
    assert pickle.loads(pickle.dumps(with_columns[1])) == with_columns[1]
    without = load_prompts(config, model_folder, {"other": None})
    assert without[1].columns == {} and without[1] != with_columns[1]
    assert without.data_hash == load_prompts(config, model_folder).data_hash != with_columns.data_hash


def test_prompt_may_fill_but_not_exceed_the_context(model_folder, tmp_path):
    source = jsonl(tmp_path, "ab", "abcde")  # 5 and 8 tokens, 3 of them from the template
    assert len(load_prompts(config_of(source, max_new_tokens=16, context_length=24), model_folder)) == 2
    with pytest.raises(
        ValueError,
        match=r"train\.jsonl:2: the prompt has 8 tokens \(8 \+ rollout\.max_new_tokens=16 = 24\), but "
        r"rollout\.context_length=23\. Fix: raise rollout\.context_length to at least 24",
    ):
        load_prompts(config_of(source, max_new_tokens=16, context_length=23), model_folder)


def test_row_that_cannot_be_tokenized_is_named(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"train\.jsonl:2: the prompt renders as empty text"):
        load_prompts(config_of(jsonl(tmp_path, "a", ""), chat_template=False), model_folder)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=r"train\.jsonl:1: a list of messages requires a chat template"):
        load_prompts(config_of(jsonl(tmp_path, messages), chat_template=False), model_folder)


def test_row_that_the_template_rejects_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"train\.jsonl:1: the model's chat template rejects .*: no system role"):
        load_prompts(config_of(jsonl(tmp_path, "a")), tmp_path)


def test_model_without_a_chat_template_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"data\.chat_template=true: .* has no chat template"):
        load_prompts(config_of("arithmetic", size=1), tmp_path)
    assert load_prompts(config_of("arithmetic", size=1, chat_template=False), tmp_path)[0].text.startswith("What")


def test_too_few_rows_are_refused(model_folder, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ValueError, match=r"data\.source=.*empty\.jsonl: the source has no rows"):
        load_prompts(config_of(empty), model_folder)
    with pytest.raises(
        ValueError, match=r"data\.size=3: .*train\.jsonl has only 1 rows\. Fix: set data\.size to at most 1"
    ):
        load_prompts(config_of(jsonl(tmp_path, "a"), size=3), model_folder)


def test_loading_prompts_does_not_import_torch(model_folder):
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from megarl.config.schema import Config\n"
        "from megarl.data.prompts import load_prompts\n"
        "assert not {'transformers', 'torch'} & set(sys.modules)\n"
        "load_prompts(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    config = config_of("arithmetic", size=2).model_dump_json()
    assert subprocess.run([sys.executable, "-c", code, config, str(model_folder)]).returncode == 0


def test_system_prompt_precedes_each_prompt(model_folder, tmp_path):
    turns = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    prompts = load_prompts(config_of(jsonl(tmp_path, "Hi", turns), system_prompt="Be brief."), model_folder)
    assert [prompt.text for prompt in prompts] == [
        "<|system|>Be brief.<eos><|user|>Hi<eos><|assistant|>",
        "<|system|>Be brief.<eos><|user|>U<eos><|assistant|>A<eos><|user|>V<eos><|assistant|>",
    ]
    assert prompts[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_evaluation_set_may_override_the_system_prompt(model_folder, tmp_path):
    sets = [EvaluationSet(name=f"{i}", system_prompt=text) for i, text in enumerate([None, "Be long.", ""])]
    sets.append(EvaluationSet(name="plain", chat_template=False))
    config = config_of(jsonl(tmp_path, "Hi"), system_prompt="Be brief.")
    texts = [load_prompts(config_of_set(config, entry), model_folder)[0].text for entry in sets]
    assert texts == [
        "<|system|>Be brief.<eos><|user|>Hi<eos><|assistant|>",
        "<|system|>Be long.<eos><|user|>Hi<eos><|assistant|>",
        "<|user|>Hi<eos><|assistant|>",
        "Hi",
    ]


def test_system_message_in_a_row_conflicts_with_system_prompt(model_folder, tmp_path):
    path = jsonl(tmp_path, "Hi", [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    with pytest.raises(
        UserError, match=r"train.jsonl:2: the prompt already has a system message, but data.system_prompt is"
    ):
        load_prompts(config_of(path, system_prompt="Be brief."), model_folder)


def levels(folder, *values):
    path = folder / "levels.jsonl"
    rows = ({"prompt": f"p{i}", "answer": i, "level": value} for i, value in enumerate(values))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_sorted_by_a_column(model_folder, tmp_path):
    """Rows with equal values keep the order of the file."""
    config = config_of(levels(tmp_path, 2, 0.5, 2, -1), sort_column="level", shuffle=False)
    prompts = load_prompts(config, model_folder)
    assert [prompt.answer for prompt in prompts.prompts] == [3, 1, 0, 2]
    assert prompts.weights is None
    assert load_prompts(config_of(levels(tmp_path, 2, 0.5, 2, -1)), model_folder).data_hash != prompts.data_hash


def test_weights_are_read_from_a_column(model_folder, tmp_path):
    config = config_of(levels(tmp_path, 2, 0.5, 0), weight_column="level")
    assert load_prompts(config, model_folder).weights == (2.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        (
            "sort_column",
            (1, "x"),
            r"levels.jsonl:2: column 'level' \(data\.sort_column\): expected a number, found 'x'",
        ),
        (
            "weight_column",
            (1, -1),
            r"level' \(data.weight_column\): expected 0 or a number from 1e-100 to 1e\+100, found -1",
        ),
        ("weight_column", (1e308, 1e308), r"levels.jsonl:1: .* expected 0 or a number from .*, found 1e\+308"),
        ("weight_column", (1, 5e-324), r"levels.jsonl:2: .* expected 0 or a number from .*, found 5e-324"),
        (
            "weight_column",
            (0, 0),
            r"data.weight_column=level: all weights are 0. Fix: set a positive weight for at least one row",
        ),
    ],
)
def test_invalid_sort_value_or_weight_is_refused(model_folder, tmp_path, key, values, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(config_of(levels(tmp_path, *values), **{key: "level"}), model_folder)


def test_missing_sort_column_is_named_with_its_key(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"missing column 'rank' .* Fix: set data.sort_column to one of the columns"):
        load_prompts(config_of(levels(tmp_path, 1), sort_column="rank", shuffle=False), model_folder)


def test_rows_of_several_files_are_read_in_order(model_folder, tmp_path):
    """Two files have the same name, so the names of their rows contain folders."""
    one, two, three = tmp_path / "one", tmp_path / "two", tmp_path / "three"
    for folder in (one, two, three):
        folder.mkdir()
    files = [jsonl(one, "a", "b"), jsonl(two, "c"), jsonl(three, "d").rename(three / "other.jsonl")]
    config = config_of(files[0], more_sources=[str(file) for file in files[1:]])
    prompts = load_prompts(config, model_folder)
    assert [prompt.messages[0]["content"] for prompt in prompts.prompts] == ["a", "b", "c", "d"]
    names = ["one/train.jsonl:1", "one/train.jsonl:2", "two/train.jsonl:1", "other.jsonl:1"]
    assert [prompt.id for prompt in prompts.prompts] == names
    assert len(load_prompts(config_of(files[0], more_sources=[str(files[1])], size=3), model_folder)) == 3
    files[2].write_text('{"prompt": 1, "answer": 2}\n')
    with pytest.raises(ValueError, match=f"{files[2]}:1: column 'prompt': expected text"):
        load_prompts(config, model_folder)


def test_rows_of_a_source_share_its_weight(model_folder, tmp_path):
    """The two rows of the first file share its weight of 3. Weights of rows are relative within their file."""
    (tmp_path / "b").mkdir()
    first, second = levels(tmp_path, 3, 1), levels(tmp_path / "b", 2)
    both = {"more_sources": [str(second)], "source_weights": {str(first): 3.0, str(second): 1.0}}
    assert load_prompts(config_of(first, **both), model_folder).weights == (1.5, 1.5, 1.0)
    by_row = config_of(first, **both, weight_column="level")
    assert load_prompts(by_row, model_folder).weights == (3 * 3 / 4, 3 * 1 / 4, 1.0)


def test_source_weights_may_refer_to_a_column(model_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = ({"prompt": "p", "answer": 1, "info": {"of": name}} for name in ("gsm8k", "math", "gsm8k"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(path, source_column="info.of", source_weights={"gsm8k": 1.0, "math": 4.0})
    assert load_prompts(config, model_folder).weights == (0.5, 4.0, 0.5)
    with pytest.raises(ValueError, match=r"data.source_weights: the source 'math' of some rows has no weight"):
        load_prompts(config_of(path, source_column="info.of", source_weights={"gsm8k": 1.0}), model_folder)


def test_verl_rows_are_read_unchanged(model_folder, tmp_path):
    """verl nests the answer in a column, and has columns that select the reward function or are passed to it."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    config = config_of(
        tmp_path / "train.parquet", answer_column="reward_model.ground_truth", source_column="data_source"
    )
    [prompt] = load_prompts(config, model_folder, {"extra_info": "f"}).prompts
    assert (prompt.answer, prompt.messages) == ("4", ({"role": "user", "content": "2+2?"},))
    assert prompt.columns == {"data_source": "openai/gsm8k", "extra_info": {"split": "train", "index": 0}}


LLAMA_3 = """
{%- if not date_string is defined -%}
  {%- if strftime_now is defined -%}{%- set date_string = strftime_now("%d %b %Y") -%}
  {%- else -%}{%- set date_string = "26 Jul 2024" -%}{%- endif -%}
{%- endif -%}
Today Date: {{ date_string }}
{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}<|assistant|>"""


def test_template_shows_the_date_of_the_run(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = LLAMA_3
    tokenizer.save_pretrained(tmp_path)
    days = ("2025-02-03", "2025-02-04", None)
    first, second, today = (load_prompts(config_of(jsonl(tmp_path, "Hi"), date=day), tmp_path) for day in days)
    assert first[0].text == "Today Date: 03 Feb 2025\n<|user|>Hi<eos><|assistant|>"
    assert second[0].text == first[0].text.replace("03", "04") and "2025" not in today[0].text
    turns = ChatTokens(load_tokenizer(tmp_path, date="2025-02-03"))
    assert turns.begin([{"role": "user", "content": "Hi"}]) == first[0].token_ids.tolist()


@pytest.mark.parametrize("day", ["2025-02-30", "yesterday", 3])
def test_date_is_checked(day):
    with pytest.raises(ValueError, match=r"data\.date|data\n?.*date"):
        config_of("arithmetic", date=day)


def test_prompt_that_ends_with_an_answer_is_refused(model_folder, tmp_path):
    messages = [{"role": "user", "content": "U"}, {"role": "assistant", "content": "The answer is"}]
    with pytest.raises(UserError, match=r"train.jsonl:1: the prompt ends with an assistant message.* Fix: drop"):
        load_prompts(config_of(jsonl(tmp_path, messages)), model_folder)


class StartingTokenizer:
    """A tokenizer that begins every text with <s>, token 1, and has one token per other character. With `closes`, it
    also ends every text with </s>, token 2."""

    bos_token, bos_token_id, eos_token, eos_token_id = "<s>", 1, "</s>", 2

    def __init__(self, closes: bool = False):
        self._end = [2] if closes else []

    def __call__(self, text):
        ids = {"<s>": 1, "</s>": 2}
        parts = [ids.get(part) or ord(part) for part in re.findall("</?s>|.", text)]
        return {"input_ids": [1, *parts, *self._end]}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("ab", [1, 97, 98]),
        ("<s>ab", [1, 97, 98]),
        ("<s><s>a", [1, 1, 97]),
        ("a<s>", [1, 97, 1]),
        ("a</s>", [1, 97, 2]),
    ],
)
def test_rendered_text_has_one_beginning_of_sequence(text, ids):
    assert opening_ids(StartingTokenizer(), text) == ids


def test_prompt_stays_open_if_the_tokenizer_adds_an_end():
    assert opening_ids(StartingTokenizer(closes=True), "ab") == [1, 97, 98]


@pytest.fixture
def starting_folder(tmp_path):
    """A model whose tokenizer has a beginning-of-sequence token and whose chat template writes it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "prompt", ["<s>Hi", [{"role": "system", "content": "<s>You"}, {"role": "user", "content": "U"}]]
)
def test_rendered_text_is_not_rendered_again(starting_folder, tmp_path, prompt):
    with pytest.raises(UserError, match=r"train.jsonl:1: a message starts with .*<s>.* Fix: remove the token"):
        load_prompts(config_of(jsonl(tmp_path, prompt)), starting_folder)
    [whole] = load_prompts(config_of(jsonl(tmp_path, "a <s> b")), starting_folder)
    assert whole.text.startswith("<s><|user|>a <s> b")


HINTED = "teachers.models=[{name: t, prompt_column: hint, sources: [math]}]"


def hinted(folder, *rows: dict, source="data.source_column=kind"):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "answer": 1, "kind": "math", **row}) + "\n" for row in rows))
    limits = "rollout={max_new_tokens: 16, context_length: 40}"
    return ["model.path=m", f"data.source={path}", source, limits, HINTED]


def test_privileged_prompts_use_the_chat_template(model_folder, tmp_path):
    """Rows of other sources and rows with empty columns have no privileged prompt. Evaluation sets have none."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    hints = ["a? b", messages, "", [], None]
    rows = [*({"hint": hint} for hint in hints), {}, {"kind": "code", "hint": "c"}]
    config = load(BASE, hinted(tmp_path, *rows))
    data = load_prompts(config, model_folder)
    tokenizer = tiny_tokenizer()
    texts = {name: tokenizer.decode(ids) for name, ids in data.privileged["hint"].items()}
    assert texts == {
        "rows.jsonl:1": "<|user|>a? b<eos><|assistant|>",
        "rows.jsonl:2": "<|system|>S<eos><|user|>U<eos><|assistant|>",
    }
    assert [prompt.text for prompt in data.prompts] == ["<|user|>a<eos><|assistant|>"] * 7
    assert load_prompts(config_of_set(config, EvaluationSet(name="set")), model_folder).privileged == {}
    rows[0]["hint"] = "a? c"
    assert load_prompts(load(BASE, hinted(tmp_path, *rows)), model_folder).data_hash != data.data_hash


def test_privileged_prompts_have_the_system_prompt(model_folder, tmp_path):
    config = load(BASE, [*hinted(tmp_path, {"hint": "b"}), "data.system_prompt=S"])
    [ids] = load_prompts(config, model_folder).privileged["hint"].values()
    assert tiny_tokenizer().decode(ids) == "<|system|>S<eos><|user|>b<eos><|assistant|>"


def test_overlong_privileged_prompts_follow_the_policy(model_folder, tmp_path):
    overrides = hinted(tmp_path, {"hint": "b" * 22}, {"hint": "b" * 21})
    with pytest.raises(UserError, match=r"rows.jsonl:1: the prompt in column 'hint' has 25 tokens \(25 \+ rollout"):
        load_prompts(load(BASE, overrides), model_folder)
    data = load_prompts(load(BASE, [*overrides, "data.overlong=drop"]), model_folder)
    assert [prompt.id for prompt in data.prompts] == [*data.privileged["hint"]] == ["rows.jsonl:2"]
    assert data.num_dropped == 1


@pytest.mark.parametrize(
    ("hints", "overrides", "message"),
    [
        ([7], [], r"rows.jsonl:1: column 'hint': expected text or a list of .*, found int 7"),
        (["", ""], [], "teachers.models: t with prompt_column=hint: no remaining row of the"),
        (
            ["b", ""],
            ["rewards.functions=[]"],
            r"rows.jsonl:2: no prompt in the column 'hint' \(prompt_column of the teacher t\), and no reward",
        ),
    ],
)
def test_unusable_privileged_prompts_are_rejected(model_folder, tmp_path, hints, overrides, message):
    config = load(BASE, [*hinted(tmp_path, *({"hint": hint} for hint in hints)), *overrides])
    with pytest.raises(UserError, match=message):
        load_prompts(config, model_folder)


def test_row_without_teacher_and_reward_is_rejected(model_folder, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a", "answer": 1, "kind": k}) + "\n" for k in ("math", "code")))
    alone = ["model.path=m", f"data.source={path}", "data.source_column=kind", "rewards.functions=[]"]

    def load_with(sources: str, *overrides: str):
        models = f"teachers.models=[{{name: a, path: x, sources: [math]}}, {{name: b, path: y, sources: {sources}}}]"
        return load_prompts(load(BASE, [*alone, models, *overrides]), model_folder)

    assert [prompt.columns["kind"] for prompt in load_with("[code]").prompts] == ["math", "code"]
    assert len(load_with("[physics]", "rewards.functions=[{function: exact_match}]")) == 2
    with pytest.raises(
        UserError, match=r"rows.jsonl:2: no teacher in teachers.models lists 'code' \(the row's 'kind'\)"
    ):
        load_with("[physics]")


GIVEN = (
    "teachers.models=[{name: t, path: x}]",
    *("algorithm.distillation={divergence: jsd, placement: loss, on_policy_share: 0.5}", "rewards.functions=[]"),
    *("algorithm.advantage.estimator=policy_gradient", "data.response_column=solution"),
)


def answered(folder, *solutions, chat_template=True, overlong="refuse"):
    path = folder / "rows.jsonl"
    rows = ({"prompt": "a", "answer": 1} | ({} if s is None else {"solution": s}) for s in solutions)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template, limits = f"data.chat_template={chat_template}", "rollout={max_new_tokens: 16, context_length: 40}"
    return load(BASE, ["model.path=m", f"data.source={path}", *GIVEN, template, f"data.overlong={overlong}", limits])


def test_given_responses_continue_their_prompts(model_folder, tmp_path):
    """Messages of other roles are not trained on. Evaluation sets have no given responses."""
    roles = [("assistant", "b"), ("user", "c"), ("assistant", "d")]
    config = answered(tmp_path, "b c", [{"role": role, "content": text} for role, text in roles])
    data = load_prompts(config, model_folder)
    text, messages = (data.responses[prompt.id] for prompt in data.prompts)
    decode = tiny_tokenizer().decode
    assert decode(text.token_ids) == "b c<eos>" and text.mask.all() and text.text == "b c"
    assert decode(messages.token_ids) == "b<eos><|user|>c<eos><|assistant|>d<eos>"
    assert decode(messages.token_ids[messages.mask]) == "b<eos>d<eos>"
    plain = load_prompts(answered(tmp_path, "b c", chat_template=False), model_folder)
    assert [decode(response.token_ids) for response in plain.responses.values()] == ["b c<eos>"]
    evaluated = load_prompts(config_of_set(config, EvaluationSet(name="set")), model_folder)
    assert evaluated.responses == {} and evaluated.data_hash != data.data_hash


def test_prompt_without_a_given_response_is_rejected(model_folder, tmp_path):
    for missing in ("", [], None):
        message = r"rows.jsonl:2: (column 'solution' \(data.response_column\): the prompt has no resp|missing column)"
        with pytest.raises(UserError, match=message):
            load_prompts(answered(tmp_path, "b", missing), model_folder)


def test_overlong_given_responses_follow_the_policy(model_folder, tmp_path):
    solutions = ("b" * 16, "b" * 15)
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* the response has 17 tokens, but rollout.max_new_tokens=16"):
        load_prompts(answered(tmp_path, *solutions), model_folder)
    data = load_prompts(answered(tmp_path, *solutions, overlong="drop"), model_folder)
    assert [*data.responses] == ["rows.jsonl:2"] and data.num_dropped == 1
