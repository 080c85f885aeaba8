"""Compare a quickstart step of megarl with TRL's GRPOTrainer: same recipe, prompts and machine, one after the other.

.venv/bin/python tools/benchmarks/step_vs_trl.py --steps 5 --out tools/benchmarks/results/step_vs_trl.json

TRL's side runs this file in an environment with TRL: --side step trains the recipe, and --side update, used by
training_step.py, makes updates on given samples. Both write their results to --folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from benchmark import QUICKSTART, ROOT, machine_cpu_seconds, option, parse, run_benchmark
from training_case import Case

from megarl.cluster.placement import place
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.models.folder import resolve

if find_spec("trl") is None:  # in the project's environment, which starts TRL's side in another one
    TrainerCallback = GRPOTrainer = object
else:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megarl.cluster.supervision.memory import MemorySampler
    from megarl.core.timing import Stopwatch
    from megarl.data.cursor import PromptCursor
    from megarl.data.prompts import load_prompts
    from megarl.models.tokenizer import load_tokenizer
    from megarl.rewards.numeric import numeric_match

PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19", "xxhash==4.1.0")
"""Packages of TRL beyond the project's, without dependencies: both sides run on the same torch and transformers."""

LINK = "import site; site.addsitedir({packages!r})\nimport sys; sys.modules['vllm'] = None\n"
"""Python runs these lines at start. Without them TRL would import vLLM, and its memory would count for TRL."""

TIMES = ("step", "rollout", "reward", "train", "refit")
START_TIMEOUT_S, STEP_TIMEOUT_S, LOOK_S = 900, 600, 0.5
SAMPLES_PER_PROMPT = 2
"""Smallest group that GRPOTrainer accepts for updates on given samples."""

COMMON = dict(
    lr_scheduler_type="constant",
    num_iterations=1,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    dataloader_pin_memory=False,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
"""Arguments of GRPOConfig in both sides."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("step_vs_trl: error: terminated"))
    config = load(QUICKSTART)
    samples_per_step = config.batch.prompts_per_step * config.batch.samples_per_prompt
    if arguments.steps < 2 or any(samples_per_step % size for size in arguments.trl_microbatch):
        sys.exit(f"step_vs_trl: error: give at least 2 steps, and microbatches that divide {samples_per_step} samples")
    resolve(config.model.path)  # a first conversion of the model would count as start-up
    with tempfile.TemporaryDirectory(prefix="step-vs-trl-") as name:
        work = Path(name)
        python = build_environment(work / "environment")
        megarl = measure_megarl(config, arguments.steps, work)
        trl = [measure_trl(python, arguments.steps, size, work) for size in arguments.trl_microbatch]
    fastest = min(trl, key=lambda side: side["median_seconds"]["step"])
    return {
        "cpu_percent_elsewhere": max(side["cpu_percent_elsewhere"] for side in (megarl, fastest)),
        "recipe": config.model_dump(),
        "ratio_of_median_steps": megarl["median_seconds"]["step"] / fastest["median_seconds"]["step"],
        "megarl": megarl,
        "trl": fastest,
        "trl_slower_settings": [side for side in trl if side is not fastest],
    }


def build_environment(folder: Path) -> Path:
    """Make an environment with TRL over the packages of this one, and return its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    link = LINK.format(packages=sysconfig.get_path("purelib"))
    next(folder.glob("lib/python*/site-packages")).joinpath("project.pth").write_text(link, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *PACKAGES], check=True)
    return python


def measure_megarl(config: Config, steps: int, work: Path) -> dict[str, Any]:
    overrides = [f"run.steps={steps}", "run.export=false", f"run.folder={work}", "run.name=megarl", "run.replace=true"]
    command = [sys.executable, "-m", "megarl.cli", "train", str(QUICKSTART), *overrides]
    conditions = run(command, steps, work / "megarl.log")
    manifest = json.loads((work / "megarl" / "manifest.json").read_text(encoding="utf-8"))
    settings = {
        "tokens_per_microbatch": config.actor.tokens_per_microbatch,
        "dtype": config.model.dtype,
        "processes": place(config).describe(),
    }
    facts = {"settings": settings, "versions": manifest["versions"], "git": manifest["git"]}
    return {**facts, **conditions, **summary(work / "megarl" / "metrics.jsonl")}


def measure_trl(python: Path, steps: int, microbatch: int, work: Path) -> dict[str, Any]:
    folder = work / f"trl-{microbatch}"
    folder.mkdir()
    options = [f"--steps={steps}", f"--trl-microbatch={microbatch}", "--side=step", f"--folder={folder}"]
    conditions = run([str(python), __file__, *options], steps, folder / "log")
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return {**facts, **conditions, **summary(folder / "metrics.jsonl")}


def run(command: Sequence[str], steps: int, log: Path) -> dict[str, float]:
    """Run one side. Return its seconds, and the percentage of the machine's CPU time that it did not use (that of other
    processes and, on a virtual machine, of its neighbors)."""
    print(f"running: {' '.join(command)}", flush=True)
    start, machine_before = time.perf_counter(), machine_cpu_seconds()
    status, own = _run_to_end(command, log, START_TIMEOUT_S + steps * STEP_TIMEOUT_S)
    if status != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        sys.exit(f"{tail}\nstep_vs_trl: error: exit status {status} of {' '.join(command)}")
    seconds = time.perf_counter() - start
    elsewhere = machine_cpu_seconds() - machine_before - own
    return {
        "seconds_with_start_and_end": seconds,
        "cpu_percent_elsewhere": 100 * elsewhere / (seconds * psutil.cpu_count()),
    }


def _run_to_end(command: Sequence[str], log: Path, timeout_s: float) -> tuple[int, float]:
    """Return the exit status, and the CPU seconds of the command's processes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        spent: dict[psutil.Process, float] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                spent |= _cpu_seconds(process.pid)
                time.sleep(LOOK_S)
            return process.wait(0), sum(spent.values())
        finally:  # also after Ctrl-C, which does not reach its process group, SIGTERM and the deadline
            process.terminate()
            process.wait()


def _cpu_seconds(pid: int) -> dict[psutil.Process, float]:
    """Return the CPU seconds of a process and its descendants. The accounting of ended children misses processes whose
    parent does not wait for them."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process] = times.user + times.system
    return found


def summary(metrics: Path) -> dict[str, Any]:
    """Return the steps, and medians without the first one, which fills caches and memory pools."""
    steps = [_step(json.loads(line)) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return {
        "median_seconds": {name: median(step["seconds"][name] for step in steps[1:]) for name in steps[0]["seconds"]},
        "median_tokens": median(step["tokens"] for step in steps[1:]),
        "peak_pss_gb": steps[-1]["peak_pss_gb"],
        "steps": steps,
    }


def _step(metrics: Mapping[str, float]) -> dict[str, Any]:
    return {
        "seconds": {name: metrics[f"time/{name}"] for name in TIMES if f"time/{name}" in metrics},
        "reward": metrics["reward/mean"],
        "tokens": round(metrics["throughput/tokens_per_second"] * metrics["time/step"]),
        "response_length_mean": metrics["response/length_mean"],
        "peak_pss_gb": metrics["memory/peak_pss_gb"],
    }


class Recorder(TrainerCallback):
    """Writes the metrics of each step of GRPOTrainer under megarl's names."""

    def __init__(self, path: Path) -> None:
        self.watch, self._memory = Stopwatch(), MemorySampler()
        self._path, self._num_tokens = path, 0
        self._step: dict[str, float] = {}

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        """Return the recipe's reward of each completion; TRL calls this once per step."""
        rewards = [float(numeric_match(*triple)) for triple in zip(prompts, completions, answer, strict=True)]
        self._step["reward/mean"] = fmean(rewards)
        self._step["response/length_mean"] = fmean(map(len, completion_ids))
        return rewards

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.watch = Stopwatch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        times = self.watch.metrics()
        times["time/train"] = times["time/step"] - times["time/rollout"] - times["time/reward"]
        num_tokens, self._num_tokens = state.num_input_tokens_seen - self._num_tokens, state.num_input_tokens_seen
        speed = {"throughput/tokens_per_second": num_tokens / times["time/step"]}
        line = {"step": state.global_step, **self._step, **times, **speed}
        with self._path.open("a", encoding="utf-8") as file:
            print(json.dumps(line | {"memory/peak_pss_gb": self._memory.peak_gb()[1]}), file=file)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer whose generation and rewards are phases of the recorder's stopwatch."""

    def __init__(self, recorder: Recorder, **arguments: Any) -> None:
        self._recorder = recorder
        super().__init__(**arguments, reward_funcs=recorder.reward, callbacks=[recorder])

    def _generate(self, *arguments: Any, **named: Any) -> Any:
        with self._recorder.watch.phase("rollout"):
            return super()._generate(*arguments, **named)

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> Any:
        with self._recorder.watch.phase("reward"):
            return super()._calculate_rewards(*arguments, **named)


def train_recipe(folder: Path, steps: int, microbatch: int) -> None:
    """Train the quickstart with GRPOTrainer. Writes metrics.jsonl and facts.json."""
    config = load(QUICKSTART)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model_folder = resolve(config.model.path)
    tokenizer = load_tokenizer(model_folder)
    optimizer, objective, batch = config.actor.optimizer, config.algorithm.objective.options(), config.batch
    settings = GRPOConfig(
        output_dir=str(folder / "trainer"),
        seed=config.run.seed,
        max_steps=steps,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=batch.prompts_per_step * batch.samples_per_prompt // microbatch,
        num_generations=batch.samples_per_prompt,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad_norm,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=objective["clip_low"],
        epsilon_high=objective["clip_high"],
        beta=config.algorithm.kl.coefficient,
        shuffle_dataset=False,
        **COMMON,
    )
    trainer = TimedTrainer(
        Recorder(folder / "metrics.jsonl"),
        model=AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        args=settings,
        train_dataset=_dataset(config, model_folder, tokenizer, steps),
        processing_class=tokenizer,
    )
    trainer.train()
    facts = {
        "settings": {
            "microbatch": microbatch,
            "optimizer": trainer.args.optim,
            "attention": trainer.model.config._attn_implementation,
            "dtype": str(trainer.model.dtype),
            "threads": torch.get_num_threads(),
        },
        "versions": _versions("trl", "transformers", "accelerate", "datasets", "torch"),
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _dataset(config: Config, model_folder: Path, tokenizer: Any, steps: int) -> Dataset:
    """Return megarl's prompts in its order, as text in the chat template; TRL tokenizes them itself."""
    prompts = load_prompts(config, model_folder)
    cursor = PromptCursor(len(prompts), config.run.seed, config.data.shuffle)
    chosen = [prompts[i] for i in cursor.take(steps * config.batch.prompts_per_step)]
    assert all(tokenizer(prompt.text)["input_ids"] == list(prompt.token_ids) for prompt in chosen)
    return Dataset.from_list([{"prompt": prompt.text, "answer": prompt.answer} for prompt in chosen])


def _versions(*packages: str) -> dict[str, str]:
    return {name: version(name) for name in packages}


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class GivenSamples(GRPOTrainer):
    """GRPOTrainer on given samples, padded to the longest of the batch as it pads generated ones."""

    def __init__(self, samples: dict[str, torch.Tensor], **arguments: Any) -> None:
        self._samples = samples
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self._samples)


def update_given_samples(folder: Path) -> None:
    """Make the updates of a training_case.Case with GRPOTrainer's microbatches, loss, clipping and optimizer."""
    case = Case.read(folder)
    torch.set_num_threads(case.threads)
    baseline = psutil.Process().memory_info().rss
    clock, num_samples = Clock(), len(case.lengths)
    settings = GRPOConfig(
        output_dir=str(folder / "trainer"),
        max_steps=1 + case.updates,
        per_device_train_batch_size=case.microbatch,
        gradient_accumulation_steps=num_samples // case.microbatch,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=case.longest,
        learning_rate=1e-6,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        beta=0.0,
        **COMMON,
    )
    config = AutoConfig.from_pretrained(folder)
    trainer = GivenSamples(
        padded(case),
        model=AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "none"}] * num_samples),
        processing_class=load_tokenizer(resolve(load(QUICKSTART).model.path)),
        callbacks=[clock],
    )
    trainer.train()
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    result = {
        "seconds": clock.seconds[1:],
        "measured_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - baseline,
        "state_bytes": 4 * 4 * num_parameters,  # weights, gradients and Adam's two moments, in float32
        "settings": {
            "samples_per_microbatch": case.microbatch,
            "attention": trainer.model.config._attn_implementation,
            "optimizer": trainer.args.optim,
            "loss_type": trainer.args.loss_type,
            "threads": case.threads,
        },
        "versions": _versions("trl", "torch", "transformers", "accelerate"),
    }
    (folder / "trl-0.json").write_text(json.dumps(result), encoding="utf-8")


def padded(case: Case) -> dict[str, torch.Tensor]:
    """Prompts [samples, longest prompt] padded on the left, responses [samples, longest response] on the right."""
    samples = case.ids()
    widths = [max(len(sample[part]) for sample in samples) for part in (0, 1)]
    prompts = [torch.tensor([0] * (widths[0] - len(prompt)) + prompt) for prompt, _ in samples]
    responses = [torch.tensor(response + [0] * (widths[1] - len(response))) for _, response in samples]
    prompt_mask = [torch.arange(widths[0]) >= widths[0] - len(prompt) for prompt, _ in samples]
    response_mask = [torch.arange(widths[1]) < len(response) for _, response in samples]
    return {
        "prompt_ids": torch.stack(prompts),
        "prompt_mask": torch.stack(prompt_mask).long(),
        "completion_ids": torch.stack(responses),
        "completion_mask": torch.stack(response_mask).long(),
        "advantages": torch.tensor([(-1.0) ** i for i in range(len(samples))]),
        "num_items_in_batch": torch.tensor(sum(len(response) for _, response in samples)),
    }


OPTIONS = (
    option("--steps", type=int, default=5, help="steps of each side, at least 2 (%(default)s)"),
    option(
        "--trl-microbatch",
        type=int,
        nargs="+",
        default=[16],
        metavar="SAMPLES",
        help="per_device_train_batch_size; several are run one by one, and the fastest counts (16)",
    ),
    option("--side", choices=("step", "update"), help="run this part of TRL's side (internal)"),
    option("--folder", type=Path, help="folder of TRL's side"),
)

if __name__ == "__main__":
    side = parse(__doc__, *OPTIONS)
    if side.side == "step":
        train_recipe(side.folder, side.steps, side.trl_microbatch[0])
    elif side.side == "update":
        update_given_samples(side.folder)
    else:
        run_benchmark(__doc__, measure, *OPTIONS)
