"""`megarl launch --dry-run`: the jobs of recipes, and errors before submission. tests/cluster covers calls to a real
Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.launch import checks, submit
from megarl.launch.folder import Job, JobFolder
from megarl.launch.request import CONTAINERS, Request
from megarl.launch.script import TEMPLATE, VARIABLES
from tests.marks import exhaustive_but
from tests.paths import ROOT
from tests.published_models import CONFIGS
from tests.tiny_image_model import write_tiny_image_model

RECIPES = sorted(file for file in (ROOT / "configs").glob("*.yaml") if file.name != "base.yaml")
ON_CPU = Request(nodes=1, time="1:00:00", gpus=0)
EIGHT = ("actor.layout={pp: 1, dp: 8, last_stage_layers: null}", "rollout.replicas=4", "cluster.placement=colocated")
SHELLCHECK = str(Path(sys.executable).with_name("shellcheck"))


@pytest.fixture(autouse=True)
def _temporary_files_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Move the folder for temporary files, because launch rejects runs inside it, and these tests' runs are there."""
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")


@pytest.fixture
def on_h100s(tmp_path: Path) -> Path:
    """Return a recipe for 16 GPUs."""
    write_model(tmp_path / "model", CONFIGS["Qwen2.5-7B"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: base.yaml\nmodel: {{path: {tmp_path}/model, dtype: bfloat16}}\n"
        "cluster: {placement: disaggregated}\nactor: {layout: {tp: 4, dp: 2}, recompute: selective}\n"
        "rollout: {tp: 2, replicas: 4, kv_cache_gib: 20, context_length: 4096, max_new_tokens: 2048}\n"
        "data: {source: arithmetic}\nrewards: {functions: [{function: exact_match}]}\n"
        f"run: {{folder: {tmp_path}/runs, name: big}}\n"
    )
    return recipe


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model folder whose weights and tokenizer are empty files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()


def launch(recipe: Path, request: Request, *overrides: str, sweeps: Sequence[str] = ()) -> list[str]:
    return list(submit.launch(recipe, overrides, request, sweeps, dry_run=True))


def script_of(run: Path) -> str:
    return JobFolder(run).script.read_text()


def array(script: str, name: str) -> list[str]:
    """Return the elements of a bash array that the script assigns."""
    line = re.search(rf"^{name}=\(.*\)$", script, re.MULTILINE)[0]
    process = subprocess.run(
        ["bash", "-c", f'{line}; for word in "${{{name}[@]}}"; do printf "%s\\0" "$word"; done'],
        capture_output=True,
        check=True,
    )
    return process.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize("recipe", exhaustive_but(RECIPES, *RECIPES[::5]), ids=lambda recipe: recipe.stem)
def test_every_recipe_becomes_a_job(recipe: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    config = load(recipe)
    own_data = [] if config.data.is_procedural else [f"data.source={rows}"]
    # The RLHF and distillation recipes start from models that other recipes write, and the image recipe from one that a
    # tool writes.
    models = {key: getattr(config, key).path for key in ("model", "critic", "reward_model")}
    if config.rollout.engine == "diffusers":
        write_tiny_image_model(tmp_path / "model")
    else:
        write_model(tmp_path / "model", {})
    own_models = [f"{key}.path={tmp_path}/model" for key, path in models.items() if path and Path(path).is_absolute()]
    own_models += [f"teachers.models=[{{name: a, path: {tmp_path}/model}}]"] if config.has_teachers else []
    lines = launch(recipe, ON_CPU, f"run.folder={tmp_path}", *own_data, *own_models)
    assert lines[-1] == "dry run: nothing was submitted"
    run = tmp_path / config.run.name
    config = load(JobFolder(run).recipe)
    assert (config.resume, config.checkpoint.on_signal, config.checkpoint.grace_s) == ("auto", True, 75.0)
    assert subprocess.run(["bash", "-n"], input=script_of(run), text=True).returncode == 0
    assert array(script_of(run), "megarl") == [sys.executable, "-m", "megarl.cli"]


def test_script_contains_the_requested_options(on_h100s: Path, tmp_path: Path) -> None:
    request = replace(
        ON_CPU, nodes=2, spares=1, gpus=8, partition="gpu", account="team", options=["--qos=high"], grace=300,
        restarts=5, setup=["module load cuda"],
    )  # fmt: skip
    launch(on_h100s, request)
    script = script_of(tmp_path / "runs/big")
    header = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert set(header) >= {
        *("--job-name=big", "--nodes=3", "--ntasks-per-node=1", "--time=1:00:00", "--signal=B:USR1@300", "--requeue"),
        *("--gpus-per-node=8", "--partition=gpu", "--account=team", "--qos=high"),
    }
    assert "\nsizes=(2)\n" in script and "\nrestarts=5 " in script
    assert "\nmodule load cuda\n" in script
    assert JobFolder(tmp_path / "runs/big").job() == Job(str(Path.cwd()), nodes=2, gpus=8, stalled=3)
    assert load(tmp_path / "runs/big/launch/recipe.yaml").cluster.nodes == 2


SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("--setup", {"setup": ["module load cuda", f"export HF_TOKEN={SECRET}"]}),
        ("--option", {"options": [f"--export=ALL,WANDB_API_KEY={SECRET}"]}),
        ("--command", {"command": f"env AWS_SECRET_ACCESS_KEY={SECRET} megarl"}),
        ("--image", {"container": "pyxis", "image": f"docker://me:{SECRET}@registry/image"}),
        ("--template", {"template": "template"}),
    ],
)
def test_credentials_are_not_stored(option: str, change: dict, tmp_path: Path) -> None:
    if "template" in change:
        change = {"template": tmp_path / "template"}
        change["template"].write_text(f"{TEMPLATE.read_text()}\nexport HF_TOKEN={SECRET}\n")
    with pytest.raises(UserError, match=rf"^{option}: contains credentials, .* Fix: export the env") as raised:
        launch(ROOT / "configs/quickstart.yaml", replace(ON_CPU, **change), f"run.folder={tmp_path}")
    assert SECRET not in str(raised.value)
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "template"]
    assert not any(SECRET in path.read_text() for path in stored)


def test_setup_may_refer_to_secrets(tmp_path: Path) -> None:
    setup = [". ~/.secrets", "export HF_TOKEN=$(cat ~/.hf_token)"]
    request = replace(ON_CPU, setup=setup, options=["--export=ALL"])
    launch(ROOT / "configs/quickstart.yaml", request, f"run.folder={tmp_path}")
    assert "\n".join(setup) in script_of(tmp_path / "quickstart")


@pytest.mark.parametrize("container", CONTAINERS)
def test_script_passes_shellcheck_in_every_container(container: str, tmp_path: Path) -> None:
    run, image = tmp_path / "a run" / "quickstart", tmp_path / "an image.sqsh"
    image.touch()
    request = replace(ON_CPU, container=container, image=None if container == "none" else str(image))
    launch(ROOT / "configs/quickstart.yaml", request, f"run.folder={run.parent}")
    checked = subprocess.run([SHELLCHECK, str(JobFolder(run).script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    outside, inside = array(script_of(run), "srun_options"), array(script_of(run), "megarl")
    mounts = [f"{folder}:{folder}" for folder in (run.parent, Path.cwd())]
    expected = {
        "none": ([], [sys.executable, "-m", "megarl.cli"]),
        "pyxis": ([f"--container-image={image}", f"--container-mounts={','.join(mounts)}"], ["megarl"]),
        "enroot": (
            [],
            [
                "enroot",
                "start",
                *(f"--env={name}" for name in VARIABLES),
                *(f"--mount={mount}" for mount in mounts),
                str(image),
                "megarl",
            ],
        ),
        "apptainer": (
            [],
            ["apptainer", "exec", *(w for m in mounts for w in ("--bind", m)), str(image), "megarl"],
        ),
    }
    assert (outside, inside) == expected[container]


def test_sweep_becomes_a_job_array(tmp_path: Path) -> None:
    sweeps = ["actor.optimizer.lr=1.0e-6,3.0e-6", "run.seed=0,1"]
    launch(ROOT / "configs/quickstart.yaml", ON_CPU, f"run.folder={tmp_path}", "run.name=s", sweeps=sweeps)
    script = script_of(tmp_path / "s")
    assert "#SBATCH --array=0,1,2,3\n" in script
    points = []
    for number in range(4):
        environment = {"SLURM_ARRAY_TASK_ID": str(number)}
        line = re.search(r"^run=.*$", script, re.MULTILINE)[0]
        process = subprocess.run(
            ["bash", "-c", f'{line}; echo "$run"'], env=environment, capture_output=True, text=True
        )
        config = load(JobFolder(Path(process.stdout.strip())).recipe)
        points.append((config.run.name, config.actor.optimizer.lr, config.run.seed))
    assert points == [("s-0", 1e-6, 0), ("s-1", 1e-6, 1), ("s-2", 3e-6, 0), ("s-3", 3e-6, 1)]


def test_custom_template_is_rendered_and_checked(tmp_path: Path) -> None:
    template = tmp_path / "mine.sbatch"
    template.write_text(TEMPLATE.read_text().replace("set -uo pipefail", "source /etc/site.sh"))
    quickstart, keys = ROOT / "configs/quickstart.yaml", f"run.folder={tmp_path}"
    launch(quickstart, replace(ON_CPU, template=template), keys)
    assert "source /etc/site.sh" in script_of(tmp_path / "quickstart")
    template.write_text("#SBATCH --nodes=@node_count@\n")
    with pytest.raises(UserError, match=r"unknown placeholder @node_count@\. Fix: use one of @name@, @nodes@"):
        launch(quickstart, replace(ON_CPU, template=template), keys)
    template.write_text("#SBATCH --nodes=@nodes@\n")
    two = replace(ON_CPU, template=template, nodes=2, fewest=1)
    with pytest.raises(UserError, match=r"mine\.sbatch: --fewest-nodes=1 requires the placeholder @sizes@"):
        launch(quickstart, two, keys, *EIGHT)


def test_prediction_is_stored_beside_the_recipe(on_h100s: Path, tmp_path: Path) -> None:
    launch(on_h100s, Request(nodes=2, time="4:00:00"))
    [file] = tmp_path.glob("**/launch/prediction.json")
    predicted = json.loads(file.read_text())
    assert {"rollout", "long_rollouts", "idle_trainers", "train", "idle_engines", "refit"} <= predicted.keys()
    assert all(seconds > 0 for seconds in predicted.values())


def test_gpu_without_a_role_is_rejected(on_h100s: Path) -> None:
    roles = "cluster.roles={actor: 0-3, rollout: 8-15}"
    with pytest.raises(UserError, match=r"cluster\.roles: GPU 4 of 16 has no role"):
        launch(on_h100s, Request(nodes=2, time="4:00:00"), roles, "actor.layout={tp: 4, dp: 1}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nodes": 0}, "cluster.nodes=0: expected at least 1"),
        ({"time": "2"}, "--time=2: 120 s is too short, because the run starts to save --grace=120 s before the end"),
        (
            {"container": "docker", "image": "x"},
            "--container=docker: unknown container runtime. Fix: use one of none, pyxis, enroot, apptainer",
        ),
        ({"container": "pyxis"}, "--container=pyxis: does not match --image=. Fix: pass both options or neither"),
        ({"container": "pyxis", "image": "/no/such.sqsh"}, "--image=/no/such.sqsh: the file does not exist"),
        ({"mounts": ["/no/such:/data"]}, "--mount=/no/such:/data: /no/such does not exist"),
        ({"template": Path("/no/such")}, "--template=/no/such: the file does not exist"),
        ({"nodes": 4}, "cluster.nodes=4: the ranks need 2 devices and each node has 1, so 2 of 4 nodes would be empty"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_invalid_options_are_rejected(changed: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        launch(ROOT / "configs/quickstart.yaml", replace(ON_CPU, **changed), f"run.folder={tmp_path}/runs")
    assert message in str(refused.value)
    assert not (tmp_path / "runs").exists()  # a rejected launch writes nothing


def test_paths_local_to_this_machine_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keys = [f"run.folder={tmp_path}/runs", "model.path=/dev/shm", f"data.source={tmp_path}/no.jsonl"]
    with pytest.raises(UserError) as refused:
        launch(ROOT / "configs/quickstart.yaml", ON_CPU, *keys)
    assert [line.split(". Fix: ")[0] for line in str(refused.value).splitlines()] == [
        f"run.folder={tmp_path}/runs: {tmp_path} exists only on this machine",
        "model.path=/dev/shm: /dev/shm exists only on this machine",
        f"data.source={tmp_path}/no.jsonl: {tmp_path} exists only on this machine",
        f"data.source={tmp_path}/no.jsonl: the file does not exist",
    ]


def test_missing_files_are_rejected(tmp_path: Path) -> None:
    functions = "[{function: /no/such.py:f}, {function: exact_match}]"
    keys = ["model.path=/no/model", "data.source=prompts.txt", f"rewards.functions={functions}"]
    keys += ["rollout.speculative={method: draft_model, path: /no/draft}"]
    with pytest.raises(UserError) as refused:
        launch(ROOT / "configs/quickstart.yaml", ON_CPU, f"run.folder={tmp_path}", "rewards.judge=/no/j.py:f", *keys)
    assert [line.split(". Fix: ")[0] for line in str(refused.value).splitlines()] == [
        "model.path=/no/model: the folder does not exist",
        "rollout.speculative.path=/no/draft: the folder does not exist",
        f"data.source={Path.cwd()}/prompts.txt: the file does not exist",
        "rewards.functions=/no/such.py: the file does not exist",
        "rewards.judge=/no/j.py: the file does not exist",
    ]


def test_model_folders_must_be_complete(on_h100s: Path, tmp_path: Path) -> None:
    """The error is the same as from `megarl check`. Nothing is written."""
    (tmp_path / "model/model.safetensors").unlink()
    (tmp_path / "model/tokenizer.json").unlink()
    (tmp_path / "critic").mkdir()
    critic = ("algorithm.advantage.estimator=gae", "critic.layout={pp: 1, tp: 4, dp: 2}")
    draft = ("rollout.speculative.method=draft_model", f"rollout.speculative.path={tmp_path}/critic")
    with pytest.raises(UserError) as refused:
        launch(on_h100s, ON_CPU, *critic, f"critic.path={tmp_path}/critic", *draft)
    assert str(refused.value).splitlines() == [
        f"{tmp_path}/model: contains neither model.safetensors nor model.safetensors.index.json. Fix: save the weights "
        "as safetensors",
        f"model.path={tmp_path}/model: the folder has no tokenizer. Fix: copy the model's tokenizer files into the "
        "folder",
        *(
            f"{key}={tmp_path}/critic: has no config.json. Fix: use the folder that contains config.json and "
            "*.safetensors"
            for key in ("critic.path", "rollout.speculative.path")
        ),
    ]
    assert not (tmp_path / "runs").exists()
    (tmp_path / "model/model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')
    with pytest.raises(UserError, match=r"lists a\.safetensors, but the file does not exist"):
        launch(on_h100s, ON_CPU)


def test_container_paths_are_checked_at_their_mount_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    request = replace(ON_CPU, container="pyxis", image="registry/name:1", mounts=[f"{tmp_path}:/data:ro"])
    keys = [f"run.folder={tmp_path}/runs", "data.source=/data/a.jsonl"]
    lines = launch(ROOT / "configs/quickstart.yaml", request, *keys)
    assert any("--image=registry/name:1: not checked, because the nodes pull it" in line for line in lines)
    with pytest.raises(UserError, match=rf"data\.source={tmp_path}/b\.jsonl: the file does not exist"):
        launch(ROOT / "configs/quickstart.yaml", request, keys[0], "data.source=/data/b.jsonl")
    # Paths inside the image are not checked here, but later on the nodes.
    launch(ROOT / "configs/quickstart.yaml", request, *keys, "model.path=/of/the/image")


def test_local_disk_is_a_warning_for_multi_node_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (*EIGHT, f"run.folder={tmp_path}")
    for kind, nodes, expected in (("ext4", 4, True), ("nfs4", 4, False), ("ext4", 1, False)):
        monkeypatch.setattr(checks, "_file_system_type", lambda path, kind=kind: kind)
        lines = launch(ROOT / "configs/quickstart.yaml", replace(ON_CPU, nodes=nodes), *keys)
        warned = [
            line for line in lines if "is on a local disk of this machine (ext4). The job fails at startup" in line
        ]
        assert [f"warning: run.folder={tmp_path} " in line for line in warned] == [True] * expected


def test_nodes_must_match_the_layout(on_h100s: Path) -> None:
    on_gpus = replace(ON_CPU, gpus=8)
    with pytest.raises(
        UserError,
        match=r"need 16 GPUs \(one per rank\), but the job has 1 x --gpus-per-node=8 = 8\. Fix: set --nodes=2, or",
    ):
        launch(on_h100s, on_gpus)
    with pytest.raises(
        UserError, match=r"but the job has 3 x --gpus-per-node=8 = 24\. Fix: change the layouts .* to use 24 GPUs"
    ):
        launch(on_h100s, replace(on_gpus, nodes=3))


def test_too_little_memory_or_time_is_rejected(on_h100s: Path) -> None:
    on_gpus = replace(ON_CPU, gpus=8, nodes=2)
    [step] = [line for line in launch(on_h100s, on_gpus) if "a step takes" in line]
    seconds = int(re.search(r"about (\d+) s", step)[1])
    assert 0 < seconds < 3000
    shorter = replace(on_gpus, time="6", grace=200)  # 360 s, but start and saving alone need 200 + 60 + 120 s
    with pytest.raises(UserError, match=f"--time=6: 360 s is too short, because a step takes about {seconds} s"):
        launch(on_h100s, shorter)
    with pytest.raises(UserError, match="GiB"):
        launch(on_h100s, on_gpus, "rollout.kv_cache_gib=90")


def test_finished_runs_are_not_launched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart, keys = ROOT / "configs/quickstart.yaml", (f"run.folder={tmp_path}", "run.name=s")
    finished = {"s", "s-1"}
    monkeypatch.setattr(
        submit, "check_beginning", lambda c: "already finished step 3" if c.run.name in finished else None
    )
    assert launch(quickstart, ON_CPU, *keys)[-1] == "already finished step 3"
    assert not (tmp_path / "s").exists()
    launch(quickstart, ON_CPU, *keys, sweeps=["run.seed=0,1,2"])
    assert "#SBATCH --array=0,2\n" in script_of(tmp_path / "s")


def test_grace_shorter_than_a_step_is_reported(on_h100s: Path) -> None:
    request = replace(ON_CPU, gpus=8, nodes=2, time="4:00:00")
    [seconds] = [int(found[1]) for line in launch(on_h100s, request) if (found := re.search(r"about (\d+) s", line))]
    message = "at the end of an allocation the run loses the steps since its last checkpoint"
    assert any(message in line for line in launch(on_h100s, replace(request, grace=seconds + 40)))
    assert not any(message in line for line in launch(on_h100s, replace(request, grace=seconds + 50)))


def test_fewest_nodes_writes_configs_with_fewer_replicas(tmp_path: Path) -> None:
    """Each node has two replicas and one engine. Every run of the sweep can be scaled down."""
    request = replace(ON_CPU, nodes=4, fewest=1)
    keys = (*EIGHT, f"run.folder={tmp_path}", "run.name=fewer")
    lines = launch(ROOT / "configs/quickstart.yaml", request, *keys, sweeps=["run.seed=0,1"])
    assert "attempts use 4 nodes, or 3 or 2 or 1 after nodes are lost" in lines
    assert array(script_of(tmp_path / "fewer"), "sizes") == ["4", "3", "2", "1"]
    for seed in range(2):
        folder = JobFolder(tmp_path / f"fewer-{seed}")
        for nodes in (4, 3, 2, 1):
            config = load(folder.recipe_on(nodes))
            assert (config.actor.layout.dp, config.rollout.replicas, config.cluster.nodes) == (2 * nodes, nodes, nodes)
            assert (config.run.seed, config.batch.prompts_per_step, config.resume) == (seed, 16, "auto")


def test_node_counts_with_fractional_replicas_are_left_out(tmp_path: Path) -> None:
    keys = (
        "actor.layout={pp: 1, dp: 8, last_stage_layers: null}",
        "rollout.replicas=2",
        f"run.folder={tmp_path}",
        "run.name=fewer",
    )
    launch(ROOT / "configs/quickstart.yaml", replace(ON_CPU, nodes=4, fewest=1), *keys)
    assert array(script_of(tmp_path / "fewer"), "sizes") == ["4", "2"]


def test_node_counts_without_enough_memory_are_left_out(on_h100s: Path, tmp_path: Path) -> None:
    """The optimizer state is sharded over the replicas, so half as many replicas hold larger shards."""
    request = Request(nodes=2, time="4:00:00", fewest=1)
    launch(on_h100s, request)
    assert array(script_of(tmp_path / "runs/big"), "sizes") == ["2", "1"]
    full = ("actor.layout={tp: 1, dp: 8}", "actor.recompute=full", "actor.tokens_per_microbatch=32768")
    with pytest.raises(UserError, match=r"needs at least 2 nodes \(on 1: --gpus 8xH100-80GB: while the actor trains"):
        launch(on_h100s, request, *full)


@pytest.mark.parametrize(
    ("fewest", "keys", "message"),
    [
        (2, (), "--fewest-nodes=2: expected a number from 1 to 1, below --nodes"),
        (
            1,
            ("actor.layout={pp: 1, dp: 3, last_stage_layers: null}", "rollout.replicas=2"),
            "the run needs at least 2 nodes (on 1: actor.layout.dp=3: 3 x 1 / 2 nodes is not an integer",
        ),
        (
            1,
            (
                "cluster.roles={actor: 0-1, rollout: 0-1}",
                "actor.layout={pp: 1, dp: 2, last_stage_layers: null}",
                "rollout.replicas=2",
            ),
            "on 1: cluster.roles: explicit device ranges do not fit on fewer nodes",
        ),
    ],
)
def test_run_that_cannot_scale_down_is_rejected(tmp_path: Path, fewest: int, keys: Sequence[str], message: str) -> None:
    request = replace(ON_CPU, nodes=2, fewest=fewest)
    with pytest.raises(UserError, match=re.escape(message)):
        launch(ROOT / "configs/quickstart.yaml", request, f"run.folder={tmp_path}", *(keys or EIGHT))
