from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner

import megarl
from megarl import cli
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.cluster.supervision import supervisor
from megarl.config.algorithm_schema import KL, Advantage, Aggregation, Correction, Objective, Value
from megarl.config.load import dump, load
from megarl.config.schema import Config
from megarl.core.errors import InfrastructureFailure, RunFailure, UserError
from megarl.launch.command import with_allowed
from megarl.launch.task import VERDICTS
from megarl.run.context import exit_status
from tests.command_line import run_command
from tests.marks import exhaustive_but
from tests.paths import ROOT
from tests.readme import text_of
from tests.timing import LIGHT_CPU_S

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run `train` in this process so that tests can observe it."""
    monkeypatch.setattr(supervisor, "supervised", lambda *_: nullcontext(tmp_path))
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with only a config.json."""
    sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=4, intermediate_size=8, vocab_size=100)
    config = {"model_type": "llama", "max_position_embeddings": 512, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_config_show_prints_the_resolved_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "show", QUICKSTART, "run.steps=3", "actor.optimizer.lr=-0") == 2
    assert "actor.optimizer.lr=0: expected more than 0" in capsys.readouterr().err
    assert run_command("config", "show", QUICKSTART, "run.steps=3") == 0
    assert capsys.readouterr().out == dump(load(QUICKSTART, ["run.steps=3"]))


def test_config_explain_prints_the_batch_arithmetic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_with_config: Path
) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(cache_with_config))
    assert run_command("config", "explain", QUICKSTART, "actor.layout.dp=2") == 0
    assert "x dp 2 = world size" in capsys.readouterr().out


def test_config_explain_checks_keys_against_the_model(capsys: pytest.CaptureFixture[str], model: str) -> None:
    def explained(*overrides: str) -> tuple[int, str, str]:
        code = run_command("config", "explain", QUICKSTART, f"model.path={model}", *overrides)
        out, err = capsys.readouterr()
        return code, out.splitlines()[-1], err

    even = "actor.layout.last_stage_layers=null"
    assert explained(even) == (0, f"model       model.path={model}: config.json is compatible with the recipe", "")
    code, _, error = explained(even, "actor.layout.pp=40")
    assert code == 2
    assert (
        "actor.layout.pp=40: 2 layers cannot be split evenly over the stages: 2 layers over 40 stages (2 / 40 = 0.05)"
        in error
    )
    code, _, error = explained(even, "actor.layout.pp=1", "actor.layout.tp=3")
    assert code == 2
    assert (
        "actor.layout.tp=3: 4 attention heads are not divisible by 3 (4 / 3 = 1.333). Fix: set actor.layout.tp to "
        "1, 2 or 4"
    ) in error
    code, _, error = explained(even, "actor.frozen=[no.such.tensor]")
    assert code == 2 and "actor.frozen" in error
    assert explained(even, "algorithm.advantage.estimator=gae", "critic.path=/no/critic")[0] == 2
    assert explained(even, "algorithm.advantage.estimator=gae", "critic.layout.tp=3")[0] == 2


def test_config_explain_handles_missing_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("config", "explain", QUICKSTART, "model.path=/no/model") == 2
    assert capsys.readouterr().err.startswith("megarl: error: model.path=/no/model: does not exist. Fix: use a Hugging")
    assert run_command("config", "explain", QUICKSTART, "model.path=nobody/no-model", "actor.layout.pp=40") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "model       model.path=nobody/no-model: not checked, because it is neither a folder on this"
    )


def test_algorithms_lists_all_names_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("algorithms") == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  grpo: (r_i − mean(r)) / (std(r) + std_epsilon)")
    assert lines[at + 1].startswith("    GRPO, arXiv 2402.03300; the group's rewards")
    assert "std=sample" in lines[at + 2] and "k=" not in lines[at + 2]
    listed = {line.split(":")[0].strip() for line in lines}
    assert {*ESTIMATORS, *OBJECTIVES, *get_args(Aggregation)} <= listed
    assert set(KL_ESTIMATORS) <= listed
    assert "    weight=auto | token | sequence | geometric | null" in lines
    words = set(re.findall(r"\w+", " ".join(lines)))
    for section in (Advantage, Objective, Value, KL, Correction):
        assert words.issuperset(section.model_fields), section


@pytest.mark.parametrize("name", exhaustive_but([*ESTIMATORS, *OBJECTIVES], *[*ESTIMATORS][::3], *[*OBJECTIVES][::3]))
def test_algorithms_prints_recipe_lines_for_one_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    assert run_command("algorithms", name) == 0
    description, _, lines = capsys.readouterr().out.partition("\n\nIn a recipe ")
    spec = (ESTIMATORS | OBJECTIVES)[name]
    assert spec.formula in description and spec.paper in description
    lines = lines.partition("\n\n")[2]
    engine = [] if name in ESTIMATORS or "tokens" in OBJECTIVES[name].actions else ["rollout.engine=diffusers"]
    recipe = tmp_path / "recipe.yaml"
    values = []
    for text in (lines, lines.replace("# ", "")):  # with default options, and with all options set
        recipe.write_text("base: base.yaml\n" + text)
        algorithm = load(recipe, ["model.path=m", "data.source=rows.jsonl", *engine]).algorithm
        chosen = algorithm.advantage if name in ESTIMATORS else algorithm.objective
        assert chosen.spec is spec
        values.append(chosen.options())
    assert values[0] == values[1] == spec.options


def test_init_writes_a_valid_recipe_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, cache_with_config: Path
) -> None:
    monkeypatch.setenv("MEGARL_CACHE", str(cache_with_config))
    monkeypatch.chdir(tmp_path)
    assert run_command("init", "my runs") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    recipe = f"'{tmp_path}/my runs/recipe.yaml'"
    assert last == f"next: megarl check {recipe}, then megarl train {recipe}"
    assert run_command("config", "explain", "my runs/recipe.yaml") == 0
    assert run_command("init", "my runs") == 2
    assert capsys.readouterr().err.startswith(
        "megarl: error: my runs/recipe.yaml and my runs/reward.py and my runs/pro"
    )


def test_unknown_algorithm_raises_with_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("algorithms", "GRP0") == 2
    line = "megarl: error: GRP0: unknown estimator or objective. Fix: use grpo\n"
    assert capsys.readouterr().err == line
    assert run_command("algorithms", "quux") == 2
    assert "Fix: use one of policy_gradient, " in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--version") == 0
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"


def test_train_returns_the_exit_code_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Config, Path]] = []
    replace(monkeypatch, "train", main=lambda config, scratch: seen.append((config, scratch)) or 7)
    keys = ["run.steps=3", f"run.folder={tmp_path}"]
    assert run_command("train", QUICKSTART, *keys) == 7
    assert seen == [(load(QUICKSTART, keys), tmp_path)]


def test_train_uses_checkpoint_grace_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[float] = []
    replace(monkeypatch, "train", main=lambda config, scratch: 0)
    monkeypatch.setattr(supervisor, "supervised", lambda grace_s: seen.append(grace_s) or nullcontext(tmp_path))
    assert run_command("train", QUICKSTART, f"run.folder={tmp_path}", "checkpoint.grace_s=280") == 0
    assert seen == [280]


def test_reshard_prints_plan_and_costs(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = ["reshard", "--model", model, "--from", "tp=2,dp=2", "--to", "vllm:tp=1,replicas=4", "--nodes-of", "4"]
    assert run_command(*arguments, "--bandwidth", "inter=50GB/s,intra=400GB/s", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert list(summary) == [
        "bytes_total",
        "bytes_wasted",
        "bytes_by_link",
        "written_once",
        "source_balance",
        "predicted_seconds",
        "floor_seconds",
        "communicators",
        "communicator_bytes",
        "neighbors",
        "operations",
        "peak_staging_bytes",
        "ranks_source",
        "ranks_destination",
        "plan_hash",
    ]
    assert (summary["bytes_wasted"], summary["written_once"]) == (0, True)
    assert sum(summary["bytes_by_link"].values()) == summary["bytes_total"]
    assert run_command(*arguments) == 0
    assert "4 -> 4" in capsys.readouterr().out
    assert run_command(*arguments[:4], "tp=3", *arguments[5:]) == 2
    error = capsys.readouterr().err
    reason = "4 attention heads are not divisible by 3 (4 / 3 = 1.333). Fix: set tp to 1, 2 or 4"
    assert error == f"megarl: error: --from tp=3: tp=3: {reason}\n"


def test_reshard_previews_the_refit_of_a_recipe(capsys: pytest.CaptureFixture[str], model: str) -> None:
    keys = [f"model.path={model}", "actor.layout={tp: 2, pp: 1, last_stage_layers: null}", "rollout.tp=2"]
    arguments = ["reshard", QUICKSTART, *keys]
    assert run_command(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("refit    cluster.placement=colocated, ") and lines[1] == "ranks    2 -> 2"
    assert lines[2].endswith(" within devices")
    assert run_command(*arguments, "cluster.placement=disaggregated", "--nodes-of", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes_by_link"]["inter"] > 0
    assert run_command(*arguments, "--to", "hf") == 2
    assert "--to: " in capsys.readouterr().err
    assert run_command("reshard", "--from", "tp=2") == 2
    expected = (
        "megarl: error: --model: required without a recipe. Fix: pass --model, --from, --to, or pass a recipe instead\n"
    )
    assert capsys.readouterr().err == expected


SETS = "evaluation.sets=[{name: a}]"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ([], "evaluation.sets=[]: the recipe has no evaluation sets. Fix: add sets to evaluation.sets"),
        (
            [SETS, "cluster.nodes=2"],
            "cluster.nodes=2: megarl evaluate runs on a single machine. Fix: set cluster.nodes=1",
        ),
        (
            [SETS, "--out", "FOLDER"],
            "--out FOLDER: the folder already exists. Fix: pass a path that does not exist yet",
        ),
        ([SETS], "model.path=/no/model: does not exist. Fix: use a Hugging Face folder"),
    ],
)
def test_evaluate_reports_errors_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: list[str], line: str
) -> None:
    keys = [key.replace("FOLDER", str(tmp_path)) for key in keys]
    assert run_command("evaluate", "/no/model", QUICKSTART, f"run.folder={tmp_path}", *keys) == 2
    assert capsys.readouterr().err.startswith(f"megarl: error: {line.replace('FOLDER', str(tmp_path))}")
    assert list(tmp_path.iterdir()) == []


def test_evaluate_warns_that_it_ignores_adapters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = [SETS, f"run.folder={tmp_path}", "actor.lora.rank=4", "actor.lora.path=/adapters"]
    assert run_command("evaluate", "/no/model", QUICKSTART, *keys) == 2
    assert capsys.readouterr().out.startswith("megarl: warning: actor.lora.path=/adapters: ")


def test_report_prints_its_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace(monkeypatch, "report", write=lambda folder: folder / "report.html", comparison=None)
    assert run_command("report", "runs/latest") == 0
    assert capsys.readouterr().out == "runs/latest/report.html\n"


def test_user_errors_are_printed_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(config: Config, scratch: Path) -> int:
        raise UserError("one thing is wrong\nand another")

    replace(monkeypatch, "train", main=fail)
    assert run_command("train", QUICKSTART, f"run.folder={tmp_path}") == 2
    assert capsys.readouterr().err == "megarl: error: one thing is wrong\nmegarl: error: and another\n"
    assert run_command("train", "none.yaml") == 2
    assert capsys.readouterr().err.startswith("megarl: error: none.yaml: cannot be read")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RunFailure("engine-0 died"), 1),
        (UserError("wrong key"), 2),
        (InfrastructureFailure("the judge is away"), 75),
        (OSError(errno.ENOSPC, "No space left on device"), 75),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 75),
    ],
)
def test_exit_code_names_the_kind_of_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, code: int
) -> None:
    def fail(config: Config, scratch: Path) -> None:
        raise error

    replace(monkeypatch, "train", main=lambda config, scratch: exit_status(fail, config, scratch))
    assert run_command("train", QUICKSTART, f"run.folder={tmp_path}") == code
    assert capsys.readouterr().err.startswith(f"megarl: error: {error}")


def test_documented_exit_codes_and_verdicts_match_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| `(\w+)`: ", text_of("docs/reference/exit-codes.md"), re.MULTILINE)
    codes = {RunFailure.exit_code: "failed", **VERDICTS}
    assert {int(code): verdict for code, verdict in rows} == codes
    assert [int(code) for code, _ in rows] == sorted(codes)


@pytest.mark.parametrize(("bug", "kind"), [(lambda: {}["bug"], KeyError), (lambda: int("bug"), ValueError)])
def test_other_errors_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: Callable, kind: type[Exception]
) -> None:
    replace(monkeypatch, "train", main=lambda config, scratch: bug())
    monkeypatch.setattr(sys, "argv", ["megarl", "train", QUICKSTART, f"run.folder={tmp_path}"])
    with pytest.raises(kind):
        cli.main()


RESHARD = ["reshard", "--model", "MODEL", "--from", "tp=2", "--to", "vllm:tp=2"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], marks=pytest.mark.exhaustive),
        ["evaluate", "--help"],
        pytest.param(["algorithms"], marks=pytest.mark.exhaustive),
        ["algorithms", "rloo"],
        pytest.param(["config", "show", QUICKSTART], marks=pytest.mark.exhaustive),
        ["config", "explain", QUICKSTART, "model.path=MODEL", "actor.layout.last_stage_layers=null"],
        ["train", QUICKSTART, "run.stps=1"],
        pytest.param(RESHARD, marks=pytest.mark.exhaustive),
        ["reshard", QUICKSTART, "model.path=MODEL", "actor.layout.last_stage_layers=null"],
    ],
)
def test_command_is_fast_and_has_no_heavy_imports(arguments: list[str], model: str) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print('\\n' + json.dumps(list(sys.modules))))\n"
        "import runpy; runpy.run_module('megarl.cli', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, *[text.replace("MODEL", model) for text in arguments]]
    for _ in range(3):  # several attempts, because other load can double the CPU time
        start = cpu_seconds_of_children()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        seconds = cpu_seconds_of_children() - start
        if seconds < LIGHT_CPU_S:
            break
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (2 if "run.stps=1" in arguments else 0)
    assert {"torch", "megatron", "vllm", "ray", "transformers"}.isdisjoint(loaded)
    assert seconds < LIGHT_CPU_S, f"{seconds:.2f} s"


def cpu_seconds_of_children() -> float:
    """Return the CPU time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def replace(monkeypatch: pytest.MonkeyPatch, name: str, **functions: object) -> None:
    """Replace the module megarl.NAME with a fake that has these functions."""
    fake = SimpleNamespace(**functions)
    monkeypatch.setitem(sys.modules, f"megarl.{name}", fake)
    monkeypatch.setattr(megarl, name, fake, raising=False)


PLAN_MODEL = dict(
    model_type="qwen2",
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    max_position_embeddings=32768,
    use_sliding_window=False,
)
BLOCKED = (
    "import json, sys\n"
    "class Blocked:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in ('torch', 'megatron', 'vllm', 'ray', 'transformers'):\n"
    "            raise ImportError(name)\n"
    "sys.meta_path.insert(0, Blocked())\n"
    "from megarl import cli\n"
    "cli.main()\n"
)


@pytest.fixture
def planned_model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAN_MODEL))
    return f"model.path={folder}"


@pytest.fixture(scope="module")
def printed_plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of `megarl plan` without heavy libraries, with a simulation and a comparison with a run."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(json.dumps(PLAN_MODEL))
    (logs := folder / "run/logs/attempt_1").mkdir(parents=True)
    start = {"begin": 0.0, "after_step": 0, "devices": 8, "nodes": 1, "job": "", "restart": 0, "allocated": 0.0}
    rows = [start, {"begin": 0.0, "end": 30.0, "seconds": {"train": 200.0, "refit": 40.0}, "step": 1}]
    (logs / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-c", BLOCKED, "plan", "configs/base.yaml", "--gpus", "8xH100-80GB", "--simulate"]
    command += [f"model.path={folder}", "data.source=arithmetic", "--html", str(folder / "plan.html")]
    command += ["--run", str(folder / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_plan_works_without_heavy_libraries(printed_plan: str) -> None:
    assert "\n1  " in printed_plan and "mostly" in printed_plan
    assert "of 79.6 GiB with 8 % kept free (--headroom 0.08):" in printed_plan
    assert "rejected: actor.layout.tp=8: 28 attention heads are not divisible by 8 (28 / 8 = 3.5)" in printed_plan
    simulated = printed_plan.partition("simulated, by rollout.max_staleness:\n")[2].splitlines()
    assert [line.split()[0] for line in simulated[1:5]] == ["0", "1", "2", "4"]


def test_plan_is_compared_with_a_run(printed_plan: str) -> None:
    goodput = "goodput: steps whose results were kept took 100.0 % of the allocated time"
    [train] = [line.split() for line in printed_plan.partition(goodput)[2].splitlines() if line.startswith("  train ")]
    assert train[:4] == ["train", "83.3", "%", "25.00"]
    assert float(train[4]) > 0


def test_plan_emits_a_recipe_with_the_planned_layout(
    capsys: pytest.CaptureFixture[str], planned_model: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "planned.yaml")
    keys = (planned_model, "data.source=arithmetic", "batch.prompts_per_update=32")
    command = ("plan", str(ROOT / "configs" / "base.yaml"), "--gpus", "16xH100", *keys, "--emit", out)
    assert run_command(*command) == 0
    first = capsys.readouterr().out
    assert run_command("config", "explain", out) == 0
    assert "world size 16" in capsys.readouterr().out
    assert run_command("plan", out, "--gpus", "16xH100", "--as-is") == 0
    again = capsys.readouterr().out
    assert "on the fullest GPU in each phase, of 79.6 GiB:" in again
    assert [line for line in again.splitlines() if line.startswith("time")] == [
        line for line in first.splitlines() if line.startswith("time")
    ]
    assert run_command("plan", out, "--gpus", "16xH100", "--as-is", "--emit", out) == 2
    assert "already exists, and megarl does not overwrite it" in capsys.readouterr().err
    assert load(out).cluster.nodes == 2


def test_plan_prints_json(capsys: pytest.CaptureFixture[str], planned_model: str) -> None:
    keys = (planned_model, "data.source=arithmetic")
    assert run_command("plan", str(ROOT / "configs" / "base.yaml"), "--gpus", "8xH100", *keys, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["gpus"], planned["headroom"], len(planned["plans"])) == ("8xH100-80GB", 0.08, 5)
    seconds = [plan["step_seconds"] for plan in planned["plans"]]
    assert seconds == sorted(seconds)
    for plan in planned["plans"]:
        assert sum(plan["phase_seconds"].values()) == pytest.approx(plan["step_seconds"])
        assert all(0 < sum(parts.values()) <= 0.92 * 79.6 * 2**30 for parts in plan["gpu_bytes"].values())


def test_plan_that_needs_the_headroom_is_refused(capsys: pytest.CaptureFixture[str], planned_model: str) -> None:
    keys = ("actor.layout.dp=8", "rollout.replicas=8", "rollout.sleep=true", planned_model, "data.source=arithmetic")
    command = ("plan", str(ROOT / "configs" / "base.yaml"), "--gpus", "8xH100", "--as-is", *keys, "--headroom")
    assert run_command(*command, "0.8") == 2
    assert "but only 15.9 of 79.6 GiB (--headroom 0.8) may be used. Fix: " in capsys.readouterr().err


@pytest.mark.parametrize("command", [("check",), ("train",), ("launch", "--nodes=1", "--time=1:00:00")])
def test_allow_changes_sets_the_key(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    name, *options = command
    allow = ["--allow-changes", "rollout.top_p,model.path", "--allow-changes", "run.seed"]
    assert run_command(name, str(ROOT / "configs" / "quickstart.yaml"), "run.steps=3", *allow, *options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" cannot change")[0] for line in lines] == [
        f"megarl: error: run.allow_changes: {key}" for key in ("model.path", "run.seed")
    ]


def test_allow_changes_adds_to_the_recipes_keys(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("base: quickstart.yaml\nrun: {allow_changes: [actor.optimizer.lr, batch]}\n")
    allowed = with_allowed(recipe, ["run.steps=3"], ["batch,rewards", "run.steps"])
    assert load(recipe, allowed).run.allow_changes == ["actor.optimizer.lr", "batch", "rewards", "run.steps"]
    assert load(recipe, with_allowed(recipe, ["run.allow_changes=[rewards]"], ["batch"])).run.allow_changes == [
        "rewards",
        "batch",
    ]
    assert with_allowed(recipe, None, None) == []
    for invalid in ("run: 3", "run: {allow_changes: batch}"):
        recipe.write_text(f"base: quickstart.yaml\n{invalid}\n")
        assert with_allowed(recipe, None, ["batch"]) == ['run.allow_changes=["batch"]']


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("rollout.kv_cache_gib=70",), "while the engine samples, a GPU would hold"),
        (("actor.layout.tp=8", "actor.layout.dp=1"), "actor.layout.tp=8: 28 attention heads are not divisible by 8"),
        (
            ("rollout.replicas=2",),
            "rollout.replicas=2: with cluster.placement=colocated each GPU has one actor rank and one engine rank",
        ),
        (("actor.layout.dp=4", "rollout.replicas=16"), "the recipe needs 16 GPUs. Fix: use --gpus 16xH100-80GB"),
    ],
)
def test_plan_raises_for_a_layout_that_does_not_fit(
    capsys: pytest.CaptureFixture[str],
    planned_model: str,
    overrides: tuple[str, ...],
    problem: str,
) -> None:
    keys = ("actor.layout.tp=4", "actor.layout.dp=2", "rollout.tp=1", "rollout.replicas=8", "rollout.sleep=true")
    keys += (planned_model, "data.source=arithmetic", *overrides)
    code = run_command("plan", str(ROOT / "configs" / "base.yaml"), "--gpus", "8xH100", "--as-is", *keys)
    error = capsys.readouterr().err
    assert code == 2
    assert problem in error.splitlines()[0] and error.startswith("megarl: error: ")


def test_plan_suggests_a_sufficient_number_of_gpus(capsys: pytest.CaptureFixture[str], planned_model: str) -> None:
    recipe = str(ROOT / "configs" / "base.yaml")
    assert run_command("plan", recipe, "--gpus", "1xH100", planned_model, "data.source=arithmetic") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "GiB" in error and error.rstrip().endswith("use --gpus 4xH100-80GB")


def help_texts() -> dict[str, str]:
    """Map each command and command group to the first sentence of its help."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, TyperGroup)
    subgroups = [command for command in group.commands.values() if isinstance(command, TyperGroup)]
    commands = {name: command for each in (group, *subgroups) for name, command in each.commands.items()}
    return {name: " ".join((command.help or "").split()) for name, command in commands.items()}


@pytest.mark.parametrize("group", [[], ["config"], ["convert"]])
def test_help_lists_whole_sentences(group: list[str]) -> None:
    text = CliRunner().invoke(cli.app, [*group, "--help"]).output
    listed = re.split(r"\n  (?=[a-z])", text.split("Commands:\n")[1])
    assert "..." not in text.split("Commands:\n")[1] and listed
    helps = help_texts()
    for entry in listed:
        name, sentence = entry.strip().split(maxsplit=1)
        shown = " ".join(sentence.split())
        assert shown.endswith(".") and helps[name].startswith(shown), name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = CliRunner().invoke(cli.app, ["--install-completion", shell], prog_name="megarl")
    assert done.exit_code == 0, done.output
    scripts = [path for path in tmp_path.rglob("*") if path.is_file() and "_MEGARL_COMPLETE" in path.read_text()]
    assert scripts


def test_printed_command_of_init_works_in_the_new_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(cli.app, ["init", "my project"]).output
    commands = re.findall(r"megarl (?:check|train) '([^']+)'", text)
    assert commands == [str(tmp_path / "my project" / "recipe.yaml")] * 2
    monkeypatch.chdir(tmp_path / "my project")
    config = load(commands[0])
    assert Path(config.data.source).is_file() and config.data.source == str(tmp_path / "my project" / "prompts.jsonl")


def test_indented_lines_of_an_error_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail() -> None:
        raise UserError("wrong\n    def f():\n        pass\nalso wrong")

    monkeypatch.setattr(cli, "app", fail)
    assert run_command() == 2
    lines = ["megarl: error: wrong", "    def f():", "        pass", "megarl: error: also wrong"]
    assert capsys.readouterr().err.splitlines() == lines


def test_package_can_be_run_as_a_module() -> None:
    process = subprocess.run([sys.executable, "-m", "megarl", "--version"], capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, f"megarl {megarl.__version__}\n", "")
