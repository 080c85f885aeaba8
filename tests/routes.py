"""Random expert routes of samples, and a plain transformers model that replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megarl.core.completion import NO_ROUTE
from megarl.core.sample import Sample
from megarl.models.families import completed
from megarl.models.folder import read_config
from megarl.models.huggingface import experts
from tests.grpo_reference import GrpoReference


def random_routes(folder: Path, num_tokens: int, seed: int) -> np.ndarray:
    """Return random experts for every MoE layer, which the router would rarely choose.

    The last token and about a tenth of the others have NO_ROUTE.
    """
    mixture = experts(completed(read_config(folder)))
    source = np.random.default_rng(seed)
    scores = source.random((num_tokens, sum(mixture.layers), mixture.count))
    routes = scores.argsort(axis=-1)[..., : mixture.active].astype(np.int8)
    routes[source.random(num_tokens) < 0.1] = NO_ROUTE
    routes[-1] = NO_ROUTE
    return routes


def with_routes(folder: Path, groups: Sequence[Sequence[tuple[Sample, float]]]) -> list[list[tuple[Sample, float]]]:
    """Give the samples random routes. Samples of a group share the routes of their common prefixes."""
    routed = []
    for number, group in enumerate(groups):
        routes_by_prefix: dict[bytes, np.ndarray] = {}
        members = []
        for index, (sample, reward) in enumerate(group):
            routes = random_routes(folder, sample.num_tokens, seed=100 * number + index)
            for end in range(1, sample.num_tokens):
                prefix = sample.token_ids[:end].tobytes()
                routes[end - 1] = routes_by_prefix.setdefault(prefix, routes[end - 1])
            members.append((replace(sample, routes=routes), reward))
        routed.append(members)
    return routed


class Replayed:
    """A transformers model whose routers replay the `routes` of one sequence, with weights from their own scores."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.routes: np.ndarray | None = None
        self.own: list[torch.Tensor] = []
        """The experts that the routers themselves would have chosen in the last forward pass, by layer."""
        gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
        for number, gate in enumerate(gates):
            self._replace(gate, number)

    def _replace(self, gate: torch.nn.Module, number: int) -> None:
        forward, norm = gate.forward, getattr(gate, "norm_topk_prob", True)

        def routed(hidden: torch.Tensor):
            logits, weights, choices = forward(hidden)
            self.own.append(choices)
            if self.routes is None:
                return logits, weights, choices
            replayed = torch.tensor(self.routes[:, number]).long()
            chosen = torch.where(replayed < 0, choices, replayed)
            scores = logits.float().softmax(-1).gather(1, chosen)
            return logits, scores / scores.sum(-1, keepdim=True) if norm else scores, chosen

        gate.forward = routed

    def by(self, routes: np.ndarray | None) -> None:
        self.routes, self.own = routes, []


class ReplayedGrpo(GrpoReference):
    """GRPO of a model that replays its samples' routes."""

    def __init__(self, folder: Path, **settings: float):
        super().__init__(folder, **settings)
        self._replayed = Replayed(self.model)
        self.choices: list[tuple[Sample, list[torch.Tensor]]] = []
        """The samples of the last update with the experts that the routers would have chosen, by layer."""

    def update(self, *arguments, **keys) -> tuple[float, dict, float]:
        self.choices = []
        return super().update(*arguments, **keys)

    def logits(self, model: torch.nn.Module, sample: Sample) -> torch.Tensor:
        self._replayed.by(sample.routes)
        logits = super().logits(model, sample)
        if model is self.model:
            self.choices.append((sample, self._replayed.own))
        return logits

    def metrics(self) -> dict[str, float]:
        """Return the routing metrics of the last update, counted token by token."""
        num_layers, num_experts = len(self.choices[0][1]), self.model.config.num_experts
        loads = [[0] * num_experts for _ in range(num_layers)]
        replayed = differs = 0
        for sample, choices_by_layer in self.choices:
            for layer, choices in enumerate(choices_by_layer):
                for chosen, route in zip(choices.tolist(), sample.routes[:, layer].tolist(), strict=True):
                    has_route = NO_ROUTE not in route
                    replayed += has_route
                    differs += has_route and {*chosen} != {*route}
                    for expert in route if has_route else chosen:
                        loads[layer][expert] += 1
        violations = [max(load) * num_experts / sum(load) - 1 for load in loads]
        return {"max_vio": sum(violations) / num_layers, "routes_differ": differs / replayed}
