"""Every objective, aggregation, correction and KL form through Megatron: loss and gradients in any layout are those of
plain Hugging Face and torch, one sample at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.schema import Config
from megarl.megatron import parallel, step
from megarl.megatron.actor_worker import ActorWorker
from megarl.megatron.sums import read
from megarl.metrics import Metric, merge
from tests import objective_reference as plain
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    TOLERANCE,
    Group,
    RankResult,
    assert_equal,
    canonical,
    config_of,
    random_groups,
    reduced_gradients,
    shares,
)
from tests.tiny_model import write_tiny_model

KL = 0.3
CONTEXT = 64
LogProbs = dict[str, torch.Tensor]
"""Sample id -> of its response tokens."""


@dataclasses.dataclass(frozen=True)
class Case:
    """objective, correction, kl: keys of these sections, beside what they amount to by the reference."""

    objective: str
    loss: plain.Loss
    aggregation: str
    correction: str = ""
    factor: plain.Factor = plain.no_factor
    kl: str = ""
    divergence: plain.Loss | None = None
    old: str = "old"
    imitation: float = 0.0
    share: float = 0.0
    bounds: tuple[float, float] | None = None

    @property
    def overrides(self) -> list[str]:
        coefficient = KL if self.kl else 0.0
        return [
            f"algorithm.objective={{{self.objective}, aggregation: {self.aggregation}}}",
            f"algorithm.correction={{{self.correction}}}",
            f"algorithm.kl={{coefficient: {coefficient}{', ' if self.kl else ''}{self.kl}}}",
        ]


MEANS, SUMS, TOKENS = "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_mean"
OVER_MAX, OF_PROMPTS = "sequence_mean_over_max_tokens", "prompt_mean_of_token_means"
CASES = {
    "dual clip": Case("name: clip, dual_clip: 1.3", plain.clip(1.3), TOKENS),
    "unclipped": Case(
        "name: unclipped",
        plain.unclipped,
        OF_PROMPTS,
        "weight: token, weight_limit: 1.2",
        plain.truncated(plain.of_token, 1.2),
        "estimator: k1",
        plain.divergence("k1", "token", False),
    ),
    "TRPO's penalty": Case(
        "name: kl_penalty, penalty: 0.7",
        plain.kl_penalty,
        MEANS,
        "mask: token, mask_low: 0.8, mask_high: 1.3",
        plain.masked(plain.of_token, 0.8, 1.3),
        "estimator: k2, level: sequence",
        plain.divergence("k2", "sequence", False),
    ),
    "GSPO": Case(
        "name: gspo, clip_low: 0.05, clip_high: 0.05",
        plain.gspo,
        MEANS,
        "weight: sequence, weight_limit: 1.5",
        plain.truncated(plain.of_sequence, 1.5),
        "estimator: k3, level: sequence",
        plain.divergence("k3", "sequence", False),
    ),
    "GMPO": Case(
        "name: gmpo, clip_low: 0.2, clip_high: 0.2",
        plain.gmpo,
        TOKENS,
        "mask: geometric, mask_low: 0.97, mask_high: 1.2",
        plain.masked(plain.geometric, 0.97, 1.2),
        "estimator: abs",
        plain.divergence("abs", "token", False),
    ),
    "CISPO": Case(
        "name: cispo, clip_high: 0.2",
        plain.cispo,
        OVER_MAX,
        "weight: geometric, weight_limit: null",
        plain.truncated(plain.geometric),
        "estimator: k3, straight_through: true",
        plain.divergence("k3", "token", True),
    ),
    "SAPO": Case(
        "name: sapo",
        plain.sapo,
        SUMS,
        "weight: token, weight_limit: null, mask: token, mask_low: 0.7, mask_high: 1.5",
        plain.icepop,
        "estimator: k3",
        plain.divergence("k3", "token", False),
    ),
    "DPPO, TV": Case(
        "name: dppo_tv, divergence_limit: 0.001",
        plain.dppo(plain.tv, 0.001),
        TOKENS,
        "mask: sequence, mask_low: 0.5, mask_high: 2",
        plain.masked(plain.of_sequence, 0.5, 2),
        "estimator: k1, level: sequence, straight_through: true",
        plain.divergence("k1", "sequence", True),
    ),
    "DPPO, KL": Case(
        "name: dppo_kl, divergence_limit: 0.0003",
        plain.dppo(plain.binary_kl, 0.0003),
        OF_PROMPTS,
        kl="estimator: abs, level: sequence",
        divergence=plain.divergence("abs", "sequence", False),
    ),
    "Clip-Cov": Case(
        "name: clip_cov, covariance_low: 0.1, covariance_high: 2, covariance_share: 0.1",
        plain.clip_cov,
        TOKENS,
        share=0.1,
        bounds=(0.1, 2.0),
    ),
    "KL-Cov": Case(
        "name: kl_cov, penalty: 0.5, covariance_share: 0.2",
        plain.kl_cov,
        MEANS,
        kl="estimator: k2",
        divergence=plain.divergence("k2", "token", False),
        share=0.2,
    ),
    "VAPO's positive examples": Case(
        "name: clip, imitation_coefficient: 0.4, imitation_above: 0.7", plain.clip(torch.inf), MEANS, imitation=0.4
    ),
    "DRO": Case("name: dro, tau: 0.3", plain.dro("sequence"), MEANS),
    "DRO of tokens": Case("name: dro, tau: 0.3, level: token", plain.dro("token"), SUMS),
    "the rollout's ratio": Case("name: clip", plain.clip(torch.inf), MEANS, "old: rollout", old="behaviour"),
    "decoupled PPO, one update": Case(
        "name: clip",
        plain.clip(torch.inf),
        MEANS,
        "weight: token, weight_limit: null",
        plain.truncated(plain.of_token),
        old="now",
    ),
}
LAYOUTS = {
    "1 process, 1 microbatch": ("{}", 1024, {}),
    "1 process, padded": ("{}", 128, dict(shares_prompts=False, document_multiple=CONTEXT)),
    "DP2": ("{dp: 2}", 64, {}),
    "TP2, SP, 1 microbatch": ("{tp: 2, sequence_parallel: true}", 1024, {}),
    "PP2": ("{pp: 2}", 64, {}),
    "CP2": ("{cp: 2}", 64, {}),
    "CP2, padded": ("{cp: 2}", 128, dict(shares_prompts=False, document_multiple=CONTEXT)),
    "EP2": ("{dp: 2, ep: 2}", 128, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("experts"),
        "qwen3_moe",
        vocab_size=128,
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=2,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
    )


@pytest.fixture(scope="module")
def reference(folder) -> GrpoReference:
    """In float64: sums over whole samples amplify rounding, and only one side's is to be seen."""
    plain_model = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
    plain_model.model.double().set_experts_implementation("eager")  # others have no float64
    return plain_model


@pytest.fixture(scope="module")
def others(reference) -> dict[str, LogProbs]:
    """Log-probs of other policies, not far from the model's."""
    generator = torch.Generator().manual_seed(3)
    samples = [sample for group in random_groups(0) for sample, _ in group]
    with torch.no_grad():
        now = {sample.id: reference.log_probs(reference.model, sample).float() for sample in samples}
    return {
        name: {i: x + spread * torch.randn(x.shape, generator=generator) for i, x in now.items()}
        for name, spread in (("old", 0.2), ("behaviour", 0.3), ("reference", 0.2))
    }


@pytest.fixture(scope="module")
def groups(others) -> list[Group]:
    return [
        [
            (dataclasses.replace(s, response_logprobs=tuple(others["behaviour"][s.id].tolist())), reward)
            for s, reward in group
        ]
        for group in random_groups(0)
    ]


@pytest.fixture(scope="module")
def expected(reference, groups, others) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    """By case, the loss and the gradients."""
    samples = [sample for group in groups for sample, _ in group]
    now = {sample.id: reference.log_probs(reference.model, sample) for sample in samples}
    return {name: plain_gradients(case, reference.model, now, groups, others) for name, case in CASES.items()}


def plain_gradients(
    case: Case, model: torch.nn.Module, log_probs: LogProbs, groups: list[Group], others: dict[str, LogProbs]
) -> tuple[float, dict[str, torch.Tensor]]:
    estimated = []
    for group in groups:
        rewards = torch.tensor([reward for _, reward in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        estimated += [(sample, advantage) for (sample, _), advantage in zip(group, advantages.tolist(), strict=True)]
    masks = [torch.tensor(sample.response_mask) for sample, _ in estimated]
    of_samples = [(s.id, a, mask, others["old"][s.id]) for (s, a), mask in zip(estimated, masks, strict=True)]
    selected = plain.select(of_samples, case.share, case.bounds)
    responses = []
    for (sample, advantage), mask, own in zip(estimated, masks, selected, strict=True):
        now = log_probs[sample.id][mask]
        of = {name: of_name[sample.id][mask] for name, of_name in others.items()} | {"now": now.detach()}
        policies = (now, of[case.old], of["behaviour"], of["reference"])
        responses.append(plain.Response(sample.prompt.id, advantage, *policies, own, 16))
    factors = [case.factor((r.old - r.behaviour).exp()) for r in responses]
    losses = [f * case.loss(r) if len(f) else f for f, r in zip(factors, responses, strict=True)]
    loss = plain.aggregate(case.aggregation, losses, responses)
    if case.divergence is not None:
        loss = loss + KL * plain.aggregate(case.aggregation, [case.divergence(r) for r in responses], responses)
    if case.imitation:
        positive = [reward > 0.7 for group in groups for _, reward in group]
        log_probs_of = [r.now for r, good in zip(responses, positive, strict=True) if good]
        loss = loss - case.imitation * torch.cat(log_probs_of).mean()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    return loss.item(), dict(revert_weight_conversion(model, dict(zip(names, gradients, strict=True))))


def of_ranks(
    store, rank: int, configs: dict[str, Config], folder: Path, groups: list[Group], others: dict, packing: dict
) -> dict[str, RankResult]:
    """By case, what this rank holds after the backward passes of one update."""
    worker = ActorWorker(next(iter(configs.values())), folder, rank, store, threads=1)
    worker.packing = dataclasses.replace(worker.packing, **packing)
    results = {}
    for name, config in configs.items():
        worker._config, worker.kl_coefficient = config, config.algorithm.kl.coefficient
        given = {"old": others["old"]} if CASES[name].old != "now" else {}
        given |= {"reference": others["reference"]} if CASES[name].kl else {}
        share = shares(config, worker.packing, groups, scores=given)[worker.data_parallel_rank]
        samples = [item.training_sample(item.sample, item.scores) for item in share.samples]
        batches = worker._training_batches(samples, share.microbatches)
        parts = step.accumulate_gradients(worker.chunks, worker.objective, batches)
        metrics: dict[str, Metric] = merge(map(read, parts)) if parallel.reports_metrics() else {}
        results[name] = RankResult(worker.holder, reduced_gradients(worker), {}, metrics)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_single_samples(folder, groups, others, expected, layout):
    settings, budget, packing = LAYOUTS[layout]
    common = [
        f"actor.layout={settings}",
        f"actor.tokens_per_microbatch={budget}",
        "actor.overlap_communication=false",
        "rollout.max_new_tokens=16",
    ]
    configs = {name: config_of(folder, *common, *case.overrides) for name, case in CASES.items()}
    world_size = configs["DRO"].actor.layout.world_size
    ranks = run_ranks(world_size, of_ranks, configs, folder, groups, others, packing)
    for name, (loss, gradients) in expected.items():
        own = [rank[name] for rank in ranks]
        reported = [rank.metrics["policy/loss"].value for rank in own if rank.metrics]
        assert sum(reported) == pytest.approx(loss, rel=TOLERANCE, abs=1e-6), name
        assert_equal(canonical(folder, own, "gradients"), gradients, f"{name}: gradient")
