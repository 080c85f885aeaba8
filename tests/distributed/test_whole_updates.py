"""Statistics of a whole update, over all ranks and microbatches, cover exactly the tokens with a loss."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Baseline
from megarl.data.collate import collate
from megarl.megatron import parallel
from megarl.megatron.advantages import with_advantages
from megarl.megatron.token_selection import with_selection
from tests.closeness import assert_matches
from tests.forked import run_ranks
from tests.packing import packing
from tests.paths import BASE
from tests.samples import training_ref
from tests.timing import WAIT_S

OLD = {"a": [-1.0, -3.0], "b": [-2.0, -0.5], "c": [-0.25], "cut": [-9.0, -9.0, -0.001]}
"""The old log-probs of each sample's tokens. The truncated response has outlying log-probs and an outlying reward."""
REWARDS = {"a": 1.0, "b": 0.0, "c": 2.0, "cut": 50.0}
RANKS = (("a", "cut"), ("b", "c"))


def training_sample(name: str) -> SampleRef:
    n = len(OLD[name])
    run = (VersionRun(0, n),)
    reason = "length" if name == "cut" else "stop"
    sample = Sample(name, Prompt(name, "", (7,)), (9,) * n, (*OLD[name],), (True,) * n, run, reason, "")
    return training_ref(sample, REWARDS[name], Baseline(0.0), 0.0 if name == "cut" else 0.2)


def advantages_and_selection(store, rank: int, config: Config) -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    """Return, by sample, the advantages and whether each token is selected. Each sample is a microbatch."""
    parallel.initialize(config.actor.layout, store, rank, seed=0, timeout_s=WAIT_S)
    members = [[training_sample(name)] for name in RANKS[rank]]
    old = {name: torch.tensor(values) for name, values in OLD.items()}
    batches = with_advantages(config.algorithm, [collate(own, packing(), old=old) for own in members])
    chosen = with_selection(config.algorithm, batches, members)
    parallel.destroy()
    advantages = {name: batch.advantage.tolist() for name, batch in zip(RANKS[rank], chosen, strict=True)}
    return advantages, {name: batch.selected.tolist() for name, batch in zip(RANKS[rank], chosen, strict=True)}


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, list[float]], dict[str, list[bool]]]:
    settings = [
        "actor.layout.dp=2",
        "algorithm.advantage={estimator: policy_gradient, whiten: true, whiten_std: population, whiten_epsilon: 0.0}",
        "algorithm.objective={name: kl_cov, covariance_share: 0.4, skip_truncated: true}",
    ]
    config = load(BASE, ["model.path=m", "data.source=arithmetic", *settings])
    (one, own), (other, others) = run_ranks(2, advantages_and_selection, config)
    return one | other, own | others


def test_advantages_are_whitened_over_tokens_with_a_loss(results):
    advantages, _ = results

    def whitened() -> dict[str, torch.Tensor]:
        rewards = torch.tensor([REWARDS[name] for name in "abc" for _ in OLD[name]])
        return {"advantages": (rewards - rewards.mean()) / rewards.std(correction=0)}

    assert_matches({"advantages": torch.tensor([a for name in "abc" for a in advantages[name]])}, whitened, "whitened")


def test_tokens_are_selected_among_tokens_with_a_loss(results):
    """Select the two tokens of largest covariance among five."""
    _, selected = results
    tokens = {(name, t): (OLD[name][t], REWARDS[name]) for name in "abc" for t in range(len(OLD[name]))}
    mean_old, mean_reward = (fmean(values) for values in zip(*tokens.values(), strict=True))
    order = sorted(tokens, key=lambda token: (tokens[token][0] - mean_old) * (tokens[token][1] - mean_reward))
    assert {(name, t) for name, own in selected.items() for t, flag in enumerate(own) if flag} == set(order[-2:])
