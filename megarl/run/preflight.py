"""Checks before a run starts its processes. `megarl check` and `megarl train` run the same checks."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.machine import (
    check_engine_kernels,
    check_gpu_memory,
    check_host_memory,
    check_machine,
    host_parts,
    place_here,
)
from megarl.cluster.megatron_settings import check_megatron_settings
from megarl.cluster.memory.vision import patches_on_node, prompts_of_replica
from megarl.cluster.network import own_address
from megarl.cluster.object_store import image_bytes
from megarl.config.device_spans import devices_per_node
from megarl.config.evaluation import config_of_set
from megarl.config.evaluation_schema import EvaluationSet
from megarl.config.explain import explain
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.errors import UserError, prefix_lines
from megarl.core.prompt import Prompt
from megarl.core.text import counted
from megarl.data.files import ALL_COLUMNS
from megarl.data.offline import OfflineData, load_offline_data
from megarl.data.prompts import PromptSet, load_prompts
from megarl.environments.hosts import HostPool, host_arguments
from megarl.environments.registry import answer_check
from megarl.environments.runner import turn_tokens
from megarl.environments.trial import try_rewards
from megarl.models.denoiser import shape_of
from megarl.models.folder import read_config, vocab_size
from megarl.models.run_models import ModelFolders, find_models
from megarl.models.tokenizer import load_tokenizer
from megarl.models.trained_model import policy_hf_config
from megarl.models.vision import vision_of
from megarl.models.weight_files import read_headers, require_tensors
from megarl.resharding.families import huggingface_holder
from megarl.resharding.families.adapters import check_adapter_weights, peft_holder
from megarl.resharding.families.eagle import check_eagle_weights
from megarl.resharding.selection import check_all_selections
from megarl.rewards.model_reward import model_judge, model_reader
from megarl.rewards.options import PROVIDED
from megarl.rewards.pool import FunctionPool, function_pool
from megarl.rewards.rating import TEMPLATE, require_answer
from megarl.rewards.row_checks import check_rows, require_prompts, require_rows
from megarl.run.beginning import resolve
from megarl.run.checkpoint_size import log_bytes, saved_bytes
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder, changes_since
from megarl.run.resume import find_checkpoint
from megarl.run.trackers.tracker import check_trackers

SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Preflight:
    """The inputs of a run that has passed all checks. `trial` maps each reward function to its reward for a row's
    answer, or is None without reward functions. `evaluation` maps the name of each evaluation set to its prompts."""

    models: ModelFolders
    data: PromptSet | OfflineData
    trial: Mapping[str, float] | None
    evaluation: Mapping[str, PromptSet] = field(default_factory=dict)

    def image_bytes(self, config: Config) -> int:
        """Return the maximum size in bytes of encoded images in the object store."""
        return image_bytes(config, self.data, self.evaluation.values())


def preflight(config: Config) -> Preflight:
    """Check the machine, run folder, models, reward functions, data, checkpoint and disk. Only the model cache is
    modified. Raise UserError with one line for each failed check, followed by indented details."""
    with _all_errors() as attempt:
        attempt(check_machine, config)
        attempt(place_here, config)
        if config.cluster.nodes > 1:
            attempt(own_address, config.cluster.interface)
        attempt(check_trackers, config)
        folder = attempt(_find_folder, config)
        models = attempt(_find_models, config)
        if models is not None:
            attempt(_check_weights, config, models)
        pool = attempt(_function_pool, config)
        with nullcontext() if pool is None else closing(pool):
            data = None if models is None else attempt(_load_data, config, models.actor, pool)
            if models is not None and config.has_environment:
                attempt(_check_environment, config, models.actor)
            if data is not None and folder is not None:
                attempt(_check_resume_and_disk, config, models, data)
            trial = None
            if isinstance(data, PromptSet):
                attempt(_check_rows, config, pool, data)
                trial = None if pool is None else attempt(try_rewards, config, pool, data.prompts, data.images)
                if models is not None:
                    attempt(_check_readability, config, models, data)
        evaluation = None if models is None else attempt(load_evaluation_sets, config, models.actor)
    assert models is not None and data is not None and evaluation is not None, "failed checks have raised their errors"
    return Preflight(models, data, trial, evaluation)


def load_evaluation_sets(config: Config, model_folder: Path) -> dict[str, PromptSet]:
    """Return the prompts in each evaluation set, keyed by set name. Raise UserError if at least one set could not be
    loaded. The message contains one line per failure."""
    with _all_errors() as attempt:
        return {
            settings.name: attempt(_load_evaluation_set, config, settings, model_folder)
            for settings in config.evaluation.sets
        }


def _load_evaluation_set(config: Config, settings: EvaluationSet, model_folder: Path) -> PromptSet:
    """Return the prompts in an evaluation set, with the columns that its environment or reward functions need. Try the
    reward functions on rows of the set. Raise a UserError that names the set if the set is invalid."""
    set_config = config_of_set(config, settings)
    try:
        pool = _function_pool(set_config)
        with nullcontext() if pool is None else closing(pool):
            prompts = _load_prompts(set_config, model_folder, pool)
            _check_rows(set_config, pool, prompts)
            if pool is not None:
                try_rewards(set_config, pool, prompts.prompts, prompts.images)
        if set_config.has_environment:
            _check_environment(set_config, model_folder)
    except UserError as error:
        raise UserError(prefix_lines(f"evaluation.sets: {settings.name}: ", str(error))) from None
    return prompts


@contextmanager
def _all_errors() -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a check and returns its result, or None if the check raises a UserError. On exit,
    raise a UserError with the messages of all failed checks, if there are any."""
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
    check_engine_kernels(config, models)
    check_megatron_settings(config, models)
    return models


def _check_weights(config: Config, models: ModelFolders) -> None:
    """Check the headers of all weight files, because a failed download may have left some incomplete."""
    with _all_errors() as attempt:
        others = [*models.others.values(), *([] if models.draft is None else [models.draft])]
        for folder in dict.fromkeys((models.actor, *others)):
            headers = attempt(read_headers, folder)
            if headers is None:
                continue
            if folder == models.draft and config.rollout.drafts_with_eagle:
                attempt(check_eagle_weights, folder, headers, read_config(folder), models.hf_config)
            elif folder != models.reward_model:  # the names of a reward model's tensors are not checked
                hf_config = read_config(folder)
                expected = policy_hf_config(config, hf_config) if folder == models.actor else hf_config
                attempt(require_tensors, folder, headers, huggingface_holder(expected).shapes)
        lora = config.actor.adapters
        if lora is not None and lora.path is not None:
            assert lora.rank is not None, "only models with adapters have this section"
            hf_config = read_config(models.actor)
            experts = shape_of(hf_config).experts
            whole = peft_holder(hf_config, lora.rank, lora.share_experts)
            attempt(check_adapter_weights, Path(lora.path).expanduser(), whole, experts.count if experts else 0)


def _load_data(config: Config, model_folder: Path, pool: FunctionPool | None) -> PromptSet | OfflineData:
    if config.is_offline:
        data = load_offline_data(config, model_folder)
        samples = [sample for row in data.rows for sample in row]
        _require_embeddings(model_folder, ((sample.id, sample.prompt.token_ids) for sample in samples))
        _require_embeddings(model_folder, ((sample.id, sample.response_ids) for sample in samples))
        return data
    return _load_prompts(config, model_folder, pool)


def _load_prompts(config: Config, model_folder: Path, pool: FunctionPool | None) -> PromptSet:
    """Load the prompts, with all columns for an environment, else only those that the reward functions need. Raise a
    UserError if such a column has the name of a value that the run passes to reward functions."""
    columns = {} if pool is None else dict(pool.columns)
    if config.data.image_column in PROVIDED:  # reward functions receive its images under this name
        columns.pop(config.data.image_column, None)
    columns = {ALL_COLUMNS: None, **columns} if config.has_environment else columns
    data = load_prompts(config, model_folder, columns)
    for prompt in data.prompts if pool is not None else ():
        if taken := [name for name in PROVIDED if name in prompt.columns]:
            raise UserError(
                f"{prompt.id}: column {taken[0]!r} has the name of a value that the run passes to reward functions. "
                "Fix: rename the column"
            )
    if config.samples_images:
        return data
    _require_embeddings(model_folder, ((prompt.id, prompt.token_ids) for prompt in data.prompts))
    responses = ((f"{name}: response", response.token_ids) for name, response in data.responses.items())
    _require_embeddings(model_folder, responses)
    for column, prompts in data.privileged.items():
        _require_embeddings(model_folder, ((f"{name}: column {column!r}", ids) for name, ids in prompts.items()))
    return data


def _require_embeddings(model_folder: Path, rows: Iterable[tuple[str, NDArray[np.int32]]]) -> None:
    """Raise UserError if a row has a token that was added to the tokenizer but not to the model. `rows`: name and token
    ids of each row."""
    num_rows = vocab_size(model_folder)
    for name, ids in rows:
        if len(ids) and (largest := int(ids.max())) >= num_rows:
            token = load_tokenizer(model_folder).convert_ids_to_tokens(largest)
            raise UserError(
                f"{name}: the tokenizer of {model_folder} has the token {token!r} ({largest}), but the model has only "
                f"{num_rows} embeddings. Fix: resize the model's embeddings, or remove the token from the tokenizer"
            )


def _check_rows(config: Config, pool: FunctionPool | None, data: PromptSet) -> None:
    """Check all rows with the built-in functions, judge and environment that need an answer. For a row that does not
    pass, they would fail on every response."""
    if pool is not None:
        check_rows(config, pool, data.prompts)
    if config.has_reward_model and config.reward_model.judges:
        template = config.reward_model.judge.template
        require_rows(data.prompts, partial(require_answer, TEMPLATE if template is None else template))
    if (check := answer_check(config.environment.name)) is not None:
        require_rows([prompt for prompt in data.prompts if prompt.messages], check)


def _check_readability(config: Config, models: ModelFolders, data: PromptSet) -> None:
    """Check that a reward model with its own tokenizer can read the prompts and leaves room for a response. At run
    time, only the response can make the input too long, and it is then truncated."""
    folder, reader = models.reward_model, None
    if folder is not None and config.reward_model.judges:
        reader = model_judge(config, folder, models.actor)
    elif folder is not None:
        reader = model_reader(config, folder, models.actor)
    if reader is None:
        return
    try:
        require_prompts([prompt for prompt in data.prompts if len(prompt.token_ids)], reader.check_prompt)
    except UserError as error:
        raise UserError(f"reward_model: {error}") from None


def _check_environment(config: Config, model_folder: Path) -> None:
    """Load the environment class in a separate process, and check that the model's chat template can render its turns.
    Raise UserError if the class cannot be loaded or its turns cannot be rendered."""

    async def find_tools() -> Sequence[Mapping[str, Any]]:
        pool = await HostPool.start(host_arguments(config), 1)
        await pool.close()
        return pool.tools

    turn_tokens(config, load_tokenizer(model_folder, date=config.data.date), asyncio.run(find_tools()))


def _function_pool(config: Config) -> FunctionPool | None:
    """Start a process for the reward functions. Return None if the run has no reward functions."""
    rewards = config.rewards
    if config.is_offline or not (rewards.functions or rewards.judge):
        return None
    return function_pool(config, 1, outage_s=0.0)


def _find_folder(config: Config) -> RunFolder:
    """Return the run folder, which need not exist. Raise UserError if it is not writable or contains another run."""
    RunFolder.require_free(config)
    folder = RunFolder.of(config)
    parent = next(path for path in folder.path.parents if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise UserError(
            f"run.folder={config.run.folder}: not writable ({error.strerror}: {parent}). Fix: set run.folder to a "
            "writable folder"
        ) from None
    return folder


def _check_resume_and_disk(config: Config, models: ModelFolders, data: PromptSet | OfflineData) -> None:
    identities = models.identify()
    checkpoint = find_checkpoint(config, data, identities)
    if checkpoint is not None:
        for line in changes_since(config, identities, checkpoint.path.parent.parent):
            print(f"changed since {checkpoint.path.name} was saved: {line}", flush=True)
    if config.checkpoint.may_be_saved:
        checkpoints, keep = Checkpoints(RunFolder.of(config).checkpoints), config.checkpoint.keep
        size = saved_bytes(config, models.trained(config))
        checkpoints.require_space(size, keep, max(0, config.max_checkpoints + 1 - _num_existing(config, checkpoints)))
    _announce_logs(config, models)


def _announce_logs(config: Config, models: ModelFolders) -> None:
    """Print a warning if the disk cannot hold the checkpoints and the rollout logs of all steps."""
    path = RunFolder.of(config).path
    free = shutil.disk_usage(next(folder for folder in path.parents if folder.exists())).free
    checkpoints = 0
    if config.checkpoint.may_be_saved:
        checkpoints = (config.max_checkpoints + 1) * saved_bytes(config, models.trained(config))
    room = max(0, free - checkpoints)
    if (logs := log_bytes(config)) > room:
        print(
            f"megarl: warning: run.steps={config.run.steps}: the rollout logs in {path} may take up to "
            f"{logs / 1e9:.2f} GB, but the checkpoints leave only {room / 1e9:.2f} GB of disk space. "
            "When the disk is full, the run continues without writing rollouts",
            file=sys.stderr,
            flush=True,
        )


def _num_existing(config: Config, checkpoints: Checkpoints) -> int:
    """Return the number of complete and incomplete checkpoints whose disk space new checkpoints will reuse."""
    if config.resume == "never" or not checkpoints.path.is_dir():
        return 0
    return sum(entry.is_dir() for entry in checkpoints.path.iterdir())


def print_checks(config: Config, _scratch: Path) -> None:
    """Run all checks and print a summary of the planned run."""
    config = resolve(config)
    checked = preflight(config)
    rows = {"model": str(checked.models.actor), "data": _first_row(config, checked.data)}
    if checked.trial is not None:
        scores = ", ".join(f"{name} = {value:g}" for name, value in checked.trial.items())
        answer = "the first row's answer"
        if config.data.source_column is not None:
            answer = "the answer of each function's first row"
        rows["rewards"] = f"{scores or 'none'} for {answer}"
    if checked.evaluation:
        sizes = (f"{name} ({counted(len(prompts), 'prompt')})" for name, prompts in checked.evaluation.items())
        rows["evaluation"] = ", ".join(sizes)
    if not device.on_cuda():
        needed = sum(host_parts(config, checked.models).values())
        rows["memory"] = f"at least {needed / 1e9:.2f} GB for weights, gradients and optimizers"
    if any(data.images is not None for data in (checked.data, *checked.evaluation.values())):
        rows["images"] = _images_row(config, checked)
    if config.checkpoint.may_be_saved:
        size = saved_bytes(config, checked.models.trained(config))
        rows["disk"] = (
            f"({config.max_checkpoints} + 1) checkpoints x {size / 1e9:.2f} GB in {RunFolder.of(config).path}"
        )
    if config.cluster.roles.assigned:
        sharing = "cluster.roles assigns the devices"
    else:
        sharing = "roles share devices" if config.is_colocated else "roles have separate devices"
    placement = f"{config.cluster.placement}, {sharing}\n{place_here(config).describe()}"
    rows["processes"] = placement.replace("\n", f"\n{'':<12}")
    print(explain(config))
    print("\n".join(f"{name:<11} {text}" for name, text in rows.items()))
    print("All checks passed. No processes were started.", flush=True)


def _first_row(config: Config, data: PromptSet | OfflineData) -> str:
    size = f"{len(data):,} {config.data.format}"
    if data.images is not None:
        size += f" with {_distinct_images(data)}"
    first = data[0]
    if not isinstance(first, Prompt) or not first.messages:
        return size
    return f"{size}; first: {_abbreviate(first.messages[-1]['content'])}, answer {_abbreviate(first.answer)}"


def _distinct_images(data: PromptSet | OfflineData) -> str:
    """Describe the distinct images in the data: how many there are, and their mean and maximum number of tokens."""
    by_digest = {image.digest: image.num_tokens for images in data.row_images.rows for image in images}
    counts = by_digest.values()
    if not counts:
        return "0 distinct images"
    tokens = f"on average {sum(counts) / len(counts):,.0f} and at most {counted(max(counts), 'token')}"
    return f"{counted(len(counts), 'distinct image')} ({tokens})"


def _images_row(config: Config, checked: Preflight) -> str:
    files = f"up to {checked.image_bytes(config) / 1e9:.2f} GB of Ray's object store for image files"
    if checked.data.images is None:
        return files
    return f"up to {_patch_bytes(config, checked) / 1e9:.2f} GB of host memory per node for patches, and {files}"


def _patch_bytes(config: Config, checked: Preflight) -> float:
    """Return the maximum size in bytes of the patches that a step's images take in a node's host memory."""
    vision = vision_of(checked.models.trained(config)["actor"])
    assert vision is not None, "rows with images require a vision tower"
    # A rank stores an image once for each update that needs it.
    num_updates = config.batch.prompts_per_step // config.batch.prompts_per_update
    features = checked.data.row_images.num_tokens(prompts_of_replica(config), num_updates)
    return patches_on_node(vision, config.actor.layout, features, devices_per_node(config))


def _abbreviate(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
