"""Tests of `megarl check`, whose checks `megarl train` runs at startup."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megarl.cluster.supervision import supervisor
from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.data.prompts import load_prompts
from megarl.models.run_models import ModelFolders
from megarl.run import preflight
from tests import tiny_vision
from tests.children import Children
from tests.command_line import run_command
from tests.e2e.run import write_recipe
from tests.paths import BASE
from tests.timing import LIMIT_S
from tests.tiny_model import write_eagle_draft, write_tiny_llama
from tests.unit.data.image_data import jsonl, png

REWARDS = """
import time

def length(prompt, response, answer):
    return len(response)

def answer_length(prompt, response, answer):
    return len(answer)

def turns(prompt, response, answer):
    return [0.5]

def number(prompt, response, answer, answer_of_next, unknown=1):
    return answer_of_next * unknown

def provided(prompt, response, answer, prompt_images, num_response_tokens):
    return num_response_tokens

def nothing(prompt, response, answer):
    pass

def mapping(prompt, response, answer):
    return {"score": 1.0}

def text(prompt, response, answer):
    return "1.0"

def not_a_number(prompt, response, answer):
    return float("nan")

def batch(prompts, responses, answers):
    return [response.split("<answer>")[1] for response in responses]

def batch_of_dicts(prompts, responses, answers):
    return [{"score": 1.0} for response in responses]

def hangs(prompt, response, answer):
    time.sleep(600)

def tags(prompt, response, answer):
    return response.split("<answer>")[1] == answer

def only_answers(prompt, response, answer):
    return [1.0 for text in [answer] if text == response][0]

def only_text(prompt, response, answer):
    return 1.0 if response else None

def batch_only_answers(prompts, responses, answers):
    return [{text: 1.0}[response] for text, response in zip(answers, responses)]

def prefers_first(prompt, first, second, answer):
    return 0.75
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "rewards.py").write_text(REWARDS)
    return write_recipe(folder)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run commands in this process."""
    monkeypatch.setattr(supervisor, "supervised", lambda: nullcontext(tmp_path / "scratch"))


def check(recipe: Path, root: Path, capfd: pytest.CaptureFixture, *overrides: str) -> tuple[dict[str, str], str]:
    """Run a successful `megarl check` that leaves no files or processes. Return the rows of stdout by name, and
    stderr."""
    children = Children()
    code = run_command("check", recipe, f"run.folder={root}", "run.steps=10", *overrides)
    out, err = capfd.readouterr()
    assert code == 0, err
    *rows, last = out.splitlines()
    assert last == "All checks passed. No processes were started."
    assert not list(root.iterdir()) and not children()
    return dict(row.split(maxsplit=1) for row in rows), err


def functions(recipe: Path, *entries: str) -> str:
    listed = [f"{{function: '{recipe.parent}/rewards.py:{entry}}}" for entry in entries]
    return f"rewards.functions=[{', '.join(listed)}]"


def test_check_prints_a_summary(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    rows, errors = check(
        recipe,
        tmp_path,
        capfd,
        functions(recipe, "length'", "turns', per_turn: true"),
        f"rewards.judge={recipe.parent}/rewards.py:prefers_first",
        "checkpoint.every_steps=1",
    )
    assert errors == ""
    assert rows["model"] == f"{recipe.parent}/model"
    assert rows["data"] == "8 prompts; first: '0 + 0 =', answer '0'"
    assert rows["rewards"] == "judge = 0.5, length = 1, turns = 0.5 for the first row's answer"
    assert rows["disk"].startswith("(2 + 1) checkpoints x 0.00 GB in ")
    assert rows["step"] == "4 prompts x 4 samples = 16 samples"


@pytest.mark.parametrize(
    ("keys", "longest", "reason"),
    [
        ("input_format: question, engine: vllm, judge: {max_new_tokens: 10, template: '{response}'}", 40, None),
        (
            "input_format: question, engine: vllm, judge: {max_new_tokens: 10, template: '{response}'}",
            11,
            "question has",
        ),
        ("input_format: text", 40, None),
        ("input_format: text", 5, "prompt has"),
        ("input_format: chat", 5, "prompt has"),
    ],
)
def test_prompts_must_fit_into_the_reward_models_context(
    recipe: Path, tmp_path: Path, keys: str, longest: int, reason: str | None
) -> None:
    folder = tmp_path / "reward"
    write_tiny_llama(folder)
    config_file = folder / "config.json"
    head = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good"}, "num_labels": 1}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | head))
    config = load(recipe, [f"reward_model={{path: {folder}, context_length: {longest}, {keys}}}"])
    models = ModelFolders(recipe.parent / "model", None, folder, None)
    data = load_prompts(config, models.actor)
    expected = (
        f"reward_model: prompts.jsonl:1, .* and 5 more rows: the {reason} .* Fix: raise reward_model.context_length"
    )
    with nullcontext() if reason is None else pytest.raises(UserError, match=expected):
        preflight._check_readability(config, models, data)


def test_reward_functions_receive_the_columns_of_the_row(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    data = tmp_path / "data" / "rows.jsonl"
    data.parent.mkdir()
    data.write_text('{"prompt": "1 + 1 =", "answer": "2", "answer_of_next": 7}\n' * 4)
    (tmp_path / "runs").mkdir()
    rows, errors = check(recipe, tmp_path / "runs", capfd, functions(recipe, "number'"), f"data.source={data}")
    assert errors == "" and rows["rewards"] == "number = 7 for the first row's answer"


def test_columns_with_names_of_provided_values_are_errors(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    data = tmp_path / "rows.jsonl"
    keys = functions(recipe, "provided'"), f"data.source={data}"
    for column in ("prompt_images", "num_response_tokens", "other"):
        data.write_text(f'{{"prompt": "1 + 1 =", "answer": "2", "{column}": 7}}\n' * 4)
        if column != "other":
            assert fail(recipe, tmp_path, capfd, *keys) == (
                f"megarl: error: rows.jsonl:1: column {column!r} has the name of a value that the run passes to reward "
                "functions. Fix: rename the column"
            )
    (tmp_path / "runs").mkdir()
    rows, errors = check(recipe, tmp_path / "runs", capfd, *keys)
    assert errors == "" and rows["rewards"] == "provided = 1 for the first row's answer"


NO_NUMBER = "returned {} instead of a finite number or a bool"
BROKEN = {
    "nothing": NO_NUMBER.format("NoneType"),
    "mapping": NO_NUMBER.format("dict"),
    "text": NO_NUMBER.format("str"),
    "not_a_number": NO_NUMBER.format("nan"),
    "turns": NO_NUMBER.format("a list of 1"),
    "tags": "raised IndexError: list index out of range",
    "batch": "raised IndexError: list index out of range",
    "batch_of_dicts": NO_NUMBER.format("dict"),
}


@pytest.mark.parametrize(
    "failures",
    [
        BROKEN,
        pytest.param({"hangs": f"did not return within rewards.timeout_s={LIMIT_S}"}, marks=pytest.mark.exhaustive),
    ],
    ids=", ".join,
)
def test_reward_that_fails_on_the_first_answer_fails_the_check(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture, failures: dict[str, str]
) -> None:
    """All broken functions are reported, those that raise with their traceback."""
    listed = functions(recipe, *(f"{name}'" for name in failures))
    lines = fail_lines(recipe, tmp_path, capfd, listed, f"rewards.timeout_s={LIMIT_S}")
    starts = [i for i, line in enumerate(lines) if line.startswith("megarl: error")]  # a killed process dumps stacks
    stacks = {lines[i]: lines[i + 1 : end] for i, end in zip(starts, [*starts[1:], len(lines)], strict=True)}
    errors = {
        name: f"megarl: error: rewards.functions: {name} {failure} on sample prompts.jsonl:1 (megarl used the row's "
        "answer as the response in this trial). Fix: make the reward function return a finite number or a bool for "
        "any response"
        for name, failure in failures.items()
    }
    assert sorted(stacks) == sorted(errors.values())
    for name, error in errors.items():
        stack = stacks[error]
        if "raised" not in error:
            assert stack == []
            continue
        assert stack[0] == "    Traceback (most recent call last):"
        assert f'    File "{recipe.parent}/rewards.py", line ' in stack[1] and name in stack[1]
        assert 'response.split("<answer>")[1]' in stack[2]
        assert stack[-1] == "    IndexError: list index out of range"


def test_reward_may_fail_on_an_answer_within_the_limit(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """The first of four answers fails."""
    data, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    runs.mkdir()
    data.write_text(
        "".join(
            f'{{"prompt": "1 + 1 =", "answer": "{text}"}}\n' for text in ("1", "<answer>2", "<answer>", "<answer>3")
        )
    )
    overrides = functions(recipe, "tags'"), f"data.source={data}"
    rows, errors = check(recipe, runs, capfd, *overrides, "rewards.failure_limit=0.25")
    assert errors.startswith("megarl: warning: rewards.functions: tags raised IndexError")
    assert rows["rewards"] == "none for the first row's answer"
    assert "tags raised IndexError" in fail_lines(recipe, runs, capfd, *overrides, "rewards.failure_limit=0.2")[0]


@pytest.mark.parametrize("answer", ["2", None])
def test_reward_that_fails_on_a_wrong_response_fails_the_check(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture, answer: str | None
) -> None:
    """All broken functions are reported, each with the first response on which it fails."""
    data, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    runs.mkdir()
    data.write_text(f"{json.dumps({'prompt': '1 + 1 =', 'answer': answer})}\n" * 4)
    listed = functions(recipe, "length'", "only_answers'", "only_text'", "batch_only_answers'")
    lines = fail_lines(recipe, runs, capfd, listed, f"data.source={data}")
    errors = [line for line in lines if line.startswith("megarl: error: ")]
    raised = {"only_answers": "IndexError: list index out of range", "batch_only_answers": "KeyError: ''"}
    failures = {name: f"raised {error}" for name, error in raised.items()}
    failures["only_text"] = "returned NoneType instead of a finite number or a bool"
    assert sorted(errors) == sorted(
        f"megarl: error: rewards.functions: {name} {failure} on sample rows.jsonl:1 (megarl used an empty response in "
        "this trial). Fix: make the reward function return a finite number or a bool for any response"
        for name, failure in failures.items()
    )
    assert lines.count("    Traceback (most recent call last):") == 2
    assert {f"    {error}" for error in raised.values()} <= set(lines)


def test_functions_are_tried_on_the_first_row_of_their_sources(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    """`length` applies to all rows, `nothing` only to the third one, and no row has the source of `tags`."""
    data, runs = tmp_path / "rows.jsonl", tmp_path / "runs"
    runs.mkdir()
    data.write_text("".join(f'{{"prompt": "1", "answer": "22", "from": "{source}"}}\n' for source in "aabbaaaa"))

    def listed(source: str, *names: str) -> tuple[str, ...]:
        entries = functions(recipe, "length'", *(f"{name}', sources: [{source}]" for name in names))
        return entries, f"data.source={data}", "data.source_column=from"

    [line] = fail_lines(recipe, runs, capfd, *listed("b", "nothing"))
    assert "nothing returned NoneType" in line and "on sample rows.jsonl:3 (megarl used the row's answer" in line
    rows, errors = check(recipe, runs, capfd, *listed("b", "answer_length"), "rewards.failure_limit=0.1")
    assert rows["rewards"] == "length = 2, answer_length = 2 for the answer of each function's first row"
    assert errors == ""
    check(recipe, runs, capfd, *listed("c", "tags"))


def test_wrong_response_of_the_trial_is_named(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    code = "def f(prompt, response, answer):\n    return None if 'wrong' in response else 1.0\n"
    (tmp_path / "reward.py").write_text(code)
    runs = tmp_path / "runs"
    runs.mkdir()
    key = f"rewards.functions=[{{function: '{tmp_path}/reward.py:f'}}]"
    line = fail(recipe, runs, capfd, key)
    assert "(megarl used the wrong response 'This response is wrong.' in this trial). Fix: make" in line
    _, errors = check(recipe, runs, capfd, key, "rewards.failure_limit=0.1")
    assert errors.startswith("megarl: warning: rewards.functions: f returned NoneType")


def test_all_functions_that_cannot_be_loaded_are_reported(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    names = "rewards.functions=[{function: exact_mach}, {function: exact_match}, {function: math_mach}]"
    first, second = fail_lines(recipe, tmp_path, capfd, names)
    assert first.startswith("megarl: error: rewards.functions: unknown function 'exact_mach'. Fix: use exact_match")
    assert second.startswith("megarl: error: rewards.functions: unknown function 'math_mach'. Fix: use math_match")


def test_damaged_weights_fail_the_check(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The weights of each model are checked."""
    names = ("model", "critic", "rollout.speculative")
    for name in names:
        model = shutil.copytree(recipe.parent / "model", tmp_path / name)
        os.truncate(model / "model.safetensors", 5000)
    keys = ["rollout.speculative.method=draft_model", "algorithm.advantage.estimator=gae", "critic.layout.pp=1"]
    lines = fail_lines(recipe, tmp_path, capfd, *keys, *(f"{name}.path={tmp_path}/{name}" for name in names))
    damaged = [line.partition(": not a complete safetensors file")[0] for line in lines]
    assert sorted(damaged) == sorted(f"megarl: error: {tmp_path}/{name}/model.safetensors" for name in names)


def test_eagle_draft_without_its_vocabulary_fails_the_check(recipe, tmp_path, capfd: pytest.CaptureFixture) -> None:
    draft = write_eagle_draft(tmp_path / "draft", recipe.parent / "model", vocab=96)
    keys = (f"rollout.speculative={{method: eagle3, path: {draft}}}", "rollout.tp=1")
    (tmp_path / "runs").mkdir()
    check(recipe, tmp_path / "runs", capfd, *keys)
    tensors = load_file(draft / "model.safetensors")
    del tensors["d2t"]
    save_file(tensors, draft / "model.safetensors")
    line = fail(recipe, tmp_path, capfd, *keys)
    assert line.startswith(f"megarl: error: {draft}: the checkpoint has no tensor d2t. Fix: ")


@pytest.mark.parametrize("data_format", ["prompts", "messages"])
def test_token_without_an_embedding_fails_the_check(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture, data_format: str
) -> None:
    model = shutil.copytree(recipe.parent / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<added>"])
    tokenizer.save_pretrained(model)
    turns = [{"role": "user", "content": "1 <added>"}, {"role": "assistant", "content": "2"}]
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "1 <added>", "answer": "2", "messages": turns}) + "\n")
    sft = ["algorithm.objective={name: sft, aggregation: token_mean}", "data.format=messages"]
    overrides = sft if data_format == "messages" else []
    line = fail(recipe, tmp_path, capfd, f"model.path={model}", f"data.source={data}", *overrides)
    assert "has the token '<added>' (" in line and "embeddings. Fix: resize" in line


def fail(recipe: Path, root: Path, capfd: pytest.CaptureFixture, *overrides: str) -> str:
    """Run a `megarl check` that fails with a one-line error. Return the line."""
    [line] = fail_lines(recipe, root, capfd, *overrides)
    return line


def fail_lines(recipe: Path, root: Path, capfd: pytest.CaptureFixture, *overrides: str) -> list[str]:
    """Run a `megarl check` that fails. Return the lines of stderr."""
    code = run_command("check", recipe, f"run.folder={root}", "run.steps=10", *overrides)
    out, err = capfd.readouterr()
    assert (code, out) == (2, ""), err
    return err.splitlines()


def test_offline_data_is_checked_without_rewards(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    rows, _ = check(
        recipe,
        tmp_path,
        capfd,
        "algorithm.objective.name=sft",
        "algorithm.objective.aggregation=token_mean",
        "data={format: messages, source: arithmetic, size: 8}",
    )
    assert rows["data"] == "8 messages" and "rewards" not in rows


def test_environments_of_evaluation_sets_are_checked_by_name(
    recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def sets(*classes: str) -> str:
        items = [
            f"{{name: s{k}, source: environment, size: 3, functions: [], environment: {{class: {name}}}}}"
            for k, name in enumerate(classes)
        ]
        return f"evaluation.sets=[{', '.join(items)}]"

    rows, errors = check(recipe, tmp_path, capfd, sets("text_game"))
    assert rows["evaluation"] == "s0 (3 prompts)" and errors == ""
    wrong = sets("text_gam", "calculator, options: {hihg: 3}")
    first, second = fail_lines(recipe, tmp_path, capfd, wrong)
    assert first.startswith(
        "megarl: error: evaluation.sets: s0: environment.class=text_gam: unknown environment. Did you"
    )
    assert second.startswith("megarl: error: evaluation.sets: s1: environment.options.hihg: unknown option")


def test_evaluation_sets_are_checked_by_name(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    rewards = f"functions: [{{function: '{recipe.parent}/rewards.py:length'}}]"
    rows, errors = check(
        recipe, tmp_path, capfd, f"evaluation.sets=[{{name: a, source: arithmetic, size: 7, {rewards}}}]"
    )
    assert (rows["evaluation"], errors) == ("a (7 prompts)", "")
    rewards = rewards.replace("length", "tags")
    sets = f"{{name: a, source: no.jsonl}}, {{name: b, functions: [{{function: exact_mach}}]}}, {{name: c, {rewards}}}"
    a, b, c, *stack = fail_lines(recipe, tmp_path, capfd, f"evaluation.sets=[{sets}]")
    assert a.startswith(f"megarl: error: evaluation.sets: a: data.source={Path.cwd()}/no.jsonl: not a file. Fix")
    assert b.startswith("megarl: error: evaluation.sets: b: rewards.functions: unknown function 'exact_mach'. Fix: use")
    assert c.startswith("megarl: error: evaluation.sets: c: rewards.functions: tags raised IndexError")
    assert stack[0] == "    Traceback (most recent call last):"


def test_checkpoint_may_be_at_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints may be copied anywhere. The parent folder has no manifest to compare with."""
    settings = load(
        BASE,
        [
            f"run.folder={tmp_path}",
            "model.path=m",
            "data.source=arithmetic",
            "checkpoint.every_steps=null",
            "checkpoint.on_signal=false",
        ],
    )
    checkpoint, models = SimpleNamespace(path=Path("/checkpoint")), SimpleNamespace(identify=dict)
    compared = []
    monkeypatch.setattr(preflight, "find_checkpoint", lambda *_: checkpoint)
    monkeypatch.setattr(preflight, "changes_since", lambda _, __, run: compared.append(run) or ())
    preflight._check_resume_and_disk(settings, models, None)
    assert compared == [Path("/")]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A model folder. Beside it are a.png (4 × 4 patches, 4 tokens) and b.png (2 × 2 patches, 1 token)."""
    for name, side in (("a", 64), ("b", 32)):
        (tmp_path / f"{name}.png").write_bytes(png(side, side))
    (tmp_path / "runs").mkdir()
    return tiny_vision.build(tmp_path / "model", "qwen3_vl")


def vision_keys(folder: Path, *keys: str) -> list[str]:
    batch = "batch={prompts_per_step: 2, prompts_per_update: 2, samples_per_prompt: 4}"
    context = "rollout={context_length: 512, max_new_tokens: 16}"
    return [f"model={{path: {folder}, vision: true}}", context, batch, *keys]


PAIR = [{"prompt": "<image><image>", "images": ["a.png", "b.png"]}, {"prompt": "<image>", "images": "a.png"}]


@pytest.mark.parametrize(
    ("keys", "num_tokens"),
    [
        ([], 5 + 4),
        (["batch.samples_per_prompt=1"], 5),
        (["batch.prompts_per_update=1"], 5 + 5),
    ],
)
def test_patches_of_all_samples_of_a_replica_are_counted(images: Path, keys: list[str], num_tokens: int) -> None:
    """Both replicas can hold samples of both prompts, unless each prompt has only one sample. Two updates can draw a
    prompt twice, at the end of an epoch and at the start of the next one. A token has 4 patches of 2 · 3 · 16²
    values."""
    source = f"data={{source: {jsonl(images.parent, *PAIR)}, image_column: images}}"
    layout = "actor.layout={tp: 2, dp: 2}", "rollout.replicas=4", "algorithm.advantage.estimator=reinforce_plus_plus"
    config = load(BASE, vision_keys(images, source, *layout, *keys))
    checked = preflight.Preflight(ModelFolders(images, None, None, None), load_prompts(config, images), None)
    assert preflight._patch_bytes(config, checked) == 4 * num_tokens * 4 * 2 * 3 * 16**2 * 4


def test_summary_has_the_images_of_the_data(images: Path, capfd: pytest.CaptureFixture) -> None:
    """a.png occurs three times. Its tokens count once in the mean."""
    source = f"data={{source: {jsonl(images.parent, *PAIR, PAIR[1])}, image_column: images}}"
    rows, _ = check(BASE, images.parent / "runs", capfd, *vision_keys(images, source))
    assert rows["data"].startswith("3 prompts with 2 distinct images (on average 2 and at most 4 tokens); first: ")
    assert rows["images"].startswith("up to 0.00 GB of host memory per node for patches, and up to 0.00 GB of Ray's")


def test_summary_has_the_images_of_offline_data(images: Path, capfd: pytest.CaptureFixture) -> None:
    data, answer = images.parent / "rows.jsonl", {"role": "assistant", "content": "a"}
    row = {"messages": [{"role": "user", "content": "<image>"}, answer], "images": "b.png"}
    data.write_text(f"{json.dumps(row)}\n" * 4)
    keys = f"data={{source: {data}, format: messages, image_column: images}}", "algorithm.objective.name=sft"
    rows, _ = check(BASE, images.parent / "runs", capfd, *vision_keys(images, *keys))
    assert rows["data"] == "4 messages with 1 distinct image (on average 1 and at most 1 token)"
    assert rows["images"].startswith("up to 0.00 GB of host memory per node for patches, and up to 0.00 GB of Ray's")


def test_summary_has_images_of_evaluation_sets_only(images: Path, capfd: pytest.CaptureFixture) -> None:
    sets = f"evaluation.sets=[{{name: a, source: {jsonl(images.parent, *PAIR)}, image_column: images}}]"
    rows, _ = check(
        BASE, images.parent / "runs", capfd, *vision_keys(images, "data={source: arithmetic, size: 8}", sets)
    )
    assert "distinct" not in rows["data"]
    assert rows["images"] == "up to 0.00 GB of Ray's object store for image files"
