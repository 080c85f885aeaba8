"""Rules for the sections `rollout` and `logprob_check`, and for all `vllm_overrides`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.document import show
from megarl.config.schema import Config
from megarl.config.vllm_arguments import MANAGED, REFITTABLE


def candidate_tokens_are_bounded(config: Config) -> Iterator[str]:
    top_p = config.rollout.top_p
    if top_p != 1 and config.rollout.top_k is None:
        yield (
            f"rollout.top_p={top_p:g}: the trainer needs the candidate tokens of the truncated distribution, but with "
            "rollout.top_k=null each position may have the whole vocabulary as candidates. Fix: set rollout.top_k=100, "
            "or set rollout.top_p=1"
        )


def nodes_do_not_share_memory(config: Config) -> Iterator[str]:
    nodes = config.cluster.nodes
    if nodes != 1 and not config.is_offline and config.rollout.transport == "shared_memory":
        yield (
            f"rollout.transport=shared_memory: with cluster.nodes={nodes} the trainer and the engines are on different "
            "nodes, which do not share memory. Fix: set rollout.transport=auto"
        )


def context_holds_a_prompt_and_a_response(config: Config) -> Iterator[str]:
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if not config.is_offline and new >= context:
        yield (
            f"rollout.max_new_tokens={new}: {context} - {new} = {context - new} of rollout.context_length={context} "
            f"tokens are left for the prompt. Fix: set rollout.max_new_tokens below {context}, or raise "
            "rollout.context_length"
        )


def given_responses_come_from_files(config: Config) -> Iterator[str]:
    if config.data.response_column is not None and config.data.is_procedural:
        yield (
            f"data.response_column={config.data.response_column}: data.source={config.data.source} has no such column. "
            "Fix: set data.source to a .jsonl or .parquet file with this column, or remove data.response_column"
        )


def prefixes_need_given_responses(config: Config) -> Iterator[str]:
    share = config.rollout.prefix_share
    if share > 0 and config.data.response_column is None:
        yield (
            f"rollout.prefix_share={share:g}: prefixes come from given responses, but data.response_column=null. Fix: "
            "set data.response_column to a column with a response to each prompt"
        )


def prefixes_begin_single_responses(config: Config) -> Iterator[str]:
    if not config.rollout.prefix_share:
        return
    reasons = {
        f"data.format={config.data.format}": config.is_offline,
        "rollout.engine=diffusers": config.samples_images,
        f"environment.class={config.environment.name}": config.has_environment,
    }
    if (reason := next((key for key, applies in reasons.items() if applies), None)) is not None:
        yield (
            f"rollout.prefix_share={config.rollout.prefix_share:g}: prefixes require rollouts that consist of a single "
            f"text response, which {reason} does not support. Fix: set rollout.prefix_share=0"
        )


def quantization_requires_bfloat16(config: Config) -> Iterator[str]:
    if config.rollout.quantization is not None and config.model.dtype != "bfloat16":
        yield (
            f"rollout.quantization={config.rollout.quantization}: fp8 engines compute in bfloat16, but "
            f"model.dtype={config.model.dtype}. Fix: set model.dtype=bfloat16 or rollout.quantization=null"
        )


def weights_are_quantized_once(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.quantization is not None and "quantization" in rollout.vllm_overrides:
        yield (
            f"rollout.vllm_overrides.quantization={rollout.vllm_overrides['quantization']}: with "
            f"rollout.quantization={rollout.quantization} engines already receive quantized weights. Fix: remove the "
            "override, or set rollout.quantization=null"
        )


def sleep_requires_idle_engines(config: Config) -> Iterator[str]:
    if _samples_ahead(config) and config.rollout.sleep and not config.pauses_rollouts:
        yield (
            f"rollout.sleep=true: with {_staleness(config)} and cluster.placement={config.cluster.placement} engines "
            "are never idle, so they cannot sleep. Fix: set rollout.sleep=false"
        )


def sleeping_engines_recompute_kv_cache(config: Config) -> Iterator[str]:
    rollout = config.rollout
    has_cache = not config.samples_images
    if has_cache and config.pauses_rollouts and rollout.sleep and rollout.kv_cache_on_update != "recompute":
        yield (
            f"rollout.kv_cache_on_update={rollout.kv_cache_on_update}: with rollout.sleep=true and "
            f"{_staleness(config)} colocated engines release the KV cache of running requests while models train. Fix: "
            "set rollout.kv_cache_on_update=recompute"
        )


def greedy_baselines_are_not_stale(config: Config) -> Iterator[str]:
    if _samples_ahead(config) and config.samples_greedily:
        yield (
            f"{_staleness(config)}: algorithm.advantage.estimator={config.algorithm.advantage.estimator} compares each "
            "sample with a greedy response from the same weights, but the weights may change between the two. Fix: set "
            "rollout.max_staleness=0"
        )


def _samples_ahead(config: Config) -> bool:
    return config.rollout.max_staleness > 0 and not config.is_offline


def _staleness(config: Config) -> str:
    return f"rollout.max_staleness={config.rollout.max_staleness}"


def overrides_exclude_managed_arguments(config: Config) -> Iterator[str]:
    sections = {"rollout": config.rollout, "reward_model": config.reward_model, "teachers": config.teachers}
    extras = {name: section.vllm_overrides for name, section in sections.items()}
    lines = []
    for section, homes in MANAGED.items():
        for name in homes.keys() & extras[section].keys():
            why = "megarl depends on its own value for this argument. Fix: remove the override"
            if home := homes[name]:
                why = f"megarl sets this argument from {home}. Fix: set {home} instead"
            lines.append(f"{section}.vllm_overrides.{name}={show(extras[section][name])}: {why}")
    yield from sorted(lines)


def overrides_keep_weights_refittable(config: Config) -> Iterator[str]:
    for name, (value, why) in REFITTABLE.items():
        override = config.rollout.vllm_overrides.get(name, value)
        if override != value:
            yield f"rollout.vllm_overrides.{name}={show(override)}: {why}. Fix: remove the override"


def masking_requires_trainer_logprobs(config: Config) -> Iterator[str]:
    if config.logprob_check.action == "mask" and config.algorithm.correction.old == "rollout":
        yield (
            "logprob_check.action=mask: with algorithm.correction.old=rollout, the trainer computes no log-probs to "
            "compare with the engine's. Fix: set algorithm.correction.old=trainer, or logprob_check.action=warn"
        )


def masking_requires_token_losses(config: Config) -> Iterator[str]:
    objective = config.algorithm.objective
    if config.logprob_check.action == "mask" and not objective.spec.is_policy_objective and not config.is_offline:
        yield (
            f"logprob_check.action=mask: algorithm.objective.name={objective.name} computes one loss per pair, so "
            "single tokens cannot be masked. Fix: set logprob_check.action=warn"
        )


def stopping_requires_fresh_samples(config: Config) -> Iterator[str]:
    check, staleness = config.logprob_check, config.rollout.max_staleness
    if check.action == "stop" and staleness and check.canaries != "refits":
        yield (
            f"logprob_check.action=stop: with rollout.max_staleness={staleness}, all samples of a step may be stale, "
            "and logprob_check.limit does not apply to them. Fix: set logprob_check.canaries=refits, or "
            "logprob_check.action=warn"
        )


def draft_model_has_a_path(config: Config) -> Iterator[str]:
    method = config.rollout.speculative.method
    if config.rollout.has_draft_model and config.rollout.speculative.path is None:
        model = "an EAGLE-3 draft of the model" if method == "eagle3" else "a smaller model with the same tokenizer"
        yield (
            f"rollout.speculative.method={method}: rollout.speculative.path=null. Fix: set rollout.speculative.path "
            f"to {model}, or set rollout.speculative.method=ngram"
        )


def sleeping_engines_have_no_draft_model(config: Config) -> Iterator[str]:
    """vLLM's sleep mode discards the weights of both models, and a refit writes only the policy's."""
    if config.rollout.has_draft_model and config.rollout.sleep:
        yield (
            f"rollout.speculative.method={config.rollout.speculative.method}: with rollout.sleep=true, engines discard "
            "the draft model's weights, and a refit does not restore them. Fix: set rollout.sleep=false, or set "
            "rollout.speculative.method=ngram and rollout.speculative.path=null"
        )


def routes_are_not_speculative(config: Config) -> Iterator[str]:
    if config.rollout.speculative.method is not None and config.actor.experts.replay_routes:
        yield (
            f"rollout.speculative.method={config.rollout.speculative.method}: with actor.experts.replay_routes=true, "
            "the engines would also report the routes of rejected draft tokens. Fix: set "
            "rollout.speculative.method=null or actor.experts.replay_routes=false"
        )


def drafts_need_the_mtp_layer(config: Config) -> Iterator[str]:
    if config.rollout.drafts_with_mtp and not config.actor.has_mtp:
        yield (
            "rollout.speculative.method=mtp: with actor.mtp.loss_coefficient=null, the MTP layer is not loaded. "
            "Fix: set actor.mtp.loss_coefficient=0.0"
        )


def sde_steps_are_denoising_steps(config: Config) -> Iterator[str]:
    denoising = config.rollout.denoising
    within, end, reason = denoising.noised_within, denoising.num_steps, ""
    if not config.algorithm.objective.spec.adds_noise:
        within, end = denoising.within, end - 1
        reason = f", because the small noise of step {end} amplifies rounding errors"
    if not within or within.stop > end:
        yield (
            f"rollout.denoising.sde_within={show(denoising.sde_within)}: with rollout.denoising.num_steps="
            f"{denoising.num_steps}, expected [first, end) with 0 <= first < end <= {end}{reason}. Fix: set "
            f"rollout.denoising.sde_within=[0, {end}]"
        )
    elif (count := denoising.sde_steps) is not None and count > len(within):
        yield (
            f"rollout.denoising.sde_steps={count}: only steps {within.start} to {within.stop - 1} can be drawn. "
            f"Fix: set rollout.denoising.sde_steps={len(within)}, or set rollout.denoising.sde_within"
        )


RULES = (
    candidate_tokens_are_bounded,
    nodes_do_not_share_memory,
    context_holds_a_prompt_and_a_response,
    given_responses_come_from_files,
    prefixes_need_given_responses,
    prefixes_begin_single_responses,
    quantization_requires_bfloat16,
    weights_are_quantized_once,
    sleep_requires_idle_engines,
    sleeping_engines_recompute_kv_cache,
    greedy_baselines_are_not_stale,
    overrides_exclude_managed_arguments,
    overrides_keep_weights_refittable,
    masking_requires_trainer_logprobs,
    masking_requires_token_losses,
    stopping_requires_fresh_samples,
    draft_model_has_a_path,
    sleeping_engines_have_no_draft_model,
    routes_are_not_speculative,
    drafts_need_the_mtp_layer,
    sde_steps_are_denoising_steps,
)
