"""Everything that can be known of a run before it starts its processes, checked in one place: by `megarl check`, and
by `megarl train` as the first thing it does."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.cluster.machine import (
    check_engine_kernels,
    check_gpu_memory,
    check_host_memory,
    check_machine,
    host_parts,
    place_here,
)
from megarl.cluster.megatron_settings import check_megatron_settings
from megarl.cluster.network import own_address
from megarl.config.evaluation import config_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.explain import explain
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.errors import UserError
from megarl.core.types import Prompt
from megarl.data.files import ALL_COLUMNS, NO_COLUMNS
from megarl.data.offline import OfflineData, load_offline_data
from megarl.data.prompts import PromptSet, load_prompts
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.pool import FunctionPool, function_pool
from megarl.environments.runner import turn_tokens
from megarl.environments.trial import Trial, try_rewards
from megarl.models.run_models import ModelFolders, find_models
from megarl.models.tokenizer import load_tokenizer
from megarl.resharding.selection import check_all_selections
from megarl.run.beginning import find_model_paths
from megarl.run.checkpoint_size import checkpoint_bytes
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder
from megarl.run.resume import find_checkpoint
from megarl.run.trackers.tracker import check_trackers

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Preflight:
    """The things that a run starts from.

    trial        of its reward functions; None if it has none
    evaluation   the prompts of each evaluation set, by its name
    """

    models: ModelFolders
    data: PromptSet | OfflineData
    trial: Trial | None
    evaluation: Mapping[str, PromptSet] = field(default_factory=dict)


def preflight(config: Config) -> Preflight:
    """Check machine, folder, models, reward functions, data, checkpoint and disk, and changes nothing but the cache of
    models. Raise UserError with a line for each thing that is wrong. A reward function that fails on the first row is
    a warning: it may need more than a bare answer."""
    with _all_errors() as attempt:
        attempt(check_machine, config)
        attempt(place_here, config)
        if config.cluster.nodes > 1:
            attempt(own_address, config.cluster.interface)
        attempt(check_trackers, config)
        folder = attempt(_find_folder, config)
        models = attempt(_find_models, config)
        pool = attempt(_function_pool, config)
        with nullcontext() if pool is None else closing(pool):
            data = None if models is None else attempt(_load_data, config, models.actor, pool)
            if models is not None and config.has_environment:
                attempt(_check_environment, config, models.actor)
            if data is not None and folder is not None:
                attempt(_check_resume_and_disk, config, models, data)
            trial = None if data is None or pool is None else attempt(try_rewards, config, pool, data[0])
        evaluation = None if models is None else attempt(load_evaluation_sets, config, models.actor)
    if trial is not None and trial.failure is not None:
        print(f"megarl: warning: {trial.failure}, whose response is the row's answer", file=sys.stderr, flush=True)
    return Preflight(models, data, trial, evaluation)


def load_evaluation_sets(config: Config, model_folder: Path) -> dict[str, PromptSet]:
    """Return the prompts of each evaluation set, by its name. Raise UserError with a line for each thing that is
    wrong."""
    with _all_errors() as attempt:
        return {
            given.name: attempt(_load_evaluation_set, config, given, model_folder) for given in config.evaluation.sets
        }


def _load_evaluation_set(config: Config, given: EvaluationSet, model_folder: Path) -> PromptSet:
    """Return the prompts of an evaluation set, with the columns that its environment or its functions ask for, which
    are tried on the first of them. Raise UserError that names the set."""
    of_set = config_of_set(config, given)
    try:
        pool = _function_pool(of_set)
        with nullcontext() if pool is None else closing(pool):
            prompts = _load_data(of_set, model_folder, pool)
            trial = None if pool is None else try_rewards(of_set, pool, prompts[0])
        if of_set.has_environment:
            _check_environment(of_set, model_folder)
    except UserError as error:
        raise UserError(
            "\n".join(f"evaluation.sets: {given.name}: {line}" for line in str(error).splitlines())
        ) from None
    if trial is not None and trial.failure is not None:
        reason = f"evaluation.sets: {given.name}: {trial.failure}, whose response is the row's answer"
        print(f"megarl: warning: {reason}", file=sys.stderr, flush=True)
    return prompts


@contextmanager
def _all_errors() -> Iterator[Callable[..., Any]]:
    """Yield a function that calls another with its arguments, and returns None where that raises UserError. Raises
    UserError with the lines of all of them at the end."""
    lines: list[str] = []

    def attempt(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except UserError as error:
            lines.append(str(error))
            return None

    yield attempt
    if lines:
        raise UserError("\n".join(lines))


def _find_models(config: Config) -> ModelFolders:
    models = find_models(config)
    check_all_selections(config, models.trained(config))
    check_gpu_memory(config, models)
    check_host_memory(config, models)
    if not config.is_offline:
        check_engine_kernels(config, models)
    check_megatron_settings(config, models)
    return models


def _load_data(config: Config, model_folder: Path, pool: FunctionPool | None) -> PromptSet | OfflineData:
    """Return the rows, prompts with the columns that reward functions ask for, or all of them for an environment."""
    if config.is_offline:
        return load_offline_data(config, model_folder)
    columns = NO_COLUMNS if pool is None else pool.columns
    return load_prompts(config, model_folder, {ALL_COLUMNS: None, **columns} if config.has_environment else columns)


def _check_environment(config: Config, model_folder: Path) -> None:
    """Look, in a process of its own, whether the environment's class is one, and whether the model's chat template can
    go on with what it says. Raise UserError where they are not."""

    async def find_tools() -> Sequence[Mapping[str, Any]]:
        pool = await HostPool.start(host_arguments(config), 1)
        await pool.close()
        return pool.tools

    turn_tokens(config, load_tokenizer(model_folder), asyncio.run(find_tools()))


def _function_pool(config: Config) -> FunctionPool | None:
    """Return a process with the user's functions, None for a run without any."""
    rewards = config.rewards
    if config.is_offline or not (rewards.functions or rewards.judge):
        return None
    return function_pool(config, 1)


def _find_folder(config: Config) -> RunFolder:
    """Return the run's folder, which may have to be made. Raise UserError where it cannot, or is another run's."""
    RunFolder.require_free(config)
    folder = RunFolder.of(config)
    there = next(path for path in folder.path.parents if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"run.folder={config.run.folder}: it cannot be written ({error.strerror}: {there}); set run.folder to a "
            "folder of yours"
        ) from None
    return folder


def _check_resume_and_disk(config: Config, models: ModelFolders, data: PromptSet | OfflineData) -> None:
    find_checkpoint(config, data, models.identify())
    if config.checkpoint.may_be_saved:
        checkpoints, keep = Checkpoints(RunFolder.of(config).checkpoints), config.checkpoint.keep
        size = checkpoint_bytes(config, models.trained(config))
        checkpoints.require_space(size, keep, max(0, config.most_checkpoints + 1 - _num_there(config, checkpoints)))


def _num_there(config: Config, checkpoints: Checkpoints) -> int:
    """Return the number of checkpoints, complete or not, whose room is that of new ones."""
    if config.resume == "never" or not checkpoints.path.is_dir():
        return 0
    return sum(entry.is_dir() for entry in checkpoints.path.iterdir())


def print_checks(config: Config, _scratch: Path) -> None:
    """Print what a run of this config would be, and what the checks found."""
    config = find_model_paths(config)
    found = preflight(config)
    rows = {"model": str(found.models.actor), "data": _first_row(config, found.data)}
    if found.trial is not None:
        said = ", ".join(f"{name} gives {value:g}" for name, value in found.trial.parts.items())
        rows["rewards"] = f"{said or 'nothing'} for the first row's answer"
    if found.evaluation:
        sizes = (f"{name} of {len(prompts):,} prompts" for name, prompts in found.evaluation.items())
        rows["evaluation"] = ", ".join(sizes)
    if not device.on_cuda():
        needed = sum(host_parts(config, found.models).values())
        rows["memory"] = f"at least {needed / 1e9:.2f} GB, for weights, gradients and optimizers"
    if config.checkpoint.may_be_saved:
        size = checkpoint_bytes(config, found.models.trained(config))
        rows["disk"] = f"{config.most_checkpoints} + 1 checkpoints x {size / 1e9:.2f} GB in {RunFolder.of(config).path}"
    if config.cluster.roles.given:
        places = "are on the devices of cluster.roles"
    else:
        places = "share their devices, from the first on" if config.is_colocated else "have devices of their own"
    placed = f"{config.cluster.placement}, roles {places}\n{place_here(config).describe()}"
    rows["processes"] = placed.replace("\n", f"\n{'':<12}")
    print(explain(config))
    print("\n".join(f"{name:<11} {text}" for name, text in rows.items()))
    print("all checks passed; nothing was started", flush=True)


def _first_row(config: Config, data: PromptSet | OfflineData) -> str:
    size = f"{len(data):,} {config.data.format}"
    first = data[0]
    if not isinstance(first, Prompt) or not first.messages:
        return size
    return f"{size}; the first: {_shown(first.messages[-1]['content'])}, answer {_shown(first.answer)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
