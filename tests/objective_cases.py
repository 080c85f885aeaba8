"""Test cases of the policy loss: their config keys and a plain Hugging Face and torch reference, sample by sample."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributions import Categorical
from transformers.core_model_loading import revert_weight_conversion

from megarl.config.schema import Config
from megarl.core.metrics import Metric, merge, values
from megarl.core.sample import Sample
from megarl.megatron import parallel, step
from megarl.megatron.metric_sums import read
from megarl.megatron.workers.actor import ActorWorker
from tests import objective_reference as plain
from tests.closeness import LOSS_FLOOR, TOLERANCE, Expected, assert_close, close_to, float64
from tests.estimator_reference import Estimate, sample_estimate, standardized
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Group,
    RankResult,
    canonical,
    config_of,
    in_environment,
    local_batch,
    random_groups,
    rank_batches,
    reduced_gradients,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_model

KL = 0.3
CONTEXT = 64
Tokens = dict[str, torch.Tensor]
"""Sample id -> one number per response token."""
Results = tuple[float, dict[str, float], dict[str, torch.Tensor]]
"""The loss, the metrics by name, and each tensor's gradient by name."""

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
"""Name -> actor.layout, tokens per microbatch, and overrides of the layout's Packing."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A policy loss: the keys of its config sections, each with its reference implementation.

    Attributes:
        objective, correction, kl, estimator: keys of these sections.
        loss, factor, divergence, estimate: their references.
        old: the World's log-probs that serve as the old policy; "now" is the policy itself.
        given: names of the World's per-token scores that the case needs.
        reported: a metric of the divergence and its reference.
        threshold, left_out: logprob_check's threshold, and what it masks ("token" or "sample").
    """

    objective: str
    loss: plain.Loss
    aggregation: str
    correction: str = ""
    factor: plain.Factor = plain.no_factor
    kl: str = ""
    divergence: plain.Loss | None = None
    old: str = "old"
    imitation: float = 0.0
    entropy: float = 0.0
    share: float = 0.0
    bounds: tuple[float, float] | None = None
    estimator: str = "estimator: grpo"
    estimate: Estimate = dataclasses.field(default_factory=lambda: sample_estimate(standardized))
    given: tuple[str, ...] = ()
    reported: tuple[str, plain.Loss] | None = None
    threshold: float = 1e-3
    left_out: str | None = None

    @property
    def name(self) -> str:
        """The name of the objective, without its options."""
        return self.objective.removeprefix("name: ").partition(",")[0]

    @property
    def overrides(self) -> list[str]:
        coefficient = KL if self.kl else 0.0
        return [
            f"algorithm.advantage={{{self.estimator}}}",
            f"algorithm.objective={{{self.objective}, aggregation: {self.aggregation}}}",
            f"algorithm.correction={{{self.correction}}}",
            f"algorithm.kl={{coefficient: {coefficient}{', ' if self.kl else ''}{self.kl}}}",
            *(
                [f"logprob_check={{threshold: {self.threshold}, action: mask, mask: {self.left_out}}}"]
                if self.left_out
                else ()
            ),
        ]


MEANS, SUMS, TOKENS = "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_mean"
OVER_MAX, PROMPTS = "sequence_mean_over_max_tokens", "prompt_mean_of_token_means"
CASES = {
    "dual clip": Case("name: clip, dual_clip: 1.3", plain.clip(1.3), TOKENS),
    "unclipped": Case(
        "name: unclipped",
        plain.unclipped,
        PROMPTS,
        "weight: token, weight_limit: 1.2",
        plain.truncated(plain.token_level, 1.2),
        "estimator: k1",
        plain.divergence("k1", "token", False),
    ),
    "TRPO's penalty": Case(
        "name: kl_penalty, penalty: 0.7",
        plain.kl_penalty,
        MEANS,
        "mask: token, mask_low: 0.8, mask_high: 1.3",
        plain.masked(plain.token_level, 0.8, 1.3),
        "estimator: k2, level: sequence",
        plain.divergence("k2", "sequence", False),
    ),
    "GSPO": Case(
        "name: gspo, clip_low: 0.05, clip_high: 0.05",
        plain.gspo,
        MEANS,
        "weight: sequence, weight_limit: 1.5",
        plain.truncated(plain.sequence_level, 1.5),
        "estimator: k3, level: sequence",
        plain.divergence("k3", "sequence", False),
        reported=("kl/loss_sequence_k3", plain.divergence("k3", "sequence", False)),
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
        "estimator: k3, limit: 0.02",
        plain.divergence("k3", "token", False, 0.02),
    ),
    "DPPO, TV": Case(
        "name: dppo_tv, divergence_limit: 0.001, divergence_limit_negative: 0.0002",
        plain.dppo(plain.tv, 0.001, 0.0002),
        TOKENS,
        "mask: sequence, mask_low: 0.5, mask_high: 2",
        plain.masked(plain.sequence_level, 0.5, 2),
        "estimator: k1, level: sequence, straight_through: true",
        plain.divergence("k1", "sequence", True),
    ),
    "DPPO, KL": Case(
        "name: dppo_kl, divergence_limit: 0.0003",
        plain.dppo(plain.binary_kl, 0.0003),
        PROMPTS,
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
    "entropy bonus": Case("name: clip, entropy_coefficient: 0.4", plain.clip(torch.inf), PROMPTS, entropy=0.4),
    "DRO": Case("name: dro, tau: 0.3", plain.dro("sequence"), MEANS),
    "DRO of tokens": Case("name: dro, tau: 0.3, level: token", plain.dro("token"), SUMS),
    "the rollout's ratio": Case("name: clip", plain.clip(torch.inf), MEANS, "old: rollout", old="rollout_logprobs"),
    "decoupled PPO, one update": Case(
        "name: clip",
        plain.clip(torch.inf),
        MEANS,
        "weight: token, weight_limit: null",
        plain.truncated(plain.token_level),
        old="now",
    ),
    "tokens on which trainer and engine agree": Case(
        "name: clip",
        plain.clip(torch.inf),
        MEANS,
        factor=plain.masked(plain.token_level, math.exp(-0.3), math.exp(0.3)),
        threshold=0.3,
        left_out="token",
    ),
    "samples on which trainer and engine agree, one update": Case(
        "name: clip",
        plain.clip(torch.inf),
        TOKENS,
        factor=lambda ratio: torch.full_like(ratio, float((ratio.log().abs() <= 0.8).all())),
        old="now",
        threshold=0.8,
        left_out="sample",
    ),
}
"""At least one case per policy objective. tests/distributed/test_offline_data.py contains the offline objectives."""


@dataclasses.dataclass(frozen=True)
class World:
    """A model with samples and rewards.

    Attributes:
        scored: the model's distributions of the response tokens, by sample id.
        others: per-token scores by name: log-probs of other policies close to the model's, critic values, and token
            rewards.
    """

    folder: Path
    model: torch.nn.Module
    groups: list[Group]
    scored: dict[str, Categorical]
    others: dict[str, Tokens]

    @classmethod
    def make(cls, folder: Path) -> World:
        """Build the world with a float64 model."""
        write_experts(folder)
        groups = random_groups(0, SHARDED_VOCAB)
        groups[1] = [(sample, 0.5) for sample, _ in groups[1]]  # an uninformative group
        samples = [sample for group in groups for sample, _ in group]
        generator = torch.Generator().manual_seed(3)
        with float64():
            model, scored = scored_samples(folder, samples)
        log_probs = {s.id: scored[s.id].log_prob(torch.tensor(s.response_ids).long()).detach().float() for s in samples}
        others = {
            name: {i: x + shift + spread * torch.randn(x.shape, generator=generator) for i, x in log_probs.items()}
            for name, spread, shift in (("old", 0.2, 0.0), ("rollout_logprobs", 0.3, 0.0), ("reference", 0.2, -0.1))
        }
        for name in ("values", "implicit_reward"):
            others[name] = {i: torch.randn(x.shape, generator=generator) for i, x in log_probs.items()}
        source = random.Random(4)
        sampled = [
            [
                (dataclasses.replace(in_environment(s, source), response_logprobs=others["rollout_logprobs"][s.id]), r)
                for s, r in group
            ]
            for group in groups
        ]
        return cls(folder, model, sampled, scored, others)

    def in_float32(self) -> World:
        """Return the same world with a float32 model."""
        model, scored = scored_samples(self.folder, [sample for group in self.groups for sample, _ in group])
        return dataclasses.replace(self, model=model, scored=scored)

    def lists(self, name: str) -> dict[str, list[float]]:
        return {i: values.tolist() for i, values in self.others[name].items()}

    def results(self, case: Case) -> Results:
        """Return the case's loss, metrics and gradients."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        loss = self.loss(case)
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        return (
            loss.item(),
            self.metrics(case),
            dict(revert_weight_conversion(self.model, dict(zip(names, gradients, strict=True)))),
        )

    def loss(self, case: Case) -> torch.Tensor:
        responses = self.responses(case)
        factors = [case.factor((r.old - r.rollout_logprobs).exp()) for r in responses]
        losses = [f * case.loss(r) if len(f) else f for f, r in zip(factors, responses, strict=True)]
        loss = plain.aggregate(case.aggregation, losses, responses)
        if case.divergence is not None:
            loss = loss + KL * plain.aggregate(case.aggregation, [case.divergence(r) for r in responses], responses)
        if case.entropy:
            loss = loss - case.entropy * plain.aggregate(case.aggregation, [r.entropy for r in responses], responses)
        if case.imitation:
            positive = [reward > 0.7 for group in self.groups for _, reward in group]
            log_probs = [r.now for r, good in zip(responses, positive, strict=True) if good]
            loss = loss - case.imitation * torch.cat(log_probs).mean()
        return loss

    def metrics(self, case: Case) -> dict[str, float]:
        """Return the metrics that an update reports about its trained tokens."""
        responses = [r for r in self.responses(case) if len(r.now)]
        factor = torch.cat([case.factor((r.old - r.rollout_logprobs).exp()) for r in responses])
        samples = [sample for group in self.groups for sample, _ in group]
        sampling = [self.others["old"][sample.id][torch.tensor(sample.response_mask)] for sample in samples]
        start = torch.cat([r.now for r in responses] if case.old == "now" else sampling)
        difference = start - torch.cat([r.rollout_logprobs for r in responses])
        mismatch, weight = difference.abs(), difference.exp()
        expected_metrics = {
            "policy/entropy": torch.cat([r.entropy for r in responses]).mean(),
            "mismatch/logprob_abs_mean": mismatch.mean(),
            "mismatch/logprob_abs_max": mismatch.max(),
            "mismatch/outlier_frac": (mismatch > case.threshold).double().mean(),
            "mismatch/kl": (weight - 1 - difference).mean(),
            "mismatch/weight_mean": weight.mean(),
            "mismatch/weight_square_mean": weight.square().mean(),
        }
        log_ratio = torch.cat([r.now - r.old for r in responses])
        expected_metrics["policy/kl_old"] = (log_ratio.exp() - 1 - log_ratio).mean()
        if "weight" in case.correction and "mask" not in case.correction:
            expected_metrics["correction/weight_mean"], expected_metrics["correction/weight_max"] = (
                factor.mean(),
                factor.max(),
            )
            expected_metrics["correction/weight_square_mean"] = factor.square().mean()
        if "mask" in case.correction:
            expected_metrics["correction/masked_frac"] = (factor == 0).double().mean()
        if case.left_out is not None:
            expected_metrics["mismatch/masked_frac"] = (factor == 0).double().mean()
        if case.reported is not None:
            name, divergence = case.reported
            divergences = [divergence(r) for r in responses]
            once = "_sequence_" in name  # these divergences have the same value on all tokens of a sample
            expected_metrics[name] = (
                torch.stack([d.mean() for d in divergences]).mean() if once else torch.cat(divergences).mean()
            )
        return {name: value.item() for name, value in expected_metrics.items()}

    def responses(self, case: Case) -> list[plain.Response]:
        old, reference = self.others["old"], self.others["reference"]
        advantages = case.estimate(self.groups, {i: (old[i] - reference[i]).double().tolist() for i in old})
        samples = [sample for group in self.groups for sample, _ in group]
        masks = [torch.tensor(sample.response_mask) for sample in samples]
        advantage = [torch.tensor(advantages[sample.id], dtype=torch.float64) for sample in samples]
        selectable = [(s.id, a, mask, old[s.id]) for s, a, mask in zip(samples, advantage, masks, strict=True)]
        selected = plain.select(selectable, case.share, case.bounds)
        responses = []
        for sample, token_advantage, mask, chosen in zip(samples, advantage, masks, selected, strict=True):
            scored = self.scored[sample.id]
            now, entropy = scored.log_prob(torch.tensor(sample.response_ids).long())[mask], scored.entropy()[mask]
            scores = {name: self.others[name][sample.id][mask] for name in ("old", "rollout_logprobs", "reference")}
            policies = ((scores | {"now": now.detach()})[case.old], scores["rollout_logprobs"], scores["reference"])
            token_advantage = token_advantage[mask]
            unequal = differ(token_advantage) or differ(case.factor((policies[0] - policies[1]).exp()))
            response = plain.Response(sample.prompt.id, token_advantage, now, entropy, *policies, chosen, unequal, 16)
            responses.append(response)
        return responses


def scored_samples(folder: Path, samples: Sequence[Sample]) -> tuple[torch.nn.Module, dict[str, Categorical]]:
    """Return a model in the default dtype and its distributions of the response tokens by sample id."""
    reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
    return reference.model, {s.id: Categorical(logits=reference.logits(reference.model, s)) for s in samples}


def differ(values: torch.Tensor) -> bool:
    return bool((values != values[:1]).any())


def write_experts(folder: Path) -> None:
    write_tiny_model(
        folder,
        "qwen3_moe",
        vocab_size=SHARDED_VOCAB,
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


def check(
    world: World,
    cases: Mapping[str, Case],
    expected: Mapping[str, Expected[Results]],
    layout: str,
    greedy: Mapping[str, float] | None = None,
    average: float = 0.0,
) -> None:
    """Check the loss, metrics and gradients of each case in a layout against references computed sample by sample.

    Args:
        greedy, average: baseline rewards of some estimators.
    """
    settings, budget, packing = LAYOUTS[layout]
    common = [
        f"actor.layout={settings}",
        f"actor.tokens_per_microbatch={budget}",
        "actor.overlap_communication=false",
        "rollout.max_new_tokens=16",
    ]
    configs = {name: config_of(world.folder, *common, *case.overrides) for name, case in cases.items()}
    world_size = next(iter(configs.values())).actor.layout.world_size
    ranks = run_ranks(world_size, run_cases, cases, configs, world, packing, greedy or {}, average)
    for name, ((loss, exact_metrics, gradients), (plain_loss, plain_metrics, plain_gradients)) in expected.items():
        results = [rank[name] for rank in ranks]
        metrics = values(merge([rank.metrics for rank in results if rank.metrics]))
        # Whitened advantages cancel in a sum over tokens, which leaves the rounding errors of all tokens.
        tokens = sum(len(r.now) for r in world.responses(cases[name])) if cases[name].aggregation == "token_sum" else 1
        assert metrics["policy/loss"] == close_to(loss, plain_loss, TOLERANCE * tokens), name
        for metric, exact in exact_metrics.items():
            assert metrics[metric] == close_to(exact, plain_metrics[metric], LOSS_FLOOR), (name, metric)
        assert_close(canonical(world.folder, results, "gradients"), gradients, plain_gradients, f"{name}: gradient")


def run_cases(
    store,
    rank: int,
    cases: Mapping[str, Case],
    configs: Mapping[str, Config],
    world: World,
    packing: dict,
    greedy: Mapping[str, float],
    average: float,
) -> dict[str, RankResult]:
    """Run the backward passes of one update for each case. Return this rank's results by case."""
    worker = ActorWorker(next(iter(configs.values())), world.folder, rank, store, threads=1)
    worker.packing = dataclasses.replace(worker.packing, **packing)
    results = {}
    for name, config in configs.items():
        worker._config, worker.kl_coefficient = config, config.algorithm.kl.coefficient
        names = [*cases[name].given, *(["old"] if cases[name].old != "now" else [])]
        given = {name: world.others[name] for name in (*names, *(["reference"] if cases[name].kl else []))}
        if config.kl_in_reward:
            given["kl_reward"] = rewarded_with_kl(worker, world)
        all_batches = rank_batches(config, worker.packing, world.groups, "actor", given, greedy, average)
        batch = local_batch(all_batches[worker.data_parallel_rank])
        batches = worker._training_batches(batch)
        parts = step.accumulate_gradients(worker.chunks, worker.loss, batches)
        metrics: dict[str, Metric] = merge(map(read, parts)) if parallel.reports_metrics() else {}
        results[name] = RankResult(worker.holder, reduced_gradients(worker.chunks), {}, metrics)
    return results


def rewarded_with_kl(worker: ActorWorker, world: World) -> Tokens:
    """Return the KL rewards of all ranks' tokens, computed by the workers from log-probs."""
    worker._kept = {name: world.others[name] for name in ("old", "reference")}
    batch = local_batch(rank_batches(worker._config, worker.packing, world.groups)[worker.data_parallel_rank])
    rank_scores: list[Tokens] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(rank_scores, worker.score_tokens(batch))
    worker._kept = {}
    return {name: values for scores in rank_scores for name, values in scores.items()}


def expected(world: World, cases: Mapping[str, Case]) -> dict[str, Expected[Results]]:
    """Return the reference loss, metrics and gradients by case, in float64 and float32."""
    rounded = world.in_float32()
    return {name: Expected(world.results(case), rounded.results(case)) for name, case in cases.items()}
