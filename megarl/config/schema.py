"""The schema of a run's configuration. Types and ranges of single keys are here, rules across keys in `rules`.

There are no defaults here: their one home is configs/base.yaml, beside the comment that explains each key. Only keys of
a list's items, which a recipe gives as a whole and cannot lay over those of the base, have theirs here.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from megarl.config.algorithm_schema import Algorithm
from megarl.config.evaluation_schema import Evaluation
from megarl.config.fields import (
    EnvironmentClass,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardFunction,
    Section,
)
from megarl.config.logprob_check_schema import LogprobCheck, Tolerance
from megarl.config.model_schema import (
    Actor,
    Critic,
    ImplicitReward,
    MegatronRole,
    Model,
    Placed,
    RewardModel,
    Trained,
)
from megarl.config.run_schema import Run, Trackers
from megarl.config.sources import is_procedural, reasoning_task


class Rollout(Section):
    replicas: PositiveInt
    tp: PositiveInt
    max_staleness: NonNegativeInt
    on_stale: Literal["wait", "drop"]
    kv_cache_on_update: Literal["keep", "recompute"]
    longest_first: bool
    temperature: PositiveFloat
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: PositiveInt | None
    max_new_tokens: PositiveInt
    stop: list[Annotated[str, Field(min_length=1)]]
    context_length: PositiveInt
    kv_cache_gib: PositiveFloat
    sleep: bool
    transport: Literal["auto", "shared_memory", "p2p"]
    refit_bucket_mib: PositiveInt | None
    refit_timeout_s: PositiveFloat
    verify_refit: Literal["off", "first", "always"]
    quantization: Literal["fp8_block"] | None
    batch_invariant: bool
    threads: PositiveInt | None
    vllm_overrides: dict[str, Any]

    @property
    def has_whole_experts(self) -> bool:
        """Whether an engine's ranks have whole experts, not a share of each."""
        return bool(self.vllm_overrides.get("enable_expert_parallel"))


class Environment(EnvironmentClass):
    options: dict[str, Any]
    weight: FiniteFloat
    max_turns: PositiveInt
    turn_tokens: PositiveInt | None
    tool_format: Annotated[str, Field(min_length=1)] | None
    processes: PositiveInt | None
    timeout_s: PositiveFloat
    tool_timeout_s: PositiveFloat
    agent_timeout_s: PositiveFloat
    max_consecutive_failures: PositiveInt | None


class Batch(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    prompts_per_update: PositiveInt
    epochs: PositiveInt
    epochs_kl_limit: PositiveFloat | None
    oversampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    sampling_rounds: PositiveInt


class Data(Section):
    source: Annotated[str, Field(min_length=1)]
    more_sources: list[Annotated[str, Field(min_length=1)]]
    source_weights: dict[str, PositiveFloat]
    options: dict[str, Any]
    stages: list[dict[str, Any]]
    format: Literal["prompts", "messages", "preferences", "labels"]
    size: PositiveInt | None
    prompt_column: str
    system_prompt: Annotated[str, Field(min_length=1)] | None
    answer_column: str
    source_column: Annotated[str, Field(min_length=1)] | None
    messages_column: str
    chosen_column: str
    rejected_column: str
    steps_column: str
    labels_column: str
    step_end: str
    chat_template: bool
    overlong: Literal["refuse", "drop"]
    shuffle: bool
    sort_column: Annotated[str, Field(min_length=1)] | None
    weight_column: Annotated[str, Field(min_length=1)] | None
    solved_weight: Annotated[float, Field(gt=0, le=1)] | None
    solved_above: FiniteFloat

    @property
    def reasoning_task(self) -> str | None:
        """The name of a task of reasoning-gym, None for other sources."""
        return reasoning_task(self.source)

    @property
    def is_procedural(self) -> bool:
        """Whether rows are made, not read from a file."""
        return is_procedural(self.source)

    @property
    def sources(self) -> list[str]:
        """All files, or what the rows are made by."""
        return [self.source, *self.more_sources]

    @property
    def draws_by_weight(self) -> bool:
        """Whether prompts are drawn by weights, instead of each once in an epoch."""
        return self.weight_column is not None or self.solved_weight is not None or bool(self.source_weights)

    @property
    def ordering_columns(self) -> dict[str, str]:
        """The columns of numbers that rows are sorted or drawn by -> the key that names each."""
        keys = {"data.sort_column": self.sort_column, "data.weight_column": self.weight_column}
        return {column: key for key, column in keys.items() if column is not None}


class Rewards(Section):
    functions: list[RewardFunction]
    judge: Annotated[str, Field(min_length=1)] | None
    judge_order: Literal["both", "seeded"]
    processes: PositiveInt | None
    timeout_s: PositiveFloat
    memory_mib: PositiveInt | None
    overlong_buffer: PositiveInt | None
    failure_limit: Annotated[float, Field(ge=0, le=1)]
    max_consecutive_failures: PositiveInt | None


class Sandbox(Section):
    provider: Literal["auto", "bubblewrap", "apptainer"]
    unsafe: Literal["refuse", "allow"]
    image: Annotated[str, Field(min_length=1)] | None
    wall_s: PositiveFloat
    cpu_s: PositiveInt
    memory_mib: PositiveInt
    processes: PositiveInt
    file_mib: PositiveInt
    output_bytes: PositiveInt


class Checkpoint(Section):
    every_steps: PositiveInt | None
    keep: PositiveInt
    background: bool
    on_signal: bool
    grace_s: NonNegativeFloat

    @property
    def may_be_saved(self) -> bool:
        """Whether a run may save any."""
        return self.every_steps is not None or self.on_signal


TimeoutKind = Literal["start", "rollout", "rewards", "passes", "update", "refit", "checkpoint"]
"""The keys of Timeouts. Each wait of the driver for a process of the run is bounded by one of them."""


class Timeouts(Section):
    start: PositiveFloat
    rollout: PositiveFloat
    rewards: PositiveFloat
    passes: PositiveFloat
    update: PositiveFloat
    refit: PositiveFloat
    checkpoint: PositiveFloat

    def seconds(self, limit: TimeoutKind) -> float:
        return getattr(self, limit)

    @property
    def longest(self) -> float:
        """The bound of waits between processes that belong to several phases."""
        return max(map(self.seconds, get_args(TimeoutKind)))


Devices = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(pattern=r"^(nodes? )?\d+(-\d+)?$"),
]
"""The first and the last of a role's devices, by their numbers over all nodes, such as 0-15; or the only one. Or of its
nodes, such as nodes 0-3."""


class Roles(Section):
    actor: Devices | None
    critic: Devices | None
    implicit_reward: Devices | None
    reward_model: Devices | None
    rollout: Devices | None

    @property
    def given(self) -> dict[str, range]:
        """The numbers of the devices, or of the nodes, of the roles that are given some."""
        numbers = {role: text.split(" ")[-1].split("-") for role, text in self if text is not None}
        return {role: range(int(ends[0]), int(ends[-1]) + 1) for role, ends in numbers.items()}

    @property
    def on_nodes(self) -> set[str]:
        """The roles that are given whole nodes."""
        return {role for role, text in self if text is not None and text.startswith("node")}


class Cluster(Section):
    nodes: PositiveInt
    interface: Annotated[str, Field(min_length=1)] | None
    placement: Literal["colocated", "disaggregated"]
    roles: Roles
    timeouts: Timeouts
    object_store_mib: PositiveInt | None


class Config(Section):
    resume: Annotated[str, Field(min_length=1)]
    run: Run
    model: Model
    actor: Actor
    critic: Critic
    reward_model: RewardModel
    implicit_reward: ImplicitReward
    rollout: Rollout
    logprob_check: LogprobCheck
    environment: Environment
    algorithm: Algorithm
    batch: Batch
    data: Data
    rewards: Rewards
    sandbox: Sandbox
    evaluation: Evaluation
    checkpoint: Checkpoint
    cluster: Cluster
    trackers: Trackers

    @model_validator(mode="after")
    def _weight_of_correction(self) -> Self:
        """Decides algorithm.correction.weight=auto: quantised engines sample from another policy than the trainer's,
        and so do those whose samples may be of earlier weights."""
        algorithm = self.algorithm
        if algorithm.correction.weight != "auto":
            return self
        samples_otherwise = self.rollout.quantization is not None or self.rollout.max_staleness > 0
        samples_otherwise = samples_otherwise and not self.is_offline and algorithm.objective.spec.is_policy_objective
        weight = "token" if samples_otherwise and algorithm.correction.old == "trainer" else None
        correction = algorithm.correction.model_copy(update={"weight": weight})
        return self.model_copy(update={"algorithm": algorithm.model_copy(update={"correction": correction})})

    @property
    def is_offline(self) -> bool:
        """Whether the responses are in the data, so that nothing is sampled."""
        return self.data.format != "prompts"

    @property
    def has_environment(self) -> bool:
        """Whether rollouts have several turns, in an environment."""
        return self.environment.name is not None

    @property
    def plays_in_environments(self) -> bool:
        """Whether rollouts of training, or of an evaluation set, have several turns, in an environment."""
        return self.has_environment or any(item.environment and item.environment.name for item in self.evaluation.sets)

    @property
    def prompts_ahead(self) -> int:
        """The prompts that are begun beside those that a step takes."""
        factor = self.batch.oversampling or 1 + self.rollout.max_staleness
        return math.ceil((factor - 1) * self.batch.prompts_per_step)

    @property
    def drops_rollouts(self) -> bool:
        """Whether rollouts of training are dropped where they are too old, not waited for."""
        return self.rollout.on_stale == "drop" and not self.is_offline

    @property
    def most_checkpoints(self) -> int:
        """The number of checkpoints that are kept: the newest ones, and that of the best evaluation."""
        return self.checkpoint.keep + (self.evaluation.best.metric is not None)

    @property
    def trained_per_prompt(self) -> int:
        """The samples of each prompt, or of each row of offline data, that the actor is trained on."""
        if self.algorithm.objective.spec.is_pairwise:
            return 2
        return 1 if self.is_offline else self.batch.samples_per_prompt

    @property
    def trains_reward_model(self) -> bool:
        """Whether the actor is a classifier."""
        return self.algorithm.objective.spec.classifier is not None

    @property
    def has_reference(self) -> bool:
        return self.algorithm.kl.coefficient > 0 or self.algorithm.objective.spec.reads_reference

    @property
    def has_critic(self) -> bool:
        """Whether the critic is a model of its own; the other critic is a head on the actor."""
        return self.algorithm.advantage.spec.comparison == "values" and not self.critic.shared_backbone

    @property
    def actor_has_values(self) -> bool:
        return self.algorithm.advantage.spec.comparison == "values" and self.critic.shared_backbone

    @property
    def num_detailed_groups(self) -> int:
        """The groups of a step whose tokens are kept one by one for people to look at."""
        return -(-self.run.token_samples // self.batch.samples_per_prompt)

    @property
    def kl_in_reward(self) -> bool:
        return self.algorithm.kl.placement == "reward" and self.algorithm.kl.coefficient > 0

    @property
    def samples_greedily(self) -> bool:
        """Whether each prompt has a greedy response beside its samples, which is scored and not trained on."""
        return self.algorithm.advantage.spec.comparison == "greedy"

    def trains_actor_in(self, step: int) -> bool:
        """Returns whether the actor is trained in this step, counted from 1: at first, only a critic may be."""
        return not self.has_critic or step > self.critic.warmup_steps

    @property
    def has_implicit_reward(self) -> bool:
        return self.implicit_reward.coefficient > 0

    @property
    def has_reward_model(self) -> bool:
        return self.reward_model.path is not None

    @property
    def is_colocated(self) -> bool:
        return self.cluster.placement == "colocated"

    @property
    def pauses_rollouts(self) -> bool:
        """Whether rollouts of later steps stand still while models train, which they share devices with."""
        return self.is_colocated and self.rollout.max_staleness > 0 and not self.is_offline

    @property
    def sends_weights(self) -> bool:
        """Whether engines are sent the actor's weights; else they read them where they lie, if their node has them."""
        chosen = self.rollout.transport
        return chosen == "p2p" or (chosen == "auto" and not self.is_colocated)

    @property
    def precision(self) -> str:
        """What engines compute in, as far as it decides how near they can be to the trainer."""
        return self.rollout.quantization or self.model.dtype

    @property
    def tolerance(self) -> Tolerance:
        """How far an engine's log-prob of one token may be from the trainer's."""
        return self.logprob_check.tolerance(self.precision)

    @property
    def agreement_limit(self) -> float | None:
        """The mean difference of the log-probs that a step may have; None where there is no limit."""
        return self.logprob_check.limit_of(self.precision, self.rollout.max_staleness)

    @property
    def canary_limit(self) -> float:
        """The mean difference that canary prompts may have, whose weights are always the trainer's."""
        return self.logprob_check.canary_limit_of(self.precision, self.rollout.max_staleness)

    def placed(self, role: MegatronRole) -> Placed:
        """Returns the section of a model that runs in Megatron."""
        sections = (self.actor, self.critic, self.reward_model, self.implicit_reward)
        return next(section for section in sections if section.section == role)

    def context_of(self, placed: Placed) -> tuple[str, int]:
        """Returns the key that gives the tokens of the longest sample for a model, and their number."""
        if isinstance(placed, RewardModel) and placed.context_length is not None:
            return "reward_model.context_length", placed.context_length
        return "rollout.context_length", self.rollout.context_length

    @property
    def all_trained(self) -> tuple[Trained, ...]:
        critic = (self.critic,) if self.has_critic else ()
        return (self.actor, *critic, *((self.implicit_reward,) if self.has_implicit_reward else ()))

    @property
    def all_placed(self) -> tuple[Placed, ...]:
        return (*self.all_trained, self.reward_model) if self.has_reward_model else self.all_trained

    @property
    def num_ranks(self) -> dict[str, int]:
        """The number of ranks of each role that the run has, and so of the devices that it is on."""
        ranks = {placed.section: placed.layout.world_size for placed in self.all_placed}
        return ranks if self.is_offline else ranks | {"rollout": self.rollout.replicas * self.rollout.tp}

    @property
    def role_devices(self) -> dict[str, range]:
        """The devices of the roles that cluster.roles gives some. A node has as many as the role's ranks that it is
        given for."""
        spans, ranks = self.cluster.roles.given, self.num_ranks
        for role in self.cluster.roles.on_nodes & ranks.keys():
            each = -(-ranks[role] // max(1, len(spans[role])))
            spans[role] = range(spans[role].start * each, spans[role].stop * each)
        return spans

    def epochs(self, trained: Trained) -> int:
        """Returns how often a model goes through the samples of a step: an implicit reward model does once."""
        return 1 if trained is self.implicit_reward else self.batch.epochs

    def moves_samples(self, trained: Trained) -> bool:
        """Returns whether a sample may be on several data-parallel ranks of a model in a step: other epochs have it in
        other updates."""
        has_several = self.batch.prompts_per_update < self.batch.prompts_per_step
        return self.epochs(trained) > 1 and has_several and trained.layout.dp > 1

    def num_updates(self, trained: Trained) -> int:
        """Returns the optimizer steps of the whole run, if no step ends before its last epoch; the first
        critic.warmup_steps steps train the critic only."""
        alone = self.critic.warmup_steps if self.has_critic and trained is self.actor else 0
        per_epoch = self.batch.prompts_per_step // self.batch.prompts_per_update
        return max(self.run.steps - alone, 0) * per_epoch * self.epochs(trained)
