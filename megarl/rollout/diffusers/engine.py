"""The rollout engine for image models."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray

from megarl.config.violations import raise_all
from megarl.core import device
from megarl.core.latents import LatentSample, VelocityInput
from megarl.models.rules.images import images_fit_the_positions
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region, differing_regions
from megarl.rollout.diffusers.pipeline import ImageModel
from megarl.rollout.diffusers.request import ImageRequest
from megarl.rollout.diffusers.sampler import Document, Trajectory, advance, velocities
from megarl.rollout.engine import EngineInfo, SyncStats
from megarl.rollout.stepping import SteppedEngine
from megarl.rollout.worker import WeightReceiver, describe_arithmetic, hashes, shapes_and_dtypes


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request with the future for its sample. Its trajectory is None until its first step."""

    request: ImageRequest
    sample: asyncio.Future[LatentSample]
    trajectory: Trajectory | None = None


class DiffusersEngine(SteppedEngine[ImageRequest, LatentSample]):
    """An engine that holds a complete image model on one device. It starts without the transformer's weights (`version`
    is None) and receives them through `refit`. A step is one denoising step of up to `max_batch` samples.

    After a refit, unfinished samples continue with the new weights. LatentSample.versions records the weight version of
    each denoising step. See SyncedEngine for the other methods.
    """

    has_lost_a_rank = False

    def __init__(self, folder: Path, dtype: str, max_batch: int, offload: bool = False, loads_weights: bool = False):
        """
        Args:
            folder: a diffusers folder with model_index.json.
            max_batch: maximum number of samples in a step, and of documents in a forward pass.
            offload: whether the text encoder and the VAE stay in host memory while they are unused.
            loads_weights: whether to load the transformer's weights from the folder. Then call `hold` to set their
                version.
        """
        super().__init__()
        self._model = ImageModel.load(folder, getattr(torch, dtype), offload, loads_weights)
        self._max_batch = max_batch
        self._pending: list[_PendingRequest] = []
        self._host: dict[str, torch.Tensor] = {}
        """Copies of the weights in host memory while the engine sleeps with `keeps_weights`."""
        self._description = (
            f"diffusers {diffusers.__version__}, {type(self._model.transformer).__name__}, {dtype}, "
            f"{describe_arithmetic()}"
        )
        print(f"engine: {self._description}", flush=True)

    @property
    def shift(self) -> float:
        """The shift of the noise levels in the folder's scheduler settings."""
        return self._model.shift

    async def _complete(self, request: ImageRequest) -> LatentSample:
        self._require_size(request)
        item = _PendingRequest(request, asyncio.get_running_loop().create_future())
        self._pending.append(item)
        if not self._is_paused:
            self._wake()
        self._ensure_stepping()
        try:
            return await item.sample
        finally:
            self._pending.remove(item)

    @property
    def _futures(self) -> Iterable[asyncio.Future[LatentSample]]:
        return [item.sample for item in self._pending]

    def _step(self) -> None:
        assert self.version is not None, "a step requires weights"
        unfinished = [item for item in self._pending if not item.sample.done()]
        self._start([item for item in unfinished if item.trajectory is None])
        pairs = [(item, item.trajectory) for item in unfinished[: self._max_batch] if item.trajectory is not None]
        trajectories = [trajectory for _, trajectory in pairs]
        advance(self._model.transformer, trajectories, self._model.shape, self._max_batch, self.version)
        done = [(item, trajectory) for item, trajectory in pairs if trajectory.is_done]
        images = iter(self._model.decoder.decode([t.latents for _, t in done if t.request.returns_image]))
        for item, trajectory in done:
            item.sample.set_result(trajectory.sample(next(images) if item.request.returns_image else None))

    def _start(self, items: Sequence[_PendingRequest]) -> None:
        """Start the trajectories of new requests. One call encodes all of their captions, so that an offloaded text
        encoder moves to the device only once."""
        if not items:
            return
        guided = any(item.request.denoising.guidance != 1 for item in items)
        captions = self._model.encoder.encode([item.request.prompt.text for item in items] + [""] * guided)
        for item in items:
            denoising = item.request.denoising
            size = denoising.height // self._scale, denoising.width // self._scale
            sigmas = self._model.sigmas(denoising.num_steps, denoising.shift)
            empty = captions[""] if denoising.guidance != 1 else None
            caption = captions[item.request.prompt.text]
            item.trajectory = Trajectory.start(
                item.request, sigmas, size, self._model.shape, device.device(), caption, empty
            )

    @property
    def _scale(self) -> int:
        return self._model.decoder.scale

    def _require_size(self, request: ImageRequest) -> None:
        """Raise a UserError if the model has no positions for an image of the requested size."""
        denoising, shape = request.denoising, self._model.shape
        raise_all([*images_fit_the_positions(denoising.height, denoising.width, shape, self._scale)])

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        """Return the number of denoising steps taken so far for the given samples, excluding finished samples."""
        trajectories = (item.trajectory for item in self._pending if item.request.sample_id in sample_ids)
        return sum(0 if trajectory is None else trajectory.step for trajectory in trajectories)

    def velocities(self, inputs: Sequence[VelocityInput]) -> list[NDArray[np.float32]]:
        """Return the velocity at each input, float32 [channels, height, width]. Raise a RuntimeError if the engine has
        no weights."""
        if self.version is None:
            raise RuntimeError("the engine has no weights yet. Fix: refit it before it computes velocities")
        self._wake()
        documents = [
            Document(_tensor(item.latents).to(device.device()), item.sigma, item.caption.map(_tensor))
            for item in inputs
        ]
        found = velocities(self._model.transformer, documents, self._model.shape, self._max_batch)
        return [velocity.cpu().numpy() for velocity in found]

    def pause(self) -> None:
        self._is_paused = True  # no need to wait: no step is in progress between calls

    def sleep(self, keeps_weights: bool) -> None:
        """See SyncedEngine.sleep. The text encoder and the VAE move to host memory even without
        `keeps_weights`, because a refit does not restore them."""
        assert self._is_paused or not self._pending, "cannot sleep while sampling. Pause the engine first"
        if not keeps_weights:
            self.version = None
        for name, parameter in self._parameters().items():
            if parameter.untyped_storage().nbytes():
                if keeps_weights:
                    self._host[name] = parameter.to("cpu", copy=True)
                parameter.untyped_storage().resize_(0)  # resize, because the transport keeps these tensors
        if not keeps_weights:
            self._host.clear()
        self._model.encoder.model.move_out()
        self._model.decoder.model.move_out()

    def _wake(self) -> None:
        for name, parameter in self._parameters().items():
            if not parameter.untyped_storage().nbytes():
                parameter.untyped_storage().resize_(parameter.nbytes)
                if name in self._host:
                    parameter.copy_(self._host.pop(name))

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        return [shapes_and_dtypes(self._parameters())]

    def repacking(self) -> list[str]:
        return []

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        assert not by_loader, "diffusers' parameters are always written in place"
        [holder] = holders
        self._receiver = WeightReceiver(plan, channel, holder, self._parameters())

    def disconnect(self) -> None:
        vars(self).pop("_receiver", None)  # absent before the first connection
        device.release_cache()

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        self.version = None
        self._wake()
        stats = self._receiver.write(self._parameters(), expected)
        self.hold(version)
        return [stats]

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        self._wake()
        return differing_regions(self._receiver.holder, self._parameters(), expected)

    def hold(self, version: int) -> None:
        """Set the weight version that is recorded for all denoising steps after this call."""
        self.version = version

    def checksums(self) -> list[dict[str, str]]:
        """Return the SHA-256 of each parameter's bytes: parameter name -> SHA-256."""
        return [hashes(self._parameters())]

    def info(self, texts: Sequence[str]) -> EngineInfo:
        encode = self._model.encoder.tokenizer.encode
        ids = tuple(tuple(encode(text, add_special_tokens=False)) for text in texts)
        return EngineInfo(dtype_name(torch.float32), ids, self._description)  # velocities are cast to float32

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors: all parameters, and SD3's position embedding, which is a buffer."""
        return self._model.transformer.state_dict()


def _tensor(array: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(array.copy())  # torch warns about read-only arrays
