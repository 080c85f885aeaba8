"""Forward-backward passes of a denoiser over an update's microbatches, and forward-only passes, for any objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megarl.megatron.model.denoiser.inputs import DenoiserInput, Document
from megarl.megatron.model.denoiser.model import Denoiser
from megarl.megatron.step import schedule

VelocityLoss = Callable[[Sequence[Document], Sequence[torch.Tensor]], tuple[torch.Tensor, Any]]
"""Function from a microbatch's documents and velocities (float32 [channels, height, width]) to Σ w·ℓ and metrics."""


def accumulate_gradients(
    chunks: Sequence[DistributedDataParallel], loss: VelocityLoss, microbatches: Sequence[Sequence[Document]]
) -> list[Any]:
    """Accumulate the gradient of Σ w·ℓ over all microbatches and ranks in the parameters' main_grad. Return the loss's
    metrics for each microbatch on this rank (empty before the last stage).

    Context-parallel ranks have the same documents, compute the same loss and return the same metrics.
    `parallel.returns_results` selects one rank of each replica.
    """
    # Cancel the divisions by the schedule and by the data-parallel reduction, as in step.accumulate_gradients.
    scale = len(microbatches) * parallel_state.get_data_parallel_world_size()

    def compute(item: DenoiserInput, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
        value, metrics = loss(item.documents, item.unpatchify(rows))
        return scale * value, metrics

    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.train()
    with _schedule(chunks, microbatches, compute, forward_only=False) as run:
        return run()


def predict(
    chunks: Sequence[DistributedDataParallel], microbatches: Sequence[Sequence[Document]]
) -> list[list[torch.Tensor]]:
    """Return the velocities of each microbatch's documents, float32 [channels, height, width] each. The list is empty
    except on the last stage."""

    def keep(item: DenoiserInput, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return rows.sum(), item.unpatchify(rows)

    with _schedule(chunks, microbatches, keep, forward_only=True) as run:
        return run()


def _schedule(
    chunks: Sequence[DistributedDataParallel],
    microbatches: Sequence[Sequence[Document]],
    compute: Callable[[DenoiserInput, torch.Tensor], tuple[torch.Tensor, Any]],
    forward_only: bool,
) -> AbstractContextManager[Callable[[], list[Any]]]:
    model: Denoiser = chunks[0].module  # pyright: ignore[reportAssignmentType]  # megarl's class
    return schedule(
        chunks,
        [partial(model.prepare, documents) for documents in microbatches],
        lambda chunk, item: chunk(item),
        compute,
        longest=max(sum(d.num_tokens(model.shape) for d in documents) for documents in microbatches),
        forward_only=forward_only,
    )
