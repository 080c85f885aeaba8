"""The script of a job: a template of launch/, filled in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.core.errors import UserError
from megarl.launch.folder import JobFolder
from megarl.launch.request import Request

TEMPLATE = Path(__file__).with_name("slurm.sbatch").resolve()
"""The template that comes with megarl: beside this file, in a checkout, is a link to the one of launch/, and in an
installed package a copy of it."""

VARIABLES = (
    *("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME"),
    *("CUDA_VISIBLE_DEVICES", "MEGARL_NODES", "MEGARL_ALLOCATED"),
)
"""The variables of a task, which enroot alone does not hand on by itself."""

_PLACE = re.compile(r"@([a-z_]+)@")


def render(request: Request, run: Path, sizes: Sequence[int], sweep: Sequence[int] = ()) -> str:
    """Return the script for the run in this folder, or for the runs of a sweep beside it, by their numbers. Raises
    UserError for a template with an unknown place. sizes: the numbers of nodes that an attempt can be on."""
    template = request.template or TEMPLATE
    if len(sizes) > 1 and "@sizes@" not in template.read_text(encoding="utf-8"):
        raise UserError(
            f"{template}: --fewest-nodes={request.fewest} needs the place @sizes@, which {TEMPLATE} has; copy that part"
        )
    values = _values(request, run, sizes, sweep)

    def fill(place: re.Match[str]) -> str:
        if place[1] not in values:
            raise UserError(
                f"{template}: @{place[1]}@ is unknown; there are {', '.join(f'@{name}@' for name in values)}"
            )
        return values[place[1]]

    return _PLACE.sub(fill, template.read_text(encoding="utf-8"))


def _values(request: Request, run: Path, sizes: Sequence[int], sweep: Sequence[int]) -> Mapping[str, str]:
    options = [f"--gpus-per-node={request.gpus}"] if request.gpus else []
    options += [f"--partition={request.partition}"] if request.partition else []
    options += [f"--account={request.account}"] if request.account else []
    options += [f"--array={','.join(map(str, sweep))}"] if sweep else []
    around, inside = _container(request, run)
    return {
        "name": run.name,
        "nodes": str(request.nodes),
        "sizes": " ".join(map(str, sizes)),
        "all_nodes": str(request.nodes + request.spares),
        "time": request.time,
        "signal_s": str(request.grace),
        "output": shlex.quote(str(JobFolder.of(run).path / ("job-%A_%a.log" if sweep else "job-%j.log"))),
        "sbatch_options": "\n".join(f"#SBATCH {option}" for option in [*options, *request.options]),
        "restarts": str(request.restarts),
        "run": shlex.quote(str(run)),
        "megarl": shlex.join([*inside, *_command(request)]),
        "srun_options": shlex.join(around),
        "setup": "\n".join(request.setup),
    }


def _command(request: Request) -> Sequence[str]:
    if request.command is not None:
        return shlex.split(request.command)
    return (sys.executable, "-m", "megarl.cli") if request.container == "none" else ("megarl",)


def mounts(request: Request, run: Path) -> list[str]:
    """Return the folders of outside that a container has, as SOURCE:DESTINATION: the one that the run's is in, the one
    from which the job was launched, and those that are asked for."""
    own = [f"{folder}:{folder}" for folder in dict.fromkeys((str(run.parent), str(Path.cwd())))]
    return [*own, *request.mounts]


def _container(request: Request, run: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Return the options of srun, and the command, by which a task is in the container."""
    binding = mounts(request, run)
    if request.container == "pyxis":
        return (f"--container-image={request.image}", f"--container-mounts={','.join(binding)}"), ()
    if request.container == "enroot":
        variables = [f"--env={name}" for name in VARIABLES]
        return (), ("enroot", "start", *variables, *(f"--mount={mount}" for mount in binding), str(request.image))
    if request.container == "apptainer":
        binds = [word for mount in binding for word in ("--bind", mount)]
        return (), ("apptainer", "exec", *(["--nv"] if request.gpus else []), *binds, str(request.image))
    return (), ()
