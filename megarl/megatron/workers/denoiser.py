"""The actor's worker for image models: one rank of the trained transformer. Its actions are denoising steps."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from numpy.typing import NDArray

from megarl.algorithms import transition
from megarl.core import device
from megarl.core.files import new_folder
from megarl.core.latents import Conditioning, VelocityInput
from megarl.core.metrics import Metric
from megarl.core.sample import SampleRef
from megarl.core.step_batch import StepBatch
from megarl.data.collate_steps import StepNumber, collate_noised_steps, collate_steps, step_number
from megarl.data.local_batch import LocalBatch
from megarl.megatron import denoiser_step, parallel
from megarl.megatron.advantages import mean_advantages
from megarl.megatron.configured_losses import configured_denoising_loss
from megarl.megatron.losses import Loss
from megarl.megatron.metric_sums import Sums, total
from megarl.megatron.model.denoiser.build import build_denoiser
from megarl.megatron.model.denoiser.inputs import Document
from megarl.megatron.workers.actor import ActorWorker, Policy
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.models.denoiser import DenoiserShape
from megarl.resharding.planning.plan import Plan
from megarl.resharding.transports.transport import Transport


class DenoiserWorker(ActorWorker):
    """One rank of the trained image model and its reference."""

    def _build(self) -> list[DistributedDataParallel]:
        return build_denoiser(self._settings, self._hf_config, self.dtype, self._frozen(), **self._attached)

    @cached_property
    def _shape(self) -> DenoiserShape:
        return DenoiserShape.of(self._hf_config)

    @property
    def loss(self) -> Loss:
        """The loss for the next update. Its terms take a StepBatch and velocities."""
        algorithm, denoising = self._config.algorithm, self._config.rollout.denoising
        tolerance, moved = self._config.tolerance, self._has_moved
        return configured_denoising_loss(
            algorithm, denoising, tolerance, self.kl_coefficient, has_moved=moved, penalty=self._penalty
        )

    def _route_metrics(self) -> dict[str, Metric]:
        return {}

    @property
    def _reports_metrics(self) -> bool:
        """Whether this rank reports metrics. Context-parallel ranks compute the same ones, so only one of them does."""
        return parallel.returns_results()

    def _accumulate_gradients(
        self, chunks: Sequence[DistributedDataParallel], loss: Loss, batches: Sequence[StepBatch]
    ) -> list[Sums]:
        remaining = iter(batches)

        def compute(documents: Sequence[Document], velocities: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Sums]:
            batch = next(remaining)
            v = self._guided(batch, velocities)
            if not len(v):  # an empty microbatch, which keeps the ranks in lockstep
                nothing = velocities[0].sum() * 0
                return nothing, {f"{self.metrics}/loss": total(nothing)}
            terms = loss.terms(batch, v)
            return terms.loss, loss.metrics(batch, terms)

        return denoiser_step.accumulate_gradients(chunks, compute, [self._documents(batch) for batch in batches])

    def _training_batches(self, batch: LocalBatch) -> list[StepBatch]:
        """Return an update's microbatches with advantages and with the velocities from the forward-only passes."""
        collated = [steps.to(device.device()) for steps in self._collated(batch)]
        if not parallel.is_last_stage(None):  # only the last stage has velocities and reads advantages
            return collated
        pairs = zip(collated, batch.members, strict=True)
        batches = self._with_advantages([replace(steps, **self._kept_velocities(items)) for steps, items in pairs])
        if parallel.returns_results() and not self._epoch:
            for steps, members in zip(batches, batch.members, strict=True):
                self._advantages |= mean_advantages(steps, [item.id for item in members])
        return batches

    def _collated(self, batch: LocalBatch) -> list[StepBatch]:
        if self._config.algorithm.objective.spec.adds_noise:
            return [collate_noised_steps(members, self._config.run.seed) for members in batch.members]
        return [collate_steps(members, self._step_weights(members)) for members in batch.members]

    def _step_weights(self, members: Sequence[SampleRef]) -> dict[int, float]:
        """Return step number -> factor of the step's loss."""
        if not members:
            return {}
        keys, weight = self._config.rollout.denoising, self._config.algorithm.objective.step_weight
        sigmas = torch.tensor(members[0].sample.sigmas)
        weights = transition.step_weights(weight, keys.kind, keys.noise_level, sigmas, list(keys.within))
        return dict(enumerate(weights.tolist()))

    def _kept_velocities(self, members: Sequence[SampleRef]) -> dict[str, torch.Tensor]:
        """Return the velocity fields of the StepBatch, from the forward-only passes of this step."""
        passes = self._velocities.items() if members else ()
        stacked = {name: torch.stack([found[step_number(item)] for item in members]) for name, found in passes}
        return {f"{name}_v": velocities.to(device.device()) for name, velocities in stacked.items()}

    @cached_property
    def _velocities(self) -> dict[Policy, dict[StepNumber, torch.Tensor]]:
        """The velocities from this step's forward-only passes, in host memory on the last stage."""
        return {}

    def keep_log_probs(self, policy: Policy, batch: LocalBatch) -> dict[str, dict[str, torch.Tensor]]:
        """Run a forward-only pass and keep the policy's velocities on this rank for the update on the same steps."""
        batches = self._collated(batch)
        with self._weights_of(policy):
            predicted = denoiser_step.predict(self.chunks, [self._documents(steps) for steps in batches])
        kept = self._velocities.setdefault(policy, {})
        for steps, velocities, members in zip(batches, predicted, batch.members, strict=False):
            guided = self._guided(steps, [velocity.cpu() for velocity in velocities])
            kept |= {step_number(item): v for item, v in zip(members, guided, strict=True)}
        return {}

    def velocities(self, inputs: Sequence[VelocityInput]) -> list[NDArray[np.float32]]:
        """Return the velocity at each input, float32 [channels, height, width]. One rank returns them."""
        documents = [
            Document(
                torch.tensor(item.latents, device=device.device()),
                item.sigma,
                item.caption.map(torch.tensor).to(device.device()),
            )
            for item in inputs
        ]
        predicted = denoiser_step.predict(self.chunks, [documents])
        if not parallel.returns_results():
            return []
        return [velocity.cpu().numpy() for velocities in predicted for velocity in velocities]

    def end_step(self) -> None:
        super().end_step()
        self._velocities.clear()

    def _documents(self, batch: StepBatch) -> list[Document]:
        """Return the documents of each row: one with its caption and, under guidance, one with the empty caption. An
        empty batch has one dummy document."""
        target = device.device()
        documents = []
        for latents, sigma, caption in zip(batch.latents, batch.sigma.tolist(), batch.captions, strict=True):
            branches = [caption, *([] if batch.unconditional is None else [batch.unconditional])]
            documents += [Document(latents.to(target), sigma, branch.to(target)) for branch in branches]
        if documents:
            return documents
        shape = self._shape
        zeros = torch.zeros(shape.channels, shape.patch, shape.patch, device=target)
        pooled = None if shape.pooled is None else torch.zeros(shape.pooled, device=target)
        return [Document(zeros, 1.0, Conditioning(torch.zeros(1, shape.caption, device=target), pooled))]

    def _guided(self, batch: StepBatch, velocities: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return each row's velocity under guidance, float32 [N, channels, height, width]."""
        if not len(batch.latents):
            return batch.latents
        stacked = torch.stack(list(velocities)).float()
        if batch.unconditional is None:
            return stacked
        return transition.guided(stacked[0::2], stacked[1::2], self._config.rollout.denoising.guidance)

    def _load_weights(self) -> None:
        TrainerWorker._load_weights(self)
        self._initialize_adapters()

    def _write_model(self, plan: Plan, transport: Transport, out: Path) -> None:
        """Write a diffusers folder: the trained transformer, and copies of the initial model's other parts."""
        initial = self._folder.parent
        others = [path for path in initial.rglob("*") if path.is_file() and self._folder not in path.parents]
        with new_folder(out, sum(path.stat().st_size for path in others)) as folder:
            for path in others:
                copy = folder / path.relative_to(initial)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
            super()._write_model(plan, transport, folder / self._folder.name)
