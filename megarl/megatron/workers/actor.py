"""One rank of the actor: the trained policy and its reference, which is a second set of weights for the same model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.distributed_c10d import Store

from megarl.algorithms.kl import adapted, adapted_penalty, kl_reward
from megarl.config.model_schema import Teacher
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.checkpoint import Checkpoint
from megarl.core.metrics import Metric
from megarl.core.row_batch import TEACHER
from megarl.core.token_batch import Scoring, TokenBatch
from megarl.data.collate import teacher_states
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel, step
from megarl.megatron.advantages import (
    AnyBatch,
    add_distillation,
    estimate_advantages,
    mean_advantages,
    moments,
    sum_over_replicas,
    with_advantages,
)
from megarl.megatron.configured_losses import (
    configured_distillation,
    configured_imitation_loss,
    configured_policy_loss,
    configured_preference_loss,
    on_sampled_tokens,
    with_distillation_loss,
    with_mtp_loss,
)
from megarl.megatron.lora.attach import adapters_off
from megarl.megatron.losses import Loss
from megarl.megatron.main_weights import ChangedShare
from megarl.megatron.metric_sums import Sums
from megarl.megatron.model.build import adapter_parameters
from megarl.megatron.model.head import LogProbHead, returning_states, scored_at
from megarl.megatron.model.mtp import has_trained_mtp, shared_embedding
from megarl.megatron.routes import model_of
from megarl.megatron.teacher_heads import copy_output_weight, prepare_divergence
from megarl.megatron.token_details import TokenDetails
from megarl.megatron.token_selection import with_selection
from megarl.megatron.trust_region import take_step
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.trained_model import trained_hf_config

Policy = Literal["old", "reference"]
"""The policy whose log-probs a pass computes: the policy at the start of the step, or the reference."""


class ActorWorker(TrainerWorker):
    role = "actor"
    metrics = "policy"
    replays = True

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        self._changed_share = ChangedShare(self.optimizer, device.device())
        if config.compares_distributions and parallel.is_last_stage(None):
            head: Any = model_of(self.chunks[-1]).output_layer
            paths = [teacher.path for teacher in config.teachers.models]
            folders = [None if path is None else Path(path) for path in paths]
            prepare_divergence(head, folders, config.algorithm.distillation, self.dtype)
        kl = config.algorithm.kl
        self.kl_coefficient = kl.coefficient
        """Coefficient of the KL to the reference. Changes between steps if algorithm.kl.adaptive_target is set."""
        self._distillation = config.algorithm.distillation
        """The distillation settings. The coefficient changes between steps if algorithm.distillation.anneal_steps is
        set."""
        self._penalty: float | None = None
        """Penalty of the objective kl_penalty, adapted to penalty_target; None before the first adaptation."""
        if config.keeps_reference and self.adapters is None:
            self._weight_snapshots.keep("reference", None if kl.renew_steps is None else kl.renew_share)
        self._token_details = TokenDetails(config.num_detailed_groups)
        self._advantages: dict[str, float] = {}
        """Sample id -> mean advantage for trained samples, kept until `take_advantages`."""
        self._rank_moments: list[torch.Tensor] = []
        """Moments of this rank's advantages for each update in the step. Used with whiten_over=step."""
        self._step_moments: torch.Tensor | None = None
        """Moments over all updates and ranks, available from the first update on."""

    def _model_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        return trained_hf_config(self._config, "actor", hf_config)

    @property
    def loss(self) -> Loss:
        loss, coefficient = self._loss_of_objective, self._config.actor.mtp.loss_coefficient
        if self._config.trains_given_responses:
            loss = on_sampled_tokens(loss)
        if self._config.compares_distributions and self._teachers:
            loss = with_distillation_loss(loss, self._distillation, self._teachers)
        return with_mtp_loss(loss, coefficient) if coefficient and has_trained_mtp(self.chunks) else loss

    @property
    def _loss_of_objective(self) -> Loss:
        config, has_moved = self._config, self._has_moved
        algorithm = config.algorithm.model_copy(update={"distillation": self._distillation})
        spec = algorithm.objective.spec
        if spec.is_policy_objective:
            loss = configured_policy_loss(
                algorithm,
                config.tolerance,
                self.kl_coefficient,
                has_moved=has_moved,
                penalty=self._penalty,
                teachers=self._teachers,
            )
            is_first = not self._has_moved and not self._epoch
            makes_no_pass = parallel.returns_results() and is_first and self._settings.layout.cp == 1
            return self._token_details.watch(loss) if makes_no_pass else loss
        if spec.is_pairwise:
            tolerance = None if config.is_offline else config.tolerance
            return configured_preference_loss(algorithm.objective, tolerance, has_moved=has_moved)
        return configured_imitation_loss(algorithm.objective)

    def _gradient_context(self) -> AbstractContextManager[None]:
        if not self._config.actor.mtp.is_trained:
            return nullcontext()
        self._complete_parameters()
        return shared_embedding(self.chunks)

    def _take_rounding_metrics(self) -> dict[str, Metric]:
        """Return the fraction of parameter elements that the updates changed. Only these elements change in the
        engines. The dict is empty if no parameter is rounded from a main weight."""
        share = self._changed_share.take()
        return {} if share is None else {"update/changed_frac": Metric(share)}

    def _apply_gradients(self, batches: Sequence[TokenBatch], sums: Sequence[Sums]) -> tuple[float, dict[str, Metric]]:
        limits = self._config.algorithm.trust_region
        if limits.kl_limit is None:
            return super()._apply_gradients(batches, sums)
        grad_norm = step.gradient_norm(self.optimizer)
        if not math.isfinite(grad_norm):
            return grad_norm, {}
        taken = take_step(self.chunks, self.optimizer, self.loss, batches, sums, limits)
        return grad_norm, {
            "policy/lr": Metric(taken.rate),
            "trust_region/kl": Metric(taken.divergence),
            "trust_region/trials": Metric(taken.trials),
        }

    def keep_log_probs(self, policy: Policy, batch: LocalBatch) -> dict[str, dict[str, torch.Tensor]]:
        """Run a forward-only pass and keep its log-probs on this rank for the update on the same samples. A pass with
        the old policy additionally keeps the values if the actor has a value head.

        If a later epoch may place the samples on different ranks, one rank per data-parallel replica returns the
        results: name in TokenBatch -> sample id -> float32 [R] on the host.
        """
        with self._weights_of(policy):
            scored = self._forward(batch, replays=policy == "old")
        columns = {policy: 0} | ({"values": 2} if policy == "old" and self._config.actor_has_values else {})
        kept = {name: {sample: values[:, i] for sample, values in scored.items()} for name, i in columns.items()}
        for name, scores in kept.items():
            self._keep(name, scores)
        if not self._config.moves_samples(self._settings) or not parallel.returns_results():
            return {}
        return {name: {sample: score.cpu() for sample, score in scores.items()} for name, scores in kept.items()}

    def score_as_teacher(self, teacher: str, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run the forward-only pass of a teacher without a path, without replayed routes, on samples with privileged
        prompts. Return the same scores as TeacherWorker.score_tokens. For an exact divergence, keep a copy of the
        output layer's weight until the next pass. One rank per data-parallel replica returns the scores."""
        models, distillation = self._config.teachers.models, self._config.algorithm.distillation
        number = next(index for index, model in enumerate(models) if model.name == teacher)
        policy = "reference" if models[number].weights == "reference" else "old"
        with (
            self._weights_of(policy),
            returning_states(self.chunks, distillation.is_exact, distillation.top_k),
        ):
            if distillation.is_exact and parallel.is_last_stage(None):
                copy_output_weight(model_of(self.chunks[-1]), number)
            scored = self._forward(batch, replays=False, to_host=True)
        if not parallel.returns_results():
            return {}
        return {name: columns[:, 0] for name, columns in scored.items()} if distillation.is_sampled else scored

    def differences(self, batch: LocalBatch, scoring: Scoring) -> dict[str, list[float]]:
        """Return sample id -> the trainer's log-prob minus the engine's for each response token. Runs a forward-only
        pass and keeps no results. One rank per data-parallel replica returns the differences."""
        with scored_at(self.chunks, scoring.temperature):
            scored = self._forward(batch, scoring.replays, scoring.truncates)
        if not parallel.returns_results():
            return {}
        engine = {item.sample.id: torch.tensor(item.sample.response_logprobs) for item in batch.samples}
        return {name: (columns[:, 0].cpu() - engine[name]).tolist() for name, columns in scored.items()}

    def _weights_of(self, policy: Policy) -> AbstractContextManager[None]:
        """Return a context manager that gives the model this policy's weights. For a model with adapters, the reference
        is the model without adapters."""
        if policy == "old":
            return nullcontext()
        if self.adapters is not None:
            return adapters_off(self.chunks)
        return self._weight_snapshots.swapped_in("reference")

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return sample id -> KL reward for each response token, float32 [R] on the host. Requires a previous
        old-policy pass and reference pass over the samples. One rank per data-parallel replica returns the rewards."""
        if not parallel.returns_results():
            return {}
        kl, old, reference = self._config.algorithm.kl, self._kept["old"], self._kept["reference"]
        assert kl.estimator is not None, "the configuration is not loaded"
        options = self.kl_coefficient, kl.estimator, kl.level, kl.limit
        masks = {item.sample.id: torch.tensor(item.sample.response_mask) for item in batch.samples}
        return {name: kl_reward(old[name].cpu(), reference[name].cpu(), mask, *options) for name, mask in masks.items()}

    def _dispatched(self, batch: LocalBatch) -> dict[str, dict[str, torch.Tensor]]:
        """Return the scores from other models. With a sampled divergence, each teacher has an entry, even if it scored
        none of this rank's samples. The hidden states or most probable tokens for other divergences are not
        included."""
        scores = super()._dispatched(batch)
        if self._config.compares_distributions:
            return {name: values for name, values in scores.items() if not name.startswith(TEACHER)}
        teachers: dict[str, dict[str, torch.Tensor]] = {teacher.scores: {} for teacher in self._teachers}
        return teachers | scores

    def _with_teacher_states(self, batches: Sequence[TokenBatch], batch: LocalBatch) -> list[TokenBatch]:
        """Return an update's microbatches with the teachers' hidden states or most probable tokens."""
        states = super()._dispatched(batch)
        of_teachers = [states.get(teacher.scores, {}) for teacher in self._teachers]
        return [
            replace(token_batch, teacher_states=tuple(teacher_states(members, part) for part in of_teachers))
            for token_batch, members in zip(batches, batch.members, strict=True)
        ]

    @property
    def _teachers(self) -> Sequence[Teacher]:
        """The teachers used in this step; empty while the coefficient is 0."""
        is_used = self._config.has_teachers and self._distillation.coefficient > 0
        return self._config.teachers.models if is_used else ()

    def note_advantages(self, batch: LocalBatch) -> None:
        """Record the moments of an update's advantages. Call it for every update before the step's first update,
        because all updates are whitened together."""
        if parallel.is_last_stage(None):
            estimated = estimate_advantages(self._config.algorithm, self._with_all_scores(batch))
            self._rank_moments.append(moments(estimated))

    def _with_advantages(self, batches: Sequence[AnyBatch]) -> list[AnyBatch]:
        if self._rank_moments:
            self._step_moments = sum_over_replicas(torch.stack(self._rank_moments).sum(0))
            self._rank_moments.clear()
        config = self._config
        estimated = with_advantages(config.algorithm, batches, self._step_moments)
        if not config.distills_by_advantage or not self._teachers:
            return estimated
        divergence = configured_distillation(self._distillation, self._teachers)
        return add_distillation(estimated, divergence, config.algorithm.correction.old == "rollout")

    def end_step(self) -> None:
        super().end_step()
        self._step_moments = None

    def _training_batches(self, batch: LocalBatch) -> list[Any]:
        batches, algorithm = super()._training_batches(batch), self._config.algorithm
        is_noted = parallel.returns_results() and not self._epoch
        if algorithm.objective.spec.is_policy_objective and is_noted:
            for token_batch, members in zip(batches, batch.members, strict=True):
                names = [item.sample.id for item in members]
                self._advantages |= mean_advantages(token_batch, names)
            self._token_details.begin_update(batches, batch)
        if self._config.compares_distributions and parallel.is_last_stage(None):
            batches = self._with_teacher_states(batches, batch)
        if not algorithm.objective.spec.selects_tokens or not parallel.is_last_stage(None):
            return batches
        return with_selection(algorithm, batches, batch.members, self._epoch)

    def take_advantages(self) -> dict[str, float]:
        """Return sample id -> mean advantage over the sample's trained tokens, for all first-epoch updates since the
        last call. One rank per data-parallel replica returns the advantages."""
        taken, self._advantages = self._advantages, {}
        return taken

    def take_token_details(self) -> dict[str, dict[str, list[float]]]:
        """Return per-token details of a few samples trained on since the last call, as {sample id: {detail name:
        values, one per response token}}."""
        return self._token_details.take()

    def set_distillation_coefficient(self, coefficient: float) -> None:
        """Set the coefficient of the divergence from the teachers for this and later steps."""
        self._distillation = self._distillation.model_copy(update={"coefficient": coefficient})

    def adapt_kl(self, divergence: float, num_samples: int) -> None:
        """Adapt the KL coefficient to a step's mean divergence from the reference."""
        kl = self._config.algorithm.kl
        if (target := kl.adaptive_target) is not None:
            coefficient = self.kl_coefficient
            self.kl_coefficient = adapted(coefficient, divergence, target, num_samples, kl.adaptive_horizon)

    def adapt_penalty(self, divergence: float) -> None:
        """Adapt the penalty in kl_penalty to a step's mean divergence from the old policy."""
        objective = self._config.algorithm.objective
        if (target := objective.adapted_penalty_target) is not None:
            penalty = objective.option("penalty") if self._penalty is None else self._penalty
            self._penalty = adapted_penalty(penalty, divergence, target)

    def _counters(self) -> dict[str, float]:
        penalty = {} if self._penalty is None else {"penalty": self._penalty}
        return super()._counters() | {"kl_coefficient": self.kl_coefficient} | penalty

    def _restore_counters(self, counters: Mapping[str, float]) -> None:
        super()._restore_counters(counters)
        self.kl_coefficient = counters["kl_coefficient"]
        self._penalty = counters.get("penalty")

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the checkpoint as the base class does. An adapted coefficient restarts from the config's value
        if that value has changed or the coefficient is no longer adapted."""
        super().load_checkpoint(checkpoint)
        saved, algorithm = checkpoint.state["config"]["algorithm"], self._config.algorithm
        kl, objective = algorithm.kl, algorithm.objective
        if kl.adaptive_target is None or saved["kl"]["coefficient"] != kl.coefficient:
            self.kl_coefficient = kl.coefficient
        penalty = (objective.model_extra or {}).get("penalty")
        if objective.adapted_penalty_target is None or saved["objective"].get("penalty") != penalty:
            self._penalty = None

    def renew_reference(self) -> None:
        """Move the reference toward the policy by algorithm.kl.renew_share. Called after a step."""
        self._weight_snapshots.renew("reference")

    def _load_weights(self) -> None:
        super()._load_weights()
        self._initialize_adapters()
        for model in map(model_of, self.chunks):
            head = model.output_layer if model.post_process else None
            if isinstance(head, LogProbHead) and head.value_head is not None:
                head.value_head.initialize(self._config.run.seed)

    def _initialize_adapters(self) -> None:
        if self.adapters is not None:
            factors, path = adapter_parameters(self.chunks), self._config.actor.lora.path
            self.adapters.initialize(factors, self._config.run.seed)
            if path is not None:
                self.adapters.load(factors, Path(path))
