"""GAE where the tokens are, from rewards of whole samples and of single tokens, against the definition by hand."""

from pathlib import Path

import pytest
import torch

from megarl.batch import NO_BASELINE, Prompt, Sample, TrainingSample, VersionRun
from megarl.config.load import load
from megarl.config.schema import Algorithm
from megarl.data.collate import collate
from megarl.megatron.advantage import with_advantages
from tests.packing import packing

GAMMA, LAMBDA = 0.9, 0.8
MASKS = {"a": (True, False, True, True, False), "b": (True,), "c": (False, True, True), "d": (False, False)}
REWARDS = {"a": 2.0, "b": -1.0, "c": 0.0, "d": 5.0}
BASE = Path(__file__).parents[3] / "configs" / "base.yaml"


def algorithm(estimator: str, *overrides: str) -> Algorithm:
    given = [f"algorithm.{override}" for override in (f"advantage.estimator={estimator}", *overrides)]
    return load(BASE, ["model.path=m", "data.source=arithmetic", *given]).algorithm


def training_sample(name: str) -> TrainingSample:
    n = len(MASKS[name])
    run = (VersionRun(0, n),)
    sample = Sample(name, Prompt(name, "", (7, 8)), (9,) * n, (-1.0,) * n, MASKS[name], run, "stop", "")
    return TrainingSample(sample, REWARDS[name], NO_BASELINE, 1.0)


def randn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(len(mask), generator=generator) for name, mask in MASKS.items()}


def by_hand(name: str, values: torch.Tensor, of_tokens: list[torch.Tensor]) -> list[float]:
    """Σ_l (γλ)^l·δ_{t+l} over the trained tokens, from the last to the first; 0 for the others."""
    trained = [t for t, flag in enumerate(MASKS[name]) if flag]
    advantages, later, following = [0.0] * len(MASKS[name]), 0.0, 0.0
    for t in reversed(trained):
        reward = sum(float(own[t]) for own in of_tokens) + (REWARDS[name] if t == trained[-1] else 0.0)
        later = reward + GAMMA * following - float(values[t]) + GAMMA * LAMBDA * later
        following = float(values[t])
        advantages[t] = later
    return advantages


@pytest.mark.parametrize("names", [(), ("process_reward",), ("token_reward",), ("token_reward", "process_reward")])
def test_rewards_of_tokens_count_where_they_are(names):
    values, given = randn(0), {name: randn(i + 1) for i, name in enumerate(names)}
    samples = [training_sample(name) for name in MASKS]
    settings = algorithm("gae", f"advantage.gamma={GAMMA}", f"advantage.gae_lambda={LAMBDA}")
    [batch] = with_advantages(settings, [collate(samples, packing(), values=values, **given)])
    of_tokens = {name: [own[name] for own in given.values()] for name in MASKS}
    expected = torch.tensor([a for name in MASKS for a in by_hand(name, values[name], of_tokens[name])])
    torch.testing.assert_close(batch.advantage, expected, rtol=1e-5, atol=1e-6)
    trained = torch.tensor([flag for mask in MASKS.values() for flag in mask])
    expected_returns = torch.where(trained, expected + torch.cat(list(values.values())), 0.0)
    torch.testing.assert_close(batch.returns, expected_returns, rtol=1e-5, atol=1e-6)
