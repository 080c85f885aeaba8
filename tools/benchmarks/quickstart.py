"""Measure steps of the quickstart: against TRL's GRPOTrainer with the same recipe and prompts, one after the other;
tokens per second with rollout.max_staleness=0 and 1, with one core each for engine and trainer; the time that a killed
rank costs, if its ranks are replaced and if the run is resumed from a checkpoint; and the time that it costs with 4
ranks of a tiny model and 2 engines, if new processes and if spare processes replace the ranks.

.venv/bin/python tools/benchmarks/quickstart.py trl --out tools/benchmarks/results/step_vs_trl.json
.venv/bin/python tools/benchmarks/quickstart.py staleness --out tools/benchmarks/results/staleness.json
.venv/bin/python tools/benchmarks/quickstart.py recovery --out tools/benchmarks/results/recovery.json
.venv/bin/python tools/benchmarks/quickstart.py spares --out tools/benchmarks/results/spares.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
from benchmark import MEGARL, QUICKSTART, read_metrics, run_benchmark, run_logged, train

from megarl.config.load import load
from megarl.models.folder import resolve
from tests.e2e.run import write_recipe

PACKAGES = ("trl==1.16.0", "datasets==5.2.0", "pandas==3.1.1", "multiprocess==0.70.19", "xxhash==4.1.0")
"""Packages that TRL needs in addition to the project's. They are installed without dependencies, so that both sides use
the same torch and transformers."""

LINK = "import site; site.addsitedir({packages!r})\nimport sys; sys.modules['vllm'] = None\n"
"""Lines that Python runs at startup. They keep TRL from importing vLLM, whose memory would count for TRL."""

TIMES = ("step", "rollout", "reward", "train", "refit")
LEFT_OUT = 2
"""Number of initial steps to exclude in runs with staleness, because queues fill and kernels are compiled in them."""

SEPARATE = (
    "actor.layout={pp: 1, last_stage_layers: null}",
    "actor.threads=1",
    "rollout.threads=1",
    "cluster.placement=disaggregated",
    "batch={prompts_per_step: 4, prompts_per_update: 4, samples_per_prompt: 4}",
    # Some responses become much longer than others, as in reasoning runs.
    "rollout.max_new_tokens=48",
    "rollout.temperature=1.0",
)
"""Keys that give engine and trainer one core each."""

SETTLE_S = 2.0
"""Seconds within which the driver notices that spares are ready."""

FOUR_RANKS = ("actor.layout={pp: 2, dp: 2}", "rollout.replicas=2")


def against_trl(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    resolve(load(QUICKSTART).model.path)  # convert the model now, because its first conversion would count as start-up
    python = build_environment(work / "environment")
    lines, conditions = train(work, QUICKSTART, f"run.steps={arguments.steps}")
    manifest = json.loads((work / "run" / "manifest.json").read_text(encoding="utf-8"))
    megarl = {"versions": manifest["versions"], "git": manifest["git"], **conditions, **summary(lines)}
    folder = work / "trl"
    folder.mkdir()
    command = [str(python), str(Path(__file__).with_name("trl_side.py")), str(folder), str(arguments.steps)]
    conditions = run_logged(command, log=folder / "log")
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    trl = {**facts, **conditions, **summary(read_metrics(folder))}
    return {
        "cpu_percent_elsewhere": max(side["cpu_percent_elsewhere"] for side in (megarl, trl)),
        "ratio_of_median_steps": megarl["median_seconds"]["step"] / trl["median_seconds"]["step"],
        "megarl": megarl,
        "trl": trl,
    }


def build_environment(folder: Path) -> Path:
    """Create an environment with TRL on top of this environment's packages, and return its Python."""
    venv.create(folder)
    python = folder / "bin" / "python"
    link = LINK.format(packages=sysconfig.get_path("purelib"))
    next(folder.glob("lib/python*/site-packages")).joinpath("project.pth").write_text(link, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", *PACKAGES], check=True)
    return python


def summary(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return medians that exclude the first step, which warms up caches and memory pools."""
    tokens = [line["throughput/tokens_per_second"] * line["time/step"] for line in lines]
    times = {name: [line[f"time/{name}"] for line in lines] for name in TIMES if f"time/{name}" in lines[0]}
    return {
        "median_seconds": {name: median(seconds[1:]) for name, seconds in times.items()},
        "median_tokens": median(tokens[1:]),
        "peak_pss_gb": lines[-1]["memory/peak_pss_gb"],
        "seconds": times,
    }


def ahead_of_training(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    runs = {}
    for max_staleness in (0, 1):
        folder = work / str(max_staleness)
        folder.mkdir()
        keys = (*SEPARATE, f"run.steps={LEFT_OUT + arguments.steps}", f"rollout.max_staleness={max_staleness}")
        lines, conditions = train(folder, QUICKSTART, *keys)
        runs[str(max_staleness)] = conditions | means(lines[LEFT_OUT:])
    return {
        "cpu_percent_elsewhere": max(run["cpu_percent_elsewhere"] for run in runs.values()),
        "steps": arguments.steps,
        "runs": runs,
        "gain": runs["1"]["tokens_per_second"] / runs["0"]["tokens_per_second"],
    }


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    seconds = sum(step["time/step"] for step in steps)
    return {
        "tokens_per_second": sum(step["throughput/tokens_per_second"] * step["time/step"] for step in steps) / seconds,
        "step_s": seconds / len(steps),
        "engines_idle": fmean(step["idle/engines"] for step in steps),
        "actor_idle": fmean(step["idle/actor"] for step in steps),
        "staleness_max": max(step["weights/staleness_max"] for step in steps),
    }


def after_a_loss(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Kill a rank after step 2, once with ranks that are replaced, and once in a run that is resumed."""
    keys, every_step = (f"run.steps={2 + arguments.steps}", "run.export=false"), "checkpoint.every_steps=1"
    replaced, resumed = work / "replaced", work / "resumed"
    for folder in (replaced, resumed):
        folder.mkdir()
    with ThreadPoolExecutor(1) as thread:
        killed = thread.submit(kill_a_rank, replaced / "run")
        lines, conditions = train(replaced, QUICKSTART, *keys, "cluster.replace_ranks=true")
        killed.result()
        [lost] = [line for line in lines if "time/recovery" in line]
        others = [line for line in lines[1:] if line is not lost]
        killed = thread.submit(kill_a_rank, resumed / "run")
        command = [*MEGARL, "train", str(QUICKSTART), f"run.folder={resumed}", "run.name=run", *keys, every_step]
        subprocess.run([*command, "cluster.replace_ranks=false"], capture_output=True)
        killed_at = killed.result()
    train(resumed, QUICKSTART, *keys, every_step, "resume=auto")
    step_s = median(line["time/step"] for line in others)
    spans = [json.loads(line) for line in (resumed / "run/logs/attempt_2/trace.jsonl").read_text().splitlines()]
    trained = next(span["end"] for span in spans if span["task"] == "train")
    return conditions | {
        "step_s": step_s,
        "copy_s": median(line["time/copy"] for line in others),
        "replacement_s": lost["time/recovery"],
        "lost_s": {"replaced": lost["time/step"] - step_s, "resumed": trained - killed_at - step_s},
    }


def kill_a_rank(run: Path) -> float:
    """Kill a trainer rank of a run in this process's session after step 2, and return the time."""
    await_step(run, 2)
    own_actors(run, "trainer-")[0].kill()
    return time.time()


def with_spares(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Kill a rank once in a run without spare processes, and once in a run in which all of them are ready."""
    (work / "recipe").mkdir()
    recipe, runs = write_recipe(work / "recipe"), {}
    with ThreadPoolExecutor(1) as thread:
        for name in ("new", "spare"):
            folder, has_spares = work / name, name == "spare"
            folder.mkdir()
            killed = thread.submit(kill_while_held, folder / "run", recipe.with_name("hold"), has_spares)
            keys = (*FOUR_RANKS, f"run.steps={3 + arguments.steps}", f"cluster.spare_processes={has_spares}".lower())
            lines, conditions = train(folder, recipe, *keys)
            step, killed_at, memory = killed.result()
            spans = [json.loads(line) for line in (folder / "run/logs/attempt_1/trace.jsonl").read_text().splitlines()]
            [ended] = [span["end"] for span in spans if span["task"] == f"step {step}"]
            lost = next(line for line in lines if line["step"] == step)
            times = [line["time/step"] for line in lines[1:] if line is not lost]
            figures = {"step_s": median(times), "replacement_s": lost["time/recovery"], "lost_s": ended - killed_at}
            runs[name] = conditions | figures | {"spare_gb": memory}
    return {"cpu_percent_elsewhere": max(run["cpu_percent_elsewhere"] for run in runs.values()), "runs": runs}


def kill_while_held(run: Path, hold: Path, has_spares: bool) -> tuple[int, float, float]:
    """Hold the run in a step until its spares, if any, are ready. Then kill a rank and release the run, which trains
    next. Return the step, the time, and the mean memory (PSS) of the spares in 10⁹ bytes."""
    await_step(run, 2)
    hold.touch()
    step, held = 0, hold.with_name("held")
    while step <= len(read_metrics(run)):  # the step in which `hold` appeared may still end
        step = len(read_metrics(run)) + 1
        held.unlink(missing_ok=True)
        while not held.exists():
            time.sleep(0.1)
    ranks = own_actors(run, "trainer-")
    while has_spares and not are_ready(run, len(ranks)):
        time.sleep(0.1)
    spares = own_actors(run, "spare-")
    memory = fmean(spare.memory_full_info().pss for spare in spares) / 1e9 if spares else 0.0
    time.sleep(SETTLE_S)
    ranks[0].kill()
    hold.unlink()
    return step, time.time(), memory


def are_ready(run: Path, count: int) -> bool:
    texts = [log.read_text(encoding="utf-8") for log in run.glob("logs/attempt_1/spare-*.log")]
    return sum("ready to become a rank" in text for text in texts) == count


def own_actors(run: Path, name: str) -> list[psutil.Process]:
    """Return the trainers' actors of a run in this process's session whose logs have names that start with `name`."""
    actors = [process for process in psutil.process_iter() if process.name().startswith("ray::TrainerAct")]
    own = [process for process in actors if os.getpid() in {parent.pid for parent in process.parents()}]
    return [process for process in own if Path(f"/proc/{process.pid}/fd/2").readlink().name.startswith(name)]


def await_step(run: Path, number: int) -> None:
    while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < number:
        time.sleep(0.1)


MEASUREMENTS = {"trl": against_trl, "staleness": ahead_of_training, "recovery": after_a_loss, "spares": with_spares}


if __name__ == "__main__":
    steps = ("--steps", dict(type=int, default=5, help="steps of each run, at least 2 (%(default)s)"))
    run_benchmark(__doc__, MEASUREMENTS, steps)
