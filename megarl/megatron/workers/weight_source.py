"""One rank of a model whose weights are sent to engines and exported."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import ProcessGroup

from megarl.core import device
from megarl.core.files import retry_when_full
from megarl.megatron import parallel
from megarl.megatron.model.build import adapter_parameters
from megarl.megatron.workers.model import ModelWorker
from megarl.models.folder import loadable_path
from megarl.models.value_head import without_value_head
from megarl.resharding.families import huggingface_holder, quantized_sources
from megarl.resharding.families.adapters import EXPERTS
from megarl.resharding.folder import write_folder
from megarl.resharding.planning.plan import Plan
from megarl.resharding.quantized_copy import QuantizedCopy
from megarl.resharding.transports import cuda_memory, shared_memory
from megarl.resharding.transports.p2p import Rendezvous
from megarl.resharding.transports.published import Published
from megarl.resharding.transports.rank_files import write_parameters
from megarl.resharding.transports.transport import Transport
from megarl.resharding.verification import Checksum, Region, source_checksums


class WeightSource(ModelWorker):
    """One rank's part of the weights in refits and exports."""

    def prepare_refit(self) -> None:
        """Prepare the weights for a refit: merge adapters and quantize. Collective over all ranks."""
        if self.adapters is not None:
            self.adapters.merge(self.parameters())
        if self._quantizes:
            self._quantized_copy.fill(self._whole_weights, parallel.reduce_max)
        device.synchronize()  # before other processes read them

    @property
    def _quantizes(self) -> bool:
        return self._config.rollout.quantization is not None and not self._config.is_offline

    @cached_property
    def _quantized_copy(self) -> QuantizedCopy:
        [quantized] = quantized_sources(self._hf_config, [self.holder])

        def group_of(parameter: str) -> ProcessGroup:
            return parallel.tensor_group(is_expert=EXPERTS in parameter)

        shapes = huggingface_holder(self._hf_config).shapes
        return QuantizedCopy(self.holder.shard, quantized.shard, shapes, group_of, device.device())

    @property
    def _whole_weights(self) -> Mapping[str, torch.Tensor]:
        """The trained model's weights, with the adapters merged if it has any."""
        return {**self.parameters(), **({} if self.adapters is None else self.adapters.merged)}

    @property
    def _refit_weights(self) -> Mapping[str, torch.Tensor]:
        """Name -> tensor for the tensors that engines receive."""
        quantized = {} if self._config.rollout.quantization is None else self._quantized_copy.tensors
        return {**self._whole_weights, **quantized}

    def publish(self, for_refit: bool) -> Published:
        """Publish weights in shared memory for readers on this machine: the weights that a refit sends if `for_refit`,
        else the weights that an export writes. On GPU, a copy of the current values is published."""
        weights = self._refit_weights if for_refit else self._exported_weights()
        self._published = {name: weight.cpu() for name, weight in weights.items()}
        return shared_memory.publish(self._published)

    def publish_on_gpu(self, readers: Mapping[str, Collection[str]]) -> dict[str, Published]:
        """Expose the weights that a refit sends to readers on this machine. The weights stay in GPU memory and are not
        copied. `readers` maps reader names to the parameters that they read."""
        parameters = self._refit_weights
        return {
            reader: cuda_memory.publish({name: parameters[name].detach() for name in names})
            for reader, names in readers.items()
        }

    def connect(self, plan: Plan, rendezvous: Rendezvous) -> None:
        """Set the plan for `send`, and connect to the receivers at the rendezvous."""
        self._transport = rendezvous.open(self.holder.name, self._refit_weights, plan)

    def send(self) -> int:
        """Send this rank's part of a refit and return the number of bytes sent."""
        return self._transport.send()

    def checksums(self, wanted: Sequence[Region], plan: Plan) -> dict[Region, Checksum]:
        """Return this rank's part of the checksums that the engines must match. `plan` is a plan for exporting the
        weights that a refit sends."""
        return source_checksums(wanted, plan, self.holder.name, self._refit_weights)

    def _exported_weights(self) -> Mapping[str, torch.Tensor]:
        """Return name -> current weight for the weights that an export writes."""
        if self.adapters is None:
            return self.parameters()
        if self.adapters.exports_factors:
            return {name: factor.detach() for name, factor in adapter_parameters(self.chunks).items()}
        self.adapters.merge(self.parameters())
        return self._whole_weights

    def export(self, plan: Plan, transport: Transport, out: Path) -> None:
        """Write the model as a Hugging Face folder, or its adapters for PEFT or diffusers, with weights from all ranks.
        If the disk is full, wait as in `retry_when_full`."""

        def write() -> None:
            if self.adapters is not None and self.adapters.exports_factors:
                base = loadable_path(self._config.model.path, self._folder)
                self.adapters.write(plan, transport, base, out)
            else:
                self._write_model(plan, transport, out)

        retry_when_full(write, out)

    def _write_model(self, plan: Plan, transport: Transport, out: Path) -> None:
        write_folder(plan, transport, without_value_head(self._hf_config), self._folder, out)

    def write_part(self, plan: Plan, folder: Path) -> None:
        """Write the parameters that an export reads from this rank to files, for ranks on remote nodes. `plan` is this
        rank's part of the export plan."""
        names = sorted({move.source.parameter for move in plan.moves_from(self.holder.name)})
        write_parameters(self._exported_weights(), names, folder)
