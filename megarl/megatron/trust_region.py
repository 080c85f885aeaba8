"""TRPO's update (Schulman et al. 2015, arXiv:1502.05477): a natural gradient step under a hard bound on the divergence.

TRPO is included for reference: an update takes about twenty passes over the samples, while an AdamW update takes one.
Second derivatives, which Megatron's schedules lack, are not needed. The Fisher matrix of the sampled tokens (the
paper's appendix C) is F = 1/N Σ ∇lp·∇lpᵀ, so F·v is the gradient of 1/N Σ (∇lp·v)·lp, and the factors ∇lp·v are central
differences between two forward passes.

Each rank holds its shard of the parameters and of every vector, split as in the distributed optimizer. A Fisher product
reduces its gradient over all replicas, like an update, and all-gathers the shifted parameters within each replica. A
dot product all-reduces one number over all ranks and counts replicated shards once. A line search trial costs a forward
pass and an all-reduce of three numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megarl.config.algorithm_schema import TrustRegion
from megarl.core import device
from megarl.core.metrics import merge
from megarl.core.token_batch import TokenBatch
from megarl.megatron import parallel, step
from megarl.megatron.losses import Loss, Scalar, advantage_of
from megarl.megatron.metric_sums import Sums, read
from megarl.megatron.optimizer import parts_of

DIFFERENCE = 1e-3
"""Distance of each point of a central difference from the parameters, relative to the norm of all parameters."""

BACKTRACKING_FACTOR = 0.5
"""Factor by which the line search shortens a step."""

Vector = list[torch.Tensor]
"""This rank's shards of a float32 vector with one element per trained parameter element."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one TRPO update.

    Attributes:
        rate: the factor applied to the natural gradient; 0 if no trial was accepted and the parameters are unchanged.
        divergence: mean divergence from the old policy over the trained tokens, in nats.
        trials: number of line search trials.
    """

    rate: float
    divergence: float
    trials: int


def take_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    objective: Loss,
    batches: Sequence[TokenBatch],
    sums: Sequence[Sums],
    limits: TrustRegion,
) -> StepResult:
    """Move the parameters from θ to θ − β·x, where conjugate gradients solve F·x = ∇loss for x. Collective over all
    ranks. Requires prepared gradients.

    β starts at √(2·limit / x·F·x), where the quadratic model of the divergence reaches the limit. It is halved until
    the loss is below the loss at θ and the divergence is within the limit. The objective has the metrics policy/loss
    and policy/kl_old, and the batches have old log-probs. `sums` holds the objective's metrics at θ for each
    microbatch.
    """
    kl_limit = limits.kl_limit
    assert kl_limit is not None, "algorithm.trust_region.kl_limit is not set"
    shards = Shards(chunks, optimizer)
    gradient, start = shards.gradient(), shards.copy()
    fisher = FisherProduct(shards, start, batches, limits.damping)
    direction, curvature = conjugate_gradients(fisher, gradient, shards.dot, limits.iterations)
    first_loss, _ = _read(sums)
    rate = math.sqrt(2 * kl_limit / curvature) if curvature > 0 else 0.0
    for trial in range(1, limits.trials + 1 if rate else 1):
        shards.move(start, -rate, direction)
        loss, divergence = _read(step.evaluate(chunks, objective, batches))
        if loss < first_loss and divergence <= kl_limit:
            return StepResult(rate, divergence, trial)
        rate *= BACKTRACKING_FACTOR
    shards.move(start, 0.0, direction)
    return StepResult(0.0, 0.0, limits.trials if rate else 0)


def conjugate_gradients(
    product: Callable[[Vector], Vector], right: Vector, dot: Callable[[Vector, Vector], float], iterations: int
) -> tuple[Vector, float]:
    """Return x with product(x) ≈ right, and the scalar x·product(x). `product` must multiply by a symmetric positive
    definite matrix (Hestenes and Stiefel 1952)."""
    solution = [torch.zeros_like(part) for part in right]
    residual, direction = [part.clone() for part in right], [part.clone() for part in right]
    square = first = dot(residual, residual)
    for _ in range(iterations):
        if square <= 1e-10 * first:
            break
        image = product(direction)
        length = square / dot(direction, image)
        for x, r, d, image_part in zip(solution, residual, direction, image, strict=True):
            x.add_(d, alpha=length)
            r.sub_(image_part, alpha=length)
        square, before = dot(residual, residual), square
        for d, r in zip(direction, residual, strict=True):
            d.mul_(square / before).add_(r)
    return solution, dot(solution, right) - dot(solution, residual)


class Shards:
    """This rank's shards of the trained parameters, split as in its optimizer."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer):
        """Requires prepared gradients for all parameters."""
        self.chunks, self._optimizer = chunks, optimizer
        self._parts = parts_of(optimizer)
        self._parameters = [parameter for part in self._parts for parameter in part.get_parameters()]
        self._counts = [
            param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
            for parameter in self._parameters
        ]
        """Whether each shard counts in dot products. Only one copy of a replicated shard counts."""

    def gradient(self) -> Vector:
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self._parameters]

    def copy(self) -> Vector:
        return [parameter.detach().clone() for parameter in self._parameters]

    def dot(self, one: Vector, other: Vector) -> float:
        """Return the dot product of two vectors, given this rank's shards. Collective over all ranks."""
        products = [
            torch.dot(a.double(), b.double()) for a, b, counts in zip(one, other, self._counts, strict=True) if counts
        ]
        total = torch.stack([torch.zeros((), dtype=torch.float64, device=device.device()), *products]).sum()
        dist.all_reduce(total)
        return float(total)

    @torch.no_grad()
    def move(self, start: Vector, factor: float, direction: Vector) -> None:
        """Set the parameters to `start` + `factor` · `direction` and all-gather them."""
        for parameter, begin, part in zip(self._parameters, start, direction, strict=True):
            parameter.copy_(begin).add_(part, alpha=factor)
        for part in self._parts:
            part._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def gradient_of(self, objective: Loss, batches: Sequence[TokenBatch]) -> Vector:
        step.accumulate_gradients(self.chunks, objective, batches)
        self._optimizer.prepare_grads()
        return self.gradient()


class FisherProduct:
    """Multiplies vectors by (F + damping · 1) at the parameters `start`. A call leaves the parameters at `start`."""

    def __init__(self, shards: Shards, start: Vector, batches: Sequence[TokenBatch], damping: float):
        self._shards, self._start, self._batches, self._damping = shards, start, batches, damping
        self._size = math.sqrt(shards.dot(start, start))
        masks = [float(batch.mask.sum()) for batch in batches] if parallel.returns_results() else []
        count = torch.tensor(sum(masks), dtype=torch.float64, device=device.device())
        dist.all_reduce(count)
        self._num_tokens = max(float(count), 1.0)

    def __call__(self, vector: Vector) -> Vector:
        length = DIFFERENCE * self._size / math.sqrt(self._shards.dot(vector, vector))
        above, below = (self._log_probs(sign * length, vector) for sign in (1, -1))
        self._shards.move(self._start, 0.0, vector)
        batches = self._batches
        if above:  # only the last stage computes a loss
            slopes = [(a - b) / (2 * length) for a, b in zip(above, below, strict=True)]
            batches = [replace(batch, advantage=slope) for batch, slope in zip(batches, slopes, strict=True)]
        product = self._shards.gradient_of(Loss(self._loss, lambda *_: {}), batches)
        return [part.add_(component, alpha=self._damping) for part, component in zip(product, vector, strict=True)]

    def _log_probs(self, factor: float, vector: Vector) -> list[torch.Tensor]:
        self._shards.move(self._start, factor, vector)
        return [scored[:, 0] for scored in step.score(self._shards.chunks, self._batches)]

    def _loss(self, batch: TokenBatch, scored: torch.Tensor) -> Scalar:
        log_prob, slope = (values.where(batch.mask, 0.0) for values in (scored[:, 0], advantage_of(batch)))
        return Scalar((slope * log_prob).sum() / self._num_tokens)


def _read(sums: Sequence[Sums]) -> tuple[float, float]:
    """Return the loss and the divergence from the old policy over the microbatches on all ranks. Collective."""
    metrics = merge(map(read, sums)) if parallel.reports_metrics() else {}
    values = torch.zeros(3, dtype=torch.float64, device=device.device())
    if "policy/kl_old" in metrics:
        divergence = metrics["policy/kl_old"]
        values += torch.tensor([metrics["policy/loss"].value, divergence.value * divergence.weight, divergence.weight])
    dist.all_reduce(values)
    loss, divergence, count = values.tolist()
    return loss, divergence / max(count, 1.0)
