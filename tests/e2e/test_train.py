"""Complete runs on tiny random models with real Megatron ranks, vLLM engines and Ray, started as a user starts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import megarl
from megarl.cluster.trace import DRIVER
from megarl.megatron.checkpoint.conversion import layout_of_files, megatron_to_huggingface, reshape
from megarl.run.audit.audit import audit
from megarl.run.diagnosis.comparison import first_different, verdict
from megarl.run.diagnosis.diagnose import diagnose, find_rollout, read_run_config
from megarl.run.diagnosis.side import SIDES
from tests.e2e.run import read_trace
from tests.e2e.series import Series
from tests.e2e.test_conversion import assert_log_probs_are_of, sampled
from tests.paths import BASE
from tests.timing import RUN_S
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.slow
OFFLOAD = "actor.offload=[gradients, optimizer]"
SLEEP = "rollout.sleep=true"
"""Runs of the series that have this key share their engine."""
TURNS = (OFFLOAD, SLEEP)
"""Keys with which trainers and engines free their memory for each other."""
REWARD = Path(__file__).with_name("digits.py")
ROUNDS = ("batch.sampling_rounds=2", f"rewards.functions=[{{function: '{REWARD}:digit_share_of_even_sums'}}]")
"""Keys with which half of the prompts are uninformative, so that other prompts are sampled in their place."""
EVALUATION = (
    "evaluation.sets=[{name: greedy, size: 6}, {name: sampled, size: 5, samples_per_prompt: 4, temperature: 0.8, "
    "top_k: 20, max_new_tokens: 5, success_above: 0.7, every_steps: 5}]"
)
AGENT = f"{Path(__file__).with_name('turns.py')}:Client"
WITH_AGENTS = EVALUATION.removesuffix("]") + (
    f", {{name: agents, size: 3, max_new_tokens: 60, environment: {{class: '{AGENT}'}}}}]"
)
METRICS = {
    *("step", "reward/mean", "reward/std", "response/length_mean", "policy/entropy", "policy/grad_norm"),
    *("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max", "time/rollout", "time/train", "time/refit"),
    *("time/step", "throughput/tokens_per_second", "memory/peak_rss_gb", "weights/version"),
}


def train(folder: Path, model: Path, *overrides: str) -> Path:
    """Run `megarl train` until it finishes. Return the run folder."""
    command = [sys.executable, "-m", "megarl.cli", "train", str(write_recipe(folder, model)), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    logs = "\n".join(f.read_text()[-2000:] for f in (folder / "runs/tiny/logs/attempt_1").glob("*"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert "\nkernels: torch layers, " in done.stdout
    return folder / "runs" / "tiny"


def train_in(series: Series, folder: Path, model: Path, *overrides: str) -> Path:
    """Train within the series. Return the run folder."""
    series.train(write_recipe(folder, model), *overrides)
    return folder / "runs" / "tiny"


def write_recipe(folder: Path, model: Path) -> Path:
    """Write a recipe whose runs use the folder runs/tiny. On tiny tensors, further threads only wait for each other."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "base": str(BASE),
                "run": {"folder": str(folder / "runs"), "name": "tiny"},
                "model": {"path": str(model), "dtype": "float32"},
                "actor": {"optimizer": {"lr": 0.01}, "tokens_per_microbatch": 1024, "threads": 1},
                "rollout": {"max_new_tokens": 8, "context_length": 128, "kv_cache_gib": 0.05, "threads": 1},
                "batch": {"prompts_per_step": 8, "samples_per_prompt": 8, "prompts_per_update": 8},
                "data": {"source": "arithmetic"},
                "rewards": {"functions": [{"function": f"{REWARD}:digit_share"}]},
                "cluster": {"object_store_mib": 80},
            }
        )
    )
    return recipe


def turns_of(run: Path) -> list[str]:
    """Return the memory-related tasks of the first trainer rank and the first engine, starting at the first refit."""
    trace = sorted(read_trace(run / "logs/attempt_1"), key=lambda span: span.begin)
    tasks = {
        "trainer-0": {"offload", "onload", "update", "save_checkpoint"},
        "engine-0": {"refit", "generate", "sleep"},
    }
    turns = [span.task for span in trace if span.task in tasks.get(span.process, ())]
    return turns[turns.index("refit") :]


def lines_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> list[dict]:
    """Return the metrics of the steps, without an evaluation before the first."""
    return [line for line in lines_of(run) if line["step"] > 0]


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    model = write_tiny_llama(folder / "model", num_kv_heads=2)
    profile = "run.profile={steps: [2], ranks: [1]}"
    return train(folder, model, "run.steps=20", "actor.layout.pp=2", profile, "run.token_samples=1", WITH_AGENTS)


def test_run_writes_trace_profile_and_token_details(learned):
    """The trace has the driver's phases, the requested rank has a profile, and one group lists its tokens."""
    phases = [span for span in read_trace(learned / "logs/attempt_1") if span.process == DRIVER]
    for number in (1, 20):
        [step] = [span for span in phases if span.task == f"step {number}"]
        inside = {span.task for span in phases if step.begin <= span.begin and span.end <= step.end} - {step.task}
        evaluation = {"evaluation"} if number == 20 else set()
        assert inside == {"rollout", "reward", "train", "copy", "refit", "save"} | evaluation
    assert [file.name for file in (learned / "profiles").rglob("*.gz")] == ["actor-1.json.gz"]
    rows = [json.loads(line) for line in (learned / "rollouts/step_000002.jsonl").read_text().splitlines()]
    detailed = [row for row in rows if "tokens" in row]
    assert len({row["prompt_id"] for row in detailed}) == 1 and len(detailed) < len(rows)
    for row in detailed:
        length = row["num_response_tokens"]
        assert {len(row[name]) for name in ("tokens", "token_advantages", "logprob_differences")} == {length}
        assert max(map(abs, row["logprob_differences"])) < 1e-3
        special = [text for text in row["tokens"] if len(text) > 2 and text[0] == "<" and "filler" not in text]
        assert row["response"] == "".join(text for text in row["tokens"] if text not in special)


@pytest.mark.exhaustive
def test_diagnosis_names_first_layer_that_differs(learned, tmp_path):
    """The engine loads a copy of the model with one changed weight; the other sides load the run's model."""
    broken, damaged = tmp_path / "broken", "model.layers.1.mlp.down_proj.weight"
    shutil.copytree(learned / "model", broken)
    [file] = broken.glob("*.safetensors")
    weights = load_file(file)
    weights[damaged][0] += 1.0
    save_file(weights, file, {"format": "pt"})
    config, rollout = read_run_config(learned), find_rollout(learned, 2, None)
    [row] = [json.loads(line) for line in (learned / "rollouts/step_000002.jsonl").open() if rollout.sample_id in line]
    assert len(rollout.response_ids) == row["num_response_tokens"]
    folders = dict.fromkeys(SIDES, learned / "model") | {"engine": broken}
    stages = diagnose(config, rollout.token_ids, folders, tmp_path)
    [first] = [stage for stage in stages if stage is first_different(stages)]
    assert (first.name, first.outlier) == ("layer 1", "engine")
    assert "layer 1 is the first stage that differs" in verdict(stages)
    assert verdict(stages).endswith("inspect this stage in the engine")
    names = [stage.name for stage in stages]
    assert names == ["embedding", *(f"layer {i}" for i in range(len(names) - 3)), "final norm", "log-probs"]
    before = stages[: names.index("layer 1")]
    assert all(max(stage.differences.values()) < 1e-5 for stage in before), "earlier stages differ"
    assert max(stage.differences["trainer", "plain"] for stage in stages) < 1e-4


def test_reward_rises(learned):
    rewards = [step["reward/mean"] for step in metrics_of(learned)]
    assert len(rewards) == 20
    assert fmean(rewards[:2]) <= 0.3
    assert fmean(rewards[-3:]) >= 0.9


def test_every_step_has_all_metrics(learned):
    for number, step in enumerate(metrics_of(learned), start=1):
        assert set(step) >= METRICS
        assert step["step"] == step["weights/version"] == number
        assert step["mismatch/logprob_abs_max"] <= 1e-4
        assert step["weights/staleness_max"] == step["weights/mixed_frac"] == 0
        assert 0 < step["time/rollout"] + step["time/train"] + step["time/refit"] <= step["time/step"]


def test_rollouts_record_the_version_that_sampled_them(learned):
    for number, step in enumerate(metrics_of(learned), start=1):
        [file] = learned.glob(f"rollouts/step_*{number:02}.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(rows) == 64
        assert {run["version"] for row in rows for run in row["version"]} == {number - 1}
        assert fmean(row["reward"] for row in rows) == pytest.approx(step["reward/mean"])
        assert all(len(row["rollout_logprobs"]) == row["num_response_tokens"] for row in rows)
        for group in (rows[begin : begin + 8] for begin in range(0, 64, 8)):
            rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            assert [row["advantage"] for row in group] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-6)


def test_exported_model_has_learned(learned):
    """transformers loads the exported model, which now answers with digits."""
    tokenizer = AutoTokenizer.from_pretrained(learned / "model")
    model = AutoModelForCausalLM.from_pretrained(learned / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 1+2?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    torch.manual_seed(0)
    out = model.generate(ids, max_new_tokens=8, do_sample=True, temperature=1.0, top_k=0)[0, ids.shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert sum(character.isdigit() for character in text) >= 0.5 * len(text) > 0


def test_sets_are_evaluated_at_start_end_and_intervals(learned):
    names = {"greedy": ["avg@1"], "sampled": ["avg@4", "pass@4", "pass^4", "pass@4_low", "pass@4_high"]}
    for name, estimates in names.items():
        evaluated = [line for line in lines_of(learned) if f"evaluation/{name}/length_mean" in line]
        expected = [0, 20] if name == "greedy" else [0, 5, 10, 15, 20]
        assert [line["step"] for line in evaluated] == [line["evaluation/version"] for line in evaluated] == expected
        for line in evaluated:
            assert line[f"evaluation/{name}/failed_frac"] == 0 and line["time/evaluation"] > 0
            assert all(0 <= line[f"evaluation/{name}/{estimate}"] <= 1 for estimate in estimates)
            rows = evaluation_rows(learned, name, line["step"])
            assert {run["version"] for row in rows for run in row["version"]} == {line["step"]}
            assert max(row["num_response_tokens"] for row in rows) == (8 if name == "greedy" else 5)
            assert fmean(row["reward"] for row in rows) == pytest.approx(line[f"evaluation/{name}/{estimates[0]}"])
        assert evaluated[-1][f"evaluation/{name}/{estimates[0]}"] > evaluated[0][f"evaluation/{name}/{estimates[0]}"]
    report = (learned / "report.html").read_text()
    assert "Evaluation: sampled" in report


def test_evaluation_set_can_have_its_own_environment(learned):
    for line in (lines_of(learned)[0], lines_of(learned)[-1]):
        rows = evaluation_rows(learned, "agents", line["step"])
        assert [len(row["mask"]) for row in rows] == [3, 1] * 3, "two conversations"
        assert line["evaluation/agents/turns_mean"] == 3 and line["evaluation/agents/failed_frac"] == 0
        values = [row["parts"]["environment"] + row["parts"]["digit_share"] for row in rows]
        assert [row["reward"] for row in rows] == pytest.approx(values)
        assert line["evaluation/agents/avg@1"] == pytest.approx(fmean(values))
        assert {run["version"] for row in rows for run in row["version"]} == {line["step"]}


def evaluation_rows(run: Path, name: str, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"evaluations/{name}/step_{step:06d}.jsonl").read_text().splitlines()]


def test_greedy_evaluation_equals_transformers(learned):
    tokenizer = AutoTokenizer.from_pretrained(learned / "model")
    model = AutoModelForCausalLM.from_pretrained(learned / "model", dtype=torch.float32)
    rows = evaluation_rows(learned, "greedy", 20)
    assert len(rows) == 6
    for row in rows:
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == row["response"]


def test_evaluation_from_python_reproduces_the_final_one(learned, tmp_path, capfd):
    """The function runs the command `megarl evaluate`."""
    key, value = WITH_AGENTS.split("=", 1)
    config, out = megarl.load_config(learned.parents[1] / "recipe.yaml", {key: yaml.safe_load(value)}), tmp_path / "out"
    last, sets = lines_of(learned)[-1], megarl.run_evaluation(learned / "model", config, out)["sets"]
    printed = capfd.readouterr().out
    for name, found in sets.items():
        for estimate, value in found["estimates"].items():
            assert value["value"] == pytest.approx(last[f"evaluation/{name}/{estimate}"])
            assert f"{estimate}  " in printed
        samples = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        expected = [row["response"] for row in evaluation_rows(learned, name, 20)]
        assert [row["response"] for row in samples] == expected
    with pytest.raises(megarl.UserError) as raised:
        megarl.run_evaluation(learned / "model", config, out)
    assert str(raised.value) == f"--out {out}: the folder already exists. Fix: pass a path that does not exist yet"


def test_last_checkpoint_converts_to_exported_model(learned, tmp_path):
    megatron_to_huggingface(learned / "checkpoints/step_000020", tmp_path / "model")
    exported, converted = (load_file(folder / "model/model.safetensors") for folder in (learned, tmp_path))
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)


def test_reshaped_checkpoint_agrees_with_transformers(learned, tmp_path):
    reshape(learned / "checkpoints/step_000020", tmp_path / "reshaped", layout_of_files(tp=2))
    megatron_to_huggingface(tmp_path / "reshaped", tmp_path / "model", shard_bytes=50_000)
    assert_log_probs_are_of(learned / "model", sampled(tmp_path / "model"))


def test_audit_proves_the_run(learned):
    is_proven, lines = audit(learned, reads_all=True)
    proof = "\n".join(lines)
    assert is_proven, proof
    evaluated = [
        name for line in lines_of(learned) for name in line if re.fullmatch(r"evaluation/\w+/failed_frac", name)
    ]
    for line in (
        "steps        20 (1 to 20, finished). Restarts: 0, undone steps: 0",
        "turns        160 groups with 1,280 rollouts, 1,280 turns and ",
        "weights      engines confirmed the trainer's checksums after 20 of 20 updates ",
        f"20 of 20 rollout files compared (160 groups), {len(evaluated)} of {len(evaluated)} evaluations compared",
    ):
        assert line in proof


def test_run_folder_is_complete(learned):
    assert (learned.parent / "latest").resolve() == learned.resolve()
    assert yaml.safe_load((learned / "config.resolved.yaml").read_text())["run"]["steps"] == 20
    manifest = json.loads((learned / "manifest.json").read_text())
    assert manifest["seed"] == 0
    assert {file.stem for file in (learned / "logs/attempt_1").iterdir()} == {
        "trainer-0",
        "trainer-1",
        "engine-0",
        "rewards-0",
        "environments-0",
        "trace",
        "time",
    }
    assert "\nactor: torch layers, " in (learned / "logs/attempt_1/trainer-1.log").read_text()
    assert "engine rank 0: vLLM " in (learned / "logs/attempt_1/engine-0.log").read_text()
    report = (learned / "report.html").read_text()
    assert "new uPlot(" in report and "reward/mean" in report


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        pytest.param(["actor.layout.tp=3", "actor.layout.sequence_parallel=true"], 3, marks=pytest.mark.exhaustive),
        (
            [
                "actor.layout.dp=2",
                "batch.prompts_per_update=4",
                "algorithm.kl.coefficient=0.01",
                *TURNS,
                *ROUNDS,
                EVALUATION,
            ],
            2,
        ),
        pytest.param(["actor.layout.cp=2", "actor.layout.pp=2", "actor.layout.vpp=2"], 4, marks=pytest.mark.exhaustive),
    ],
    ids=["tp3-sp", "dp2-two-updates-kl-offload-sleep", "cp2-pp2-vpp2"],
)
def test_layouts_train(series, model, tmp_path, overrides, ranks):
    if ranks > 2:  # three heads and four layers
        sizes = dict(hidden_size=96, num_heads=3, num_kv_heads=3, intermediate_size=96, num_layers=4)
        model = write_tiny_llama(tmp_path / "model", **sizes)
    run = train_in(series, tmp_path, model, "run.steps=2", *overrides)
    steps = metrics_of(run)
    assert [step["weights/version"] for step in steps] == [1, 2]
    assert len(list((run / "logs/attempt_1").glob("trainer-*"))) == ranks
    if OFFLOAD in overrides:
        [(gradients, before), (again, moments)] = (
            [step[f"memory/actor_{part}_offloaded_gb"] for part in ("gradients", "optimizer")] for step in steps
        )
        assert gradients == again > 0 == before
        assert moments == pytest.approx(gradients, rel=0.1)  # two float32 moments, sharded over two ranks
        assert [step["rollout/rounds"] for step in steps] == [2, 2]
        rollout = ["offload", "generate", "generate", "sleep"]
        step = [*rollout, "onload", "update", "update", "offload", "refit"]
        evaluation = ["offload", "generate", "generate", "sleep"]  # two sets, before the first step and at the end
        canaries = ["offload", "generate", "sleep"]
        begin = ["refit", *canaries, *evaluation]
        assert turns_of(run) == [*begin, *step, *step, *evaluation, "save_checkpoint", "offload"]
    if "algorithm.kl.coefficient=0.01" in overrides:
        # In the second update of a step, the policy differs from the sampling policy and from the reference.
        assert all(step["kl/loss_token_k3"] > 0 and step["policy/ratio_max"] > 1 for step in steps)
    assert all(("policy/drift_abs_max" in step) == ("batch.prompts_per_update=4" in overrides) for step in steps)
    assert all(step["mismatch/logprob_abs_max"] <= 1e-4 for step in steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_fp8_block_engines_receive_quantized_weights(series, tmp_path, placement):
    """Engines read the quantized weights from shared memory or receive them over the network, with one byte per matrix
    element and four bytes per block scale."""
    model = write_tiny_llama(
        tmp_path / "model", hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=384, tied=False
    )
    keys = ("model.dtype=bfloat16", "rollout.quantization=fp8_block", "rollout.verify_refit=always")
    ranks = ("actor.layout.tp=2", "actor.layout.sequence_parallel=true", f"cluster.placement={placement}")
    run = train_in(series, tmp_path, model, "run.steps=2", *keys, *ranks)
    rows = (256, 128, 128, 256, 384, 384)
    blocks = 2 * (sum(size // 128 for size in rows) * 2 + 2 * 3)
    others = 2 * 128 * 256 + 5 * 256
    for step in metrics_of(run):
        assert step["refit/gb"] * 1e9 == pytest.approx(blocks * (128**2 + 4) + 2 * others)
        assert step["mismatch/logprob_abs_mean"] < 0.6
        assert step["correction/weight_mean"] == pytest.approx(1, abs=0.1), "the default correction has no effect"
