"""Expert routing: replays the engine's routes in the trainer and measures how they differ from the trainer's.

A Megatron router delegates the choice of experts to an object, by default a RouterReplay. We replace RouterReplay for
three reasons: its registry is process-wide, so actor and critic would use each other's routes; it requires routes for
every token; and it switches all routers at once between forward pass and recomputation, which alternate in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from megarl.core import device
from megarl.core.metrics import Metric
from megarl.core.token_batch import TokenBatch
from megarl.megatron import parallel
from megarl.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes for this rank's tokens in a microbatch, in the order that the routers process them.

    Attributes:
        experts: [t, layers, experts per token], as in TokenBatch; None lets the trainer choose the experts for every
            token.
        is_sampled: bool [t], false for the padding after the samples.
    """

    experts: torch.Tensor | None
    is_sampled: torch.Tensor

    @classmethod
    def of(cls, batch: TokenBatch, places: torch.Tensor, sequence_parallel: bool) -> Routes:
        """Return this rank's routes. `places` holds the pack positions of this context-parallel rank's tokens, which
        sequence parallelism splits evenly over the tensor-parallel ranks."""
        if sequence_parallel:
            places = parallel.local_part(places)
        is_sampled = torch.zeros(len(batch.tokens), dtype=torch.bool)
        is_sampled[batch.document_tokens[: int(batch.boundaries[len(batch.reward)])]] = True
        is_sampled = device.send(is_sampled, batch.tokens.device)
        return cls(None if batch.routes is None else batch.routes[places], is_sampled[places])


class LayerRouter:
    """Chooses the experts in one layer. A Megatron router calls it with the router scores.

    In the backward pass a layer may be recomputed for any microbatch in flight. Schedules run a chunk's backward passes
    in the same order as its forward passes, so a queue suffices.
    """

    def __init__(self, router: TopKRouter, layer: int, num_experts: int):
        """`layer` is the index of the router's layer among the layers with experts."""
        self.layer = layer
        self._router, self._num_experts = router, num_experts
        self._routes: Routes | None = None
        """Routes for the microbatch in the current forward pass; None outside forward passes."""
        self._recomputed: list[Routes] = []
        """Routes for microbatches that will be recomputed."""
        self._counts: torch.Tensor | None = None

    def begin(self, routes: Routes) -> None:
        self._routes = routes

    def end(self) -> None:
        self._routes = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores and indices of each token's experts. Replayed experts are scored like the router's own choice,
        with a gradient, because their scores are gathered from `scores` rather than from the router's top-k."""
        routes = self._recomputed.pop(0) if self._routes is None else self._routes
        with torch.no_grad():
            _, preferred = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = preferred
        if routes.experts is not None:
            replayed = routes.experts[:, self.layer].long()
            chosen = torch.where(replayed < 0, preferred, replayed)
        if self._routes is not None and self._router.training:
            self._count(preferred, chosen, routes)
            if not torch.is_grad_enabled():
                self._recomputed.append(routes)
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _count(self, preferred: torch.Tensor, chosen: torch.Tensor, routes: Routes) -> None:
        """Count the tokens per expert, the replayed tokens that the router would send elsewhere, and all replayed
        tokens."""
        if self._counts is None:
            self._counts = torch.zeros(self._num_experts + 2, dtype=torch.int64, device=preferred.device)
        is_sampled = routes.is_sampled.long()
        self._counts.scatter_add_(0, chosen.flatten(), is_sampled.repeat_interleave(chosen.shape[1]))
        if routes.experts is not None:
            is_replayed = is_sampled * (routes.experts[:, self.layer] >= 0).all(dim=1)
            differs = (preferred.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1)
            self._counts[-2] += (is_replayed * differs).sum()
            self._counts[-1] += is_replayed.sum()

    def take_counts(self) -> torch.Tensor | None:
        """Return the counts since the last call, or None if no token was counted."""
        counts, self._counts = self._counts, None
        return counts

    @property
    def is_done(self) -> bool:
        """Whether no microbatch is waiting to be recomputed."""
        return not self._recomputed


def install_routers(model: GPTModel, shape: ModelShape) -> None:
    """Install a LayerRouter in each router in a chunk's decoder."""
    layer_routers: list[LayerRouter] = []
    for router in (module for module in model.decoder.modules() if isinstance(module, TopKRouter)):
        assert router.layer_number is not None, "the router has no layer number"
        layer = router.layer_number - 1  # Megatron numbers layers from 1 across all stages
        assert shape.experts is not None and shape.has_experts(layer), f"layer {layer} has no experts"
        layer_routers.append(LayerRouter(router, sum(shape.experts.layers[:layer]), shape.experts.count))
        router.router_replay = layer_routers[-1]  # pyright: ignore[reportAttributeAccessIssue]  # has its interface
    vars(model)["layer_routers"] = layer_routers


def layer_routers(model: GPTModel) -> list[LayerRouter]:
    return vars(model)["layer_routers"]


def model_of(chunk: DistributedDataParallel) -> GPTModel:
    """Return the model that DDP wraps."""
    return unwrap_model(chunk)  # pyright: ignore[reportReturnType]  # Megatron's function has no annotations


@contextmanager
def routed(model: GPTModel, routes: Routes) -> Iterator[None]:
    """Return a context manager that routes a microbatch's tokens by `routes` in the chunk's forward pass."""
    for router in layer_routers(model):
        router.begin(routes)
    yield
    for router in layer_routers(model):
        router.end()


def route_metrics(chunks: Sequence[DistributedDataParallel], shape: ModelShape, prefix: str) -> dict[str, Metric]:
    """Return the routing metrics for one update over all ranks. Collective."""
    if shape.experts is None:
        return {}
    routers = [router for chunk in chunks for router in layer_routers(model_of(chunk))]
    assert all(router.is_done for router in routers), "a microbatch was not recomputed"
    device = next(chunks[0].parameters()).device
    counts = torch.zeros(sum(shape.experts.layers), shape.experts.count + 2, dtype=torch.int64, device=device)
    for router in routers:
        layer_counts = router.take_counts()
        if layer_counts is not None:
            counts[router.layer] += layer_counts
    dist.all_reduce(counts)
    return metrics_of(counts.cpu(), prefix)


def metrics_of(counts: torch.Tensor, prefix: str) -> dict[str, Metric]:
    """Return the routing metrics. `counts`, int64 [layers, experts + 2], holds each layer's LayerRouter counts.

    max_vio: load of a layer's busiest expert relative to the mean, minus 1, averaged over layers; 0 if all loads are
    equal (MaxVio, arXiv 2408.15664).

    routes_differ: fraction of replayed (token, layer) pairs for which the trainer would have chosen different experts.
    """
    loads, (differing, replayed) = counts[:, :-2].double(), counts[:, -2:].sum(dim=0).tolist()
    metrics = {}
    if loads.sum():
        metrics[f"{prefix}/max_vio"] = Metric(float((loads.amax(dim=1) / loads.mean(dim=1) - 1).mean()))
    if replayed:
        metrics[f"{prefix}/routes_differ"] = Metric(differing / replayed, replayed)
    return metrics
