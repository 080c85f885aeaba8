"""The job script, rendered from a template."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.core.credentials import has_credentials
from megarl.core.errors import UserError
from megarl.core.interpreter import MEGARL
from megarl.launch.folder import JobFolder
from megarl.launch.request import Request

TEMPLATE = Path(__file__).with_name("slurm.sbatch").resolve()
"""The default template. In a checkout, it is a symlink to launch/slurm.sbatch; in an installed package, a copy."""

VARIABLES = (
    *("SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURMD_NODENAME"),
    *("CUDA_VISIBLE_DEVICES", "MEGARL_NODES", "MEGARL_ALLOCATED", "MEGARL_SUBMITTED", "MEGARL_NOTICED"),
    "MEGARL_ALLOCATED_NODES",
)
"""Environment variables that tasks use. enroot is the only runtime that does not pass them on by default."""

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")


def render(request: Request, run: Path, sizes: Sequence[int], sweep: Sequence[int] = ()) -> str:
    """Render the job script. Raise UserError if the template has an unknown placeholder or the script contains
    credentials.

    Args:
        sizes: the node counts that an attempt may run on, largest first.
        sweep: the numbers of the runs in a sweep, whose folders are next to `run`.
    """
    template = request.template or TEMPLATE
    if len(sizes) > 1 and "@sizes@" not in template.read_text(encoding="utf-8"):
        raise UserError(
            f"--template={template}: --fewest-nodes={request.fewest} requires the placeholder @sizes@. Fix: copy the "
            f"lines with @sizes@ from {TEMPLATE}"
        )
    _require_no_credentials(request, template)
    values = _values(request, run, sizes, sweep)

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(
                f"--template={template}: unknown placeholder @{match[1]}@. Fix: use one of "
                f"{', '.join(f'@{name}@' for name in values)}"
            )
        return values[match[1]]

    return _PLACEHOLDER.sub(fill, template.read_text(encoding="utf-8"))


def _require_no_credentials(request: Request, template: Path) -> None:
    """Raise UserError if an option or the template contains credentials, because other users may read the script."""
    texts = {
        **{"setup": request.setup, "option": request.options, "mount": request.mounts},
        **{name: [getattr(request, name) or ""] for name in ("command", "image", "partition", "account")},
        "template": template.read_text(encoding="utf-8").splitlines(),
    }
    for name, lines in texts.items():
        if any(map(has_credentials, lines)):
            raise UserError(
                f"--{name}: contains credentials, which megarl would write to job.sbatch. Fix: export the environment "
                "variable before megarl launch, and pass it to the job with --option=--export=ALL, or source a file "
                "that only you can read, as in --setup '. ~/.secrets'"
            )


def _values(request: Request, run: Path, sizes: Sequence[int], sweep: Sequence[int]) -> Mapping[str, str]:
    options = [f"--gpus-per-node={request.gpus}"] if request.gpus else []
    options += [f"--partition={request.partition}"] if request.partition else []
    options += [f"--account={request.account}"] if request.account else []
    options += [f"--array={','.join(map(str, sweep))}"] if sweep else []
    srun_options, wrapper = _container(request, run)
    command = MEGARL if request.container == "none" else ("megarl",)
    return {
        "name": run.name,
        "nodes": str(request.nodes),
        "sizes": " ".join(map(str, sizes)),
        "all_nodes": str(request.nodes + request.spares),
        "time": request.time,
        "signal_s": str(request.grace),
        "output": shlex.quote(str(JobFolder(run).path / ("job-%A_%a.log" if sweep else "job-%j.log"))),
        "sbatch_options": "\n".join(f"#SBATCH {option}" for option in [*options, *request.options]),
        "restarts": str(request.restarts),
        "run": shlex.quote(str(run)),
        "megarl": shlex.join([*wrapper, *(command if request.command is None else shlex.split(request.command))]),
        "srun_options": shlex.join(srun_options),
        "setup": "\n".join(request.setup),
    }


def mounts(request: Request, run: Path) -> list[str]:
    """Return the container's mounts as SOURCE:DESTINATION: the parent of the run's folder, the current directory, and
    the requested mounts."""
    default = [f"{folder}:{folder}" for folder in dict.fromkeys((str(run.parent), str(Path.cwd())))]
    return [*default, *request.mounts]


def _container(request: Request, run: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Return the srun options and the wrapper command that run a task in the container."""
    all_mounts = mounts(request, run)
    if request.container == "pyxis":
        return (f"--container-image={request.image}", f"--container-mounts={','.join(all_mounts)}"), ()
    if request.container == "enroot":
        variables = [f"--env={name}" for name in VARIABLES]
        return (), ("enroot", "start", *variables, *(f"--mount={mount}" for mount in all_mounts), str(request.image))
    if request.container == "apptainer":
        binds = [word for mount in all_mounts for word in ("--bind", mount)]
        return (), ("apptainer", "exec", *(["--nv"] if request.gpus else []), *binds, str(request.image))
    return (), ()
