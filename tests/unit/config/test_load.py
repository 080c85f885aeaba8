from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import OPTIONAL, dump, load
from megarl.config.schema import Config
from megarl.config.vllm_arguments import MANAGED, REFITTABLE
from tests.paths import CONFIGS

QUICKSTART = CONFIGS / "quickstart.yaml"
READABLE = "Fix: use the path of a recipe that exists and is readable"

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a recipe on base.yaml with a model, a data source and the given text, and return its path."""
    (tmp_path / "base.yaml").write_text((CONFIGS / "base.yaml").read_text())
    (tmp_path / "parent.yaml").write_text("base: base.yaml\nmodel: {path: m}\ndata: {source: arithmetic}\n")

    def recipe(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"base: parent.yaml\n{text}")
        return path

    return recipe


def errors(path: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(ValueError) as error:
        load(path, overrides)
    return str(error.value).splitlines()


@pytest.mark.parametrize("path", sorted(set(CONFIGS.glob("*.yaml")) - {CONFIGS / "base.yaml"}), ids=lambda p: p.name)
def test_recipes_load(path: Path) -> None:
    assert isinstance(load(path), Config)


def test_nearest_layer_takes_precedence() -> None:
    config = load(QUICKSTART, ["run.steps=3", "actor.layout.pp=3", "actor.layout.last_stage_layers=null"])
    assert config.run.steps == 3, "command line"
    assert config.run.name == "quickstart", "overlay"
    assert config.run.folder == str(Path.cwd() / "runs"), "base"
    assert (config.actor.layout.pp, config.actor.layout.last_stage_layers) == (3, None)
    assert config.actor.layout.world_size == 3


def test_overrides_of_libraries_are_merged(write: Write) -> None:
    path = write("actor: {megatron_overrides: {model: {b: 1}}}\nrollout: {vllm_overrides: {x: on}}\n")
    config = load(path, ["actor.megatron_overrides.model.c=2", "rollout.vllm_overrides={y: [1, 2]}"])
    assert config.actor.megatron_overrides.model == {"b": 1, "c": 2}
    assert config.rollout.vllm_overrides == {"x": "on", "y": [1, 2]}


def test_later_overrides_win() -> None:
    assert load(QUICKSTART, ["run.steps=3", "run={steps: 4}"]).run.steps == 4


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("actor.optimizer.lr=1e-6", lambda config: config.actor.optimizer.lr, 1e-6),
        ("actor.optimizer.lr=1", lambda config: config.actor.optimizer.lr, 1.0),
        ("run.name=no", lambda config: config.run.name, "no"),
        ("algorithm.advantage.std=none", lambda config: config.algorithm.advantage.std, "none"),
        ("data.source=1:30", lambda config: config.data.source, "1:30"),
        ("run.seed=010", lambda config: config.run.seed, 10),
        ("run.export=false", lambda config: config.run.export, False),
        ("data.answer_column=a=b", lambda config: config.data.answer_column, "a=b"),
        ("data.answer_column=''", lambda config: config.data.answer_column, ""),
        ("rewards.functions=[{function: f}]", lambda config: config.rewards.functions[0].weight, 1.0),
    ],
)
def test_yaml_values(override: str, read: Callable[[Config], object], value: object) -> None:
    found = read(load(QUICKSTART, [override]))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps", "'run.steps': expected KEY=VALUE. Fix: write it in this form, such as run.steps=3"),
        ("=3", "'=3': expected KEY=VALUE. Fix: write it in this form, such as run.steps=3"),
        (
            "run.steps=",
            "run.steps= has no value. Fix: write run.steps=null for none, or \"run.steps=''\" for empty text",
        ),
        ("run.steps=[1", "run.steps=[1: invalid YAML value: "),
        (
            "rewards.functions.0.weight=2",
            "rewards.functions.0.weight: list indexes are not supported. Fix: set the whole list: rewards.functions=",
        ),
        (
            "rewards.functions[0].weight=2",
            "rewards.functions[0].weight: list indexes are not supported. Fix: set the whole list: rewards.functions=",
        ),
        ("run.step=3", "run.step: unknown key; did you mean run.steps?"),
        ("rollout.n=8", "rollout.n: unknown key; verl's rollout.n corresponds to batch.samples_per_prompt"),
        ("actor.layout={tp: 1, zp: 2}", "actor.layout.zp: unknown key; did you mean "),
        ("rewards.functions=[{function: f, wait: 1}]", "rewards.functions.0.wait: unknown key; did you mean "),
        (
            "rewards.functions=[{weight: 1}]",
            "missing key rewards.functions.0.function. Fix: set every required key of the list entry",
        ),
        ("rewards.functions=f", "rewards.functions=f: expected a list, found text"),
        ("run=3", "run=3: expected a mapping, found an integer"),
        ("actor.megatron_overrides=[]", "actor.megatron_overrides=[]: expected a mapping, found a list"),
        ("run.steps=ten", "run.steps=ten: expected an integer, found text"),
        ("run.steps='3'", "run.steps='3': expected an integer, found text"),
        ("run.steps=1e3", "run.steps=1000.0: expected an integer, found a decimal number"),
        ("run.steps=true", "run.steps=true: expected an integer, found a boolean"),
        ("run.steps=null", "run.steps=null: expected an integer, found null"),
        ("run.steps=0", "run.steps=0: expected at least 1"),
        ("run.export=yes", "run.export=yes: expected true or false, found text"),
        ('run.steps="a\\nb"', "run.steps='a b': expected an integer, found text"),
        (f"run.steps={'x' * 99}", f"run.steps={'x' * 57}...: expected an integer, found text"),
        ("actor.optimizer.lr=1e400", "actor.optimizer.lr=.inf: expected a finite number"),
        ("rollout.temperature=.nan", "rollout.temperature=.nan: expected "),
        ("run.export=1", "run.export=1: expected true or false, found an integer"),
        ("run.name=a/b", "run.name=a/b: expected text that matches ^[A-Za-z0-9]"),
        ("run.folder=''", "run.folder='': expected non-empty text"),
        ("actor.optimizer.lr='1e-6'", "actor.optimizer.lr='1e-6': expected a number, found text"),
        ("actor.optimizer.lr=0", "actor.optimizer.lr=0: expected more than 0"),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr=.inf: expected a finite number"),
        ("actor.optimizer.beta1=1", "actor.optimizer.beta1=1: expected less than 1"),
        ("rewards.failure_limit=2", "rewards.failure_limit=2: expected at most 1"),
        (
            "algorithm.kl.estimator=k4",
            "algorithm.kl.estimator=k4: expected 'k1', 'k2', 'k3', 'abs', 'gaussian' or 'velocity'",
        ),
    ],
)
def test_bad_override(override: str, message: str) -> None:
    (line,) = errors(QUICKSTART, override)
    assert line.startswith(f"command line: {message}") and "Fix: " in line


def test_errors_of_a_file_have_one_line_with_its_position(write: Write) -> None:
    path = write("run:\n  steps: ten\n  name: 7\nlr: 1e-6\nrollout:\n  functoin: x\n")
    assert errors(path) == [
        f"{path}:4: run.name=7: expected text, found an integer. Fix: write '7'",
        f"{path}:3: run.steps=ten: expected an integer, found text. Fix: set run.steps to an integer",
        f"{path}:7: rollout.functoin: unknown key; did you mean rewards.functions.function? Fix: rename the key",
        f"{path}:5: lr: unknown key; did you mean actor.optimizer.lr or critic.optimizer.lr or "
        "implicit_reward.optimizer.lr? Fix: rename the key",
    ]


def test_error_names_the_file_that_contains_it(write: Write, tmp_path: Path) -> None:
    path = write("run: {steps: 3}\n")
    parent = tmp_path / "parent.yaml"
    parent.write_text(parent.read_text() + "run: {sede: 1}\n")
    assert errors(path) == [f"{parent}:4: run.sede: unknown key; did you mean run.seed? Fix: rename the key"]


def test_every_key_below_an_unknown_section_is_explained() -> None:
    lines = errors(QUICKSTART, "actor_rollout_ref={rollout: {n: 8}, actor: {ppo_mini_batch_size: 4, zzz: {}}}")
    assert len(lines) == 3
    assert (
        "actor_rollout_ref.rollout.n: unknown key; verl's rollout.n corresponds to batch.samples_per_prompt" in lines[0]
    )
    assert "batch.prompts_per_update" in lines[1]
    assert "actor_rollout_ref.actor.zzz: unknown key; " in lines[2]


def test_required_keys_are_named() -> None:
    path = CONFIGS / "base.yaml"
    assert errors(path) == [
        f"{path}: model.path is required. Fix: set it to a Hugging Face folder, a Hub id, or package:NAME, or pass "
        "model.path=VALUE on the command line",
        f"{path}: data.source is required. Fix: set it to arithmetic, reasoning_gym:TASK, or a .jsonl or .parquet "
        "file, or pass data.source=VALUE on the command line",
    ]


def test_missing_keys_point_to_the_base(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "run: {name: a, folder: b, seed: 0, export: true, replace: false, token_samples: 0, trackers: [], "
        "profile: {steps: [], ranks: [0]}, allow_changes: [], stop_on: []}\n"
    )
    remedy = "Fix: start the file with `base: base.yaml`, which has the defaults"
    assert errors(path) == [
        f"{path}: missing keys resume, model, actor, critic, reward_model, implicit_reward, teachers, rollout, "
        "logprob_check, environment, algorithm, batch, data, rewards, sandbox, evaluation, checkpoint, cluster, "
        f"trackers. {remedy}",
        f"{path}:1: missing key run.steps. {remedy}",
    ]


def test_base_files(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in ("a.yaml", "b.yaml", "c.yaml"))
    a.write_text("base: sub/../b.yaml\n")
    (tmp_path / "sub").mkdir()
    b.write_text("run: {}\nbase: c.yaml\n")
    c.write_text("base: a.yaml\n")
    (line,) = errors(a)
    assert line.startswith(f"{tmp_path}/sub/../c.yaml: the base files form a cycle: {a} -> ")
    c.unlink()
    assert errors(b) == [f"{c} (the base of {b}): cannot be read (No such file or directory). {READABLE}"]
    b.write_text("\nbase: [c.yaml]\n")
    assert errors(b) == [
        f"{b}:2: base=[c.yaml]: expected a file name, found a list. Fix: set it to base.yaml, or to "
        "the path of another recipe"
    ]


def test_base_can_name_files_shipped_with_megarl(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("base: base.yaml\nmodel: {path: m}\ndata: {source: arithmetic}\n")
    assert load(path) == load(CONFIGS / "base.yaml", ["model.path=m", "data.source=arithmetic"])
    path.write_text("base: quickstart.yaml\nrun: {steps: 3}\n")
    assert load(path) == load(QUICKSTART, ["run.steps=3"])
    (tmp_path / "base.yaml").write_text("run: {steps: -1}\n")
    path.write_text("base: base.yaml\n")
    assert errors(path)[0].startswith(f"{tmp_path}/base.yaml:1: run.steps=-1: "), "a neighboring file takes precedence"
    path.write_text("base: none.yaml\n")
    assert errors(path) == [
        f"{tmp_path}/none.yaml (the base of {path}): cannot be read (No such file or directory). {READABLE}"
    ]


@pytest.mark.parametrize(("short", "long"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_dtypes_have_short_names(short: str, long: str) -> None:
    assert load(QUICKSTART, [f"model.dtype={short}"]).model.dtype == long


@pytest.mark.parametrize("value", ["foo", "2026-13-45"])
def test_invalid_date_is_reported_with_its_key(value: str) -> None:
    (line,) = errors(QUICKSTART, f"data.date={value}")
    assert line.startswith(f"data.date={value}: not a date (")
    assert line.endswith("). Fix: set data.date=YYYY-MM-DD or null")


@pytest.mark.parametrize("value", ["fp8", "[bf16]", "16"])
def test_invalid_dtype_is_reported_as_written(value: str) -> None:
    (line,) = errors(QUICKSTART, f"model.dtype={value}")
    expected = "expected 'float32', 'bfloat16' or 'float16'. Fix: set model.dtype to one of these values"
    assert line == f"command line: model.dtype={value}: {expected}"


def test_unreadable_files(tmp_path: Path) -> None:
    assert errors(tmp_path / "none.yaml") == [
        f"{tmp_path}/none.yaml: cannot be read (No such file or directory). {READABLE}"
    ]
    assert errors(tmp_path) == [f"{tmp_path}: cannot be read (Is a directory). {READABLE}"]
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"run: {name: \xe9}")
    assert errors(path) == [f"{path}: byte 12 is not UTF-8. Fix: save the file as UTF-8 text"]


def test_rules_are_checked() -> None:
    lines = errors(QUICKSTART, "rollout.top_p=0.9", "actor.layout.ep=2")
    assert [line.split("=")[0] for line in lines] == ["rollout.top_p", "actor.layout.ep"]


positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
RULED = {*MANAGED["rollout"], *REFITTABLE}
"""vLLM arguments that rules check. They are excluded, because Hypothesis also tries names from the package's source."""
extras = st.dictionaries(
    st.text().filter(lambda name: name not in RULED),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)


@st.composite
def changes(draw: st.DrawFn) -> dict[str, dict]:
    """Draw changed keys by section."""
    functions = st.fixed_dictionaries({"function": st.text(min_size=1), "weight": positive})
    name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True) | st.sampled_from(["no", "1e5", "12", "on"])
    return {
        "run": {"name": draw(name), "folder": draw(st.text(min_size=1)), "seed": draw(st.integers(min_value=0))},
        "rollout": {
            "temperature": draw(st.floats(min_value=0, max_value=2, exclude_min=True)),
            "vllm_overrides": draw(extras),
        },
        "data": {"size": draw(st.none() | st.integers(min_value=1)), "shuffle": draw(st.booleans())},
        "rewards": {"functions": draw(st.lists(functions, min_size=1, max_size=3))},
    }


@settings(max_examples=10)
@given(changes())
def test_dump_loads_back(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, dict]) -> None:
    values = load(QUICKSTART).model_dump()
    config = Config.model_validate(values | {name: values[name] | keys for name, keys in changed.items()})
    path = tmp_path_factory.mktemp("dump") / "resolved.yaml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    loaded = load(path)
    run = config.run.model_copy(update={"folder": loaded.run.folder})
    assert loaded == config.model_copy(update={"run": run}), "only relative paths change"
    path.write_text(dump(loaded), encoding="utf-8", newline="")
    assert load(path) == loaded


@pytest.mark.parametrize(
    ("factor", "prompts", "ahead"), [(1.1, 10, 1), (1.2, 5, 1), (1.15, 20, 3), (1.01, 10, 1), (2, 7, 7)]
)
def test_oversampling_rounds_up_exactly(factor: float, prompts: int, ahead: int) -> None:
    batch = f"batch={{prompts_per_step: {prompts}, prompts_per_update: {prompts}, oversampling: {factor}}}"
    config = load(QUICKSTART, [batch, "rollout.max_staleness=1", "cluster.placement=disaggregated"])
    assert config.prompts_ahead == ahead


@pytest.mark.parametrize(
    "text",
    [
        *("Use #### before", "a: b", "- a", "{a}", "[a", "a b ", "'a' or 'b'", "%x", "- #1", "true: #", "| a", "&a b"),
        *("7", "1e3", "true", "~", "Null", "2025-01-01", "# a", "a\n# b", "*a", "!a b", "`a`", "@a", "a=b", "\\n"),
    ],
)
def test_text_keys_take_the_text_as_typed(text: str) -> None:
    assert load(QUICKSTART, [f"data.system_prompt={text}"]).data.system_prompt == text


def test_text_in_all_sections_is_taken_as_typed() -> None:
    keys = ["run.name=7", "model.path=./a #1", "data.prompt_column=a: b", "environment.class=a.py:B #2"]
    config = load(QUICKSTART, [*keys, "environment.options.prompt=Use #### before", "environment.options.n=3 # cells"])
    assert (config.run.name, config.model.path, config.data.prompt_column) == ("7", f"{Path.cwd()}/a #1", "a: b")
    assert config.environment.options == {"prompt": "Use #### before", "n": 3}
    assert getattr(config.environment, "class") == f"{Path.cwd()}/a.py:B #2"


@pytest.mark.parametrize(
    ("text", "value"), [("null", None), ("'Use # it'", "Use # it"), ('"a\\nb"', "a\nb"), ("'7'", "7"), ("''''", "'")]
)
def test_text_keys_take_null_and_quoted_text(text: str, value: str | None) -> None:
    assert load(QUICKSTART, [f"data.system_prompt={text}"]).data.system_prompt == value


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("algorithm.advantage.estimator=gropo", "grpo"),
        ("algorithm.advantage.estimator=GRPO", "grpo"),
        ("algorithm.advantage.estimator=ppo", "gae"),
        ("algorithm.advantage.estimator=dr_grpo", "grpo"),
        ("algorithm.objective.name=dapo", "clip"),
        ("algorithm.objective.name=ppo", "clip"),
        ("algorithm.objective.name=geo_mean", "gmpo"),
        ("algorithm.objective.aggregation=token_means", "token_mean"),
        ("data.format=message", "messages"),
        ("cluster.placement=collocated", "colocated"),
        ("rollout.on_stale=waits", "wait"),
        ("actor.optimizer.schedule.name=cosin", "cosine"),
    ],
)
def test_similar_value_is_suggested(override: str, suggestion: str) -> None:
    [line] = errors(QUICKSTART, override)
    key = override.partition("=")[0]
    assert line.endswith(f"; did you mean {suggestion}? Fix: set {key} to {suggestion}")


@pytest.mark.parametrize("key", ["algorithm.advantage.estimator=xyz", "rollout.transport=zzz"])
def test_unlike_value_has_no_suggestion(key: str) -> None:
    [line] = errors(QUICKSTART, key)
    assert "did you mean" not in line and line.endswith("to one of these values")


@pytest.mark.parametrize("key", OPTIONAL)
def test_null_restores_the_defaults_of_an_optional_section(write: Write, key: str) -> None:
    """The defaults switch these sections off."""
    defaults = load(write("run: {name: x}\n"), [f"{key}=null"])
    assert defaults == load(write("run: {name: x}\n"))


def test_null_disables_evaluation(write: Write) -> None:
    text = "evaluation: {every_steps: 5, at_start: false, best: {metric: evaluation/a/avg@1}, sets: [{name: a}]}\n"
    path = write(f"checkpoint: {{every_steps: 5}}\n{text}")
    assert load(path).evaluation.sets
    off = load(path, ["evaluation=null"]).evaluation
    assert (off.sets, off.every_steps, off.best.metric) == ([], None, None)
    on = load(path, ["evaluation=null", "evaluation.sets=[{name: b}]"]).evaluation
    assert [each.name for each in on.sets] == ["b"]
    (path.parent / "off.yaml").write_text("base: recipe.yaml\nevaluation:\n")
    assert load(path.parent / "off.yaml").evaluation == off


def test_null_disables_environment_and_adapters(write: Write) -> None:
    text = "environment: {class: calculator, max_turns: 3}\nactor: {lora: {rank: 4}}\nrewards: {functions: []}\n"
    path = write(text)
    assert load(path).has_environment and load(path).actor.adapters
    config = load(path, ["environment=null", "actor.lora=null", "rewards.functions=[{function: exact_match}]"])
    assert not config.has_environment and not config.actor.adapters


def test_null_is_an_error_for_other_sections() -> None:
    [line] = errors(QUICKSTART, "checkpoint=null")
    assert line.startswith("command line: checkpoint=null: expected a mapping, found null")
