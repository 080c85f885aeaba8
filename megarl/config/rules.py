"""The rules across keys, and between the configuration and the model: one function each, named as the rule.

A rule returns None where it is kept, otherwise one line with the keys, the arithmetic and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import gcd
from typing import Any

from megarl.config.classifier import score_head_of
from megarl.config.huggingface import attention_window, completed, experts, kv_heads, unsupported
from megarl.config.learning_rate import num_updates
from megarl.config.schema import Config, Layout, Placed, Trained


def check(config: Config) -> None:
    """Checks the keys against each other. Raises ValueError with one line per broken rule."""
    of_placed = [rule(config, placed) for placed in config.all_placed for rule in _PLACED_RULES]
    of_trained = [rule(config, trained) for trained in config.all_trained for rule in _TRAINED_RULES]
    _raise_all([rule(config) for rule in _RULES] + of_placed + of_trained)


def check_model(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Checks the keys against the content of the model's config.json. Raises ValueError with a line per broken rule."""
    model = _completed(config, config.actor, hf_config)
    of_actor = [rule(config, config.actor, model) for rule in _PLACED_MODEL_RULES]
    _raise_all(of_actor + [rule(config, model) for rule in _ENGINE_RULES])


def check_critic_model(config: Config, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]) -> None:
    """The same for the model that the critic starts from, whose config.json is critic_hf_config."""
    critic = _completed(config, config.critic, critic_hf_config)
    of_critic = [rule(config, config.critic, critic) for rule in _PLACED_MODEL_RULES]
    head = score_head_of(critic)
    labels = None if head is None else has_one_label(config, config.critic, head.num_labels)
    _raise_all([*of_critic, labels, knows_every_token(config, config.critic, hf_config, critic)])


def check_reward_model(config: Config, hf_config: Mapping[str, Any], reward_hf_config: Mapping[str, Any]) -> None:
    """The same for the reward model, whose config.json is reward_hf_config."""
    placed = config.reward_model
    reward = _completed(config, placed, reward_hf_config)
    of_reward = [rule(config, placed, reward) for rule in _PLACED_MODEL_RULES]
    head = score_head_of(reward)
    if head is None:
        architectures = ", ".join(reward.get("architectures") or ["none"])
        raise ValueError(
            f"{_model(config, placed)}: its architecture is {architectures}, without scores; take a classification "
            "checkpoint (...ForSequenceClassification or ...ForTokenClassification)"
        )
    labels = has_one_label(config, placed, head.num_labels)
    steps = steps_are_of_a_token_classifier(config, head.kind)
    _raise_all([*of_reward, labels, steps, knows_every_token(config, placed, hf_config, reward)])


def check_implicit_reward_model(config: Config, hf_config: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """The same for the implicit reward model, whose config.json is `own`."""
    placed = config.implicit_reward
    model = _completed(config, placed, own)
    of_model = [rule(config, placed, model) for rule in _PLACED_MODEL_RULES]
    if score_head_of(model) is not None:
        raise ValueError(
            f"{_model(config, placed)}: its architecture is {', '.join(model['architectures'])}, and token rewards "
            "come from log-probs; take a language model (...ForCausalLM)"
        )
    _raise_all([*of_model, knows_every_token(config, placed, hf_config, model)])


def prompts_per_update_divides_prompts_per_step(config: Config) -> str | None:
    per_step, per_update = config.batch.prompts_per_step, config.batch.prompts_per_update
    return _does_not_divide("batch.prompts_per_update", per_update, "prompts per step", per_step, _divisors(per_step))


def grpo_compares_samples_of_a_prompt(config: Config) -> str | None:
    samples = config.batch.samples_per_prompt
    if config.algorithm.advantage.estimator != "grpo" or samples >= 2:
        return None
    return (
        f"batch.samples_per_prompt={samples}: grpo compares the samples of a prompt with each other and needs at "
        "least 2; set batch.samples_per_prompt=8"
    )


def top_p_is_one(config: Config) -> str | None:
    top_p = config.rollout.top_p
    if top_p == 1:
        return None
    return (
        f"rollout.top_p={top_p:g}: the engine would sample from a truncated distribution whose log-probs the trainer "
        "does not compute; set rollout.top_p=1"
    )


def sequence_parallel_needs_tensor_parallel(config: Config, placed: Placed) -> str | None:
    role, layout = placed.section, placed.layout
    if not layout.sequence_parallel or layout.tp > 1:
        return None
    return (
        f"{role}.layout.sequence_parallel=true: it shards over the tensor-parallel ranks, and {role}.layout.tp=1 has "
        f"one; set {role}.layout.sequence_parallel=false or a larger tp"
    )


def uneven_stages_need_pipeline(config: Config, placed: Placed) -> str | None:
    role, layout = placed.section, placed.layout
    given = [name for name, layers in _uneven(layout).items() if layers is not None]
    if not given or layout.pp > 1:
        return None
    return (
        f"{role}.layout.{' and '.join(given)} given, but {role}.layout.pp=1 is a single stage; set it to null or raise "
        "pp"
    )


def virtual_stages_need_pipeline(config: Config, placed: Placed) -> str | None:
    role, layout = placed.section, placed.layout
    if layout.vpp == 1 or layout.pp > 1:
        return None
    return (
        f"{role}.layout.vpp={layout.vpp}: virtual stages interleave the layers of several pipeline stages, and "
        f"{role}.layout.pp=1 is a single one; set {role}.layout.vpp=1 or raise pp"
    )


def expert_tensor_parallel_needs_expert_parallel(config: Config, placed: Placed) -> str | None:
    """Megatron computes wrong gradients otherwise, without an error."""
    role, layout = placed.section, placed.layout
    if layout.ep > 1 or layout.expert_tp == layout.tp:
        return None
    return (
        f"{role}.layout.etp={layout.etp}: without expert parallelism ({role}.layout.ep=1) experts are sharded like the "
        f"other layers (tp={layout.tp}); set {role}.layout.etp=null or raise ep"
    )


def experts_tile_a_stage(config: Config, placed: Placed) -> str | None:
    """The ranks of a pipeline stage are tp x cp x dp, and for the experts etp x ep x their own data parallelism."""
    role, layout = placed.section, placed.layout
    ranks, needed = layout.tp * layout.cp * layout.dp, layout.expert_tp * layout.ep
    if ranks % needed == 0:
        return None
    return (
        f"{role}.layout.ep={layout.ep}: a pipeline stage has tp x cp x dp = {layout.tp} x {layout.cp} x {layout.dp} = "
        f"{ranks} ranks, which do not divide by etp x ep = {layout.expert_tp} x {layout.ep} = {needed}; choose ep from "
        f"{', '.join(str(n) for n in _divisors(ranks // gcd(ranks, layout.expert_tp)))}"
    )


def context_holds_a_prompt_and_a_response(config: Config) -> str | None:
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if new < context:
        return None
    return (
        f"rollout.max_new_tokens={new}: {context - new} of rollout.context_length={context} tokens are left for the "
        f"prompt ({context} - {new}); lower max_new_tokens or raise context_length"
    )


def microbatch_holds_the_longest_sample(config: Config, placed: Placed) -> str | None:
    """The budget is of one rank, and a sample's tokens are shared out over the context-parallel ranks, in two chunks
    of equal size for each."""
    role = placed.section
    budget, cp, context = placed.tokens_per_microbatch, placed.layout.cp, config.rollout.context_length
    needed = -(-context // (2 * cp)) * 2 if cp > 1 else context
    if budget >= needed:
        return None
    ranks = f" on {role}.layout.cp={cp} ranks" if cp > 1 else ""
    return (
        f"{role}.tokens_per_microbatch={budget}: a sample may have rollout.context_length={context} tokens{ranks} and "
        f"is never split over microbatches ({budget} < {needed}); set {role}.tokens_per_microbatch to at least {needed}"
    )


def every_data_parallel_rank_has_a_sample(config: Config, placed: Placed) -> str | None:
    role = placed.section
    prompts, per_prompt = config.batch.prompts_per_update, config.batch.samples_per_prompt
    dp, samples = placed.layout.dp, prompts * per_prompt
    if dp <= samples:
        return None
    return (
        f"{role}.layout.dp={dp}: an update has {samples} samples ({prompts} prompts x {per_prompt} samples), fewer "
        f"than data-parallel ranks; set dp to at most {samples} or raise batch.prompts_per_update"
    )


def warmup_of_the_critic_ends(config: Config) -> str | None:
    warmup, steps = config.critic.warmup_steps, config.run.steps
    if config.actor_has_values and warmup:
        return (
            f"critic.warmup_steps={warmup}: with critic.trunk=actor the critic is not trained without the actor; set "
            "critic.warmup_steps=0 or critic.trunk=own"
        )
    if not config.has_critic or warmup < steps:
        return None
    return (
        f"critic.warmup_steps={warmup}: in these steps only the critic is trained, and the run has run.steps={steps}; "
        f"set critic.warmup_steps below {steps}"
    )


def token_rewards_need_a_critic(config: Config) -> str | None:
    coefficient, estimator = config.implicit_reward.coefficient, config.algorithm.advantage.estimator
    if not config.has_implicit_reward or estimator == "gae":
        return None
    return (
        f"implicit_reward.coefficient={coefficient:g}: algorithm.advantage.estimator={estimator} compares whole "
        "samples and has no use for token rewards; set algorithm.advantage.estimator=gae or "
        "implicit_reward.coefficient=0"
    )


def something_gives_rewards(config: Config) -> str | None:
    if config.rewards.functions or config.has_reward_model:
        return None
    return (
        "rewards.functions=[]: nothing would reward the samples; list a function such as exact_match, or set "
        "reward_model.path"
    )


def clipped_ratio_stays_positive(config: Config) -> str | None:
    low = config.algorithm.objective.clip_low
    if low < 1:
        return None
    return (
        f"algorithm.objective.clip_low={low:g}: the ratio's lower bound 1 - {low:g} = {1 - low:g} is not positive; set "
        "clip_low below 1, such as 0.2"
    )


def fp8_needs_bfloat16(config: Config, trained: Trained) -> str | None:
    dtype = config.model.dtype
    if trained.fp8 is None or dtype == "bfloat16":
        return None
    key = f"{trained.section}.fp8"
    return (
        f"{key}={trained.fp8}: its matrix products are between parameters and activations in bfloat16, and "
        f"model.dtype={dtype}; set model.dtype=bfloat16 or {key}=null"
    )


def schedule_lengths_are_whole_updates(config: Config, trained: Trained) -> str | None:
    schedule = trained.optimizer.schedule
    for name, length in (("warmup", schedule.warmup), ("decay", schedule.decay)):
        if length is not None and length > 1 and length != int(length):
            return (
                f"{trained.section}.optimizer.schedule.{name}={length:g}: from 1 on this counts updates; give a whole "
                "number, or a share of the run's updates below 1"
            )
    return None


def schedule_has_the_keys_of_its_name(config: Config, trained: Trained) -> str | None:
    """decay belongs to wsd, which needs it, and min_lr to those that decay."""
    schedule = trained.optimizer.schedule
    name, prefix = schedule.name, f"{trained.section}.optimizer.schedule"
    if name == "wsd" and schedule.decay is None:
        return f"{prefix}.name=wsd: it needs the length of its decay; set {prefix}.decay=0.2"
    if name != "wsd" and schedule.decay is not None:
        return f"{prefix}.decay={schedule.decay:g}: only wsd has it, and {prefix}.name={name}; set decay=null"
    if name == "constant" and schedule.min_lr:
        return f"{prefix}.min_lr={schedule.min_lr:g}: {prefix}.name=constant does not decay to it; set min_lr=0"
    return None


def schedule_ends_below_its_peak(config: Config, trained: Trained) -> str | None:
    optimizer, prefix = trained.optimizer, f"{trained.section}.optimizer"
    if optimizer.schedule.min_lr <= optimizer.lr:
        return None
    return (
        f"{prefix}.schedule.min_lr={optimizer.schedule.min_lr:g}: the schedule decays to it from "
        f"{prefix}.lr={optimizer.lr:g}; set min_lr to at most {optimizer.lr:g}"
    )


def schedule_fits_the_run(config: Config, trained: Trained) -> str | None:
    """wsd's warm-up and decay do not overlap."""
    schedule, total = trained.optimizer.schedule, config.num_updates(trained)
    if schedule.name != "wsd" or schedule.decay is None:
        return None
    warmup, decay = num_updates(schedule.warmup, total), num_updates(schedule.decay, total)
    if warmup + decay <= total:
        return None
    return (
        f"{trained.section}.optimizer.schedule.warmup={schedule.warmup:g}, decay={schedule.decay:g}: "
        f"{warmup} + {decay} = {warmup + decay} updates, but in the run there are {total}; give both as shares of the "
        "run, such as 0.1 and 0.2"
    )


_PLACED_RULES: tuple[Callable[[Config, Placed], str | None], ...] = (
    sequence_parallel_needs_tensor_parallel,
    uneven_stages_need_pipeline,
    virtual_stages_need_pipeline,
    expert_tensor_parallel_needs_expert_parallel,
    experts_tile_a_stage,
    microbatch_holds_the_longest_sample,
    every_data_parallel_rank_has_a_sample,
)
"""Those that each section of a model on ranks of its own keeps."""

_TRAINED_RULES: tuple[Callable[[Config, Trained], str | None], ...] = (
    fp8_needs_bfloat16,
    schedule_lengths_are_whole_updates,
    schedule_has_the_keys_of_its_name,
    schedule_ends_below_its_peak,
    schedule_fits_the_run,
)
"""Those that each section of a trained model keeps."""

_RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    grpo_compares_samples_of_a_prompt,
    top_p_is_one,
    context_holds_a_prompt_and_a_response,
    warmup_of_the_critic_ends,
    something_gives_rewards,
    token_rewards_need_a_critic,
    clipped_ratio_stays_positive,
)


def model_config_is_complete(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    needed = ("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    missing = [name for name in needed if name not in hf]
    if not missing:
        return None
    lacking = ", ".join(missing)
    return f"{_model(config, placed)}: its config.json lacks {lacking}; take the config.json of the original model"


def attention_heads_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    return _tensor_parallel(config, placed, hf, "attention heads", hf["num_attention_heads"])


def kv_heads_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    return _tensor_parallel(config, placed, hf, "KV heads", kv_heads(hf))


def mlp_divides_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    if not _has_dense_layers(hf):
        return None
    return _tensor_parallel(config, placed, hf, "MLP rows (intermediate_size)", hf["intermediate_size"])


def experts_divide_by_ep(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    role = placed.section
    ep, mixture = placed.layout.ep, experts(hf)
    if mixture is not None:
        return _does_not_divide(f"{role}.layout.ep", ep, "experts", mixture.count, _divisors(mixture.count))
    if ep == 1:
        return None
    return f"{role}.layout.ep={ep}: {_model(config, placed)} has no experts to share out; set {role}.layout.ep=1"


def expert_mlp_divides_by_etp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    role = placed.section
    mixture = experts(hf)
    if mixture is None:
        return None
    layout, rows = placed.layout, mixture.intermediate
    key = f"{role}.layout.tp" if layout.etp is None else f"{role}.layout.etp"
    return _does_not_divide(key, layout.expert_tp, "MLP rows of an expert", rows, _divisors(rows))


def shared_experts_divide_by_tp(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None or not mixture.shared_intermediate:
        return None
    rows, tp = mixture.shared_intermediate, placed.layout.tp
    return _does_not_divide(f"{placed.section}.layout.tp", tp, "MLP rows of the shared experts", rows, _divisors(rows))


def experts_and_tensor_parallel_need_sequence_parallel(
    config: Config, placed: Placed, hf: Mapping[str, Any]
) -> str | None:
    role, layout = placed.section, placed.layout
    if layout.tp == 1 or layout.sequence_parallel or experts(hf) is None:
        return None
    return (
        f"{role}.layout.tp={layout.tp}, sequence_parallel=false: with experts every rank would dispatch all tokens, "
        f"which Megatron refuses; set {role}.layout.sequence_parallel=true"
    )


def layers_tile_the_stages(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Layers left by a first or last stage of its own size divide evenly over the other stages, at least one each."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    given = {name: layers for name, layers in _uneven(layout).items() if layers is not None}
    left, stages = num_layers - sum(given.values()), layout.pp - len(given)
    if (left == 0) if stages == 0 else (left >= stages and left % stages == 0):
        return None
    taken = "".join(f" - {layers}" for layers in given.values())
    keys = "".join(f", {name}={layers}" for name, layers in given.items())
    rest = f"{num_layers}{taken} = {left}" if given else f"{num_layers}"
    problem = (
        f"{role}.layout.pp={layout.pp}{keys}: {num_layers} layers do not tile the stages: {rest} layers over {stages} "
        f"{'other ' if given else ''}{'stage' if stages == 1 else 'stages'}"
    )
    if stages > 0:
        problem += f" ({left} / {stages} = {left / stages:.4g})"
    return f"{problem}; {_stage_remedy(layout.pp, num_layers)}"


def virtual_stages_tile_each_stage(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """Each pipeline stage's layers divide evenly over its virtual stages."""
    role = placed.section
    layout, num_layers = placed.layout, hf["num_hidden_layers"]
    if layers_tile_the_stages(config, placed, hf) is not None:
        return None
    given = {name: layers for name, layers in _uneven(layout).items() if layers is not None}
    others = layout.pp - len(given)
    sizes = given | ({"the other stages": (num_layers - sum(given.values())) // others} if others else {})
    broken = [f"{layers} layers ({name})" for name, layers in sizes.items() if layers % layout.vpp]
    if not broken:
        return None
    choices = ", ".join(str(value) for value in _divisors(gcd(*sizes.values())))
    return (
        f"{role}.layout.vpp={layout.vpp}: {' and '.join(broken)} of a pipeline stage do not divide into {layout.vpp} "
        f"virtual stages; choose from {choices}"
    )


def engine_heads_divide_by_tp(config: Config, hf: Mapping[str, Any]) -> str | None:
    heads, sizes = hf["num_attention_heads"], _engine_sizes(hf)
    return _does_not_divide("rollout.tp", config.rollout.tp, "attention heads", heads, sizes)


def engine_kv_heads_split_or_repeat(config: Config, hf: Mapping[str, Any]) -> str | None:
    """The engine shards KV heads over its ranks, or repeats each on several where there are more ranks than heads."""
    tp, heads = config.rollout.tp, kv_heads(hf)
    if tp % heads == 0:
        return None
    return _does_not_divide("rollout.tp", tp, "KV heads", heads, _engine_sizes(hf))


def engine_mlp_divides_by_tp(config: Config, hf: Mapping[str, Any]) -> str | None:
    rows = hf["intermediate_size"]
    if not _has_dense_layers(hf):
        return None
    return _does_not_divide("rollout.tp", config.rollout.tp, "MLP rows (intermediate_size)", rows, _engine_sizes(hf))


def engine_expert_mlp_divides_by_tp(config: Config, hf: Mapping[str, Any]) -> str | None:
    mixture = experts(hf)
    if mixture is None:
        return None
    rows, sizes = mixture.intermediate, _engine_sizes(hf)
    return _does_not_divide("rollout.tp", config.rollout.tp, "MLP rows of an expert", rows, sizes)


def context_fits_the_positions(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    context, positions = config.rollout.context_length, hf["max_position_embeddings"]
    if context <= positions:
        return None
    return (
        f"rollout.context_length={context}: the model has {positions} positions (max_position_embeddings); set "
        f"rollout.context_length to at most {positions}"
    )


def attention_is_full(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    """A window that is as long as the longest sample hides nothing."""
    window, context = attention_window(hf), config.rollout.context_length
    if window is None or context <= window:
        return None
    return (
        f"rollout.context_length={context}: with sliding_window {window} the model would not see the tokens before, "
        f"which the trainer's attention does; set rollout.context_length to at most {window}"
    )


def features_are_supported(config: Config, placed: Placed, hf: Mapping[str, Any]) -> str | None:
    found = unsupported(hf)
    if not found:
        return None
    return (
        f"{_model(config, placed)}: {' and '.join(found)} is not supported by this version; choose a model without it"
    )


def has_one_label(config: Config, placed: Placed, num_labels: int) -> str | None:
    if num_labels == 1:
        return None
    return (
        f"{_model(config, placed)}: it has {num_labels} labels (id2label), and a score is one number; take a "
        "classification checkpoint with num_labels=1"
    )


def knows_every_token(config: Config, placed: Placed, actor: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """It reads the ids that the actor's tokenizer and engine make."""
    if own["vocab_size"] >= actor["vocab_size"]:
        return None
    return (
        f"{_model(config, placed)}: its vocab_size {own['vocab_size']} is below the actor's {actor['vocab_size']}, "
        "whose token ids it must read; take a model with the actor's tokenizer"
    )


def steps_are_of_a_token_classifier(config: Config, kind: str) -> str | None:
    if config.reward_model.step_end is None or kind == "token":
        return None
    return (
        f"reward_model.step_end={config.reward_model.step_end!r}: {_model(config, config.reward_model)} scores whole "
        "samples (...ForSequenceClassification); set reward_model.step_end=null"
    )


def engine_routes_as_the_model(config: Config, hf: Mapping[str, Any]) -> str | None:
    """vLLM takes DeepSeek-V3's router from keys that transformers neither reads nor writes."""
    wanted = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    missing = [key for key in wanted if key not in hf]
    if hf["model_type"] != "deepseek_v3" or not missing:
        return None
    return (
        f"model.path={config.model.path}: its config.json lacks {' and '.join(missing)}, and the engine would route by "
        f"softmax, without the bias; add {' and '.join(f'{key}: {wanted[key]}' for key in missing)}"
    )


_PLACED_MODEL_RULES: tuple[Callable[[Config, Placed, Mapping[str, Any]], str | None], ...] = (
    attention_heads_divide_by_tp,
    kv_heads_divide_by_tp,
    mlp_divides_by_tp,
    experts_divide_by_ep,
    expert_mlp_divides_by_etp,
    shared_experts_divide_by_tp,
    experts_and_tensor_parallel_need_sequence_parallel,
    layers_tile_the_stages,
    virtual_stages_tile_each_stage,
    context_fits_the_positions,
    attention_is_full,
    features_are_supported,
)
"""Those that the config.json of each of these models keeps."""

_ENGINE_RULES: tuple[Callable[[Config, Mapping[str, Any]], str | None], ...] = (
    engine_heads_divide_by_tp,
    engine_kv_heads_split_or_repeat,
    engine_mlp_divides_by_tp,
    engine_expert_mlp_divides_by_tp,
    engine_routes_as_the_model,
)


def _completed(config: Config, placed: Placed, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        model = completed(hf_config)
    except ValueError as error:
        raise ValueError(f"{_model(config, placed)}: {error}") from None
    if violation := model_config_is_complete(config, placed, model):
        raise ValueError(violation)
    return model


def _raise_all(violations: Iterable[str | None]) -> None:
    found = [violation for violation in violations if violation is not None]
    if found:
        raise ValueError("\n".join(found))


def _does_not_divide(key: str, divisor: int, what: str, number: int, legal: Iterable[int]) -> str | None:
    if number % divisor == 0:
        return None
    arithmetic = f"{number} / {divisor} = {number / divisor:.4g}"
    choices = ", ".join(str(value) for value in legal)
    return f"{key}={divisor}: {number} {what} do not divide by {divisor} ({arithmetic}); choose from {choices}"


def _tensor_parallel(config: Config, placed: Placed, hf: Mapping[str, Any], what: str, number: int) -> str | None:
    role = placed.section
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    legal = _divisors(gcd(hf["num_attention_heads"], kv_heads(hf), *rows))
    return _does_not_divide(f"{role}.layout.tp", placed.layout.tp, what, number, legal)


def _has_dense_layers(hf: Mapping[str, Any]) -> bool:
    mixture = experts(hf)
    return mixture is None or not all(mixture.layers)


def _engine_sizes(hf: Mapping[str, Any]) -> list[int]:
    mixture, heads = experts(hf), kv_heads(hf)
    rows = [hf["intermediate_size"]] if _has_dense_layers(hf) else []
    rows += [mixture.intermediate] if mixture else []
    sizes = _divisors(gcd(hf["num_attention_heads"], *rows))
    return [tp for tp in sizes if heads % tp == 0 or tp % heads == 0]


def _stage_remedy(pp: int, num_layers: int) -> str:
    choices = ", ".join(str(value) for value in _divisors(num_layers))
    remedy = f"choose pp from {choices} with first_stage_layers and last_stage_layers null"
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if pp in _divisors(num_layers) or last < 1:
        return remedy
    return f"{remedy}, or last_stage_layers={last} alone ({pp - 1} x {per_stage} + {last} = {num_layers})"


def _uneven(layout: Layout) -> dict[str, int | None]:
    return {"first_stage_layers": layout.first_stage_layers, "last_stage_layers": layout.last_stage_layers}


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def _model(config: Config, placed: Placed) -> str:
    own = None if placed is config.actor else placed.path
    return f"model.path={config.model.path}" if own is None else f"{placed.section}.path={own}"
