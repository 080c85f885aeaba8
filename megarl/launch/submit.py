"""`megarl launch`: check a recipe and submit it as a Slurm job."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from megarl.config.load import dump, load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.files import read_text, replace_text
from megarl.launch.checks import check, check_slurm, plan_of, run_slurm
from megarl.launch.folder import Job, JobFolder
from megarl.launch.request import Request
from megarl.launch.script import render
from megarl.planner.predicted_time import write_prediction
from megarl.run.beginning import check_beginning
from megarl.run.folder import RunFolder


def launch(
    file: Path, overrides: Sequence[str], request: Request, sweeps: Sequence[str], dry_run: bool
) -> Iterator[str]:
    """Check a recipe, write its job files and submit the job. Yield progress lines. Raise UserError before anything is
    submitted if a check fails. sweeps: axes of a sweep as KEY=VALUE,VALUE…. Each combination becomes a run, named after
    the recipe's run with a number appended."""
    points = _points(sweeps)
    configs = [_config(file, [*overrides, *point], request, i if sweeps else None) for i, point in enumerate(points)]
    folder = JobFolder(RunFolder.of(_config(file, overrides, request, None)).path)
    unfinished = []
    for number, (config, point) in enumerate(zip(configs, points, strict=True)):
        lines = check(request, config)
        yield from (f"{config.run.name}: {line}" for line in (" ".join(point), *lines) if line)
        if finished := check_beginning(config):
            yield finished
        else:
            unfinished.append(number)
    if not unfinished:
        return

    def on_fewer(nodes: int, number: int) -> Config:
        changes = [*overrides, *points[number], *_fewer_replicas(configs[number], nodes)]
        return _config(file, changes, replace(request, nodes=nodes), number if sweeps else None)

    smaller = _configs_for_fewer_nodes(request, unfinished, on_fewer)
    if smaller:
        yield f"attempts use {request.nodes} nodes, or {' or '.join(map(str, smaller))} after nodes are lost"
    if not dry_run:
        check_slurm(request)
    _refuse_duplicate(folder)
    script = render(request, folder.path.parent, [request.nodes, *smaller], unfinished if sweeps else ())
    if not dry_run:
        _test_submission(script)
    for number in unfinished:
        by_nodes = {nodes: by_run[number] for nodes, by_run in smaller.items()}
        yield f"wrote {_write(request, {request.nodes: configs[number], **by_nodes})}"
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_text(folder.script, script)
    yield f"wrote {folder.script}"
    if dry_run:
        yield "dry run: nothing was submitted"
        return
    number = run_slurm("sbatch", "--parsable", str(folder.script)).strip().split(";")[0]
    replace_text(folder.submitted, f"{number}\n")
    yield f"submitted job {number}, which writes to {folder.path}/job-{number}*.log"


def _test_submission(script: str) -> None:
    """Raise UserError if Slurm would reject the script."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        run_slurm("sbatch", "--test-only", file.name)


def _points(sweeps: Sequence[str]) -> list[list[str]]:
    """Return the overrides for each combination in the sweep."""
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not (key and equals and values):
            raise UserError(
                f"--sweep={sweep}: expected KEY=VALUE,VALUE. Fix: use this form, such as "
                "actor.optimizer.lr=1.0e-6,3.0e-6"
            )
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [list(point) for point in product(*axes)]


def _config(file: Path, overrides: Sequence[str], request: Request, number: int | None) -> Config:
    """Return the config for a run in a job. It resumes automatically and saves on a signal."""
    config = load(file, overrides)
    name = config.run.name if number is None else f"{config.run.name}-{number}"
    keys = {
        "resume": "auto",
        "run.name": name,
        "run.folder": str(RunFolder.of(config).path.parent),
        "cluster.nodes": request.nodes,
        "checkpoint.on_signal": "true",
        "checkpoint.grace_s": float(max(0, request.saving_seconds)),
    }
    return load(file, [*overrides, *(f"{key}={value}" for key, value in keys.items())])


def _configs_for_fewer_nodes(
    request: Request, runs: Sequence[int], on_fewer: Callable[[int, int], Config]
) -> dict[int, dict[int, Config]]:
    """Return the configs for fewer nodes, keyed by node count and run number. Only node counts that every run supports
    are included. Raise UserError if --fewest-nodes is set and no node count qualifies. on_fewer: returns the config for
    a node count and a run number."""
    if request.fewest is None:
        return {}
    if not 1 <= request.fewest < request.nodes:
        raise UserError(
            f"--fewest-nodes={request.fewest}: expected a number from 1 to {request.nodes - 1}, below --nodes. Fix: "
            "choose a number in this range, or remove the option"
        )
    by_nodes: dict[int, dict[int, Config]] = {}
    rejected: dict[int, str] = {}
    for nodes in range(request.nodes - 1, request.fewest - 1, -1):
        try:
            configs = {run: on_fewer(nodes, run) for run in runs}
            for config in configs.values():
                check(replace(request, nodes=nodes), config)
        except UserError as error:
            rejected[nodes] = str(error).splitlines()[0]
        else:
            by_nodes[nodes] = configs
    if not by_nodes:
        reasons = "; ".join(f"on {nodes}: {reason}" for nodes, reason in rejected.items())
        raise UserError(
            f"--fewest-nodes={request.fewest}: the run needs at least {request.nodes} nodes ({reasons}). Fix: remove "
            "--fewest-nodes, or change the layouts"
        )
    return by_nodes


def _fewer_replicas(config: Config, nodes: int) -> list[str]:
    """Return the overrides that scale data-parallel replicas and engines down to `nodes` nodes. Batches stay the same,
    so updates are equal up to rounding. Raise UserError if a count does not scale to an integer."""
    num_nodes = config.cluster.nodes
    if config.cluster.roles.assigned:
        raise UserError(
            "cluster.roles: explicit device ranges do not fit on fewer nodes. Fix: remove cluster.roles and set "
            "cluster.placement"
        )
    counts = {f"{placed.section}.layout.dp": placed.layout.dp for placed in config.all_placed}
    if own := [teacher.name for teacher, _ in config.placed_teachers if teacher.layout is not None]:
        raise UserError(
            f"teachers.models: {own[0]} with layout: a teacher's own layout cannot be scaled to fewer nodes. Fix: "
            f"remove layout from {own[0]}, and set teachers.layout"
        )
    if not config.is_offline:
        counts["rollout.replicas"] = config.rollout.replicas
    for key, count in counts.items():
        if count * nodes % num_nodes:
            raise UserError(f"{key}={count}: {count} x {nodes} / {num_nodes} nodes is not an integer")
    return [f"{key}={count * nodes // num_nodes}" for key, count in counts.items()]


def _write(request: Request, configs: Mapping[int, Config]) -> Path:
    """Write a run's job settings and its configs, which are keyed by node count. Return the main config file."""
    folder = JobFolder(RunFolder.of(configs[request.nodes]).path)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.forget_cause()
    folder.write_job(Job(str(Path.cwd()), request.nodes, request.gpus, request.stalled))
    for nodes, config in configs.items():
        replace_text(folder.recipe_on(nodes), dump(config))
    if request.gpus:
        write_prediction(plan_of(request, configs[request.nodes]), folder.path.parent)
    return folder.recipe


def _refuse_duplicate(folder: JobFolder) -> None:
    """Raise UserError if a job for this run is already queued or running."""
    if not os.path.lexists(folder.submitted) or shutil.which("squeue") is None:
        return
    number = read_text(folder.submitted).strip()
    queued = [line.split("|") for line in run_slurm("squeue", "--noheader", "--format=%F|%T").splitlines()]
    states = [state for job, state in queued if job == number]
    if states:
        raise UserError(
            f"{folder.path.parent}: job {number} of this run is {states[0].lower()}. Fix: cancel it with scancel "
            f"{number}, or wait until it ends"
        )
