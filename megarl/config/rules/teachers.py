"""Rules for sections `teachers` and `algorithm.distillation`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.model_schema import Layout, Teacher
from megarl.config.schema import Config


def teachers_have_distinct_names(config: Config) -> Iterator[str]:
    names = [teacher.name for teacher in config.teachers.models]
    taken = next((name for name in names if names.count(name) > 1), None)
    if taken is not None:
        yield f"teachers.models: two teachers have the name {taken}. Fix: give each teacher a different name"


def distillation_alone_needs_no_rounds(config: Config) -> Iterator[str]:
    rounds = config.batch.sampling_rounds
    if config.has_teachers and not config.has_rewards and not config.is_offline and rounds > 1:
        yield (
            f"batch.sampling_rounds={rounds}: dynamic sampling replaces prompts whose samples have equal rewards, but "
            "with rewards.functions=[] no sample has a reward. Fix: set batch.sampling_rounds=1, or add a reward"
        )


def distillation_alone_does_not_end(config: Config) -> Iterator[str]:
    distillation, steps = config.algorithm.distillation, config.run.steps
    last = distillation.anneal_steps
    is_alone = config.has_teachers and not config.has_rewards and not config.is_offline
    if not is_alone or last is None or distillation.final_coefficient > 0:
        return
    if last < steps:
        yield (
            f"algorithm.distillation.anneal_steps={last}: with rewards.functions=[] and final_coefficient=0, the actor "
            f"would learn nothing in the steps after {last} of run.steps={steps}. Fix: set "
            f"algorithm.distillation.anneal_steps={steps}, set algorithm.distillation.final_coefficient=0.1, or add a "
            "reward"
        )


def teacher_sources_require_source_column(config: Config) -> Iterator[str]:
    named = next((teacher for teacher in config.teachers.models if teacher.sources is not None), None)
    if named is not None and config.is_offline:
        yield (
            f"teachers.models: {named.name} with sources={named.sources}: with data.format={config.data.format}, every "
            f"teacher scores all rows. Fix: remove sources from {named.name}"
        )
    elif named is not None and config.data.source_column is None:
        yield (
            f"teachers.models: {named.name} with sources={named.sources}: the source of a row is unknown, because "
            "data.source_column=null. Fix: set data.source_column"
        )


def teachers_without_a_path_see_another_prompt(config: Config) -> Iterator[str]:
    for teacher in config.teachers.models:
        if teacher.path is None and teacher.prompt_column is None:
            yield (
                f"teachers.models: {teacher.name} with path=null and prompt_column=null: the teacher would see the "
                "same prompts as the actor. Fix: set path, or set prompt_column to a column with prompts that contain "
                "a hint. For a KL to the reference, set algorithm.kl.coefficient"
            )
        if teacher.path is None and teacher.revision is not None:
            yield (
                f"teachers.models: {teacher.name} with revision={teacher.revision}: has no effect with path=null. Fix: "
                "set path, or remove revision"
            )
        if teacher.path is not None and teacher.weights == "reference":
            yield (
                f"teachers.models: {teacher.name} with weights=reference: has no effect with path={teacher.path}. Fix: "
                "remove weights, or set path=null for the actor's reference"
            )


def teachers_in_vllm_have_their_own_model(config: Config) -> Iterator[str]:
    for teacher in config.teachers.models:
        if teacher.path is None and (teacher.engine == "vllm" or teacher.layout is not None):
            key = "engine=vllm" if teacher.engine == "vllm" else "layout"
            yield (
                f"teachers.models: {teacher.name} with {key}: has no effect with path=null, because the teacher runs "
                f"on the actor's ranks. Fix: set path, or remove {key.partition('=')[0]}"
            )


def teachers_in_vllm_use_only_tp_and_dp(config: Config) -> Iterator[str]:
    for teacher, layout in _in_vllm(config):
        other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
        assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
        if assignments:
            where = "teachers.layout" if teacher.layout is None else "its layout"
            yield (
                f"teachers.models: {teacher.name} with engine=vllm: teachers in vLLM support only tp and dp, but "
                f"{where} has {', '.join(assignments)}. Fix: set layout={{tp: {layout.tp}, dp: {layout.dp}}} for "
                f"{teacher.name}, or set engine=megatron"
            )


def teachers_in_vllm_return_log_probs(config: Config) -> Iterator[str]:
    divergence, top_k = config.algorithm.distillation.divergence, config.rollout.top_k
    for teacher, _ in _in_vllm(config):
        entry = f"teachers.models: {teacher.name} with engine=vllm"
        if config.distills_exactly:
            yield (
                f"{entry}: an exact divergence (algorithm.distillation.divergence={divergence}) needs the teacher's "
                "hidden states, which vLLM does not return. Fix: set algorithm.distillation.top_k=64, or set "
                "engine=megatron"
            )
        if top_k is not None:
            yield (
                f"{entry}: vLLM normalizes the log-probs of given tokens over the full vocabulary, but the actor's "
                f"refer to the candidate tokens of rollout.top_k={top_k}. Fix: set rollout.top_k=null and "
                "rollout.top_p=1, or set engine=megatron"
            )


def _in_vllm(config: Config) -> list[tuple[Teacher, Layout]]:
    """Return the teachers in vLLM, and their layouts."""
    teachers = config.teachers
    return [(teacher, teachers.layout_of(teacher)) for teacher, _ in config.placed_teachers if teacher.engine == "vllm"]


def prompt_columns_require_rows_of_files(config: Config) -> Iterator[str]:
    teacher = next((teacher for teacher in config.teachers.models if teacher.prompt_column is not None), None)
    if teacher is None:
        return
    entry = f"teachers.models: {teacher.name} with prompt_column={teacher.prompt_column}"
    if config.is_offline:
        yield (
            f"{entry}: with data.format={config.data.format}, teachers see the rows' own prompts. Fix: remove "
            f"prompt_column from {teacher.name}"
        )
        return
    if config.data.is_procedural:
        yield (
            f"{entry}: data.source={config.data.source} has no such column. Fix: set data.source to a .jsonl or "
            ".parquet file with this column"
        )
    if config.has_environment and config.actor.experts.replay_routes:
        yield (
            f"{entry}: with actor.experts.replay_routes=true, megarl cannot check whether rollouts of "
            f"environment.class={config.environment.name} start with the row's prompt. Fix: set "
            "actor.experts.replay_routes=false"
        )


def divergence_of_distributions_is_in_the_loss(config: Config) -> Iterator[str]:
    key, distillation = "algorithm.distillation", config.algorithm.distillation
    if not distillation.is_sampled and distillation.placement != "loss":
        yield (
            f"{key}.divergence={distillation.divergence}: a divergence of distributions must be a loss, because an "
            f"advantage applies only to the sampled token. Fix: set {key}.placement=loss, or set "
            f"{key}.divergence=sampled"
        )


def divergence_of_distributions_covers_the_vocabulary(config: Config) -> Iterator[str]:
    distillation, top_k = config.algorithm.distillation, config.rollout.top_k
    if not distillation.is_sampled and top_k is not None:
        yield (
            f"algorithm.distillation.divergence={distillation.divergence}: it needs the full vocabulary, but "
            f"rollout.top_k={top_k} limits the policy to candidate tokens. Fix: set rollout.top_k=null and "
            "rollout.top_p=1, or set algorithm.distillation.divergence=sampled"
        )


def exact_divergence_requires_other_models(config: Config) -> Iterator[str]:
    for teacher in config.self_teachers if config.algorithm.distillation.is_exact else ():
        yield (
            f"algorithm.distillation.divergence={config.algorithm.distillation.divergence}: exact divergences are "
            f"not supported for teachers without a path, such as {teacher.name}. Fix: set path, or set "
            "algorithm.distillation.top_k=64"
        )


RULES = (
    teachers_have_distinct_names,
    teachers_without_a_path_see_another_prompt,
    prompt_columns_require_rows_of_files,
    teachers_in_vllm_have_their_own_model,
    teachers_in_vllm_use_only_tp_and_dp,
    teachers_in_vllm_return_log_probs,
    distillation_alone_needs_no_rounds,
    distillation_alone_does_not_end,
    teacher_sources_require_source_column,
    divergence_of_distributions_is_in_the_loss,
    divergence_of_distributions_covers_the_vocabulary,
    exact_divergence_requires_other_models,
)
