"""One rank of a trained model, with its shard and optimizer; the base class for trained roles."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from megarl.config.device_spans import is_alone
from megarl.config.learning_rate import learning_rate
from megarl.config.model_schema import Trained
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.checkpoint import Checkpoint, FileRecord
from megarl.core.metrics import Metric, merge
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import TokenScores, add_scores
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel, random_state, step
from megarl.megatron.advantages import AnyBatch, estimate_advantages
from megarl.megatron.checkpoint import host_copies, sharded
from megarl.megatron.checkpoint.node_copies import NodeCopies
from megarl.megatron.loss_scale import LossScale
from megarl.megatron.losses import Loss
from megarl.megatron.main_weights import begin_main_weights, main_grad, rounded_parameters
from megarl.megatron.metric_sums import Sums, read
from megarl.megatron.model.build import adapter_parameters, named_parameters, named_weights
from megarl.megatron.muon import add_muon
from megarl.megatron.nonfinite import RouterBiases, SkippedUpdates, describe_worst
from megarl.megatron.offload import Offload, Part
from megarl.megatron.optimizer import build_optimizer, optimizer_config, set_rates
from megarl.megatron.routes import route_metrics
from megarl.megatron.weight_snapshots import WeightSnapshots
from megarl.megatron.workers.weight_source import WeightSource
from megarl.models.shape import ModelShape
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import ITEM_BYTES
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.selection import frozen_parameters, select_tensors, whole_parameters


class TrainerWorker(WeightSource, ABC):
    """One rank of a trained model. Each role defines the model, the loss, and the scores that a forward-only pass
    returns."""

    metrics: str
    """Prefix for the names of the role's metrics."""

    _accumulate_gradients: Callable[..., list[Sums]] = staticmethod(step.accumulate_gradients)
    """Accumulates the gradient of a loss over microbatches; see step.accumulate_gradients."""

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        settings, self._store = self._settings, store
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        """Scores from passes over this step's samples: name in TokenBatch -> sample id -> float32 [R]."""
        undecayed = self._chosen("optimizer.no_weight_decay", settings.optimizer.no_weight_decay)
        trained = named_parameters(self.chunks)  # router biases have no optimizer state
        without_decay = [trained[name] for name in undecayed if name in trained]
        self.optimizer = build_optimizer(settings, self.chunks, self.dtype, without_decay)
        self._begin_main_weights(rounded_parameters(self.optimizer, trained))
        if settings.optimizer.name == "muon":
            add_muon(self.optimizer, trained, self.holder, settings.optimizer.momentum, self.dtype)
        self._offload = Offload(self.chunks, self.optimizer)
        self._weight_snapshots = WeightSnapshots(named_weights(self.chunks))
        self.num_updates = 0
        """Number of optimizer steps so far, which determines the learning rate."""
        self._skipped = SkippedUpdates()
        self._loss_scale = LossScale(self.chunks, self.dtype, optimizer_config(settings, self.dtype))
        self._copies: NodeCopies | None = None
        self._has_moved = False
        """Whether this step has updated the parameters."""
        self._epoch = 0
        """Number of finished epochs in this step. If it is above 0, the step has already trained on the same
        samples."""
        self._is_complete = True
        """Whether the parameters are complete on this rank: see `_complete_parameters`."""

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """The loss for the next update."""

    @property
    def _settings(self) -> Trained:
        sections = self._config.actor, self._config.critic, self._config.implicit_reward
        return next(section for section in sections if section.section == self.role)

    def update(self, batch: LocalBatch) -> dict[str, Metric]:
        """Take one optimizer step on the loss Σ w·ℓ over the microbatches on all ranks, or skip it if the gradient is
        non-finite. Return metrics on the ranks that report for their replica, and an empty dict on all other ranks. A
        skipped update has no loss metrics. After optimizer.nonfinite_limit consecutive skipped updates, raise a
        RuntimeError on all ranks."""
        batches = self._training_batches(batch)
        optimizer = self._settings.optimizer
        rate = learning_rate(optimizer, self.num_updates, self._config.num_updates(self._settings))
        set_rates(self.optimizer, rate, optimizer.weight_decay)
        biases, context = RouterBiases(self.chunks), self._gradient_context()
        self._is_complete = False
        with context:
            sums = self._accumulate_gradients(self.chunks, self.loss, batches)
        routes = self._route_metrics()
        self._loss_scale.unscale_gradients()
        grad_norm, additional = self._apply_gradients(batches, sums)
        is_skipped = not math.isfinite(grad_norm)
        self._skipped.add(is_skipped, self._loss_scale.is_minimal)
        self._loss_scale.update(is_skipped)
        additional |= self._take_rounding_metrics()
        if is_skipped:
            biases.restore()
            self._check_limit(batch, sums, grad_norm)
        else:
            self.num_updates += 1
            self._has_moved = True
        if not self._reports_metrics:
            return {}
        metrics = {f"{self.metrics}/skipped_updates": Metric(self._skipped.total, reduction="max")}
        if self._loss_scale.value is not None:
            metrics[f"{self.metrics}/loss_scale"] = Metric(self._loss_scale.value, reduction="max")
        if is_skipped:
            return metrics
        metrics |= {f"{self.metrics}/grad_norm": Metric(grad_norm), f"{self.metrics}/lr": Metric(rate)}
        return merge(map(read, sums)) | routes | metrics | additional

    def _gradient_context(self) -> AbstractContextManager[None]:
        """Return a context manager for the computation of gradients. Collective over all ranks."""
        return nullcontext()

    def _route_metrics(self) -> dict[str, Metric]:
        return route_metrics(self.chunks, ModelShape.of(self._hf_config), self.metrics)

    @property
    def _reports_metrics(self) -> bool:
        return parallel.reports_metrics()

    def _apply_gradients(self, batches: Sequence[TokenBatch], sums: Sequence[Sums]) -> tuple[float, dict[str, Metric]]:
        """Take the optimizer step unless the gradient is non-finite. Return the gradient norm and additional metrics.
        `sums` holds the loss metrics for each microbatch."""
        return step.apply_gradients(self.optimizer), {}

    def _take_rounding_metrics(self) -> dict[str, Metric]:
        """Return metrics for parameters that are rounded from main weights. Collective over all ranks."""
        return {}

    def _check_limit(self, batch: LocalBatch, sums: Sequence[Sums], grad_norm: float) -> None:
        """Raise a RuntimeError if too many consecutive updates were skipped. The arguments describe the last update."""
        key, limit = f"{self._settings.section}.optimizer", self._settings.optimizer.nonfinite_limit
        if self._skipped.consecutive >= limit:
            worst = describe_worst(batch.members, sums, f"{self.metrics}/loss")
            raise RuntimeError(
                f"{key}.nonfinite_limit={limit}: {self._skipped.consecutive} consecutive updates were skipped, because "
                f"their gradients were not finite (last norm: {grad_norm:g}). Worst microbatch: {worst}. Fix: inspect "
                f"these samples, lower {key}.lr or raise {key}.nonfinite_limit, and resume with resume=auto"
            )

    def offload(self, parts: Collection[Part]) -> dict[str, Metric]:
        """Move the requested parts that are listed in the section's `offload` key to host memory until `onload` is
        called, and free the device's cached memory. Return the sizes of the offloaded parts as metrics, in GB."""
        section = self._settings.section
        num_bytes = {part: self._offload.move_out(part) for part in self._offloaded(parts)}
        device.release_cache()
        return {
            f"memory/{section}_{part}_offloaded_gb": Metric(size / 1e9, reduction="sum")
            for part, size in num_bytes.items()
        }

    def onload(self, parts: Collection[Part]) -> None:
        for part in self._offloaded(parts):
            self._offload.move_in(part)

    def _offloaded(self, parts: Collection[Part]) -> list[Part]:
        return sorted(set(parts).intersection(self._settings.offload))

    def end_epoch(self) -> None:
        """End an epoch. The step may train on the same samples again."""
        self._epoch += 1
        self._complete_parameters()

    def end_step(self) -> None:
        """End the step and drop the scores for its samples."""
        self._has_moved, self._epoch = False, 0
        self._complete_parameters()
        self._kept.clear()
        if not is_alone(self._config, self.role):
            device.release_cache()  # a different model on the device runs next

    def _complete_parameters(self) -> None:
        """All-gather the parameters after updates, unless they are complete. Required before other processes read them
        and before they are offloaded."""
        if not self._is_complete:
            step.gather_parameters(self.chunks)
            device.synchronize()
            self._is_complete = True

    def start_profile(self, ranks: Sequence[int]) -> None:
        """Start recording operators and kernels. Shapes, stacks and memory are not recorded, to limit the overhead."""
        if self._rank in ranks:
            self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
            self._profile.start()

    def stop_profile(self, ranks: Sequence[int], folder: Path) -> None:
        """Stop recording, and write a Chrome trace to the folder."""
        if self._rank in ranks:
            self._profile.stop()
            self._profile.export_chrome_trace(str(folder / f"{self.role}-{self._rank}.json.gz"))
            del self._profile

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Verify this rank's share of the role's files. If the layout has not changed, these are the files that the
        rank wrote and loads next, so the load finds them in the page cache. Raise a UserError that names the first
        corrupt file."""
        files = [record for record in checkpoint.files if record.path.startswith(f"{self.role}/")]
        same_layout, num_ranks = self._has_layout_of(checkpoint), self._settings.layout.world_size
        checkpoint.verify(
            record
            for number, record in enumerate(files)
            if (record.rank if same_layout else number) % num_ranks == self._rank
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load weights, optimizer state, counters, RNG state and mutable weight snapshots in place. A fixed reference
        is loaded from the initial model's folder instead.

        RNG state belongs to one rank under one layout. Under a different layout, generators are seeded from run.seed
        and the number of updates. Training does not depend on the generators: there is no dropout, and routers have no
        noise unless megatron_overrides adds it.
        """
        same_layout = self._has_layout_of(checkpoint)
        folder, adapters = checkpoint.path / self.role, self._sharded_adapters()
        counters = sharded.load(self.chunks, self.optimizer, self._weight_snapshots, folder, same_layout, adapters)
        self._restore_counters(counters)
        if not same_layout:
            random_state.reseed(self._config.run.seed, self.num_updates)

    def copy_bytes(self) -> int:
        """Return the size in bytes of this rank's copies in host memory."""
        return host_copies.num_bytes(self.chunks, self.optimizer, self._weight_snapshots)

    def copy_state(self, step: int, folder: Path) -> None:
        """Start copying the state after `step` to the run's folder in shared memory, which outlives this process. See
        `wait_for_copy` and `finish_copies`."""
        copies = self._copies_in(folder)
        copy = host_copies.begin(
            copies.own,
            step,
            self.chunks,
            self.optimizer,
            self._weight_snapshots,
            self._counters(),
            self._offload.on_device,
        )
        copies.start(copy)
        if self._offload.holds_state:  # copying moves it to the device, where engines may soon need the memory
            copies.wait_for_copy()

    def wait_for_copy(self) -> None:
        """Wait until no thread is copying the state, so that it may change or move."""
        if self._copies is not None:
            self._copies.wait_for_copy()

    def start_delivery(self, step: int, folder: Path, keepers: Sequence[int]) -> None:
        """Start delivering the copy of the state after `step` to its keeper on another node. See NodeCopies.deliver."""
        self._copies_in(folder).deliver(step, keepers)

    def finish_copies(self, waits: bool) -> tuple[str, str] | None:
        """Return the result of NodeCopies.finish for the latest copy and its delivery. If they are incomplete, wait for
        them if `waits`, else return None."""
        if self._copies is None:
            return "", ""
        return self._copies.finish() if waits or self._copies.is_finished else None

    def discard_copies(self, folder: Path) -> None:
        """Discard all copies of this model on this node, before the ranks start again from their initial state."""
        self._copies_in(folder).discard_after(0)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        super().close()

    def restore_state(self, step: int, folder: Path, keepers: Sequence[int] = ()) -> None:
        """Restore the state after `step` that an earlier process of this rank copied to the folder, on this node or on
        the keeper's."""
        copies = self._copies_in(folder)
        copies.fetch(step, keepers)
        copies.discard_after(step)
        counters = host_copies.restore(copies.own, step, self.chunks, self.optimizer, self._weight_snapshots)
        self._restore_counters(counters)

    def _copies_in(self, folder: Path) -> NodeCopies:
        if self._copies is None:
            timeout_s = self._config.cluster.timeouts.longest
            self._copies = NodeCopies(folder, self.role, self._rank, self._store, timeout_s)
        return self._copies

    def _has_layout_of(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.state["config"][self.role].get("layout") == self._settings.layout.model_dump()

    def save_checkpoint(self, checkpoint: Path) -> None:
        """Copy the state to host memory, and write it to files in checkpoint/role while training continues. Offloaded
        optimizer state is restored one parameter at a time, because an engine may occupy the device."""
        self._saving = sharded.save(
            self.chunks,
            self.optimizer,
            self._weight_snapshots,
            self._counters(),
            checkpoint / self.role,
            self._offload.on_device,
            self._sharded_adapters(),
        )

    def _sharded_adapters(self) -> sharded.ShardedAdapters | None:
        return None if self.adapters is None else self.adapters.sharded(adapter_parameters(self.chunks))

    def checkpoint_written(self) -> bool:
        return self._saving.written

    def finish_checkpoint(self, checkpoint: Path) -> list[FileRecord]:
        """Wait until this rank's files are on disk, and return their records."""
        return self._saving.finish(checkpoint)

    def _counters(self) -> dict[str, float]:
        """Return the counters that a resumed run needs. They are the same on all ranks."""
        return {"num_updates": self.num_updates} | self._skipped.counters() | self._loss_scale.counters()

    def _restore_counters(self, counters: Mapping[str, float]) -> None:
        self.num_updates = int(counters["num_updates"])
        self._skipped.restore(counters)
        self._loss_scale.restore(counters)

    def _begin_main_weights(self, rounded: Mapping[str, torch.nn.Parameter]) -> None:
        """Initialize the main weights of rounded parameters, from the folder's float32 weights if it has them."""
        if not rounded:
            return
        pieces = self.holder.shard.by_parameter()
        with self._opened_folder() as (transport, source):
            finer = {name for name, dtype in source.dtypes.items() if ITEM_BYTES[dtype] > self.dtype.itemsize}
            tensors = {name: {piece.canonical for piece in pieces[name]} - {None} for name in rounded}
            exact = {name: main_grad(parameter) for name, parameter in rounded.items() if tensors[name] <= finer}
            if exact:
                holder = replace(self.holder, shard=self.holder.shard.only(exact, "float32"))
                execute(make_plan([source], [holder]).into(holder.name), exact, transport)
        begin_main_weights(self.optimizer, rounded, self.holder, exact)

    def _frozen(self) -> Collection[str]:
        if self.adapters is not None:
            return super()._frozen()
        return frozen_parameters(self._settings, self._hf_config, self.holder)

    def _chosen(self, key: str, patterns: Sequence[str]) -> list[str]:
        """Return the names of this rank's parameters that match `patterns`, the value of the section's key `key`."""
        key = f"{self._settings.section}.{key}"
        selected = select_tensors(key, patterns, huggingface_holder(self._hf_config).shapes)
        return whole_parameters(key, selected, self.holder)

    def _training_batches(self, batch: LocalBatch) -> list[Any]:
        """Return an update's microbatches with advantages and with the scores of previous passes and other models."""
        batches = self._with_all_scores(batch)
        # Only the last stage has the critic's values and reads advantages.
        estimated = self._config.algorithm.objective.spec.is_policy_objective and parallel.is_last_stage(None)
        return self._with_advantages(batches) if estimated else batches

    def _with_advantages(self, batches: Sequence[AnyBatch]) -> list[AnyBatch]:
        return estimate_advantages(self._config.algorithm, batches)

    def _with_all_scores(self, batch: LocalBatch) -> list[TokenBatch]:
        return self._scored(batch, self._kept | self._dispatched(batch))

    def _dispatched(self, batch: LocalBatch) -> dict[str, dict[str, torch.Tensor]]:
        """Return the scores from other models, as TokenScores."""
        names = dict.fromkeys(name for item in batch.samples for name in item.scores)
        return {
            name: {item.sample.id: item.scores[name] for item in batch.samples if name in item.scores} for name in names
        }

    def _scored(self, batch: LocalBatch, scores: TokenScores) -> list[TokenBatch]:
        pairs = zip(self._collate(batch), batch.members, strict=True)
        return [add_scores(token_batch, members, scores) for token_batch, members in pairs]

    def _keep(self, name: str, scores: Mapping[str, torch.Tensor]) -> None:
        """Keep scores for the update on the same samples, on the last stage, which computes and reads them."""
        if parallel.is_last_stage(None):
            self._kept.setdefault(name, {}).update(scores)
