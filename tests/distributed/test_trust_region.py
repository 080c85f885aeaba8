"""TRPO's update in any layout against plain float64 torch, whose Fisher-vector products are second derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.trust_region import conjugate_gradients
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.marks import exhaustive_but
from tests.parity import EPS, LR, TEMPERATURE, RankResult, canonical, config_of, own_batch, random_groups
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama

GROUPS = random_groups(0, SHARDED_VOCAB)
ITERATIONS, DAMPING = 5, 0.1


@dataclass(frozen=True)
class Plain:
    """The reference's step by parameter, and its metrics."""

    moved: dict[str, torch.Tensor]
    rate: float
    divergence: float
    trials: int


class TrpoReference:
    """TRPO (arXiv 1502.05477, appendix C) on a flat vector of all parameters.

    The conjugate gradient method solves for the step, with damped Hessian-vector products of the KL at the old policy
    (double backward). A backtracking line search follows.
    """

    def __init__(self, folder: Path):
        self.plain = GrpoReference(folder, LR, EPS, TEMPERATURE)
        self.model = self.plain.model.double()
        self.parameters = list(self.model.parameters())
        with torch.no_grad():
            self.old = self.log_probs()

    def log_probs(self) -> list[torch.Tensor]:
        return [self.plain.log_probs(self.model, sample) for group in GROUPS for sample, _ in group]

    def trained(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        samples = [sample for group in GROUPS for sample, _ in group]
        return [own[torch.tensor(s.response_mask)] for own, s in zip(values, samples, strict=True)]

    def loss(self) -> torch.Tensor:
        """Return the mean over samples of the mean over trained tokens of −ρ·A."""
        advantages = []
        for group in GROUPS:
            rewards = torch.tensor([reward for _, reward in group], dtype=torch.float64)
            advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        ratios = zip(self.trained(self.log_probs()), self.trained(self.old), advantages, strict=True)
        terms = [-(new - old).exp() * advantage for new, old, advantage in ratios]
        return torch.stack([term.mean() if len(term) else term.sum() for term in terms]).mean()

    def log_ratio(self) -> torch.Tensor:
        return torch.cat(self.trained(self.log_probs())) - torch.cat(self.trained(self.old))

    def product(self, vector: torch.Tensor) -> torch.Tensor:
        divergence = self.log_ratio().square().mean() / 2
        slope = flat(torch.autograd.grad(divergence, self.parameters, create_graph=True))
        return flat(torch.autograd.grad(slope @ vector, self.parameters)) + DAMPING * vector

    def step(self, limit: float) -> Plain:
        loss = self.loss()
        gradient = flat(torch.autograd.grad(loss, self.parameters))
        x, residual = torch.zeros_like(gradient), gradient.clone()
        direction = residual
        for _ in range(ITERATIONS):
            image = self.product(direction)
            length = (residual @ residual) / (direction @ image)
            x, following = x + length * direction, residual - length * image
            direction = following + (following @ following) / (residual @ residual) * direction
            residual = following
        rate = math.sqrt(2 * limit / float(x @ self.product(x)))
        start = flat(self.parameters).detach()
        trials = 0
        while True:
            trials += 1
            torch.nn.utils.vector_to_parameters(start - rate * x, self.parameters)
            with torch.no_grad():
                ratio, better = self.log_ratio(), self.loss() < loss
                divergence = float((ratio.exp() - 1 - ratio).mean())
            if better and divergence <= limit:
                break
            rate /= 2
        names = [name for name, _ in self.model.named_parameters()]
        moved = [part.clone() for part in unflat(-rate * x, self.parameters)]
        return Plain(dict(zip(names, moved, strict=True)), rate, divergence, trials)


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = vector.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def trust_region_config(folder: Path, limit: float, layout: str, *overrides: str) -> Config:
    limits = f"algorithm.trust_region={{kl_limit: {limit}, iterations: {ITERATIONS}, damping: {DAMPING}}}"
    return config_of(folder, "algorithm.objective.name=unclipped", limits, f"actor.layout={layout}", *overrides)


def train_one(store, rank: int, config: Config, folder: Path) -> RankResult:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = own_batch(config, worker, GROUPS, None)
    before = {name: p.clone() for name, p in worker.parameters().items()}
    worker.keep_log_probs("old", batch)
    metrics = worker.update(batch)
    worker.end_step()
    moved = {name: p - before[name] for name, p in worker.parameters().items()}
    return RankResult(worker.holder, {}, moved, metrics)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sizes = dict(num_heads=3, num_kv_heads=3, hidden_size=48, num_layers=2, intermediate_size=48)
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **sizes, vocab_size=SHARDED_VOCAB)


CASES = {
    "1 process": (0.01, 2, "{}"),
    "DP2": (0.01, 2, "{dp: 2}"),
    "CP2 PP2": (0.01, 2, "{cp: 2, pp: 2}"),
    "TP3 SP": (0.01, 2, "{tp: 3, sequence_parallel: true}"),
    "DP2, the whole step": (5.0, 1, "{dp: 2}"),
}
"""KL limit, trials and layout. The quadratic model's full step exceeds the small limit, but half of it does not."""


@pytest.mark.parametrize("case", exhaustive_but(CASES, "CP2 PP2"))
def test_step_equals_plain_torch(folder, case):
    limit, trials, layout = CASES[case]
    plain = TrpoReference(folder).step(limit)
    assert plain.trials == trials
    config = trust_region_config(folder, limit, layout)
    ranks = run_ranks(config.actor.layout.world_size, train_one, config, folder)
    found = next(rank.metrics for rank in ranks if rank.metrics)
    assert found["policy/lr"].value == pytest.approx(plain.rate, rel=0.01)
    assert found["trust_region/kl"].value == pytest.approx(plain.divergence, rel=0.02)
    assert found["trust_region/trials"].value == trials
    moved = canonical(folder, ranks, "weights")
    names = [name for name in plain.moved if name in moved]
    actual, expected = (flat([own[name].double() for name in names]) for own in (moved, plain.moved))
    assert float((actual - expected).norm() / expected.norm()) <= 0.01


def test_failed_line_search_changes_nothing(folder):
    config = trust_region_config(folder, 0.01, "{dp: 2}", "algorithm.trust_region.trials=1")
    for rank in run_ranks(2, train_one, config, folder):
        assert rank.metrics["policy/lr"].value == 0 and rank.metrics["trust_region/trials"].value == 1
        assert not any(moved.any() for moved in rank.weights.values())


def test_conjugate_gradients_solve_the_system():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix, right = root @ root.T + torch.eye(6), torch.randn(6, generator=generator, dtype=torch.float64)

    def product(vector: list[torch.Tensor]) -> list[torch.Tensor]:
        return list((matrix @ torch.cat(vector)).split([2, 4]))

    found, curvature = conjugate_gradients(product, list(right.split([2, 4])), lambda a, b: float(flat(a) @ flat(b)), 6)
    expected = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(flat(found), expected)
    assert curvature == pytest.approx(float(expected @ right))
