"""Rules for the sections `run` and `batch`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.continuation import is_free, may_be_allowed
from megarl.config.divisors import divisibility_error, divisors
from megarl.config.document import leaves
from megarl.config.names import suggest
from megarl.config.schema import Config
from megarl.core.credentials import has_credentials, is_secret_key


def prompts_per_update_divides_prompts_per_step(config: Config) -> Iterator[str]:
    per_step, per_update = config.batch.prompts_per_step, config.batch.prompts_per_update
    legal = divisors(per_step)
    if error := divisibility_error("batch.prompts_per_update", per_update, "prompts per step", per_step, legal):
        yield error


def dynamic_sampling_needs_groups(config: Config) -> Iterator[str]:
    rounds, samples = config.batch.sampling_rounds, config.batch.samples_per_prompt
    if rounds != 1 and samples < 2:
        yield (
            f"batch.sampling_rounds={rounds}: dynamic sampling replaces prompts whose samples all have the same "
            "reward. With batch.samples_per_prompt=1 it would replace every prompt. Fix: set batch.sampling_rounds=1 "
            "or batch.samples_per_prompt=8"
        )


def oversampled_prompts_are_used(config: Config) -> Iterator[str]:
    factor, staleness = config.batch.oversampling, config.rollout.max_staleness
    if factor is None or config.is_offline or config.drops_rollouts or factor <= 1 + staleness:
        return
    most = 1 + staleness
    yield (
        f"batch.oversampling={factor:g}: with rollout.max_staleness={staleness} a sample must be used within {most} "
        f"{'steps' if staleness else 'step'}, so at most {most} x batch.prompts_per_step prompts can be in flight. "
        f"Fix: set batch.oversampling to at most {most}, or set rollout.on_stale=drop to drop stale samples"
    )


def trackers_are_named_once(config: Config) -> Iterator[str]:
    names = config.run.trackers
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"run.trackers=[{', '.join(names)}]: {twice[0]} is listed twice. Fix: list it once"


def profiled_steps_are_steps_of_the_run(config: Config) -> Iterator[str]:
    late = [step for step in config.run.profile.steps if step > config.run.steps]
    if late:
        yield (
            f"run.profile.steps: step {late[0]} is after the last step of the run (run.steps={config.run.steps}). Fix: "
            f"list only steps up to {config.run.steps}"
        )


def profiled_ranks_are_ranks_of_a_model(config: Config) -> Iterator[str]:
    """A rank in run.profile is profiled in every trained model that has a rank with this number."""
    if not config.run.profile.steps:
        return
    largest = max(trained.layout.world_size for trained in config.all_trained)
    beyond = [rank for rank in config.run.profile.ranks if rank >= largest]
    if beyond:
        yield (
            f"run.profile.ranks: no trained model has a rank {beyond[0]}, because the largest has {largest} ranks. "
            f"Fix: list only ranks below {largest}"
        )


def allowed_changes_are_possible(config: Config) -> Iterator[str]:
    existing = [key for key, _ in leaves(config.model_dump())]
    for name in config.run.allow_changes:
        keys = [key for key in existing if key == name or key.startswith(f"{name}.")]
        if not keys and not may_be_allowed(name):
            yield f"run.allow_changes: {name} is not a key; {suggest(name)}"
        elif keys and not all(map(is_free, keys)) and not any(map(may_be_allowed, keys)):
            yield (
                f"run.allow_changes: {name} cannot change in the middle of a run, because its models, data or "
                "checkpoints depend on it. Fix: remove it from the list, and start a new run to change it"
            )


def values_have_no_credentials(config: Config) -> Iterator[str]:
    """Every value reaches the run folder, the report and the trackers."""
    for key, value in _texts(config.model_dump()):
        if has_credentials(value) or is_secret_key(key.rpartition(".")[2]):
            yield (
                f"{key}: contains credentials, which megarl would write to the run folder. Fix: remove them, and pass "
                "them in an environment variable such as MLFLOW_TRACKING_PASSWORD or the one in options.api_key_env"
            )


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each text at any depth."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


RULES = (
    values_have_no_credentials,
    prompts_per_update_divides_prompts_per_step,
    dynamic_sampling_needs_groups,
    oversampled_prompts_are_used,
    trackers_are_named_once,
    profiled_steps_are_steps_of_the_run,
    profiled_ranks_are_ranks_of_a_model,
    allowed_changes_are_possible,
)
