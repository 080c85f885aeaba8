"""The learning cases: each estimator and objective on a tiny random model and a task with a known optimum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.environment_tasks import Calculation, Letters, Search
from tests.e2e.knights import Knights
from tests.e2e.learning_tasks import (
    DIVERGENCE,
    EARNED,
    Answers,
    Bandit,
    EvenAndLow,
    EvenDigits,
    HintedDigits,
    Labels,
    Optimum,
    Preferences,
    ScoredDigits,
    Task,
    TaughtDigits,
    TwoTeachers,
    logit,
    of_forward_kl,
    of_reverse_kl,
)
from tests.e2e.scene_reader import Scenes
from tests.e2e.tiny_families import GATED_DELTA, GPT_OSS_YARN

ON_POLICY = ("batch.prompts_per_update=8",)
FOUR_PROMPTS = ("batch.prompts_per_step=4", "batch.prompts_per_update=4")
TWO_UPDATES = ("batch.prompts_per_update=4",)  # with one update per step, the ratio would stay 1
ONE_SAMPLE = ("batch.prompts_per_step=64", "batch.prompts_per_update=64", "batch.samples_per_prompt=1")
ALL_ROWS = ("batch.prompts_per_step=40", "batch.prompts_per_update=40")  # each update sees the whole offline data set
ANNEALED = "actor.optimizer.schedule.name=linear"  # leaves little noise at the end
APART = "cluster.placement=disaggregated"
FEW_AT_ONCE = "rollout.vllm_overrides={max_num_seqs: 16}"  # leaves rollouts unfinished when a step has enough samples
OTHER_SEEDS = 1, 2
IN_SEARCH = ("batch.samples_per_prompt=16", "actor.optimizer.lr=0.002")
CRITIC = ("critic.optimizer.lr=0.003", "critic.tokens_per_microbatch=1024", "critic.threads=1")


EVEN_DIGITS = EvenDigits()
COMMON_SIZES = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
GPT_OSS = dict(
    num_hidden_layers=2,
    intermediate_size=64,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=4,  # shorter than the samples
    tie_word_embeddings=False,
    rope_parameters=GPT_OSS_YARN,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A learning run.

    Attributes:
        family: the model's type and keys of its config.json, if it is not the tiny Llama of all other cases.
        has_control: whether it has a control run. At least one case of each task has one.
        start: upper bound of the share of the optimum at the start.
        learned: lower bound of the share at the end.
        bounds: part -> bounds of its first and last value, and of the control's ("control_first", "control_last").
    """

    overrides: tuple[str, ...]
    steps: int = 20
    task: Task = EVEN_DIGITS
    family: tuple[str, dict[str, Any]] | None = None
    has_control: bool = False
    start: float = 0.2
    learned: float = 0.9
    bounds: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)


def estimator(name: str, *overrides: str, **fields) -> Case:
    return Case((f"algorithm.advantage.estimator={name}", *ON_POLICY, *overrides), **fields)


DISTANT, CLOSE = 1.0, 0.02
"""Lower bound of the KL to the teacher at the start, and its upper bound at the end, in nats."""
KL = {DIVERGENCE: {"first": (DISTANT, math.inf), "last": (0.0, CLOSE)}}


def distillation(divergence: str, *overrides: str, **fields) -> Case:
    """Return a case with an exact divergence from the teachers as the only signal."""
    distilled = f"algorithm.distillation={{divergence: {divergence}, placement: loss}}"
    return estimator("policy_gradient", distilled, ANNEALED, *overrides, **fields)


def ahead(steps: int, *overrides: str) -> tuple[str, ...]:
    """Return the overrides that let rollouts run ahead, with samples up to `steps` weight versions old."""
    return f"rollout.max_staleness={steps}", *overrides


def objective(name: str, *overrides: str) -> Case:
    return Case((f"algorithm.objective.name={name}", *TWO_UPDATES, *overrides))


def under_kl(keys: str, optimum: Optimum, has_control: bool = False) -> Case:
    """Return an on-policy case with unscaled advantages, since scaling would change the effective KL coefficient."""
    batch = "batch={prompts_per_step: 4, prompts_per_update: 4, samples_per_prompt: 128}"
    overrides = ("algorithm.advantage.estimator=rloo", f"algorithm.kl={{{keys}}}", batch, "rollout.max_new_tokens=1")
    return Case((*overrides, ANNEALED, "actor.optimizer.lr=0.005"), 40, Bandit(optimum), has_control=has_control)


def given(keys: str, task: Task, *overrides: str, **fields) -> Case:
    return Case((f"algorithm.objective={{{keys}}}", *ALL_ROWS, ANNEALED, *overrides), 40, task, **fields)


CASES: dict[str, Case] = {
    "policy gradient": estimator("policy_gradient"),
    "REINFORCE, moving average": estimator("reinforce"),
    "REINFORCE++": estimator(
        "reinforce_plus_plus", *ONE_SAMPLE, "algorithm.kl={placement: reward, estimator: k1, coefficient: 0.001}"
    ),
    "REINFORCE++, group baseline": estimator("reinforce_plus_plus_baseline"),
    "RLOO": estimator("rloo"),
    "ReMax": estimator("remax", "batch.samples_per_prompt=4"),
    "GRPO": estimator("grpo", has_control=True),
    "GRPO, two samples per prompt": estimator("grpo", "batch.samples_per_prompt=2"),
    "GRPO, two samples of four prompts": estimator(
        *("grpo", "batch.samples_per_prompt=2", *FOUR_PROMPTS),
        learned=0.0,  # with other seeds, so few samples may teach nothing
    ),
    "GRPO, Qwen3.5": estimator("grpo", family=("qwen3_5_text", GATED_DELTA | COMMON_SIZES)),
    "GRPO, gpt-oss": estimator("grpo", family=("gpt_oss", COMMON_SIZES | GPT_OSS)),
    "GRPO, rollouts a step ahead": estimator("grpo", *ahead(1, APART)),
    "GRPO, rollouts four steps ahead": estimator("grpo", *ahead(4, APART)),
    "GRPO, rollouts ahead in turns": estimator("grpo", *ahead(1, "rollout.kv_cache_on_update=recompute", FEW_AT_ONCE)),
    **{f"GRPO, seed {seed}": estimator("grpo", f"run.seed={seed}") for seed in OTHER_SEEDS},
    **{
        f"GRPO, rollouts a step ahead, seed {seed}": estimator("grpo", *ahead(1, APART), f"run.seed={seed}")
        for seed in OTHER_SEEDS
    },
    "GRPO, prompts by solve rate": estimator("grpo", "data={solved_weight: 0.05, solved_above: 0.9}"),
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
    "GDPO": estimator("gdpo", task=EvenAndLow(), has_control=True),
    "GiGPO": estimator("gigpo", *IN_SEARCH, steps=25, task=Search(), has_control=True, start=0.25),
    "PPO, GAE": estimator("gae", *CRITIC),
    "PPO, Bi-Level GAE": estimator(
        "bi_level_gae", *IN_SEARCH, *CRITIC, steps=25, task=Search(), has_control=True, start=0.25
    ),
    "PPO, three epochs": estimator(
        "gae",
        *CRITIC,
        *TWO_UPDATES,
        *("batch.epochs=3", "batch.epochs_kl_limit=0.3", "actor.layout.dp=2"),
        has_control=True,
    ),
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
        "algorithm.advantage={credit: reward_to_go, whiten: true}",
        "implicit_reward={coefficient: 1.0, success_above: 0.3, threads: 1}",
        "implicit_reward.optimizer.lr=0.001",
        "implicit_reward.tokens_per_microbatch=1024",
    ),
    "RLOO, token rewards": estimator(
        "rloo", "algorithm.advantage.credit=reward_to_go", task=ScoredDigits(), has_control=True
    ),
    "GRPO, step rewards": estimator(
        "grpo", "algorithm.advantage.credit=reward_to_go", "reward_model.step_end='0'", task=ScoredDigits()
    ),
    "distillation, sampled tokens": estimator(
        "policy_gradient", task=TaughtDigits(), has_control=True, bounds={DIVERGENCE: {"first": (DISTANT, math.inf)}}
    ),
    # The reverse KL is mode-seeking: the policy first writes only some of the even digits, so it needs more steps.
    "distillation, reverse KL": distillation("reverse_kl", steps=30, task=TaughtDigits(), bounds=KL),
    "distillation, reverse KL, one sample per prompt": distillation(
        "reverse_kl", "batch.samples_per_prompt=1", steps=30, task=TaughtDigits(), bounds=KL
    ),
    "distillation, forward KL": distillation("forward_kl", task=TaughtDigits(), bounds=KL),
    "distillation, forward KL, one sample per prompt": distillation(
        "forward_kl", "batch.samples_per_prompt=1", task=TaughtDigits(), bounds=KL
    ),
    "distillation, forward KL, one sample of four prompts": distillation(
        "forward_kl", "batch.samples_per_prompt=1", *FOUR_PROMPTS, task=TaughtDigits(), bounds=KL
    ),
    "distillation, JSD": distillation("jsd", task=TaughtDigits()),
    "distillation, two teachers": distillation("reverse_kl", task=TwoTeachers(), has_control=True),
    "self-distillation": estimator(
        "grpo",
        task=HintedDigits(),
        has_control=True,
        bounds={EARNED: {"first": (0, 0), "last": (0.9, 1), "control_first": (0, 0), "control_last": (0, 0)}},
    ),
    "clip": objective("clip"),
    "clip-higher, dual clip": objective("clip", "algorithm.objective={clip_high: 0.28, dual_clip: 3.0}"),
    "unclipped": objective("unclipped"),
    # With kl_limit=0.05 and damping=0.01, which overfits single tokens, the reward was only 0.43 after as many steps.
    "TRPO": Case(
        ("algorithm.objective.name=unclipped", *ON_POLICY, "algorithm.trust_region={kl_limit: 0.3, damping: 1.0}"),
        has_control=True,
    ),
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
    "online DPO": Case(("algorithm.objective.name=dpo", *ON_POLICY)),
    "KL in the reward, k1": under_kl("placement: reward, estimator: k1", of_reverse_kl, has_control=True),
    "KL as a loss, k2": under_kl("placement: loss, estimator: k2", of_reverse_kl),
    "KL as a loss, k3": under_kl("placement: loss, estimator: k3", of_forward_kl),
    "SFT": given("name: sft, aggregation: token_mean", Answers(), has_control=True),
    "reward model": given("name: reward_model", Preferences(logit, classifies=True), has_control=True),
    "process reward model": given("name: process_reward_model, aggregation: token_mean", Labels(), has_control=True),
    "token reward model": given("name: token_reward_model, aggregation: token_mean", Labels(everywhere=True)),
    "DPO": given("name: dpo, beta: 0.5", Preferences(lambda share: logit(share) / 0.5), has_control=True),
    "IPO": given("name: ipo, beta: 0.1", Preferences(lambda share: (share - 0.5) / 0.1)),
    # The hinge's slope is 1 − 2·p within its margin and 1 − p beyond it, where it outweighs the other term.
    # Adam overshoots and returns slowly.
    "SLiC": given(
        "name: slic, hinge_margin: 3.0, regularisation: 0.1",
        Preferences(lambda share: math.copysign(3.0, share - 0.5), is_relative=False),
        "actor.optimizer.lr=0.005",
    ),
    # The learning rate is 10 times that of full training. The temperature is low, because the frozen head bounds the
    # logits, which would limit the share at temperature 1.
    "GRPO, LoRA": estimator(
        "grpo",
        *("actor.lora={rank: 8}", "actor.optimizer.lr=0.1", "rollout.temperature=0.5"),
        steps=30,
        has_control=True,
    ),
    "environment: search": estimator(
        "grpo",
        *IN_SEARCH,
        steps=25,
        task=Search(),
        has_control=True,
        start=0.25,
    ),
    "environment: calculator": estimator(
        "grpo",
        *("batch.prompts_per_step=16", "batch.prompts_per_update=16", "actor.optimizer.lr=0.001", ANNEALED),
        steps=50,
        task=Calculation(),
        has_control=True,
        start=0.25,
    ),
    "environment: verifiers": estimator(
        *("grpo", "actor.optimizer.lr=0.002", ANNEALED),
        steps=20,
        task=Letters(),
        has_control=True,
        start=0.25,
        learned=0.8,  # low: batches depend on when turns arrive, so runs differ
    ),
    "GRPO, images": estimator(
        *("grpo", "batch={prompts_per_step: 32, prompts_per_update: 32, samples_per_prompt: 16}"),
        *("actor.optimizer.lr=0.0005", ANNEALED),
        steps=80,
        task=Scenes(),
        has_control=True,
        start=0.4,
    ),
    "Logic-RL": estimator(
        "reinforce_plus_plus",
        *("batch={prompts_per_step: 128, prompts_per_update: 64, samples_per_prompt: 1}", "actor.optimizer.lr=0.0005"),
        "algorithm.kl={placement: reward, estimator: k1, coefficient: 0.001}",
        *("algorithm.objective.aggregation=token_mean", ANNEALED),
        steps=30,
        task=Knights(),
        has_control=True,
        start=0.25,
        learned=0.6,
    ),
}

COMPARED = {
    "distillation, forward KL, one sample per prompt": ("GRPO", "GRPO, two samples per prompt"),
    "distillation, forward KL, one sample of four prompts": ("GRPO, two samples of four prompts",),
}
"""Distillation -> GRPO with as many prompts per step, compared by the number of samples."""
CURVES = (
    *(name for names in COMPARED.values() for name in names),
    *(name for name, case in CASES.items() if isinstance(case.task, TaughtDigits)),
)
"""Cases whose measurements of each step are recorded."""
