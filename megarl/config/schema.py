"""The schema of a run's configuration: types and ranges of individual keys. Constraints across keys are in `rules`.

Defaults are in configs/base.yaml, next to the comments that explain the keys. There are two exceptions. Defaults for
keys of list items are in this module, because a recipe replaces lists as a whole. Defaults for options of estimators
and objectives are in their specs.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal, Self, overload

from pydantic import Field, model_validator

from megarl.algorithms.kl import distillation_estimator, usual_estimator
from megarl.algorithms.specs import ImitationObjective
from megarl.config.algorithm_schema import Algorithm
from megarl.config.cluster_schema import Cluster
from megarl.config.data_schema import Data
from megarl.config.evaluation_schema import Evaluation
from megarl.config.fields import EnvironmentClass, RewardFunction, Section, Text
from megarl.config.logprob_check_schema import ROUNDING, SHARE_OF_CLIP, THRESHOLD, LogprobCheck, Tolerance
from megarl.config.model_schema import (
    Actor,
    Critic,
    ImplicitReward,
    MegatronRole,
    Model,
    Placed,
    RewardModel,
    Role,
    Teacher,
    Teachers,
    Trained,
)
from megarl.config.rollout_schema import Rollout
from megarl.config.run_schema import Run, Trackers
from megarl.core.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt


class Environment(EnvironmentClass):
    options: dict[str, Any]
    weight: FiniteFloat
    max_turns: PositiveInt
    turn_tokens: PositiveInt | None
    observation_tokens: PositiveInt | None
    overlong_observation: Literal["cut", "refuse"]
    tool_format: Text | None
    processes: PositiveInt | None
    timeout_s: PositiveFloat
    tool_timeout_s: PositiveFloat
    agent_timeout_s: PositiveFloat
    memory_mib: PositiveInt | None
    max_consecutive_failures: PositiveInt | None


class Batch(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    prompts_per_update: PositiveInt
    epochs: PositiveInt
    epochs_kl_limit: PositiveFloat | None
    oversampling: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    sampling_rounds: PositiveInt


class Rewards(Section):
    functions: list[RewardFunction]
    judge: Text | None
    judge_order: Literal["both", "seeded"]
    processes: PositiveInt | None
    timeout_s: PositiveFloat
    outage_s: NonNegativeFloat
    memory_mib: PositiveInt | None
    overlong_buffer: PositiveInt | None
    failure_limit: Annotated[float, Field(ge=0, le=1)]
    max_consecutive_failures: PositiveInt | None


class Sandbox(Section):
    provider: Literal["auto", "bubblewrap", "apptainer"]
    unsafe: Literal["refuse", "allow"]
    image: Text | None
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
        """Whether the run may save a checkpoint."""
        return self.every_steps is not None or self.on_signal


class Config(Section):
    resume: Text
    run: Run
    model: Model
    actor: Actor
    critic: Critic
    reward_model: RewardModel
    implicit_reward: ImplicitReward
    teachers: Teachers
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
        """Resolve algorithm.correction.weight=auto: quantized engines and engines with stale weights sample from a
        different policy than the trainer's."""
        algorithm, spec = self.algorithm, self.algorithm.objective.spec
        if algorithm.correction.weight != "auto":
            return self
        samples_otherwise = self.rollout.quantization is not None or self.rollout.max_staleness > 0
        has_ratio = not self.is_offline and spec.is_policy_objective and not spec.adds_noise
        weight = "token" if samples_otherwise and has_ratio and algorithm.correction.old == "trainer" else None
        correction = algorithm.correction.model_copy(update={"weight": weight})
        return self.model_copy(update={"algorithm": algorithm.model_copy(update={"correction": correction})})

    @model_validator(mode="after")
    def _usual_kl(self) -> Self:
        """Resolve algorithm.kl.estimator=null to the KL of denoising steps for image models, else to the estimator that
        papers use for this placement and level."""
        kl = self.algorithm.kl
        if kl.estimator is not None:
            return self
        of_steps = "velocity" if self.algorithm.objective.spec.adds_noise else "gaussian"
        usual = of_steps if self.samples_images else usual_estimator(kl.placement, kl.level)
        algorithm = self.algorithm.model_copy(update={"kl": kl.model_copy(update={"estimator": usual})})
        return self.model_copy(update={"algorithm": algorithm})

    @model_validator(mode="after")
    def _usual_distillation(self) -> Self:
        """Resolve algorithm.distillation.estimator=null. See `distillation_estimator`."""
        distillation = self.algorithm.distillation
        if distillation.estimator is not None or not self.teachers.models or not distillation.is_sampled:
            return self
        usual = distillation.model_copy(update={"estimator": distillation_estimator(distillation.placement)})
        return self.model_copy(update={"algorithm": self.algorithm.model_copy(update={"distillation": usual})})

    @property
    def is_offline(self) -> bool:
        """Whether the data contains the responses, so that nothing is sampled."""
        return self.data.format != "prompts"

    @property
    def samples_images(self) -> bool:
        """Whether the policy is an image model. Its actions are denoising steps instead of tokens."""
        return self.rollout.engine == "diffusers"

    @property
    def has_environment(self) -> bool:
        """Whether training rollouts use an environment."""
        return self.environment.name is not None

    @property
    def plays_in_environments(self) -> bool:
        """Whether rollouts for training or for any evaluation set use an environment."""
        return self.has_environment or any(item.environment and item.environment.name for item in self.evaluation.sets)

    @property
    def prompts_ahead(self) -> int:
        """The number of prompts in flight beyond those for the current step."""
        factor = Fraction(repr(self.batch.oversampling or 1 + self.rollout.max_staleness))  # exact: 1.1 becomes 11/10
        return math.ceil((factor - 1) * self.batch.prompts_per_step)

    @property
    def drops_rollouts(self) -> bool:
        """Whether stale training rollouts are dropped instead of waited for."""
        return self.rollout.on_stale == "drop" and not self.is_offline

    @property
    def max_checkpoints(self) -> int:
        """The maximum number of checkpoints kept: the newest ones and the one with the best evaluation."""
        return self.checkpoint.keep + (self.evaluation.best.metric is not None)

    @property
    def trained_per_prompt(self) -> int:
        """The number of samples per prompt, or per row of offline data, that the actor is trained on."""
        if self.algorithm.objective.spec.is_pairwise:
            return 2
        return 1 if self.is_offline else self.batch.samples_per_prompt

    @property
    def trains_reward_model(self) -> bool:
        """Whether the actor is a classifier."""
        return self.algorithm.objective.spec.classifier is not None

    @property
    def has_reference(self) -> bool:
        """Whether the KL or the objective uses the reference's log-probs."""
        return self.algorithm.kl.coefficient > 0 or self.algorithm.objective.spec.reads_reference

    @property
    def keeps_reference(self) -> bool:
        """Whether the actor keeps the reference's weights."""
        return self.has_reference or any(teacher.weights == "reference" for teacher in self.self_teachers)

    @property
    def has_critic(self) -> bool:
        """Whether the run has a critic that is a separate model rather than a head on the actor."""
        return self.algorithm.advantage.spec.comparison == "values" and not self.critic.shared_backbone

    @property
    def actor_has_values(self) -> bool:
        return self.algorithm.advantage.spec.comparison == "values" and self.critic.shared_backbone

    @property
    def num_detailed_groups(self) -> int:
        """The number of groups per step whose tokens are recorded for the report."""
        return -(-self.run.token_samples // self.batch.samples_per_prompt)

    @property
    def kl_in_reward(self) -> bool:
        return self.algorithm.kl.placement == "reward" and self.algorithm.kl.coefficient > 0

    @property
    def samples_greedily(self) -> bool:
        """Whether each prompt has an additional greedy response that is scored but not trained on."""
        return self.algorithm.advantage.spec.comparison == "greedy"

    def trains_actor_in(self, step: int) -> bool:
        """Return whether the actor is trained in this step, counting from 1. During the critic's warmup, only the
        critic is trained."""
        return not self.has_critic or step > self.critic.warmup_steps

    @property
    def has_implicit_reward(self) -> bool:
        return self.implicit_reward.coefficient > 0

    @property
    def has_reward_model(self) -> bool:
        return self.reward_model.path is not None

    @property
    def has_teachers(self) -> bool:
        return bool(self.teachers.models) and self.algorithm.distillation.is_used

    @property
    def placed_teachers(self) -> list[tuple[Teacher, str]]:
        """The teachers with a path, and the path."""
        models = self.teachers.models if self.has_teachers else []
        return [(teacher, teacher.path) for teacher in models if teacher.path is not None]

    def teacher_section(self, name: str) -> Teachers:
        """Return section `teachers` with only this teacher and its layout."""
        [teacher] = [teacher for teacher in self.teachers.models if teacher.name == name]
        return self.teachers.only(teacher)

    @property
    def teacher_engines(self) -> set[str]:
        """The engines of the teachers with a path."""
        return {teacher.engine for teacher, _ in self.placed_teachers}

    @property
    def self_teachers(self) -> list[Teacher]:
        """The teachers that are the policy or the reference with privileged prompts."""
        return [teacher for teacher in self.teachers.models if teacher.path is None] if self.has_teachers else []

    @property
    def trains_on_images(self) -> bool:
        """Whether training samples may contain images, in the prompts or from an environment."""
        from_environment = self.model.vision and self.has_environment and self.data.chat_template
        return self.data.image_column is not None or from_environment

    @property
    def may_have_images(self) -> bool:
        """Whether samples of the run or of its evaluation sets may contain images."""
        sets = self.evaluation.sets
        templates = [item.chat_template for item in sets if (item.environment or self.environment).name]
        from_environment = any(self.data.chat_template if value is None else value for value in templates)
        has_column = any(item.image_column for item in sets)
        return self.trains_on_images or has_column or (self.model.vision and from_environment)

    @property
    def teachers_see_feedback(self) -> bool:
        """Whether a teacher uses feedback on samples."""
        return self.has_teachers and any(teacher.feedback is not None for teacher in self.teachers.models)

    @property
    def distills_exactly(self) -> bool:
        """Whether the loss includes an exact divergence from the teachers, computed from their hidden states."""
        return self.has_teachers and self.algorithm.distillation.is_exact

    @property
    def compares_distributions(self) -> bool:
        """Whether the loss includes a divergence from the teachers that the actor's head computes."""
        return self.has_teachers and not self.algorithm.distillation.is_sampled

    @property
    def may_have_teachers(self) -> bool:
        """Whether the actor can learn from teachers. A sampled divergence requires a policy objective; the others also
        work in supervised fine-tuning."""
        objective = self.algorithm.objective.spec
        imitates = isinstance(objective, ImitationObjective) and not self.algorithm.distillation.is_sampled
        return imitates or (objective.is_policy_objective and not self.is_offline)

    @property
    def trains_given_responses(self) -> bool:
        """Whether some prompts are trained on the responses in the data."""
        return self.has_teachers and self.algorithm.distillation.on_policy_share < 1

    @property
    def distills_by_advantage(self) -> bool:
        """Whether the advantages include the divergence from the teachers."""
        return self.has_teachers and self.algorithm.distillation.placement == "advantage"

    @property
    def has_rewards(self) -> bool:
        """Whether training rollouts are rewarded. If not, the actor learns from teachers alone."""
        rewards = self.rewards
        is_scored = bool(rewards.functions) or rewards.judge is not None or self.has_reward_model
        return is_scored or self.has_environment

    @property
    def is_colocated(self) -> bool:
        return self.cluster.placement == "colocated"

    @property
    def pauses_rollouts(self) -> bool:
        """Whether rollouts for later steps pause while models train on the same devices."""
        return self.is_colocated and self.rollout.max_staleness > 0 and not self.is_offline

    @property
    def sends_weights(self) -> bool:
        """Whether weights are sent to the engines; otherwise engines read those on their own node in place."""
        chosen = self.rollout.transport
        return chosen == "p2p" or (chosen == "auto" and not self.is_colocated)

    @property
    def precision(self) -> str:
        """The engines' precision, a key of ROUNDING. It determines how closely they can match the trainer."""
        return self.rollout.quantization or self.model.dtype

    @property
    def tolerance(self) -> Tolerance:
        """The tolerated difference between the engine's and the trainer's log-prob for a token."""
        check = self.logprob_check
        default = THRESHOLD * (self.agreement_limit if self.samples_images else ROUNDING[self.precision])
        threshold = default if check.threshold is None else check.threshold
        return Tolerance(threshold, check.mask if check.action == "mask" else None)

    @property
    def agreement_limit(self) -> float:
        """The maximum mean log-prob difference of samples from the current weights, in a step and on canary prompts."""
        limit = self.logprob_check.limit
        if limit is not None:
            return limit
        if not self.samples_images:
            return ROUNDING[self.precision]
        options = self.algorithm.objective.options()
        bounds = [float(bound) for name in ("clip_low", "clip_high") if (bound := options.get(name)) is not None]
        # Rounding errors cancel in a mean over the elements of the latents, but add up in their sum.
        rounding = [ROUNDING["float32"]] if self.rollout.denoising.logprob == "mean" or not bounds else []
        return min([*rounding, *(SHARE_OF_CLIP * bound for bound in bounds)])

    @overload
    def placed(self, role: Role) -> Trained: ...
    @overload
    def placed(self, role: MegatronRole) -> Placed: ...
    def placed(self, role: MegatronRole) -> Placed:
        """Return the config section for a model that runs in Megatron."""
        return getattr(self, role)

    def context_of(self, placed: Placed) -> tuple[str, int]:
        """Return the key that bounds a model's sample length, and its value in tokens."""
        if isinstance(placed, RewardModel) and placed.context_length is not None:
            return "reward_model.context_length", placed.context_length
        return "rollout.context_length", self.rollout.context_length

    @property
    def all_trained(self) -> tuple[Trained, ...]:
        critic = (self.critic,) if self.has_critic else ()
        return (self.actor, *critic, *((self.implicit_reward,) if self.has_implicit_reward else ()))

    @property
    def muon_roles(self) -> list[Role]:
        """The trained models whose optimizer is Muon."""
        return [trained.section for trained in self.all_trained if trained.optimizer.name == "muon"]

    @property
    def all_placed(self) -> tuple[Placed, ...]:
        """The sections of all models with their own ranks. Each teacher with its own layout has a separate section."""
        reward_model = (self.reward_model,) if self.has_reward_model else ()
        placed = [teacher for teacher, _ in self.placed_teachers]
        shared = (self.teachers,) if any(teacher.layout is None for teacher in placed) else ()
        own = (self.teachers.only(teacher) for teacher in placed if teacher.layout is not None)
        return (*self.all_trained, *reward_model, *shared, *own)

    @property
    def num_ranks(self) -> dict[str, int]:
        """The number of ranks, and therefore of devices, for each role in the run. Teachers share devices, so the
        largest teacher determines their number."""
        ranks: dict[str, int] = {}
        for placed in self.all_placed:
            ranks[placed.section] = max(placed.layout.world_size, ranks.get(placed.section, 0))
        return ranks if self.is_offline else ranks | {"rollout": self.rollout.replicas * self.rollout.tp}

    @property
    def role_devices(self) -> dict[str, range]:
        """The devices of each role that has a range in cluster.roles. A role that is placed by nodes has the same
        number of ranks on each of its nodes."""
        spans = self.cluster.roles.assigned
        ranks = self.num_ranks if spans else {}
        for role in self.cluster.roles.on_nodes & ranks.keys():
            each = -(-ranks[role] // max(1, len(spans[role])))
            spans[role] = range(spans[role].start * each, spans[role].stop * each)
        return spans

    def epochs(self, trained: Trained) -> int:
        """Return a model's number of epochs over a step's samples; always 1 for an implicit reward model."""
        return 1 if trained is self.implicit_reward else self.batch.epochs

    def moves_samples(self, trained: Trained) -> bool:
        """Return whether a sample may move to another data-parallel rank within a step, because a later epoch packs it
        into a different update."""
        has_several = self.batch.prompts_per_update < self.batch.prompts_per_step
        return self.epochs(trained) > 1 and has_several and trained.layout.dp > 1

    def num_updates(self, trained: Trained) -> int:
        """Return the number of optimizer steps in the run, if no step skips epochs. The first critic.warmup_steps steps
        train only the critic."""
        alone = self.critic.warmup_steps if self.has_critic and trained is self.actor else 0
        per_epoch = self.batch.prompts_per_step // self.batch.prompts_per_update
        return max(self.run.steps - alone, 0) * per_epoch * self.epochs(trained)
