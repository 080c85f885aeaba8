"""All metrics in metrics.jsonl: names, meanings and units. Runs emit no other metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Declaration:
    """A metric, or several that differ in a part of their names.

    Attributes:
        name: the name. Words in capitals are placeholders: ROLE is actor, critic or implicit_reward; MODEL, the prefix
            for the metrics of a trained model, is policy, value, implicit_reward or reward_model; STATE is parameters,
            optimizer or gradients; N and K are numbers; NAME is the name of a score; other placeholders match any text.
        meaning: what is measured, over which samples or tokens.
        unit: the unit; empty for numbers without a unit, such as fractions from 0 to 1.
        present: the condition under which the metric exists; empty if every RL run has it.
    """

    name: str
    meaning: str
    unit: str = ""
    present: str = ""

    def matches(self, name: str) -> bool:
        return re.fullmatch(_PLACEHOLDER.sub(_pattern, re.escape(self.name)), name) is not None


_PLACEHOLDER = re.compile(r"(?<![A-Za-z])[A-Z]+(?![a-z])")
_VALUES = {
    "ROLE": "actor|critic|implicit_reward",
    "MODEL": "policy|value|implicit_reward|reward_model",
    "N": r"\d+",
    "K": r"\d+",
    "NAME": r"[A-Za-z0-9_.-]+",
    "STATE": "parameters|optimizer|gradients",
}


def _pattern(placeholder: re.Match[str]) -> str:
    return f"(?:{_VALUES.get(placeholder[0], '.+')})"


def is_declared(name: str) -> bool:
    return any(declaration.matches(name) for declaration in METRICS)


STALENESS, OFFLINE, ENVIRONMENT = "rollout.max_staleness > 0", "offline data", "environment"
GAE, PREFERENCES, LABELS = "estimator=gae", "preference objectives", "data.format=labels"
CORRECTION, TOP_K, CANARIES = "algorithm.correction", "rollout.top_k", "logprob_check.canaries=refits"
SPECULATIVE = "rollout.speculative.method"

METRICS = (
    Declaration("reward/mean", "mean reward of the step's rollouts"),
    Declaration("reward/std", "population standard deviation of the rewards of the step's rollouts"),
    Declaration("reward/failed_frac", "fraction of rollouts without a reward because of a failure"),
    Declaration("reward/infrastructure_failed_frac", "fraction of rollouts without a reward because of an outage"),
    Declaration("reward/zero_std_groups", "fraction of groups whose rewards are all equal"),
    Declaration("reward/greedy_mean", "mean reward of greedy rollouts", present="estimator=remax"),
    Declaration("reward/baseline", "moving average of rewards before the step", present="estimator=reinforce"),
    Declaration("reward/NAME", "mean score by one reward function, reward model, judge or named environment reward"),
    Declaration("reward/NAME_unrated_frac", "fraction of responses that a judge did not rate", "", "a judge"),
    Declaration(
        "reward/NAME_truncated_frac", "fraction of responses too long for a reward model", "", "a reward model"
    ),
    Declaration(
        "reward/reward_model_verbatim_frac",
        "fraction of responses inserted without the chat template",
        "",
        "a classifier",
    ),
    Declaration("response/length_mean", "mean response length", "tokens"),
    Declaration("response/length_min", "shortest response", "tokens"),
    Declaration("response/length_max", "longest response", "tokens"),
    Declaration("response/truncated_frac", "fraction of responses that reached the maximum length"),
    Declaration("throughput/images_per_second", "images of the step / time/step", "images/s", "image models"),
    Declaration("throughput/tokens_per_second", "prompt and response tokens of the step / time/step", "tokens/s"),
    Declaration("time/step", "duration of the step", "s"),
    Declaration("time/rollout", "time spent submitting rollouts and waiting for them", "s"),
    Declaration("time/reward", "time spent waiting for rewards after the last rollout", "s"),
    Declaration("time/train", "time of the passes and updates of all models", "s"),
    Declaration(
        "time/copy",
        "time spent waiting for copies of the trained models' state in shared memory and on other nodes",
        "s",
    ),
    Declaration(
        "time/recovery", "time spent replacing the ranks of the trained models", "s", "steps that replaced ranks"
    ),
    Declaration("recovery/replacements", "number of rank replacements", "", "steps that replaced ranks"),
    Declaration(
        "cluster/slowest_node",
        "duration of matrix products on the slowest node, relative to the median node",
        "",
        "trained models on several nodes",
    ),
    Declaration("time/refit", "time of the weight sync and of the log-prob checks after it", "s"),
    Declaration("time/evaluation", "duration of the step's evaluations", "s", "steps with an evaluation"),
    Declaration("time/checkpoint", "time that training waited for a save", "s", "steps with a save"),
    Declaration("checkpoint/seconds", "time to write the latest complete checkpoint", "s", "after a save"),
    Declaration("checkpoint/bytes", "size of the latest complete checkpoint", "bytes", "after a save"),
    Declaration("cluster/goodput", "fraction of the run's allocated time so far spent on steps that were kept"),
    Declaration(
        "goodput/CAUSE", "fraction of all device-seconds so far, including queue time", "", "causes with recorded time"
    ),
    Declaration("idle/engines", "fraction of the step that engines were idle"),
    Declaration("idle/ROLE", "fraction of the step that a trained model's ranks were idle"),
    Declaration("engines/alive", "number of running engines"),
    Declaration("reward_models/alive", "number of running reward model engines", "", "reward_model.engine=vllm"),
    Declaration("memory/peak_pss_gb", "peak memory of the run's processes on the fullest node so far, as PSS", "GB"),
    Declaration("memory/peak_rss_gb", "peak memory as RSS (shared pages are counted once per process)", "GB"),
    Declaration("memory/ROLE_STATE_offloaded_gb", "host memory of offloaded state", "GB", "ROLE.offload"),
    Declaration("refit/gb", "size of the weights that engines received", "GB"),
    Declaration("refit/sent_gb", "size of the weights sent between processes", "GB", "p2p transport, or several nodes"),
    Declaration("refit/staging_mib", "largest buffer of an engine rank during a refit", "MiB"),
    Declaration("weights/version", "weight version after the step"),
    Declaration("weights/staleness_max", "largest number of weight versions between a sample and the trained weights"),
    Declaration("weights/staleness_N_share", "fraction of samples with staleness N", "", STALENESS),
    Declaration("weights/mixed_frac", "fraction of samples with tokens of several weight versions"),
    Declaration("rollout/prompts", "prompts sampled in all rounds"),
    Declaration("rollout/rounds", "rounds of dynamic sampling; 1 without it"),
    Declaration("rollout/groups_ahead", "groups in flight beyond the step", "", STALENESS),
    Declaration("rollout/groups_ahead_finished", "finished groups in rollout/groups_ahead", "", STALENESS),
    Declaration("rollout/dropped_samples", "samples that were dropped as stale", "", "rollout.on_stale=drop"),
    Declaration(
        "rollout/dropped_tokens", "tokens of samples that were dropped as stale", "tokens", "rollout.on_stale=drop"
    ),
    Declaration("rollout/aborted_samples", "dropped samples that were not finished", "", "rollout.on_stale=drop"),
    Declaration("rollout/aborted_tokens", "tokens of aborted samples", "tokens", "rollout.on_stale=drop"),
    Declaration("rollout/draft_accepted_frac", "fraction of draft tokens that were accepted", "", SPECULATIVE),
    Declaration(
        "rollout/accepted_length_mean",
        "mean number of tokens added by a forward pass that verifies drafts",
        "tokens",
        SPECULATIVE,
    ),
    Declaration("policy/loss", "loss of an update, mean over the step's updates"),
    Declaration("policy/entropy", "mean entropy of the policy", "nats/token"),
    Declaration("policy/ratio_mean", "mean ratio of the policy to the old policy, per token"),
    Declaration("policy/ratio_max", "largest ratio of the policy to the old policy"),
    Declaration("policy/clip_low_frac", "fraction of tokens that the objective clips at the lower bound"),
    Declaration("policy/clip_high_frac", "fraction of tokens that the objective clips at the upper bound"),
    Declaration("policy/kl_old", "KL(old policy ‖ policy), by k3; exact for denoising steps", "nats/token"),
    Declaration(
        "policy/drift_abs_mean", "mean |log-prob − log-prob at the start of the step|", "nats", "several updates"
    ),
    Declaration(
        "policy/drift_abs_max", "maximum |log-prob − log-prob at the start of the step|", "nats", "several updates"
    ),
    Declaration(
        "policy/velocity_change",
        "mean squared change of the velocity since the start of the step",
        "",
        "objective.name=diffusion_nft, several updates",
    ),
    Declaration("policy/penalty", "coefficient of the objective's penalty", "", "objective.penalty_target"),
    Declaration("policy/imitation_loss", "loss on positive examples", "", "objective.imitation_coefficient > 0"),
    Declaration("policy/selected_frac", "fraction of tokens that Clip-Cov or KL-Cov select", "", "clip_cov, kl_cov"),
    Declaration("policy/candidates_mean", "mean number of candidate tokens", "", TOP_K),
    Declaration("policy/outside_candidates_frac", "fraction of sampled tokens that are not candidates", "", TOP_K),
    Declaration("policy/nll", "negative log-likelihood of trained tokens", "nats/token", "objective.name=sft"),
    Declaration("MODEL/grad_norm", "gradient norm before clipping, mean over updates; policy: the actor"),
    Declaration("MODEL/lr", "learning rate, mean over updates"),
    Declaration("MODEL/skipped_updates", "updates skipped so far because of a nonfinite gradient"),
    Declaration("MODEL/loss_scale", "loss scale", "", "model.dtype=float16"),
    Declaration("MODEL/max_vio", "load of the busiest expert relative to the mean, minus 1", "", "mixture of experts"),
    Declaration(
        "MODEL/routes_differ",
        "fraction of tokens, over all layers, that the trainer would have routed to other experts",
        "",
        "actor.experts.replay_routes",
    ),
    Declaration(
        "mtp/loss",
        "mean −log-prob of the MTP layer's targets, weighted as in the objective",
        "nats",
        "actor.mtp.loss_coefficient > 0",
    ),
    Declaration("update/changed_frac", "fraction of parameter elements that the updates changed", "", "16-bit models"),
    Declaration("update/epochs", "epochs of the step", "", "batch.epochs > 1"),
    Declaration("trust_region/kl", "KL of the accepted update", "nats/token", "trust_region.kl_limit"),
    Declaration("trust_region/trials", "line-search steps", "", "trust_region.kl_limit"),
    Declaration("kl/coefficient", "KL coefficient", "", "KL in the loss"),
    Declaration("kl/FORM", "mean KL to the reference; placement, level and estimator are in the name", "nats", "kl"),
    Declaration(
        "kl/teacher_NAME",
        "KL(old policy ‖ teacher) by k1; if the divergence is not sampled, its mean under the current policy",
        "nats/token",
        "teachers",
    ),
    Declaration(
        "distillation/coefficient", "coefficient of the divergence from the teachers", "", "distillation.anneal_steps"
    ),
    Declaration(
        "distillation/on_policy_frac",
        "fraction of the step's samples that the policy sampled; the rest are given responses",
        "",
        "distillation.on_policy_share < 1",
    ),
    Declaration("teachers/seconds", "time of the teachers' passes, included in time/train", "s", "teachers"),
    Declaration("correction/weight_mean", "mean importance weight", "", CORRECTION),
    Declaration("correction/weight_square_mean", "mean squared importance weight", "", CORRECTION),
    Declaration("correction/weight_max", "largest importance weight", "", CORRECTION),
    Declaration("correction/limited_frac", "fraction of tokens whose weight was limited", "", CORRECTION),
    Declaration("correction/masked_frac", "fraction of tokens excluded from the loss", "", "correction.mask"),
    Declaration(
        "mismatch/logprob_abs_mean",
        "mean |trainer log-prob − engine log-prob| before the updates, excluding stale samples",
        "nats",
    ),
    Declaration(
        "mismatch/logprob_abs_max", "maximum |trainer log-prob − engine log-prob|, excluding stale samples", "nats"
    ),
    Declaration("mismatch/kl", "KL(engine ‖ trainer), excluding stale samples, estimated by k3", "nats/token"),
    Declaration(
        "mismatch/outlier_frac",
        "fraction of all tokens with |trainer log-prob − engine log-prob| above logprob_check.threshold",
    ),
    Declaration("mismatch/effective_frac", "effective sample size of the engine's tokens under the trainer's policy"),
    Declaration("policy_lag/logprob_abs_mean", "mismatch/logprob_abs_mean on stale samples", "nats", STALENESS),
    Declaration("policy_lag/logprob_abs_max", "mismatch/logprob_abs_max on stale samples", "nats", STALENESS),
    Declaration("policy_lag/kl", "KL(sampling policy ‖ trained policy) on stale samples", "nats/token", STALENESS),
    Declaration("mismatch/masked_frac", "fraction of tokens excluded from the loss", "", "logprob_check.action=mask"),
    Declaration("mismatch/canary_greedy_abs_mean", "mean log-prob difference on greedy canaries", "nats", CANARIES),
    Declaration(
        "mismatch/canary_velocity",
        "images: largest relative velocity difference on canaries",
        present=CANARIES,
    ),
    Declaration("mismatch/canary_sampled_abs_mean", "mean log-prob difference on sampled canaries", "nats", CANARIES),
    Declaration("value/loss", "critic loss of an update, mean over the step's updates", "", GAE),
    Declaration("value/mean", "mean value", "", GAE),
    Declaration("value/return_mean", "mean return", "", GAE),
    Declaration("value/error_abs_mean", "mean |value − return|", "", GAE),
    Declaration("value/clip_frac", "fraction of tokens with a clipped value", "", GAE),
    Declaration("value/explained_variance", "explained variance of the values before the step", "", GAE),
    Declaration("implicit_reward/loss", "loss of the implicit reward model", "", "implicit_reward"),
    Declaration(
        "implicit_reward/accuracy", "fraction of samples whose success is predicted correctly", "", "implicit_reward"
    ),
    Declaration("implicit_reward/mean", "mean implicit reward of a sample", "", "implicit_reward"),
    Declaration("reward_model/loss", "loss of an update, mean over the step's updates", "", "training a reward model"),
    Declaration("preference/loss", "mean loss per pair", "", PREFERENCES),
    Declaration("preference/accuracy", "fraction of pairs whose chosen response scores higher", "", PREFERENCES),
    Declaration("preference/margin", "mean score difference of a pair", "", PREFERENCES),
    Declaration("preference/chosen", "mean score of chosen responses", "", PREFERENCES),
    Declaration("preference/rejected", "mean score of rejected responses", "", PREFERENCES),
    Declaration("preference/tied_frac", "fraction of groups without a pair", "", "online preference objectives"),
    Declaration("label/loss", "mean loss per label", "", LABELS),
    Declaration("label/accuracy", "fraction of labels that are predicted correctly", "", LABELS),
    Declaration("label/mean", "mean label", "", LABELS),
    Declaration("label/predicted_mean", "mean predicted label", "", LABELS),
    Declaration("environment/turns_mean", "mean number of turns of a rollout", "", ENVIRONMENT),
    Declaration("environment/turns_max", "largest number of turns", "", ENVIRONMENT),
    Declaration("environment/samples_per_rollout", "mean number of samples of a rollout", "", ENVIRONMENT),
    Declaration("environment/stop_REASON", "fraction of rollouts that ended for this reason", "", ENVIRONMENT),
    Declaration("environment/restarts", "restarts of rollouts after outages", "", ENVIRONMENT),
    Declaration("environment/tool_calls", "mean number of tool calls of a rollout", "", ENVIRONMENT),
    Declaration("environment/tool_error_frac", "fraction of tool calls that failed", "", ENVIRONMENT),
    Declaration("environment/tool_STATUS", "mean number of tool calls of a rollout with this status", "", ENVIRONMENT),
    Declaration("environment/prefix_hit_frac", "fraction of context tokens in the prefix cache", "", ENVIRONMENT),
    Declaration("data/tokens", "tokens of the step's rows", "tokens", OFFLINE),
    Declaration("data/trained_tokens", "trained tokens of the step's rows", "tokens", OFFLINE),
    Declaration("data/dropped_rows", "rows dropped because they are too long (data.overlong)"),
    Declaration("data/seen_frac", "fraction of prompts sampled so far", "", "data.solved_weight"),
    Declaration(
        "data/solve_rate_mean", "mean solve rate of the sampled prompts, when last sampled", "", "data.solved_weight"
    ),
    Declaration("evaluation/version", "weight version that was evaluated", "", "steps with an evaluation"),
    Declaration("evaluation/SET/avg@K", "mean score of the K samples of a prompt, mean over prompts", "", "evaluation"),
    Declaration("evaluation/SET/pass@K", "probability that at least one of K samples succeeds", "", "evaluation"),
    Declaration("evaluation/SET/pass^K", "probability that all K samples succeed", "", "samples_per_prompt > 1"),
    Declaration("evaluation/SET/METRIC_low", "lower end of the 95 % confidence interval", "", "evaluation"),
    Declaration("evaluation/SET/METRIC_high", "upper end of the 95 % confidence interval", "", "evaluation"),
    Declaration("evaluation/SET/failed_frac", "fraction of samples that could not be scored", "", "evaluation"),
    Declaration("evaluation/SET/truncated_frac", "fraction of responses that reached a limit", "", "evaluation"),
    Declaration("evaluation/SET/length_mean", "mean number of policy tokens", "tokens", "evaluation"),
    Declaration("evaluation/SET/draft_accepted_frac", "fraction of draft tokens that were accepted", "", SPECULATIVE),
    Declaration(
        "evaluation/SET/accepted_length_mean",
        "mean number of tokens added by a forward pass that verifies drafts",
        "tokens",
        SPECULATIVE,
    ),
    Declaration("evaluation/SET/turns_mean", "mean number of turns", "", "sets in an environment"),
)
