"""Forward-backward passes over an update's microbatches, and forward-only passes, for any model and objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.core import device
from megarl.core.token_batch import TokenBatch
from megarl.megatron.losses import Loss
from megarl.megatron.metric_sums import Sums
from megarl.megatron.model.head import LogProbHead, ScoreLayer
from megarl.megatron.model.inputs import ModelInput
from megarl.megatron.model.layer_spec import is_recurrent, requires_our_attention, splits_documents
from megarl.megatron.model.mtp import has_trained_mtp
from megarl.megatron.model.vision import vision_tower
from megarl.megatron.routes import model_of, routed

Item = TypeVar("Item")
"""A model's input for one microbatch."""


def accumulate_gradients(
    chunks: Sequence[DistributedDataParallel], loss: Loss, batches: Sequence[TokenBatch]
) -> list[Sums]:
    """Accumulate the gradient of Σ w·ℓ over all microbatches and ranks in the parameters' main_grad. Return the loss
    metrics for each microbatch on this rank (empty before the last stage)."""
    # The schedule multiplies the loss by cp / num_microbatches, and DDP averages over dp · cp ranks. Both are undone
    # here and nowhere else: cp / num_microbatches · 1 / (dp · cp) · (num_microbatches · dp) = 1.
    scale = len(batches) * parallel_state.get_data_parallel_world_size()
    for chunk in chunks:
        chunk.zero_grad_buffer()
        chunk.train()
    with _token_schedule(chunks, batches, partial(compute_loss, loss, scale), forward_only=False) as run:
        return run()


def apply_gradients(optimizer: MegatronOptimizer) -> float:
    """Run one optimizer step, or skip it if the gradient is non-finite, leaving weights and moments unchanged. Return
    `gradient_norm`. It is finite if and only if the step ran, on all ranks."""
    grad_norm = gradient_norm(optimizer)
    if math.isfinite(grad_norm):
        optimizer.step()
    return grad_norm


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the gradient's norm before clipping, without MTP layers, which Megatron clips separately. If it is finite
    but an MTP gradient is not, return the norm of that gradient."""
    # Megatron's step computes these norms again for clipping but does not check them. The norms here cost an additional
    # pass over the rank's gradient shard.
    optimizer.prepare_grads()
    norms = [float(optimizer.get_grad_norm()), *map(float, optimizer._compute_grad_norms_by_group().values())]
    return next((norm for norm in norms if not math.isfinite(norm)), norms[0])


def gather_parameters(chunks: Sequence[DistributedDataParallel]) -> None:
    """All-gather the parameters after the last update. With overlapped communication, the parts owned by remote ranks
    would otherwise be fetched only in the next training forward pass."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def score(
    chunks: Sequence[DistributedDataParallel], batches: Sequence[TokenBatch], to_host: bool = False
) -> list[torch.Tensor]:
    """Return the head's output for each microbatch: float32 [N, columns] with log-probs and entropies or scores, or
    hidden states, [N, h], in the model's dtype. The list is empty except on the last stage. `to_host`: move each
    microbatch's output to host memory before the next microbatch."""

    def keep(item: ModelInput, scored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = item.whole(scored[0])
        return scored.sum(), output.cpu() if to_host else output

    with _token_schedule(chunks, batches, keep, forward_only=True) as run:
        return run()


def evaluate(chunks: Sequence[DistributedDataParallel], loss: Loss, batches: Sequence[TokenBatch]) -> list[Sums]:
    """Run a forward-only pass and return each microbatch's loss metrics (empty before the last stage)."""
    with _token_schedule(chunks, batches, partial(compute_loss, loss, 1), forward_only=True) as run:
        return run()


def compute_loss(loss: Loss, scale: int, item: ModelInput, scored: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Return a microbatch's loss times `scale`, and its metrics."""
    terms = loss.terms(item.rows, scored[0])
    return scale * terms.loss, loss.metrics(item.rows, terms)


def _token_schedule(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[TokenBatch],
    compute: Callable[[ModelInput, torch.Tensor], tuple[torch.Tensor, Any]],
    forward_only: bool,
) -> AbstractContextManager[Callable[[], list[Any]]]:
    """Return the `schedule` of a language model."""
    config = chunks[0].config
    window = None if config.window_size is None else config.window_size[0] + 1
    attention = splits_documents(is_recurrent(config)), window, requires_our_attention(config)
    options = (config.sequence_parallel, *attention, not forward_only and has_trained_mtp(chunks))
    # Overlapped gradient reduction waits for the gradients of all trained parameters.
    needs_gradient = not forward_only and chunks[0].ddp_config.overlap_grad_reduce
    options += (vision_tower(model_of(chunks[0])), needs_gradient)
    return schedule(
        chunks,
        [partial(ModelInput.of, batch, *options) for batch in batches],
        _run_on_tokens,
        compute,
        longest=max(len(batch.tokens) for batch in batches),
        forward_only=forward_only,
    )


def _run_on_tokens(chunk: DistributedDataParallel, item: ModelInput) -> torch.Tensor:
    unwrapped = model_of(chunk)
    if unwrapped.post_process:
        head: LogProbHead | ScoreLayer = unwrapped.output_layer  # pyright: ignore[reportAssignmentType]  # megarl's class
        head.request = item.head  # pyright: ignore[reportArgumentType]  # Megatron declares submodules only
    if (tower := vision_tower(unwrapped)) is not None:
        tower.images = item.images
    with routed(unwrapped, item.routes):
        return chunk(
            input_ids=item.tokens,
            position_ids=item.positions,
            attention_mask=None,
            packed_seq_params=item.attention,
        )


@contextmanager
def schedule(
    chunks: Sequence[DistributedDataParallel],
    prepare: Sequence[Callable[[], Item]],
    run_chunk: Callable[[DistributedDataParallel, Item], torch.Tensor],
    compute: Callable[[Item, torch.Tensor], tuple[torch.Tensor, Any]],
    longest: int,
    forward_only: bool,
) -> Iterator[Callable[[], list[Any]]]:
    """Return a context manager that yields this layout's Megatron schedule: a function without arguments, which
    returns the second result of `compute` for each microbatch.

    Args:
        prepare: for each microbatch, a function that returns the model's input.
        run_chunk: runs a chunk on this input.
        compute: maps the model's output to the loss and an arbitrary second result.
        longest: upper bound on the number of tokens in a microbatch. Each stage receives the actual number from the
            previous one.
    """

    def forward_step(iterator: Iterator[Item], chunk: DistributedDataParallel):
        item = next(iterator)
        return run_chunk(chunk, item), partial(compute, item)

    if forward_only:
        for chunk in chunks:
            chunk.eval()
    gradients = torch.no_grad() if forward_only else nullcontext()
    with gradients, device.helper_thread("inputs") as thread:
        inputs = _Inputs(prepare, thread, len(chunks))
        yield partial(
            get_forward_backward_func(),
            forward_step_func=forward_step,
            data_iterator=[iter(inputs) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(prepare),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
        )


class _Inputs(Generic[Item]):
    """The model inputs for each microbatch, shared by the model's chunks. A thread prepares the next input while the
    current input is processed; the thread runs no collectives. An input is dropped once all chunks have taken it,
    because those of an update may not fit on the device together."""

    def __init__(self, prepare: Sequence[Callable[[], Item]], thread: Executor, num_chunks: int):
        self._prepare, self._thread, self._num_chunks = prepare, thread, num_chunks
        self._prepared: list[Future[Item] | None] = []
        self._num_takes = [0] * len(prepare)

    def __iter__(self) -> Iterator[Item]:
        for number in range(len(self._prepare)):
            for prepare in self._prepare[len(self._prepared) : number + 2]:
                self._prepared.append(self._thread.submit(prepare))
            yield self._take(number)  # a local variable would keep the input

    def _take(self, number: int) -> Item:
        prepared = self._prepared[number]
        assert prepared is not None, "a chunk takes each input once"
        self._num_takes[number] += 1
        if self._num_takes[number] == self._num_chunks:
            self._prepared[number] = None
        return prepared.result()
