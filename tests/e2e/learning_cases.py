"""Which settings are seen to learn: each estimator and objective, on a tiny random model whose optimum is known.

The reward is the share of even digits: 0.1 at the start, 1 at the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass

ON_POLICY = ("batch.prompts_per_update=8",)
TWO_UPDATES = ("batch.prompts_per_update=4",)  # only then is an objective's ratio not 1
ONE_SAMPLE = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=1")
CRITIC = ("critic.optimizer.lr=0.003", "critic.tokens_per_microbatch=1024", "critic.threads=1")


@dataclass(frozen=True, slots=True)
class Case:
    overrides: tuple[str, ...]
    steps: int = 20


def estimator(name: str, *overrides: str, steps: int = 20) -> Case:
    return Case((f"algorithm.advantage.estimator={name}", *ON_POLICY, *overrides), steps)


def objective(name: str, *overrides: str, steps: int = 20) -> Case:
    return Case((f"algorithm.objective.name={name}", *TWO_UPDATES, *overrides), steps)


CASES: dict[str, Case] = {
    "policy gradient": estimator("policy_gradient"),
    "REINFORCE, moving average": estimator("reinforce"),
    "REINFORCE++": estimator(
        "reinforce_plus_plus", *ONE_SAMPLE, "algorithm.kl={placement: reward, estimator: k1, coefficient: 0.001}"
    ),
    "REINFORCE++, group baseline": estimator("reinforce_plus_plus_baseline"),
    "RLOO": estimator("rloo"),
    "ReMax": estimator("remax", "batch.samples_per_prompt=4"),
    "GRPO": estimator("grpo"),
    "Dr.GRPO": estimator(
        "grpo", "algorithm.advantage.std=none", "algorithm.objective.aggregation=sequence_mean_over_max_tokens"
    ),
    "DAPO": estimator(
        "grpo",
        "batch.prompts_per_update=4",
        "batch.sampling_rounds=2",
        "algorithm.objective={clip_high: 0.28, aggregation: token_mean}",
        "rewards.overlong_buffer=2",
    ),
    "OPO": estimator("opo", "algorithm.objective.aggregation=sequence_mean_of_token_sums"),
    "GPG": estimator("gpg", "algorithm.objective.aggregation=token_mean"),
    "pass@k": estimator("pass_at_k"),
    "PPO, GAE": estimator("gae", *CRITIC),
    "VC-PPO": estimator("gae", *CRITIC, "critic.warmup_steps=3", "algorithm.advantage.critic_lambda=1.0", steps=23),
    "VAPO": estimator(
        "gae",
        *CRITIC,
        "critic.warmup_steps=3",
        "algorithm.advantage={critic_lambda: 1.0, length_alpha: 1.0}",
        "algorithm.objective={clip_high: 0.28, imitation_coefficient: 0.1}",
        steps=23,
    ),
    "PRIME": estimator(
        "rloo",
        "algorithm.advantage={credit: to_go, whiten: true}",
        "implicit_reward={coefficient: 1.0, success_above: 0.3, threads: 1}",
        "implicit_reward.optimizer.lr=0.001",
        "implicit_reward.tokens_per_microbatch=1024",
    ),
    "clip": objective("clip"),
    "clip-higher, dual clip": objective("clip", "algorithm.objective={clip_high: 0.28, dual_clip: 3.0}"),
    "unclipped": objective("unclipped"),
    "KL penalty": objective("kl_penalty"),
    "GSPO": objective("gspo"),
    "GMPO": objective("gmpo"),
    "CISPO": objective("cispo"),
    "SAPO": objective("sapo"),
    "DPPO, TV": objective("dppo_tv", "algorithm.correction.old=rollout"),
    "DPPO, KL": objective("dppo_kl", "algorithm.correction.old=rollout"),
    "Clip-Cov": objective("clip_cov", "algorithm.objective.covariance_share=0.01"),
    "KL-Cov": objective("kl_cov", "algorithm.objective.covariance_share=0.01"),
    "DRO": objective("dro", "algorithm.objective.tau=0.1", "algorithm.advantage.std=none"),
}


def markdown(rows: dict[str, dict]) -> str:
    """The README's table of what was seen."""
    lines = ["| | first step | last three | steps until 0.9 | with others' rewards |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        of_control = f"{row['control_last']:.2f}"
        lines.append(f"| {name} | {row['first']:.2f} | {row['last']:.2f} | {row['steps_to_optimum']} | {of_control} |")
    return "\n".join(lines)
