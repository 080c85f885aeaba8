"""The experts that tokens go to: those of the engine in place of the trainer's own choice, and how they differ.

A router of Megatron asks an object for its choice, by default Megatron's RouterReplay. Ours stands in its place. Those
of Megatron have a registry for the whole process, in which an actor and a critic would take each other's routes; every
token must have some; and all are switched together between forward and recomputed passes, which alternate in a
pipeline.
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

from megarl.core.metrics import Metric
from megarl.core.token_batch import TokenBatch
from megarl.megatron import parallel
from megarl.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of this rank's tokens of a microbatch, in the order in which its routers get them.

    experts     as in TokenBatch, [t, layers, experts per token]; None: every token takes the trainer's
    is_sampled  bool [t]: False for padding after the samples
    """

    experts: torch.Tensor | None
    is_sampled: torch.Tensor

    @classmethod
    def of(cls, batch: TokenBatch, own: torch.Tensor, sequence_parallel: bool) -> Routes:
        """own: the places in the pack of this context-parallel rank's tokens, of which sequence parallelism gives each
        tensor-parallel rank one of equal parts."""
        if sequence_parallel:
            own = parallel.own_part(own)
        is_sampled = torch.zeros_like(batch.tokens, dtype=torch.bool)
        is_sampled[batch.document_tokens[: int(batch.boundaries[len(batch.reward)])]] = True
        return cls(None if batch.routes is None else batch.routes[own], is_sampled[own])


class LayerRouter:
    """The choice of experts in one layer, which a router of Megatron calls with its scores.

    A layer may be computed a second time in the backward pass, in whichever microbatch's turn that comes: schedules go
    backward through a chunk's microbatches in the order in which they went forward.
    """

    def __init__(self, router: TopKRouter, layer: int, num_experts: int):
        """layer: the number of the router's layer among those with experts."""
        self.layer = layer
        self._router, self._num_experts = router, num_experts
        self._routes: Routes | None = None
        """Those of the microbatch that goes forward; None while none does."""
        self._again: list[Routes] = []
        """Those of the microbatches that will be computed again."""
        self._counts: torch.Tensor | None = None

    def begin(self, routes: Routes) -> None:
        self._routes = routes

    def end(self) -> None:
        self._routes = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores and numbers of each token's experts. Those of another layer's choice are scores like
        others, with a gradient: they are not taken from what the router's own choice has left."""
        routes = self._again.pop(0) if self._routes is None else self._routes
        with torch.no_grad():
            _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        chosen = own
        if routes.experts is not None:
            replayed = routes.experts[:, self.layer].long()
            chosen = torch.where(replayed < 0, own, replayed)
        if self._routes is not None and self._router.training:
            self._count(own, chosen, routes)
            if not torch.is_grad_enabled():
                self._again.append(routes)
        return scores.gather(1, chosen), chosen

    @torch.no_grad()
    def _count(self, own: torch.Tensor, chosen: torch.Tensor, routes: Routes) -> None:
        """Counts the tokens of each expert, those that are replayed elsewhere than the router would send them, and
        those that are replayed."""
        if self._counts is None:
            self._counts = torch.zeros(self._num_experts + 2, dtype=torch.int64, device=own.device)
        is_sampled = routes.is_sampled.long()
        self._counts.scatter_add_(0, chosen.flatten(), is_sampled.repeat_interleave(chosen.shape[1]))
        if routes.experts is not None:
            is_replayed = is_sampled * (routes.experts[:, self.layer] >= 0).all(dim=1)
            differs = (own.sort(dim=1).values != chosen.sort(dim=1).values).any(dim=1)
            self._counts[-2] += (is_replayed * differs).sum()
            self._counts[-1] += is_replayed.sum()

    def take_counts(self) -> torch.Tensor | None:
        """Returns what has been counted since the last call; None if nothing was."""
        taken, self._counts = self._counts, None
        return taken

    @property
    def is_done(self) -> bool:
        """Whether every microbatch has been computed again that will be."""
        return not self._again


def install_routers(model: GPTModel, shape: ModelShape) -> None:
    """Makes the routers of a chunk choose by a LayerRouter each."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    for router in routers:
        layer = router.layer_number - 1  # Megatron counts from 1, over all stages, layers without experts included
        assert shape.has_experts(layer), f"layer {layer} has no experts"
        router.router_replay = LayerRouter(router, sum(shape.experts.layers[:layer]), shape.experts.count)
    model.layer_routers = [router.router_replay for router in routers]


def layer_routers(chunks: Sequence[DistributedDataParallel]) -> list[LayerRouter]:
    return [router for chunk in chunks for router in unwrap_model(chunk).layer_routers]


@contextmanager
def routed(model: GPTModel, routes: Routes) -> Iterator[None]:
    """Makes the chunk, which goes forward meanwhile, send the tokens of a microbatch by these routes."""
    for router in model.layer_routers:
        router.begin(routes)
    yield
    for router in model.layer_routers:
        router.end()


def route_metrics(chunks: Sequence[DistributedDataParallel], shape: ModelShape, prefix: str) -> dict[str, Metric]:
    """Returns the metrics of the routes of one update, of all ranks, which call it together."""
    if shape.experts is None:
        return {}
    routers = layer_routers(chunks)
    assert all(router.is_done for router in routers), "a microbatch was not computed again"
    device = next(chunks[0].parameters()).device
    counts = torch.zeros(sum(shape.experts.layers), shape.experts.count + 2, dtype=torch.int64, device=device)
    for router in routers:
        own = router.take_counts()
        if own is not None:
            counts[router.layer] += own
    dist.all_reduce(counts)
    return metrics_of(counts.cpu(), prefix)


def metrics_of(counts: torch.Tensor, prefix: str) -> dict[str, Metric]:
    """Returns the metrics of the counts of each layer, as LayerRouter has them, int64 [layers, experts + 2].

    max_vio        how much more than the mean the busiest expert of a layer has, mean over the layers: 0 if all have as
                   many tokens (arXiv 2408.15664)
    routes_differ  share of replayed tokens and layers where the trainer would have chosen another set of experts
    """
    loads, (differing, replayed) = counts[:, :-2].double(), counts[:, -2:].sum(dim=0).tolist()
    metrics = {}
    if loads.sum():
        metrics[f"{prefix}/max_vio"] = Metric(float((loads.amax(dim=1) / loads.mean(dim=1) - 1).mean()))
    if replayed:
        metrics[f"{prefix}/routes_differ"] = Metric(differing / replayed, replayed)
    return metrics
