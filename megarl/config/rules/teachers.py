"""Rules for sections `teachers` and `algorithm.distillation`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.model_schema import Layout, Teacher
from megarl.config.schema import Config
from megarl.core.score import ENVIRONMENT


def teachers_have_distinct_names(config: Config) -> Iterator[str]:
    names = [teacher.name for teacher in config.teachers.models]
    taken = next((name for name in names if names.count(name) > 1), None)
    if taken is not None:
        yield f"teachers.models: two teachers have the name {taken}. Fix: give each teacher a different name"


def distillation_alone_needs_no_rounds(config: Config) -> Iterator[str]:
    rounds, functions = config.batch.sampling_rounds, config.rewards.functions
    only_weightless = bool(functions) and all(entry.weight == 0 for entry in functions)
    has_others = config.rewards.judge is not None or config.has_reward_model or config.has_environment
    is_alone = not config.has_rewards or (only_weightless and not has_others)
    if config.has_teachers and is_alone and not config.is_offline and rounds > 1:
        reason = (
            "all reward functions have weight 0" if functions else "with rewards.functions=[] no sample has a reward"
        )
        yield (
            f"batch.sampling_rounds={rounds}: dynamic sampling replaces prompts whose samples have equal rewards, but "
            f"{reason}. Fix: set batch.sampling_rounds=1, or add a reward"
        )


def distillation_alone_does_not_end(config: Config) -> Iterator[str]:
    distillation, steps = config.algorithm.distillation, config.run.steps
    last = distillation.anneal_steps
    without, remedy = "rewards.functions=[]", "add a reward"
    is_alone = not config.has_rewards
    if config.is_offline:
        without, remedy = "algorithm.objective.nll_coefficient=0", "set algorithm.objective.nll_coefficient=1"
        is_alone = config.algorithm.objective.is_without_nll
    if not is_alone or not config.has_teachers or last is None or distillation.final_coefficient > 0:
        return
    if last < steps:
        yield (
            f"algorithm.distillation.anneal_steps={last}: with {without} and final_coefficient=0, the actor would "
            f"learn nothing in the steps after {last} of run.steps={steps}. Fix: set "
            f"algorithm.distillation.anneal_steps={steps}, set algorithm.distillation.final_coefficient=0.1, or "
            f"{remedy}"
        )


def fine_tuning_without_nll_needs_teachers(config: Config) -> Iterator[str]:
    if config.algorithm.objective.is_without_nll and not config.has_teachers:
        problem, remedy = "teachers.models=[]", "add a teacher to teachers.models"
        if config.teachers.models:
            coefficient = config.algorithm.distillation.coefficient
            problem = f"algorithm.distillation.coefficient={coefficient:g}"
            remedy = "set algorithm.distillation.coefficient=1"
        yield (
            f"algorithm.objective.nll_coefficient=0: the loss would be 0, because {problem}. Fix: {remedy}, or set "
            "algorithm.objective.nll_coefficient=1"
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
        if teacher.path is None and teacher.prompt_column is None and teacher.feedback is None:
            yield (
                f"teachers.models: {teacher.name} with path=null, prompt_column=null and feedback=null: the teacher "
                "would see the same prompts as the actor. Fix: set path, set prompt_column to a column with prompts "
                "that contain a hint, or set feedback to a reward function or to environment. For a KL to the "
                "reference, set algorithm.kl.coefficient"
            )


def keys_of_a_teacher_have_an_effect(config: Config) -> Iterator[str]:
    for teacher in config.teachers.models:
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


def feedback_has_a_source(config: Config) -> Iterator[str]:
    names = [entry.label for entry in config.rewards.functions] + [ENVIRONMENT] * config.has_environment
    for teacher in config.teachers.models:
        sources = teacher.feedback or ()
        for repeated in [name for name in names if sources.count(name) > 1][:1]:
            yield (
                f"teachers.models: {teacher.name} with feedback={_names(sources)}: {repeated} is listed more than "
                "once. Fix: list each source once"
            )
        for unknown in [name for name in sources if name not in names][:1]:
            problem, fix = "rewards.functions has no function with this name", f"add {unknown} to rewards.functions"
            if unknown == ENVIRONMENT:
                problem, fix = "environment.class=null", "set environment.class"
            others = f", or use one of {', '.join(names)}" if names else ""
            yield f"teachers.models: {teacher.name} with feedback={unknown}: {problem}. Fix: {fix}{others}"


def feedback_is_the_only_addition(config: Config) -> Iterator[str]:
    for teacher in config.teachers.models:
        if teacher.feedback is not None and teacher.prompt_column is not None:
            yield (
                f"teachers.models: {teacher.name} with feedback={_names(teacher.feedback)} and prompt_column="
                f"{teacher.prompt_column}: feedback is appended to the row's own prompt. Fix: remove one of the two "
                "keys, or use a separate teacher for each"
            )


def feedback_is_on_sampled_responses(config: Config) -> Iterator[str]:
    teacher = next((teacher for teacher in config.teachers.models if teacher.feedback is not None), None)
    if teacher is not None and teacher.feedback is not None and config.is_offline:
        yield (
            f"teachers.models: {teacher.name} with feedback={_names(teacher.feedback)}: responses are not sampled with "
            f"data.format={config.data.format}, so there is no feedback on them. Fix: {_remove('feedback', teacher)}"
        )


def _remove(key: str, teacher: Teacher) -> str:
    """Return the remedy for a key that must not be set. A teacher without a path requires one of these keys."""
    return f"remove the teacher {teacher.name}" if teacher.path is None else f"remove {key} from {teacher.name}"


def _names(feedback: Sequence[str]) -> str:
    return feedback[0] if len(feedback) == 1 else f"[{', '.join(feedback)}]"


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
                f"{where} sets {', '.join(assignments)}. Fix: set layout={{tp: {layout.tp}, dp: {layout.dp}}} for "
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
                f"{entry}: vLLM normalizes log-probs over the full vocabulary, but the actor's are normalized over the "
                f"candidate tokens of rollout.top_k={top_k}. Fix: set rollout.top_k=null and rollout.top_p=1, or set "
                "engine=megatron"
            )


def _in_vllm(config: Config) -> list[tuple[Teacher, Layout]]:
    """Return the teachers in vLLM with their layouts."""
    teachers = config.teachers
    return [(teacher, teachers.layout_of(teacher)) for teacher, _ in config.placed_teachers if teacher.engine == "vllm"]


def prompt_columns_require_rows_of_files(config: Config) -> Iterator[str]:
    teacher = _first_with_prompts(config)
    if teacher is None:
        return
    if config.is_offline:
        yield (
            f"{_with_column(teacher)}: with data.format={config.data.format}, teachers see the rows' own prompts. Fix: "
            f"{_remove('prompt_column', teacher)}"
        )
    elif config.data.is_procedural:
        yield (
            f"{_with_column(teacher)}: data.source={config.data.source} has no such column. Fix: set data.source to a "
            ".jsonl or .parquet file with this column"
        )


def prompt_columns_require_checked_rollouts(config: Config) -> Iterator[str]:
    teacher = _first_with_prompts(config)
    if teacher is not None and config.has_environment and config.actor.experts.replay_routes:
        yield (
            f"{_with_column(teacher)}: with actor.experts.replay_routes=true, megarl cannot check whether rollouts of "
            f"environment.class={config.environment.name} start with the row's prompt. Fix: set "
            "actor.experts.replay_routes=false"
        )


def _first_with_prompts(config: Config) -> Teacher | None:
    return next((teacher for teacher in config.teachers.models if teacher.prompt_column is not None), None)


def _with_column(teacher: Teacher) -> str:
    return f"teachers.models: {teacher.name} with prompt_column={teacher.prompt_column}"


def given_responses_need_a_column(config: Config) -> Iterator[str]:
    if config.trains_given_responses and not config.is_offline and config.data.response_column is None:
        yield (
            f"{_share(config)}: the remaining prompts need responses, but data.response_column=null. Fix: set "
            "data.response_column to a column with a response to each prompt"
        )


def given_responses_need_distributions(config: Config) -> Iterator[str]:
    if config.trains_given_responses and not config.is_offline and config.algorithm.distillation.is_sampled:
        yield (
            f"{_share(config)}: algorithm.distillation.divergence=sampled estimates the KL from tokens that the policy "
            "sampled. Fix: set algorithm.distillation.divergence to forward_kl, reverse_kl or jsd"
        )


def given_responses_have_no_rewards(config: Config) -> Iterator[str]:
    if not config.trains_given_responses or config.is_offline:
        return
    estimator = config.algorithm.advantage.estimator
    if config.has_rewards:
        yield (
            f"{_share(config)}: the only loss on given responses is the divergence from the teachers, but the run has "
            "rewards. Fix: set rewards.functions=[] and remove other rewards, or set "
            "algorithm.distillation.on_policy_share=1"
        )
    elif estimator != "policy_gradient":
        yield (
            f"{_share(config)}: without rewards, algorithm.advantage.estimator={estimator} has no effect, and given "
            "responses have no group. Fix: set algorithm.advantage.estimator=policy_gradient"
        )


def given_responses_exclude_trust_region(config: Config) -> Iterator[str]:
    limit = config.algorithm.trust_region.kl_limit
    if config.trains_given_responses and limit is not None:
        yield (
            f"{_share(config)}: algorithm.trust_region.kl_limit={limit:g} limits the change on sampled tokens only. "
            "Fix: set algorithm.trust_region.kl_limit=null, or set algorithm.distillation.on_policy_share=1"
        )


def given_responses_are_not_offline(config: Config) -> Iterator[str]:
    if config.trains_given_responses and config.is_offline:
        yield (
            f"{_share(config)}: with data.format={config.data.format}, no responses are sampled. Fix: set "
            "algorithm.distillation.on_policy_share=1, or set data.format=prompts"
        )


def _share(config: Config) -> str:
    return f"algorithm.distillation.on_policy_share={config.algorithm.distillation.on_policy_share:g}"


def divergence_of_distributions_is_in_the_loss(config: Config) -> Iterator[str]:
    key, distillation = "algorithm.distillation", config.algorithm.distillation
    if not distillation.is_sampled and distillation.placement != "loss":
        yield (
            f"{key}.divergence={distillation.divergence}: a divergence between distributions must be part of the "
            f"loss, because an advantage applies only to the sampled token. Fix: set {key}.placement=loss, or set "
            f"{key}.divergence=sampled"
        )


def divergence_of_distributions_covers_the_vocabulary(config: Config) -> Iterator[str]:
    distillation, top_k = config.algorithm.distillation, config.rollout.top_k
    if not distillation.is_sampled and top_k is not None:
        yield (
            f"algorithm.distillation.divergence={distillation.divergence}: this divergence needs the full "
            f"vocabulary, but rollout.top_k={top_k} limits the policy to candidate tokens. Fix: set rollout.top_k=null "
            "and rollout.top_p=1, or set algorithm.distillation.divergence=sampled"
        )


RULES = (
    teachers_have_distinct_names,
    teachers_without_a_path_see_another_prompt,
    keys_of_a_teacher_have_an_effect,
    feedback_has_a_source,
    feedback_is_the_only_addition,
    feedback_is_on_sampled_responses,
    prompt_columns_require_rows_of_files,
    prompt_columns_require_checked_rollouts,
    teachers_in_vllm_have_their_own_model,
    teachers_in_vllm_use_only_tp_and_dp,
    teachers_in_vllm_return_log_probs,
    distillation_alone_needs_no_rounds,
    distillation_alone_does_not_end,
    fine_tuning_without_nll_needs_teachers,
    teacher_sources_require_source_column,
    given_responses_need_a_column,
    given_responses_need_distributions,
    given_responses_have_no_rewards,
    given_responses_exclude_trust_region,
    given_responses_are_not_offline,
    divergence_of_distributions_is_in_the_loss,
    divergence_of_distributions_covers_the_vocabulary,
)
