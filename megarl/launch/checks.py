"""What can be found wrong with a job before it is queued, on the login node."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megarl.cluster.placement import place
from megarl.config.device_spans import device_spans, num_devices
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.launch.named_files import Named, named_files
from megarl.launch.request import CONTAINERS, HANDLING_S, Request
from megarl.launch.script import mounts
from megarl.planner.hardware import read_cluster
from megarl.planner.plan import plan_recipe

RUN = "run.folder"

SLACK_S = 60
"""The seconds by which Slurm's signal before a time limit may come early."""

START_S = 120
"""The seconds that a run on GPUs takes until its first step, at the least: engines load and capture graphs."""

NODE_LOCAL = ("tmpfs", "ramfs", "devtmpfs")
"""Kinds of file systems that are in a machine's memory."""

ON_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay")
"""Kinds of file systems that are on a machine's own disks; others see them where it exports them."""


def check(request: Request, config: Config) -> list[str]:
    """Raise UserError with a line for each thing that is wrong, as far as it can be known without Slurm: layout and
    nodes, time, files, container. Return lines of what was found."""
    raise_all([*_broken_options(request), *_broken_paths(request, config)])
    found = [_check_layout(request, config)]
    if request.gpus:
        found.append(_check_plan(request, config))
    if request.image is not None and not _is_file(request.image):
        found.append(f"--image={request.image}: the nodes fetch it by this name; nobody has asked its registry for it")
    return [*found, *_doubtful_paths(request, config)]


def _broken_options(request: Request) -> Iterator[str]:
    counts = {"spares": (request.spares, 0), "gpus-per-node": (request.gpus, 0)}
    counts |= {
        "grace": (request.grace, HANDLING_S + 1),
        "restarts": (request.restarts, 0),
        "stalled": (request.stalled, 1),
    }
    for name, (value, least) in counts.items():
        if value < least:
            yield f"--{name}={value}: expected at least {least}"
    if request.seconds <= request.grace + SLACK_S:
        yield (
            f"--time={request.time}: {request.seconds} s, but the run is told to save --grace={request.grace} s before "
            f"the end, and Slurm may tell it {SLACK_S} s earlier; ask for more time"
        )
    if request.container not in CONTAINERS:
        yield f"--container={request.container}: expected one of {', '.join(CONTAINERS)}"
    elif (request.container == "none") != (request.image is None):
        yield f"--container={request.container}: --image={request.image or ''} does not go with it; give both or none"
    if request.image is not None and _is_file(request.image) and not Path(request.image).exists():
        yield f"--image={request.image}: there is no such file; give the path of one, or a registry's name"
    for mount in request.mounts:
        if not Path(mount.split(":")[0]).exists():
            yield f"--mount={mount}: {mount.split(':')[0]} is not there"
    if request.template is not None and not request.template.is_file():
        yield f"--template={request.template}: there is no such file"


def _is_file(image: str) -> bool:
    return image.startswith(("/", ".", "~")) or image.endswith((".sqsh", ".sif"))


def _broken_paths(request: Request, config: Config) -> Iterator[str]:
    """Yield a line for each path that other machines cannot see, or that is not there."""
    for named in _named_here(request, config):
        there = _existing(named)
        if there.is_relative_to(Path(tempfile.gettempdir()).resolve()) or _kind(there) in NODE_LOCAL:
            yield (
                f"{named.key}={named.path}: it lies on {there}, which only this machine has; use a folder on the file "
                "system that all nodes share"
            )
        if named.key != RUN and not named.is_there:
            yield named.missing("give its path on the file system that all nodes share")


def _doubtful_paths(request: Request, config: Config) -> Iterator[str]:
    """Yield a line for each path that other machines see if this one exports it to them."""
    if request.nodes + request.spares == 1:
        return
    for named in _named_here(request, config):
        if (kind := _kind(_existing(named))) in ON_DISKS:
            yield (
                f"warning: {named.key}={named.path} is on a disk of this machine ({kind}): the job fails at its start "
                "unless its nodes see the same files there"
            )


def _named_here(request: Request, config: Config) -> list[Named]:
    """Return the run's folder, and the files that the recipe names, as far as they are not in an image, by their paths
    outside of it."""
    named = [Named(RUN, config.run.folder, is_folder=True), *named_files(config)]
    outside = [(each, _outside(each.path, request, config)) for each in named]
    return [replace(each, path=path) for each, path in outside if path is not None]


def _outside(path: str, request: Request, config: Config) -> str | None:
    """Return the path that a container has mounted as this one, None for one in its image."""
    if request.container == "none":
        return path
    wanted = Path(path).expanduser().absolute()
    for mount in mounts(request, Path(config.run.folder).expanduser() / config.run.name):
        outside, _, inside = mount.partition(":")
        inside = inside.partition(":")[0] or outside
        if wanted.is_relative_to(inside):
            return str(Path(outside) / wanted.relative_to(inside))
    return None


def _existing(named: Named) -> Path:
    """Return the folder in which it would be made, or itself where it is there, with links followed."""
    given = Path(named.path).expanduser().absolute()
    return next(above for above in (given, *given.parents) if above.exists()).resolve()


def _kind(path: Path) -> str:
    """Return the kind of the file system that a path is on."""
    mounted = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(where), kind) for _, where, kind, *_ in mounted if path.is_relative_to(where)]
    return max(above)[1]


def _check_layout(request: Request, config: Config) -> str:
    """Check that the ranks fill the nodes."""
    needed, there = num_devices(config), request.nodes * request.gpus
    idle = set(range(needed)).difference(*device_spans(config).values())
    if request.gpus and idle:
        raise UserError(f"cluster.roles: GPU {min(idle)} of {there} has no role; give each of them one")
    if request.gpus and needed != there:
        enough = -(-needed // request.gpus)
        remedy = f"give --nodes={enough}, or lower dp" if needed > there else "raise dp"
        raise UserError(
            f"--nodes={request.nodes}: the layouts have {needed} ranks with a GPU each, and {request.nodes} x "
            f"--gpus-per-node={request.gpus} are {there} GPUs; {remedy} of the layouts or rollout.replicas (see megarl "
            "plan)"
        )
    on_gpus = request.gpus > 0
    placed = place(config, cores=1, on_gpus=on_gpus, gpus_per_node=request.gpus if on_gpus else None)
    return placed.describe()


def _check_plan(request: Request, config: Config) -> str:
    """Check that the recipe fits on the GPUs, and that the time is enough for a step."""
    gpus = f"{request.nodes * request.gpus}x{request.gpu}"
    planned = plan_recipe(config, read_cluster(gpus, request.gpus), as_it_is=True).best
    step, start = planned.times.seconds, START_S + request.grace + SLACK_S
    if request.seconds < start + step:
        raise UserError(
            f"--time={request.time}: {request.seconds} s, but a step takes about {step:.0f} s (megarl plan), after "
            f"{START_S} s to start, and --grace={request.grace} and {SLACK_S} s are kept for saving; ask for "
            f"{-(-int(start + step) // 60)} minutes or more"
        )
    said = f"a step takes about {step:.0f} s; the fullest GPU, {planned.fullest.phase}: {planned.fullest.arithmetic}"
    if step > request.saving_seconds:
        said += (
            f"\n--grace={request.grace} leaves {request.saving_seconds} s to end a step: at the end of an allocation "
            f"the run loses its steps since the last checkpoint; --grace={int(step) + 2 * HANDLING_S} saves them"
        )
    return said


def ask_slurm(*command: str) -> str:
    """Return what a command of Slurm prints. Raises UserError with its words where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command[0]}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return done.stdout


def check_slurm(request: Request) -> None:
    """Raise UserError where there is no Slurm here, or it does not know the partition, or has fewer nodes in it."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: there is none here; run this on a login node of the cluster, or with --dry-run")
    if request.partition is None:
        return
    sizes: dict[str, int] = {}
    for name, count in (line.split("|") for line in ask_slurm("sinfo", "--noheader", "--format=%R|%D").splitlines()):
        sizes[name] = sizes.get(name, 0) + int(count)
    if request.partition not in sizes:
        raise UserError(f"--partition={request.partition}: Slurm has none of this name, but {', '.join(sorted(sizes))}")
    if sizes[request.partition] < request.nodes + request.spares:
        raise UserError(
            f"--partition={request.partition}: it has {sizes[request.partition]} nodes, and --nodes={request.nodes} + "
            f"--spares={request.spares} are asked for"
        )
