"""Hostile files: every reader either succeeds or raises a one-line error that names the file."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from megarl.cluster.trace import EARLIER, FILE, read_spans
from megarl.config.load import load
from megarl.config.model_schema import Lora
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, write_manifest
from megarl.core.errors import DamagedCheckpoint, UserError
from megarl.core.jsonl import read_objects
from megarl.core.prompt import Prompt
from megarl.data.chat import prompt_ids
from megarl.data.cursor import PromptCursor
from megarl.data.files import file_rows, label_rows, message_rows, preference_rows
from megarl.data.prompts import PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.environments.shipped import retrieval
from megarl.launch.folder import Job, JobFolder
from megarl.models.families import FAMILIES
from megarl.models.folder import read_config
from megarl.models.peft import check_adapter_config
from megarl.models.rules import check_model
from megarl.models.shape import ModelShape
from megarl.models.tokenizer import load_tokenizer
from megarl.models.weight_files import read_headers
from megarl.planner.plan import recorded
from megarl.report.evaluations import read_evaluations
from megarl.report.history import read_history
from megarl.report.viewer import read_rollouts
from megarl.resharding.planning import results
from megarl.rewards.sample_file import load_samples
from megarl.run import beginning
from megarl.run.attempts import Attempts
from megarl.run.diagnosis.diagnose import find_rollout
from megarl.run.folder import RunFolder
from megarl.run.resume import find_checkpoint
from megarl.run.time_ledger import read_ledger
from megarl.step.state import PendingPrompt, RunState, saved_state
from tests.marks import exhaustive_but
from tests.paths import QUICKSTART
from tests.tiny_model import tiny_tokenizer

HUGE = "9" * 5000
DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 500 + "]" * 500

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "nul": b"\0" * 64,
    "not_utf8": b'{"prompt": "\xff\xfe", "answer": "\xc3"}\n',
    "bom": b"\xef\xbb\xbf{}\n",
    "utf16": '{"prompt": "a"}'.encode("utf-16"),
    "huge_integer": f'{{"prompt": "a", "answer": {HUGE}, "step": {HUGE}, "r": {HUGE}}}\n'.encode(),
    "large_integer": f'{{"step": {"9" * 400}, "num_response_tokens": {"9" * 400}, "r": {"9" * 400}}}\n'.encode(),
    "deep": DEEP.encode(),
    "deep_field": f'{{"prompt": "a", "answer": {DEEP}}}\n'.encode(),
    "nested": f'{{"prompt": "a", "answer": {NESTED}, "step": {NESTED}}}\n'.encode(),
    "list": b"[1, 2]\n",
    "number": b"7\n",
    "text": b'"text"\n',
    "null": b"null\n",
    "torn": b'{"prompt": "a", "answ',
    "infinity": b'{"prompt": "a", "answer": Infinity, "step": NaN}\n',
    "surrogate": b'{"prompt": "\\ud800", "answer": "\\udfff", "sample_id": "\\ud800"}\n',
    "parquet_magic": b"PAR1" + b"\xff" * 100 + b"PAR1",
    "safetensors_length": b"\xff" * 8 + b"{}",
    "gzip": gzip.compress(b"{}")[:-4],
}
VALUES = [None, True, -1, 0, 2**40, 10**400, 1.5, float("nan"), "x", "\ud800", [], [1], {}, {"a": 1}]
"""Values that replace each field of a valid file in turn."""


def answers_or_names(read: Callable[[], object], name: str) -> None:
    try:
        read()
    except UserError as error:
        lines = str(error).splitlines()
        assert lines and all("Fix: " in line for line in lines), error
        assert name in str(error), error


def fields_of(value: Any) -> list[Any]:
    """Return copies of an object in which one field at any depth has a different value or is missing."""
    variants = []
    for name in value:
        variants += [{**value, name: other} for other in VALUES]
        variants.append({other: value[other] for other in value if other != name})
        if isinstance(value[name], dict):
            variants += [{**value, name: inner} for inner in fields_of(value[name])]
    return variants


TEMPLATES = [
    *("{{ 1 / 0 }}", "{{ messages[9].content + 1 }}", "{% for %}", "{{ raise_exception('no') }}", "{{ 'a'.x.y }}"),
    *("{{ messages | nofilter }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ range(10**9) | list }}"),
]

ROWS: dict[str, Callable[[Path], object]] = {
    "prompts": lambda path: list(file_rows(path, "prompt", "answer", {"row": None})),
    "messages": lambda path: list(message_rows(path, "messages")),
    "preferences": lambda path: list(preference_rows(path, "prompt", "chosen", "rejected")),
    "labels": lambda path: list(label_rows(path, "prompt", "steps", "labels")),
}
MESSAGES = [{"role": "user", "content": "a"}]
ROW = {
    **{"prompt": MESSAGES, "answer": "1", "messages": MESSAGES, "chosen": "a", "rejected": "b"},
    **{"steps": ["a", "b"], "labels": [1, None]},
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("kind", ROWS)
def test_data_file(tmp_path: Path, kind: str, suffix: str, content: str) -> None:
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(CONTENTS[content])
    answers_or_names(lambda: ROWS[kind](file), file.name)


@pytest.mark.parametrize("kind", ROWS)
def test_values_of_data_rows(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.jsonl"
    for row in fields_of(ROW):
        file.write_text(json.dumps(row) + "\n")
        answers_or_names(lambda: ROWS[kind](file), "rows.jsonl:1")


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_truncated_or_damaged_parquet(tmp_path: Path, kept: float) -> None:
    file = tmp_path / "rows.parquet"
    rows = [{"prompt": f"question {i}" * 20, "answer": str(i)} for i in range(5000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=500)
    whole = file.read_bytes()
    size = int(kept * len(whole))
    file.write_bytes(whole[:size])
    with pytest.raises(UserError, match=r"rows\.parquet: not a Parquet file"):
        ROWS["prompts"](file)
    file.write_bytes(whole[: size // 2] + b"\xff" * 4000 + whole[size // 2 + 4000 :])
    with pytest.raises(UserError, match=r"rows.parquet:\d+: this row or a later one cannot be read"):
        ROWS["prompts"](file)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([b"\xff\xfe"], pyarrow.binary()),
        pyarrow.StringArray.from_buffers(
            1, pyarrow.py_buffer((0).to_bytes(4, "little") + (2).to_bytes(4, "little")), pyarrow.py_buffer(b"\xff\xfe")
        ),
        pyarrow.array([2**62], pyarrow.timestamp("ms")),
        pyarrow.array([2**62], pyarrow.duration("s")),
        pyarrow.array([None]),
    ],
    ids=["bytes", "not_utf8", "late", "long", "null"],
)
def test_odd_parquet_columns(tmp_path: Path, column: pyarrow.Array) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": column}), file)
    answers_or_names(lambda: ROWS["prompts"](file), "rows.parquet:1")


RECIPES = [*CONTENTS, "alias", "integer", "deep_yaml", "tag", "date"]


@pytest.mark.parametrize("content", exhaustive_but(RECIPES, *(name for name in RECIPES if name != "deep_field")))
def test_recipe(tmp_path: Path, content: str) -> None:
    more = {
        "alias": b"base: base.yaml\nrun: &r\n  steps: 1\n  more: *r\ndata: &d [*d]\n",
        "integer": f"base: base.yaml\nrun: {{steps: {HUGE}}}\n".encode(),
        "deep_yaml": ("base: " + "{a: " * 3000 + "1" + "}" * 3000).encode(),
        "tag": b"base: !!python/object/apply:os.system [id]\n",
        "date": b"base: base.yaml\nrun: 2020-01-01\n",
    }
    file = tmp_path / "recipe.yaml"
    file.write_bytes((CONTENTS | more)[content])
    with pytest.raises(UserError) as error:
        load(file)
    assert "recipe.yaml" in str(error.value)


@pytest.mark.parametrize("value", [HUGE, DEEP, "&a [*a]", "{a: &a {b: *a}}", "!!python/name:os.system", "\0", "[" * 9])
def test_value_on_the_command_line(value: str) -> None:
    with pytest.raises(UserError, match=r"command line: run\.steps="):
        load(QUICKSTART, [f"run.steps={value}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "a\udcff") for key in ("run.name", "model.path", "data.system_prompt")),
        *(("rollout.stop", r'["a\udcff"]'), ("data.options.a", r'"a\ud800"')),
    ],
)
def test_invalid_utf8_on_the_command_line(key: str, value: str) -> None:
    """Python represents the byte 0xff in an argument as a lone surrogate."""
    with pytest.raises(UserError, match=rf"^command line: {re.escape(key)}.*=.*: not valid UTF-8\. Fix: "):
        load(QUICKSTART, [f"{key}={value}"])


CONFIG_JSON = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    **{"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    **{"id2label": {"0": "a"}},
    **{"hidden_act": "silu", "attention_bias": False, "sliding_window": None, "quantization_config": None},
}
SHAPES = ["llama", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral"]


def read_model(folder: Path, recipe: Config) -> None:
    config = read_config(folder)
    check_model(recipe, config)
    ModelShape.of(config)


@pytest.mark.parametrize("content", CONTENTS)
def test_model_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(CONTENTS[content])
    answers_or_names(lambda: read_config(tmp_path), "config.json")


@pytest.mark.parametrize("family", SHAPES)
def test_values_in_a_model_config(tmp_path: Path, family: str) -> None:
    whole = {**FAMILIES[family], **CONFIG_JSON, "model_type": family}
    recipe = load(QUICKSTART)
    for config in fields_of(whole):
        (tmp_path / "config.json").write_text(json.dumps(config))
        answers_or_names(lambda: read_model(tmp_path, recipe), "")


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer(tmp_path: Path, tokenizer_files: dict[str, bytes], name: str, content: str) -> None:
    for other, data in tokenizer_files.items():
        (tmp_path / other).write_bytes(data)
    (tmp_path / name).write_bytes(CONTENTS[content])
    answers_or_names(lambda: load_tokenizer(tmp_path), str(tmp_path))


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_template(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"^rows:1: the model's chat template rejects the messages: .*Fix: "):
        prompt_ids(tokenizer, "a", True, "rows:1")


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_weights(tmp_path: Path, name: str, content: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / name).write_bytes(CONTENTS[content])
    answers_or_names(lambda: read_headers(tmp_path), str(tmp_path))


@pytest.mark.parametrize("name", ["..", ".", "", "/etc/passwd", "a\0b", "x" * 5000, 5, None])
def test_file_names_in_an_index(tmp_path: Path, name: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", CONTENTS)
def test_adapter_config(tmp_path: Path, content: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(CONTENTS[content])
    lora = load(QUICKSTART, ["actor.lora.rank=8", "actor.lora.alpha=16"]).actor.lora
    answers_or_names(lambda: check_adapter_config(tmp_path, lora), str(tmp_path))
    assert isinstance(lora, Lora)


@pytest.mark.parametrize("content", CONTENTS)
def test_corpus(tmp_path: Path, content: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_bytes(CONTENTS[content])
    answers_or_names(lambda: retrieval._read(file), "corpus.jsonl")
    for row in fields_of({"title": "a", "text": "b"}) + fields_of({"contents": "c"}):
        file.write_text(json.dumps(row) + "\n")
        answers_or_names(lambda: retrieval._read(file), "corpus.jsonl")


MANIFEST = {
    **{"name": "run", "models": {"model.path": {"given": "a", "folder": "b", "hash": "c"}}},
    **{"finished_after_step": 10**6, "format_version": 1},
}
SAMPLE = {
    **{"sample_id": "s", "prompt": "p", "response": "r", "reward": 1.0, "num_response_tokens": 3, "answer": "a"},
    **{"messages": [{"role": "user", "content": "a"}], "tokens": ["a"], "prompt_ids": [1], "response_ids": [1, 2]},
    **{"rollout_logprobs": [0.5], "mask": [1], "turns": [{"role": "user", "content": "a"}]},
    **{"image": "step_000001/s.png", "preview": "step_000001/s.jpg"},
}


def read_run(folder: Path, config: Config) -> None:
    run = RunFolder(folder)
    read_history(run.metrics)
    for read in (lambda: run.values_of("r"), lambda: run.num_steps, lambda: run.finished_after):
        read()
    _ = run.resolved_models
    beginning.resolve(config)
    beginning.check_beginning(config)
    run.metrics_until(5)
    read_rollouts(run.rollout_files())
    read_evaluations(run.evaluation_files())
    Attempts(folder).all()
    read_ledger(folder).describe()
    list(read_spans(folder / "logs"))


FILES = {
    "metrics.jsonl": {"step": 1, "r": 0.5, "time/step": 1.0, "nonfinite": []},
    "manifest.json": MANIFEST,
    "config.resolved.yaml": {"data": {"date": "2020-01-01"}},
    "rollouts/step_000001.jsonl": SAMPLE,
    "evaluations/set/step_000001.jsonl": SAMPLE,
    "launch/attempts/1": {"job": "1", "restart": 0, "allocated": 1.0, "began": 1.0, "saved": 0},
    f"logs/{FILE}": {"process": "a", "task": "b", "begin": 0.0, "end": 1.0},
    f"logs/{EARLIER}": {},
    "logs/attempt_1/time.jsonl": {"begin": 1.0, "end": 2.0, "seconds": {"train": 1.0}, "step": 1},
    "launch/prediction.json": {"train": 1.0},
    "checkpoints/latest": {},
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_run(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    config = load(QUICKSTART, [f"run.folder={tmp_path}", "run.name=run", "resume=auto"])
    file = folder / name
    file.parent.mkdir(parents=True)
    for content in CONTENTS.values():
        file.write_bytes(content)
        answers_or_names(lambda: read_run(folder, config), file.name)
    for row in fields_of(FILES[name]):
        file.write_text(json.dumps(row) + "\n")
        answers_or_names(lambda: read_run(folder, config), file.name)


@pytest.mark.parametrize("content", CONTENTS)
def test_other_files_of_runs(tmp_path: Path, content: str) -> None:
    """Covers files named in commands and files that jobs read."""
    file = tmp_path / "rollouts" / "step_000001.jsonl"
    file.parent.mkdir()
    file.write_bytes(CONTENTS[content])
    answers_or_names(lambda: recorded(file), file.name)
    answers_or_names(lambda: find_rollout(tmp_path, 1, None), file.name)
    read_objects(file)
    (tmp_path / "samples").write_bytes(CONTENTS[content])
    answers_or_names(lambda: load_samples(tmp_path / "samples"), "samples")
    launch = JobFolder(tmp_path)
    launch.path.mkdir()
    (launch.path / "job.json").write_bytes(CONTENTS[content])
    answers_or_names(launch.job, "job.json")
    (tmp_path / "result.json").write_bytes(CONTENTS[content])
    assert results._read(tmp_path / "result.json") is None


def test_values_in_a_rollout_file_and_a_job(tmp_path: Path) -> None:
    file = tmp_path / "rollouts" / "step_000001.jsonl"
    file.parent.mkdir()
    for row in fields_of(SAMPLE):
        file.write_text(json.dumps(row) + "\n")
        answers_or_names(lambda: recorded(file), file.name)
        answers_or_names(lambda: find_rollout(tmp_path, 1, None), file.name)
    launch = JobFolder(tmp_path)
    launch.path.mkdir()
    launch.write_job(job := Job("folder", 1, 8, 3))
    assert launch.job() == job
    for row in fields_of({"folder": "f", "nodes": 1, "gpus": 8, "stalled": 3}):
        (launch.path / "job.json").write_text(json.dumps(row))
        answers_or_names(launch.job, "job.json")


def test_manifest_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    for content in CONTENTS.values():
        (folder / "manifest.json").write_bytes(content)
        answers_or_names(lambda: Checkpoint.open(folder), str(folder))
    write_manifest(folder, 1, {"data_hash": "a"}, [])
    whole = json.loads((folder / "manifest.json").read_text())
    assert Checkpoint.open(folder).step == 1
    for content in [*fields_of(whole["content"]), *VALUES]:
        whole = {"sha256": _digest(content), "content": content}
        (folder / "manifest.json").write_text(json.dumps(whole))
        answers_or_names(lambda: Checkpoint.open(folder), str(folder))


RECORD = {"path": "weights", "num_bytes": 3, "sha256": "a" * 64}
RESUMING = load(QUICKSTART, ["run.folder=/nowhere", "run.name=run"])
ROWS_OF_RUN = PromptSet(tuple(Prompt(str(i), "", (i,)) for i in range(5)), "hash")
STARTED_FROM = {"model.path": {"folder": "/models/m", "hash": "1234567890"}}


def sealed(folder: Path, content: Any) -> None:
    """Write a manifest whose digest is valid, as anyone can."""
    (folder / "manifest.json").write_text(json.dumps({"sha256": _digest(content), "content": content}))


def test_file_records_of_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "step_000001"
    folder.mkdir()
    (folder / "weights").write_bytes(b"abc")
    for record in [*fields_of(RECORD), *VALUES]:
        sealed(folder, {"format_version": 1, "step": 1, "state": {}, "files": [record]})

        def read() -> None:
            checkpoint = Checkpoint.open(folder)
            checkpoint.verify(checkpoint.files)

        answers_or_names(read, str(folder))


def resumed(folder: Path, config: Config) -> None:
    settings = config.model_copy(update={"resume": str(folder)})
    checkpoint = find_checkpoint(settings, ROWS_OF_RUN, STARTED_FROM)
    state = RunState.restore(saved_state(checkpoint, settings, len(ROWS_OF_RUN)), settings, ROWS_OF_RUN)
    state.draw(3, 1)
    state.cursor.take(3)
    json.dumps(state.dump())
    assert state.average.value == state.average.value


@pytest.mark.parametrize("order", ["shuffled", "weighted"])
def test_values_in_the_state_of_a_checkpoint(tmp_path: Path, order: str) -> None:
    """Each value of the driver's state, and the sections of the config."""
    config = load(QUICKSTART, ["data.solved_weight=0.1"] if order == "weighted" else [])
    cursor = PromptCursor(5, 0, True) if order == "shuffled" else WeightedCursor(5, 0, None, 0.1)
    run = RunState(1, cursor, under_way=[PendingPrompt(3, 1, 3)], lengths={2: 5.0}, num_draws=4)
    run.cursor.take(3)
    if order == "weighted":
        cursor.note({1: 0.5})
    state = {"config": config.model_dump(), "data_hash": "hash", "models": STARTED_FROM, "run": run.dump()}
    folder = tmp_path / "step_000001"
    folder.mkdir()

    def write(changed: Any) -> None:
        sealed(folder, {"format_version": 1, "step": 1, "state": changed, "files": []})

    write(state)
    resumed(folder, config)
    sections = [{**state["config"], name: value} for name in state["config"] for value in VALUES]
    steps = [{**state["config"], "run": {**state["config"]["run"], "steps": value}} for value in VALUES]
    variants = []
    if order == "shuffled":  # these sections do not depend on the order
        variants += [{**state, "config": other} for other in [*sections, *steps, *VALUES]]
        variants += [{**state, "models": other} for other in [*fields_of(STARTED_FROM), *VALUES]]
    variants += [{**state, "run": other} for other in [*fields_of(state["run"]), *VALUES]]
    variants += [{**state, "run": {**state["run"], "under_way": [value]}} for value in VALUES]
    variants += [{**state, "run": {**state["run"], "lengths": {key: 1.0}}} for key in ("7", "-1", "a", "9" * 40)]
    variants += [{key: state[key] for key in state if key != name} for name in state]
    for variant in variants:
        write(variant)
        answers_or_names(lambda: resumed(folder, config), str(folder))


@pytest.mark.parametrize("name", exhaustive_but(["manifest.json", "config.resolved.yaml"], "manifest.json"))
def test_files_of_a_finished_run(tmp_path: Path, name: str) -> None:
    folder, config = tmp_path / "run", load(QUICKSTART, [f"run.folder={tmp_path}", "run.name=run", "resume=auto"])
    folder.mkdir()
    values = {
        "manifest.json": {**MANIFEST, "finished_after_step": config.run.steps},
        "config.resolved.yaml": config.model_dump(),
    }
    for other, value in values.items():
        (folder / other).write_text(json.dumps(value))
    beginning.check_beginning(config)
    whole = values[name]
    variants = fields_of(whole) if name == "manifest.json" else [{**whole, key: v} for key in whole for v in VALUES]
    for variant in variants:
        (folder / name).write_text(json.dumps(variant))
        answers_or_names(lambda: beginning.check_beginning(config), "")


def test_wrong_value_is_named_with_file_and_remedy(tmp_path: Path) -> None:
    state = {"config": RESUMING.model_dump(), "data_hash": "hash", "models": STARTED_FROM}
    state["run"] = RunState(1, PromptCursor(5, 0, True)).dump()
    state["run"]["cursor"]["position"] = 10**30
    folder = tmp_path / "step_000001"
    folder.mkdir()
    sealed(folder, {"format_version": 1, "step": 1, "state": state, "files": []})
    with pytest.raises(DamagedCheckpoint) as raised:
        resumed(folder, RESUMING)
    assert str(raised.value) == (
        f"{folder}: manifest.json: run.cursor.position={10**30} is invalid (Input should be less than "
        "9007199254740992). No earlier checkpoint exists. Fix: start from scratch with resume=never run.replace=true"
    )


def _digest(content: Any) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
