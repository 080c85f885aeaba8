"""One rank of a Megatron model: loads its shard from a Hugging Face folder and runs forward-only passes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.distributed_c10d import Store

from megarl.config.model_schema import MegatronRole, Placed
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import Reads
from megarl.data.images import ImageProcessor
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel, step
from megarl.megatron.lora.adapters import Adapters
from megarl.megatron.model.build import build_model, kernels, named_weights
from megarl.megatron.model.layer_spec import uses_transformer_engine
from megarl.megatron.packing import packing_of
from megarl.models.classifier import BIAS, WEIGHT
from megarl.models.folder import read_config
from megarl.models.mtp import add_mtp, num_mtp_layers
from megarl.models.value_head import value_head_shapes
from megarl.models.vision import add_vision, vision_of
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder, megatron_holder
from megarl.resharding.piece import Holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.safetensors import SafetensorsFolder


class ModelWorker:
    """One rank of a model, and the base class for all roles. It receives samples as a `LocalBatch`; tensors built from
    the samples stay on the rank."""

    role: MegatronRole
    reads: Reads = "states"
    """Position in the pack at which the head reads the hidden state for a response token; see Reads."""
    truncates: bool = True
    """Whether a token's distribution covers only the engine's candidate tokens."""

    replays: bool = False
    """Whether tokens are routed to the experts that the engine chose. Only the policy replays routes, because the
    engine runs only the policy."""

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        self._config, self._folder, self._rank = config, model_folder, rank
        self._hf_config = self._model_config(read_config(model_folder))
        settings = self._settings
        self.packing = packing_of(settings, self._hf_config)
        device.claim(threads)
        device.use_expandable_segments()
        parallel.initialize(settings.layout, store, rank, config.run.seed, config.cluster.timeouts.longest)
        lora = settings.adapters
        self.adapters = None if lora is None else Adapters(lora, self._hf_config, self.holder)
        self._processor = self._image_processor()
        self.chunks = self._build()
        self._load_weights()
        self.kernels = kernels.describe()
        print(f"{settings.section}: {self.kernels}", flush=True)

    def _build(self) -> list[DistributedDataParallel]:
        """Build this rank's shard of the model."""
        return build_model(
            self._settings,
            self._hf_config,
            self.dtype,
            self.temperature,
            self._config.context_of(self._settings)[1],
            frozen=self._frozen(),
            logits_dtype=getattr(torch, self._config.model.logits_dtype),
            **self._attached,
        )

    @property
    def has_tower(self) -> bool:
        """Whether this rank has a vision tower and thus needs the images of samples."""
        return self._processor is not None

    def _image_processor(self) -> ImageProcessor | None:
        """Return the image processor; None on ranks without a vision tower."""
        if vision_of(self._hf_config) is None or not parallel.is_first_stage(None):
            return None
        return ImageProcessor.of(self._folder, self._config.data.min_pixels, self._config.data.max_pixels)

    @property
    def _attached(self) -> dict[str, Any]:
        """The keyword argument that attaches the adapters; empty without adapters."""
        return {} if self.adapters is None else {"attach": self.adapters.attach}

    def _model_config(self, hf_config: dict[str, Any]) -> dict[str, Any]:
        """Return the config for the role's model, whose head may differ from the head in the folder's config."""
        return hf_config

    @property
    def _settings(self) -> Placed:
        """The role's section of the config."""
        return self._config.placed(self.role)

    @property
    def temperature(self) -> float:
        """Divisor of a language model's logits. For the actor it is the sampling temperature."""
        return self._config.rollout.temperature

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self._config.model.dtype)

    @property
    def holder(self) -> Holder:
        return megatron_holder(
            self._hf_config,
            self._settings.layout,
            self._rank,
            dtype=self._config.model.dtype,
            transformer_engine=uses_transformer_engine(),
        )

    @property
    def data_parallel_rank(self) -> int:
        return parallel.data_parallel_rank()

    def parameters(self) -> dict[str, torch.Tensor]:
        return named_weights(self.chunks)

    def close(self) -> None:
        parallel.destroy()

    def _frozen(self) -> Collection[str]:
        """Return the names of this rank's frozen parameters."""
        return self.holder.shapes

    def _load_weights(self) -> None:
        """Load the weights from the model folder. A score or value head that the folder lacks is
        zero-initialized."""
        with self._opened_folder() as (transport, source):
            missing = {WEIGHT, BIAS, *value_head_shapes(self._hf_config)}.difference(source.shapes)
            plan = make_plan([source], [self.holder.zeroed(missing)])
            execute(plan.into(self.holder.name), self.parameters(), transport)

    @contextmanager
    def _opened_folder(self) -> Iterator[tuple[SafetensorsFolder, Holder]]:
        """Open the folder that contains the weights. Yields the folder's transport and holder."""
        hf_config = read_config(self._folder)
        if num_mtp_layers(self._hf_config):
            hf_config = add_mtp(hf_config)
        if vision_of(self._hf_config) is not None:
            hf_config = add_vision(hf_config)
        holder = huggingface_holder(hf_config)
        with SafetensorsFolder(self._folder) as transport:
            yield transport, transport.with_file_dtypes(holder)

    def _forward(
        self,
        batch: LocalBatch,
        replays: bool | None = None,
        truncates: bool | None = None,
        to_host: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> the head's output for the response tokens, float32 [R,
        columns]; empty before the last stage. `replays` and `truncates` override the class attributes. `to_host`: as in
        `step.score`."""
        scored = step.score(self.chunks, self._collate(batch, replays, truncates), to_host)
        results = {}
        for members, columns in zip(batch.members, scored, strict=False):
            parts = columns.split([len(item.sample.response_ids) for item in members])
            results |= {item.sample.id: part for item, part in zip(members, parts, strict=True)}
        return results

    def _first_column(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Return the first column of `_forward`: log-probs, scores or values, float32 [R]."""
        return {name: columns[:, 0] for name, columns in self._forward(batch).items()}

    def _collate(
        self, batch: LocalBatch, replays: bool | None = None, truncates: bool | None = None
    ) -> list[TokenBatch]:
        replays = self.replays if replays is None else replays
        truncates = self.truncates if truncates is None else truncates
        return batch.token_batches(self.packing, self.reads, truncates, replays, device.device(), self._processor)
