"""`megarl launch`: a recipe becomes a job. All that can be wrong is said before it is queued."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from megarl.config.load import dump, load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.files import replace_text
from megarl.launch.checks import ask_slurm, check, check_slurm
from megarl.launch.fewer import fewer_replicas
from megarl.launch.folder import Job, JobFolder
from megarl.launch.request import Request
from megarl.launch.script import render
from megarl.run.beginning import check_beginning
from megarl.run.folder import RunFolder


def launch(
    file: Path, overrides: Sequence[str], request: Request, sweeps: Sequence[str], dry_run: bool
) -> Iterator[str]:
    """Check a recipe, writes its job and submits it. Yields lines for people. dry_run: nothing is submitted.

    sweeps   KEY=VALUE,VALUE…; a run for each combination, named after the recipe's with a number

    Raises UserError, with nothing submitted, for all that can be found wrong here.
    """
    points = _points(sweeps)
    configs = [_config(file, [*overrides, *point], request, i if sweeps else None) for i, point in enumerate(points)]
    folder = JobFolder.of(RunFolder.of(_config(file, overrides, request, None)).path)
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
        given = [*overrides, *points[number], *fewer_replicas(configs[number], nodes)]
        return _config(file, given, replace(request, nodes=nodes), number if sweeps else None)

    smaller = _smaller(request, unfinished, on_fewer)
    if smaller:
        yield f"attempts are on {request.nodes} nodes or, where some are lost, on {' or '.join(map(str, smaller))}"
    if not dry_run:
        check_slurm(request)
    _refuse_second(folder)
    script = render(request, folder.path.parent, [request.nodes, *smaller], unfinished if sweeps else ())
    if not dry_run:
        _try(script)
    for number in unfinished:
        on_each = {nodes: found[number] for nodes, found in smaller.items()}
        yield f"wrote {_write(request, {request.nodes: configs[number], **on_each})}"
    folder.path.mkdir(parents=True, exist_ok=True)
    replace_text(folder.script, script)
    yield f"wrote {folder.script}"
    if dry_run:
        yield "dry run: nothing was submitted"
        return
    number = ask_slurm("sbatch", "--parsable", str(folder.script)).strip().split(";")[0]
    replace_text(folder.submitted, f"{number}\n")
    yield f"submitted job {number}; its output: {folder.path}/job-{number}*.log"


def _try(script: str) -> None:
    """Ask Slurm whether it would take the script. Raises UserError where it would not."""
    with tempfile.NamedTemporaryFile("w", suffix=".sbatch") as file:
        file.write(script)
        file.flush()
        ask_slurm("sbatch", "--test-only", file.name)


def _points(sweeps: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each combination."""
    axes = []
    for sweep in sweeps:
        key, equals, values = sweep.partition("=")
        if not (key and equals and values):
            raise UserError(f"--sweep={sweep}: expected KEY=VALUE,VALUE, such as actor.optimizer.lr=1.0e-6,3.0e-6")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [list(point) for point in product(*axes)]


def _config(file: Path, overrides: Sequence[str], request: Request, number: int | None) -> Config:
    """Return the config of a run in a job: it goes on by itself, saves when it is told to end, and is on all nodes."""
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


def _smaller(
    request: Request, runs: Sequence[int], on_fewer: Callable[[int, int], Config]
) -> dict[int, dict[int, Config]]:
    """Return the configs on fewer nodes, by the number of nodes and of the run, as far as the options allow it and all
    runs can be on so few. Raises UserError where they can be on none. on_fewer: returns the config of nodes and run."""
    if request.fewest is None:
        return {}
    if not 1 <= request.fewest < request.nodes:
        raise UserError(f"--fewest-nodes={request.fewest}: expected 1 to {request.nodes - 1}, fewer than --nodes")
    found: dict[int, dict[int, Config]] = {}
    refused: dict[int, str] = {}
    for nodes in range(request.nodes - 1, request.fewest - 1, -1):
        try:
            configs = {run: on_fewer(nodes, run) for run in runs}
            for config in configs.values():
                check(replace(request, nodes=nodes), config)
        except UserError as reason:
            refused[nodes] = str(reason).splitlines()[0]
        else:
            found[nodes] = configs
    if not found:
        reasons = "; ".join(f"on {nodes}: {reason}" for nodes, reason in refused.items())
        raise UserError(f"--fewest-nodes={request.fewest}: the run can be on no fewer than {request.nodes}: {reasons}")
    return found


def _write(request: Request, configs: Mapping[int, Config]) -> Path:
    """Write what the tasks of a run read: its configs, by the number of nodes."""
    folder = JobFolder.of(RunFolder.of(configs[request.nodes]).path)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.forget_cause()
    folder.write_job(Job(str(Path.cwd()), request.nodes, request.gpus, request.stalled))
    for nodes, config in configs.items():
        replace_text(folder.recipe_on(nodes), dump(config))
    return folder.recipe


def _refuse_second(folder: JobFolder) -> None:
    """Raise UserError where a job of this run is queued or under way."""
    if not folder.submitted.exists() or shutil.which("squeue") is None:
        return
    number = folder.submitted.read_text(encoding="utf-8").strip()
    queued = [line.split("|") for line in ask_slurm("squeue", "--noheader", "--format=%F|%T").splitlines()]
    states = [state for job, state in queued if job == number]
    if states:
        raise UserError(
            f"{folder.path.parent}: job {number} is {states[0].lower()}; scancel {number} first, or wait for it"
        )
