"""The rules across keys: one function each, named as the rule. Those of a layout alone are in `layout_rules`, those of
the objective and its data in `objective_rules`, those between keys and model in `model_rules`.

A rule returns None where it is kept, otherwise one line with the keys, the arithmetic and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.config.divisors import divisors, does_not_divide
from megarl.config.document import show
from megarl.config.layout_rules import LAYOUT_RULES
from megarl.config.learning_rate import num_updates
from megarl.config.objective_rules import OBJECTIVE_RULES
from megarl.config.schema import Config, Placed, Trained
from megarl.config.unused_keys import unused_keys
from megarl.config.violations import raise_all
from megarl.config.vllm_arguments import GIVEN, REFITTABLE


def check(config: Config, defaults: Mapping[str, Any]) -> None:
    """Checks the keys against each other, and those that nothing reads against the base recipe's values (defaults).
    Raises UserError with one line per broken rule."""
    placed_violations = [rule(config, placed) for placed in config.all_placed for rule in _PLACED_RULES]
    layout_violations = [
        rule(f"{placed.section}.layout.", placed.layout) for placed in config.all_placed for rule in LAYOUT_RULES
    ]
    trained_violations = [rule(config, trained) for trained in config.all_trained for rule in _TRAINED_RULES]
    config_violations = [rule(config) for rule in (*_RULES, *OBJECTIVE_RULES)]
    raise_all(
        config_violations + layout_violations + placed_violations + trained_violations + unused_keys(config, defaults)
    )


def prompts_per_update_divides_prompts_per_step(config: Config) -> str | None:
    per_step, per_update = config.batch.prompts_per_step, config.batch.prompts_per_update
    return does_not_divide("batch.prompts_per_update", per_update, "prompts per step", per_step, divisors(per_step))


def estimator_reads_its_options(config: Config) -> str | None:
    advantage = config.algorithm.advantage
    options = {name: value for name, value in advantage.model_dump().items() if name != "estimator"}
    unused_keys = [name for name, value in options.items() if value is not None and name not in advantage.spec.options]
    if not unused_keys:
        return None
    assignments = ", ".join(f"algorithm.advantage.{name}={show(options[name])}" for name in unused_keys)
    return (
        f"{assignments}: not read by algorithm.advantage.estimator={advantage.estimator}, which has the options "
        f"{', '.join(advantage.spec.options)}; set {'it' if len(unused_keys) == 1 else 'them'} to null"
    )


def compared_samples_are_of_one_prompt(config: Config) -> str | None:
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    if not config.algorithm.objective.spec.is_policy_objective or not advantage.spec.compares_samples or samples >= 2:
        return None
    if advantage.option("group_of_one") == "reward":
        return None
    return (
        f"batch.samples_per_prompt={samples}: {advantage.estimator} compares the samples of a prompt with each other "
        "and needs at least 2; set batch.samples_per_prompt=8"
    )


def prompts_that_tell_nothing_can_be_found(config: Config) -> str | None:
    rounds, samples = config.batch.sampling_rounds, config.batch.samples_per_prompt
    if rounds == 1 or samples >= 2:
        return None
    return (
        f"batch.sampling_rounds={rounds}: prompts whose samples all have one reward are replaced, and with "
        "batch.samples_per_prompt=1 that is each of them; set batch.sampling_rounds=1 or batch.samples_per_prompt=8"
    )


def deltas_are_sent(config: Config) -> str | None:
    rollout = config.rollout
    if not rollout.refit_delta or config.sends_weights:
        return None
    return (
        f"rollout.refit_delta=true: with rollout.transport={rollout.transport} and "
        f"cluster.placement={config.cluster.placement} engines read the weights where they lie, and nothing is sent; "
        "set rollout.transport=p2p or rollout.refit_delta=false"
    )


def std_of_pass_at_k_has_a_reader(config: Config) -> str | None:
    advantage = config.algorithm.advantage
    if advantage.estimator != "pass_at_k" or advantage.std != "sample":
        return None
    return (
        "algorithm.advantage.std=sample: pass_at_k divides by the deviation over all sets of k samples, which is that "
        "of the population; set algorithm.advantage.std=null"
    )


def k_samples_are_there(config: Config) -> str | None:
    """k is at most the number of samples; with the baseline over all sets it is less, as n samples make one set of n,
    whose best is the same for each of them."""
    samples, advantage = config.batch.samples_per_prompt, config.algorithm.advantage
    if advantage.estimator != "pass_at_k" or samples < 2:  # a rule of its own says that there must be two
        return None
    k, all_sets = advantage.option("k"), advantage.option("pass_at_k_baseline") == "all"
    if k > samples:
        return (
            f"algorithm.advantage.k={k}: the best of k is among batch.samples_per_prompt={samples} samples; set k to "
            f"at most {samples - all_sets}"
        )
    if k == samples and all_sets:
        return (
            f"algorithm.advantage.k={k}: of batch.samples_per_prompt={samples} samples there is one set of {k}, whose "
            f"best no sample changes, so that every advantage is 0; set k to at most {k - 1}, or "
            "pass_at_k_baseline=without"
        )
    return None


def kept_tokens_can_be_handed_over(config: Config) -> str | None:
    top_p = config.rollout.top_p
    if top_p == 1 or config.rollout.top_k is not None:
        return None
    return (
        f"rollout.top_p={top_p:g}: the trainer needs the tokens that the engine kept, to compute log-probs of the same "
        "truncated distribution, and with rollout.top_k=null they may be the whole vocabulary at every position; set "
        "rollout.top_k too, such as 100, or rollout.top_p=1"
    )


def context_holds_a_prompt_and_a_response(config: Config) -> str | None:
    new, context = config.rollout.max_new_tokens, config.rollout.context_length
    if config.is_offline or new < context:
        return None
    return (
        f"rollout.max_new_tokens={new}: {context - new} of rollout.context_length={context} tokens are left for the "
        f"prompt ({context} - {new}); lower max_new_tokens or raise context_length"
    )


def microbatch_holds_the_longest_sample(config: Config, placed: Placed) -> str | None:
    """The token budget of one rank holds its share of the longest sample, whose tokens are shared out over the
    context-parallel ranks, in two chunks of equal size for each. The two samples of a pair are in one microbatch."""
    role = placed.section
    budget, cp, (key, context) = placed.tokens_per_microbatch, placed.layout.cp, config.context_of(placed)
    together = 2 if placed is config.actor and config.algorithm.objective.spec.is_pairwise else 1
    needed = together * (-(-context // (2 * cp)) * 2 if cp > 1 else context)
    if budget >= needed:
        return None
    ranks = f" on {role}.layout.cp={cp} ranks" if cp > 1 else ""
    unit, tokens = ("a sample", f"{key}={context}") if together == 1 else ("a pair", f"2 x {key}={context}")
    return (
        f"{role}.tokens_per_microbatch={budget}: {unit} may have {tokens} tokens{ranks} and "
        f"is never split over microbatches ({budget} < {needed}); set {role}.tokens_per_microbatch to at least {needed}"
    )


def every_data_parallel_rank_has_a_sample(config: Config, placed: Placed) -> str | None:
    role = placed.section
    dp, prompts, per_prompt = placed.layout.dp, config.batch.prompts_per_update, config.batch.samples_per_prompt
    units, what = prompts * per_prompt, f"samples ({prompts} prompts x {per_prompt} samples)"
    if placed is config.actor and config.algorithm.objective.spec.is_pairwise:
        units, what = prompts, "pairs, which are never split"
    elif config.is_offline:
        units, what = prompts, "rows"
    if dp <= units:
        return None
    return (
        f"{role}.layout.dp={dp}: an update has {units} {what}, fewer than data-parallel ranks; set dp to at most "
        f"{units} or raise batch.prompts_per_update"
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


def sampled_ids_have_one_length(config: Config) -> str | None:
    settings = config.reward_model
    if settings.context_length is None or settings.reads != "ids":
        return None
    return (
        f"reward_model.context_length={settings.context_length}: with reward_model.reads=ids it reads the sampled "
        f"tokens, at most rollout.context_length={config.rollout.context_length}; set reward_model.context_length=null"
    )


def reward_engines_have_tensor_and_data_parallel_ranks_only(config: Config) -> str | None:
    layout = config.reward_model.layout
    other = {key: value for key, value in layout.model_dump().items() if key not in ("tp", "dp") and value}
    assignments = [f"{key}={str(value).lower()}" for key, value in other.items() if value is True or value != 1]
    if not config.has_reward_model or config.reward_model.engine == "megatron" or not assignments:
        return None
    return (
        f"reward_model.engine=vllm: its layout is dp engines of tp ranks, and reward_model.layout has "
        f"{', '.join(assignments)}; take the default there, or set reward_model.engine=megatron"
    )


def reward_engines_keep_their_parameters(config: Config) -> str | None:
    settings = config.reward_model
    if not config.has_reward_model or settings.engine == "megatron" or not settings.offload:
        return None
    return (
        f"reward_model.offload={settings.offload}: only a reward model in Megatron moves them, and "
        "reward_model.engine=vllm; set reward_model.offload=[] or reward_model.engine=megatron"
    )


def arguments_of_vllm_are_given_once(config: Config) -> str | None:
    extras = {"rollout": config.rollout.vllm_overrides, "reward_model": config.reward_model.vllm_overrides}
    lines = []
    for section, homes in GIVEN.items():
        for name in homes.keys() & extras[section].keys():
            home = homes[name]
            why = f"this follows from {home}; set it there" if home else "megarl relies on its own value; leave it out"
            lines.append(f"{section}.vllm_overrides.{name}={show(extras[section][name])}: {why}")
    return "\n".join(sorted(lines)) or None


def weights_stay_where_refits_write_them(config: Config) -> str | None:
    lines = []
    for name, (value, why) in REFITTABLE.items():
        override = config.rollout.vllm_overrides.get(name, value)
        if override != value:
            lines.append(f"rollout.vllm_overrides.{name}={show(override)}: {why}; leave it out")
    return "\n".join(lines) or None


def something_gives_rewards(config: Config) -> str | None:
    rewards = config.rewards
    if config.is_offline or rewards.functions or rewards.judge is not None or config.has_reward_model:
        return None
    return (
        "rewards.functions=[]: nothing would reward the samples; list a function such as exact_match, or set "
        "reward_model.path or rewards.judge"
    )


def turns_are_rewarded_by_functions_of_ones_own(config: Config) -> str | None:
    per_turn = [entry.function for entry in config.rewards.functions if entry.per_turn]
    functions = [name for name in per_turn if ":" not in name]
    if not functions:
        return None
    return (
        f"rewards.functions: {functions[0]} with per_turn=true: it returns one reward, of the whole response; set "
        "per_turn=false, or name path/to/file.py:function, a function of your own that returns a list of them"
    )


def judge_has_samples_to_compare(config: Config) -> str | None:
    samples, judge = config.batch.samples_per_prompt, config.rewards.judge
    if judge is None or config.is_offline or samples > 1:
        return None
    return (
        f"rewards.judge={judge}: it compares the samples of a prompt with each other, and batch.samples_per_prompt=1; "
        "set it to at least 2"
    )


def correction_is_of_another_old_policy(config: Config) -> str | None:
    correction = config.algorithm.correction
    for name, level in (("weight", correction.weight), ("mask", correction.mask)):
        if correction.old == "rollout" and level is not None:
            return (
                f"algorithm.correction.{name}={level}: with algorithm.correction.old=rollout the old policy is the one "
                f"that sampled, and every ratio between them is 1; set {name}=null or old=trainer"
            )
    return None


def correction_keeps_some_tokens(config: Config) -> str | None:
    low, high = config.algorithm.correction.mask_low, config.algorithm.correction.mask_high
    if low < high:
        return None
    return (
        f"algorithm.correction.mask_low={low:g}: no ratio is between it and mask_high={high:g}; set mask_low below "
        f"{high:g}"
    )


def overlong_buffer_fits_a_response(config: Config) -> str | None:
    buffer, longest = config.rewards.overlong_buffer, config.rollout.max_new_tokens
    if buffer is None or buffer <= longest:
        return None
    return (
        f"rewards.overlong_buffer={buffer}: it is the last part of rollout.max_new_tokens={longest}; set it to at most "
        f"{longest}"
    )


def covariances_to_choose_from(config: Config) -> str | None:
    if config.algorithm.objective.name != "clip_cov":
        return None
    low, high = (config.algorithm.objective.option(name) for name in ("covariance_low", "covariance_high"))
    if low < high:
        return None
    return (
        f"algorithm.objective.covariance_low={low:g}: no covariance is between it and covariance_high={high:g}; set "
        f"covariance_low below {high:g}"
    )


def clipped_ratio_stays_positive(config: Config) -> str | None:
    """The lower bound 1 − clip_low of the ratio is positive, except for GMPO, which clips log-ratios."""
    name, low = config.algorithm.objective.name, config.algorithm.objective.clip_low
    if low is None or low < 1 or name == "gmpo":
        return None
    return (
        f"algorithm.objective.clip_low={low:g}: the ratio's lower bound 1 - {low:g} = {1 - low:g} is not positive; set "
        "clip_low below 1, such as 0.2"
    )


def adaptive_coefficient_starts_somewhere(config: Config) -> str | None:
    kl, batch = config.algorithm.kl, config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt
    if kl.adaptive_target is None:
        return None
    if not kl.coefficient:
        return (
            f"algorithm.kl.adaptive_target={kl.adaptive_target:g}: algorithm.kl.coefficient=0 stays 0 whatever it is "
            "multiplied with; set a coefficient above 0, or adaptive_target=null"
        )
    if samples <= kl.adaptive_horizon:
        return None
    return (
        f"algorithm.kl.adaptive_horizon={kl.adaptive_horizon}: a step has {batch.prompts_per_step} x "
        f"{batch.samples_per_prompt} = {samples} samples and would change the coefficient by more than 20 %; set "
        f"adaptive_horizon to at least {samples}"
    )


def renewal_is_of_a_reference(config: Config) -> str | None:
    kl = config.algorithm.kl
    if kl.renew_steps is not None and not config.has_reference:
        return (
            f"algorithm.kl.renew_steps={kl.renew_steps}: with algorithm.kl.coefficient=0 there is no reference to "
            "renew; set renew_steps=null or a coefficient above 0"
        )
    if kl.renew_steps is None and kl.renew_share != 1:
        return (
            f"algorithm.kl.renew_share={kl.renew_share:g}: with algorithm.kl.renew_steps=null the reference is never "
            "renewed; set renew_steps=1 for a moving average, or renew_share=1"
        )
    return None


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
    """The key decay belongs to wsd, which needs it, and min_lr to the schedules that decay."""
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
    """Warm-up and decay of wsd do not overlap."""
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
    microbatch_holds_the_longest_sample,
    every_data_parallel_rank_has_a_sample,
)
"""The rules of each section of a model on ranks of its own."""

_TRAINED_RULES: tuple[Callable[[Config, Trained], str | None], ...] = (
    fp8_needs_bfloat16,
    schedule_lengths_are_whole_updates,
    schedule_has_the_keys_of_its_name,
    schedule_ends_below_its_peak,
    schedule_fits_the_run,
)
"""The rules of each section of a trained model."""

_RULES: tuple[Callable[[Config], str | None], ...] = (
    prompts_per_update_divides_prompts_per_step,
    estimator_reads_its_options,
    compared_samples_are_of_one_prompt,
    prompts_that_tell_nothing_can_be_found,
    std_of_pass_at_k_has_a_reader,
    k_samples_are_there,
    kept_tokens_can_be_handed_over,
    deltas_are_sent,
    context_holds_a_prompt_and_a_response,
    warmup_of_the_critic_ends,
    sampled_ids_have_one_length,
    reward_engines_have_tensor_and_data_parallel_ranks_only,
    reward_engines_keep_their_parameters,
    arguments_of_vllm_are_given_once,
    weights_stay_where_refits_write_them,
    something_gives_rewards,
    turns_are_rewarded_by_functions_of_ones_own,
    judge_has_samples_to_compare,
    correction_is_of_another_old_policy,
    correction_keeps_some_tokens,
    overlong_buffer_fits_a_response,
    covariances_to_choose_from,
    clipped_ratio_stays_positive,
    adaptive_coefficient_starts_somewhere,
    renewal_is_of_a_reference,
)
