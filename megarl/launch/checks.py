"""Checks a job on the login node before submission."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from megarl.cluster.placement import place
from megarl.config.device_spans import device_spans, num_devices
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.launch.named_files import NamedPath, named_files
from megarl.launch.request import CONTAINERS, HANDLING_S, Request
from megarl.launch.script import mounts
from megarl.models.folder import DRAFT_KEY, all_model_paths, resolve
from megarl.models.tokenizer import require_tokenizer
from megarl.models.weight_files import require_files
from megarl.planner.hardware import read_cluster
from megarl.planner.plan import plan_recipe
from megarl.planner.step_plan import StepPlan

RUN_FOLDER = "run.folder"

SLACK_S = 60
"""Slurm may send its signal up to this many seconds early."""

START_S = 120
"""Minimum seconds until the first step of a GPU run: engines load weights and capture CUDA graphs."""

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
"""File system types that are stored in a machine's memory."""

DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "overlay")
"""File system types on local disks. Other machines can access them only if they are exported."""


def check(request: Request, config: Config) -> list[str]:
    """Run all checks that do not need Slurm: layout and nodes, time limit, files, container. Return informational
    lines. Raise UserError with one line per problem."""
    raise_all([*_option_errors(request), *_path_errors(request, config)])
    raise_all([*dict.fromkeys(_model_errors(request, config))])  # two roles may use the same folder
    lines = [_check_layout(request, config)]
    if request.gpus:
        lines.append(_check_plan(request, config))
    if request.image is not None and not _is_file(request.image):
        lines.append(f"--image={request.image}: not checked, because the nodes pull it from a registry")
    return [*lines, *_path_warnings(request, config)]


def _option_errors(request: Request) -> Iterator[str]:
    counts = {"spares": (request.spares, 0), "gpus-per-node": (request.gpus, 0)}
    counts |= {
        "grace": (request.grace, HANDLING_S + 1),
        "restarts": (request.restarts, 0),
        "stalled": (request.stalled, 1),
    }
    for name, (value, minimum) in counts.items():
        if value < minimum:
            yield f"--{name}={value}: expected at least {minimum}. Fix: set --{name}={minimum} or more"
    if request.seconds <= request.grace + SLACK_S:
        yield (
            f"--time={request.time}: {request.seconds} s is too short, because the run starts to save "
            f"--grace={request.grace} s before the end, or up to {SLACK_S} s earlier. Fix: raise --time, or lower "
            "--grace"
        )
    if request.container not in CONTAINERS:
        yield f"--container={request.container}: unknown container runtime. Fix: use one of {', '.join(CONTAINERS)}"
    elif (request.container == "none") != (request.image is None):
        yield (
            f"--container={request.container}: does not match --image={request.image or ''}. Fix: pass both options or "
            "neither"
        )
    if request.image is not None and _is_file(request.image) and not Path(request.image).exists():
        yield (
            f"--image={request.image}: the file does not exist. Fix: use an existing file, or the name of an image in "
            "a registry"
        )
    for mount in request.mounts:
        if not Path(mount.split(":")[0]).exists():
            yield f"--mount={mount}: {mount.split(':')[0]} does not exist. Fix: use an existing source path"
    if request.template is not None and not request.template.is_file():
        yield f"--template={request.template}: the file does not exist. Fix: use the path of an existing template"


def _is_file(image: str) -> bool:
    return image.startswith(("/", ".", "~")) or image.endswith((".sqsh", ".sif"))


def _path_errors(request: Request, config: Config) -> Iterator[str]:
    """Yield an error for each path that is missing or invisible to other machines."""
    for named in _host_paths(request, config):
        existing = _existing_path(named)
        if (
            existing.is_relative_to(Path(tempfile.gettempdir()).resolve())
            or _file_system_type(existing) in MEMORY_FILE_SYSTEMS
        ):
            yield (
                f"{named.key}={named.path}: {existing} exists only on this machine. Fix: use a folder on a file system "
                "that all nodes share"
            )
        if named.key != RUN_FOLDER and not named.exists:
            yield named.missing_error("use a path on a file system that all nodes share")


def _model_errors(request: Request, config: Config) -> Iterator[str]:
    """Yield an error for each model folder that lacks a file the run needs: config.json, weights or a tokenizer. Hub
    ids and folders inside the image are not checked."""
    used = {
        "model.path": True,
        "critic.path": config.has_critic,
        "reward_model.path": config.has_reward_model,
        "implicit_reward.path": config.has_implicit_reward,
        DRAFT_KEY: config.rollout.has_draft_model,
        **{teacher.path_key: config.has_teachers for teacher in config.teachers.models if teacher.path is not None},
    }
    for key, path in all_model_paths(config).items():
        host_path = _host_path(path, request, config) if used[key] else None
        if host_path is None or not Path(host_path).expanduser().is_dir():
            continue
        try:
            folder = resolve(host_path, key=key)
        except UserError as error:
            yield str(error)
            continue
        # An image model's tokenizer is in a sibling folder of its transformer.
        tokenizer = folder.parent / "tokenizer" if config.samples_images else folder
        has_none = key == "critic.path" or (key == DRAFT_KEY and config.rollout.drafts_with_eagle)
        needs_tokenizer = [] if has_none else [partial(require_tokenizer, tokenizer, key)]
        for require in (partial(require_files, folder), *needs_tokenizer):
            try:
                require()
            except UserError as error:
                yield str(error)


def _path_warnings(request: Request, config: Config) -> Iterator[str]:
    """Yield a warning for each path that other machines can access only if this one exports it."""
    if request.nodes + request.spares == 1:
        return
    for named in _host_paths(request, config):
        if (kind := _file_system_type(_existing_path(named))) in DISK_FILE_SYSTEMS:
            yield (
                f"warning: {named.key}={named.path} is on a local disk of this machine ({kind}). The job fails at "
                "startup unless all nodes mount it"
            )


def _host_paths(request: Request, config: Config) -> list[NamedPath]:
    """Return the run's folder and the paths that the recipe names, as seen from outside the container. Paths inside the
    image are omitted."""
    named = [NamedPath(RUN_FOLDER, config.run.folder, is_folder=True), *named_files(config)]
    host_paths = [(each, _host_path(each.path, request, config)) for each in named]
    return [replace(each, path=path) for each, path in host_paths if path is not None]


def _host_path(path: str, request: Request, config: Config) -> str | None:
    """Return the host path that the container mounts as `path`, or None if `path` is inside the image."""
    if request.container == "none":
        return path
    target = Path(path).expanduser().absolute()
    for mount in mounts(request, Path(config.run.folder).expanduser() / config.run.name):
        source, _, destination = mount.partition(":")
        destination = destination.partition(":")[0] or source
        if target.is_relative_to(destination):
            return str(Path(source) / target.relative_to(destination))
    return None


def _existing_path(named: NamedPath) -> Path:
    """Return the path itself or its closest existing parent, with symlinks resolved."""
    path = Path(named.path).expanduser().absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists()).resolve()


def _file_system_type(path: Path) -> str:
    """Return the type of the file system that contains the path."""
    entries = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    matches = [(len(mount_point), kind) for _, mount_point, kind, *_ in entries if path.is_relative_to(mount_point)]
    return max(matches)[1]


def _check_layout(request: Request, config: Config) -> str:
    """Check that the ranks fill the nodes. Return the placement as text."""
    needed, available = num_devices(config), request.nodes * request.gpus
    idle = set(range(needed)).difference(*device_spans(config).values())
    if request.gpus and idle:
        raise UserError(
            f"cluster.roles: GPU {min(idle)} of {available} has no role. Fix: assign every GPU to at least one role"
        )
    if request.gpus and needed != available:
        num_nodes = -(-needed // request.gpus)
        remedy = f"set --nodes={num_nodes}, or change" if needed > available else "change"
        raise UserError(
            f"--nodes={request.nodes}: the layouts need {needed} GPUs (one per rank), but the job has "
            f"{request.nodes} x --gpus-per-node={request.gpus} = {available}. Fix: {remedy} the layouts or "
            f"rollout.replicas to use {available} GPUs (see megarl plan RECIPE --gpus GPUS)"
        )
    on_gpus = request.gpus > 0
    placed = place(config, cores=1, on_gpus=on_gpus, gpus_per_node=request.gpus if on_gpus else None)
    return placed.describe()


def _check_plan(request: Request, config: Config) -> str:
    """Check that the recipe fits on the GPUs and that the time limit allows at least one step. Return the estimate as
    text."""
    planned = plan_of(request, config)
    step, start = planned.times.seconds, START_S + request.grace + SLACK_S
    if request.seconds < start + step:
        raise UserError(
            f"--time={request.time}: {request.seconds} s is too short, because a step takes about {step:.0f} s (megarl "
            f"plan), plus {START_S} s to start, --grace={request.grace} s and {SLACK_S} s to save. Fix: set --time to "
            f"at least {-(-int(start + step) // 60)} minutes"
        )
    summary = (
        f"a step takes about {step:.0f} s, and GPU memory peaks {planned.fullest.phase}: {planned.fullest.arithmetic}"
    )
    if step > request.saving_seconds:
        summary += (
            f"\n--grace={request.grace} leaves {request.saving_seconds} s to finish a step, so at the end of an "
            f"allocation the run loses the steps since its last checkpoint. Use --grace={int(step) + 2 * HANDLING_S} "
            "to keep them"
        )
    return summary


def plan_of(request: Request, config: Config) -> StepPlan:
    """Return the plan for the recipe on the request's GPUs. Raise UserError if it does not fit."""
    gpus = f"{request.nodes * request.gpus}x{request.gpu}"
    return plan_recipe(config, read_cluster(gpus, request.gpus), as_is=True).best


def run_slurm(*command: str) -> str:
    """Run a Slurm command and return its output. Raise UserError with the command's last error line if it fails."""
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        line = (process.stderr.strip() or process.stdout.strip()).splitlines()[-1]
        raise UserError(f"{command[0]}: {line}. Fix: change the job's options, or check Slurm with sinfo")
    return process.stdout


def check_slurm(request: Request) -> None:
    """Raise UserError if Slurm is not installed, or if the partition does not exist or is too small."""
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: command not found. Fix: run this on a login node of the cluster, or with --dry-run")
    if request.partition is None:
        return
    sizes: dict[str, int] = {}
    for name, count in (line.split("|") for line in run_slurm("sinfo", "--noheader", "--format=%R|%D").splitlines()):
        sizes[name] = sizes.get(name, 0) + int(count)
    if request.partition not in sizes:
        raise UserError(
            f"--partition={request.partition}: unknown partition. Fix: use one of {', '.join(sorted(sizes))}"
        )
    if sizes[request.partition] < request.nodes + request.spares:
        raise UserError(
            f"--partition={request.partition}: the partition has {sizes[request.partition]} nodes, but the job needs "
            f"--nodes={request.nodes} + --spares={request.spares}. Fix: lower --nodes or --spares, or use another "
            "partition"
        )
