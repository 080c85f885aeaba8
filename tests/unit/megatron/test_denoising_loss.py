"""The policy loss over denoising steps, compared with public trainers and with torch's distributions in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.transition import step_weights
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.latents import Conditioning
from megarl.core.metrics import merge, values
from megarl.core.step_batch import StepBatch
from megarl.megatron.advantages import mean_advantages, with_advantages
from megarl.megatron.configured_losses import configured_denoising_loss
from megarl.megatron.denoising_losses import VelocityTerms
from megarl.megatron.losses import Loss, PolicyTerms
from megarl.megatron.metric_sums import read
from tests.closeness import relative_error
from tests.paths import BASE, ROOT

RECORDED = json.loads((ROOT / "tests" / "published_numbers" / "flow_grpo.json").read_text())
LOSSES = RECORDED["losses"]
TOLERANCE = 1e-6
KINDS = {"flow": 0.7, "dance": 0.3, "cps": 0.7}
"""Kind of transition -> noise level."""


def tensor(numbers: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


def config_of(*overrides: str) -> Config:
    return load(BASE, ["model.path=m", "data.source=rows.jsonl", "rollout.engine=diffusers", *overrides])


def batch_of(
    x: torch.Tensor, x_next: torch.Tensor, sigma: torch.Tensor, sigma_next: torch.Tensor, **fields
) -> StepBatch:
    """Return denoising steps of one sample each, with equal weights."""
    n = len(x)
    given = dict(
        row_sample=torch.arange(n),
        rollout_logprobs=torch.zeros(n),
        mask=torch.ones(n, dtype=torch.bool),
        weight=torch.full((n,), 1 / n),
        reward=torch.zeros(n, dtype=torch.float64),
        baseline=torch.zeros(n, dtype=torch.float64),
        scale=torch.ones(n, dtype=torch.float64),
        token_baseline=torch.zeros(n),
        token_scale=torch.ones(n),
        captions=(Conditioning(torch.zeros(1, 1)),) * n,
    )
    steps = dict(latents=x, next_latents=x_next, sigma=sigma.double(), sigma_next=sigma_next.double())
    return StepBatch(**given | steps | fields)


def loss_of(config: Config, coefficient: float, has_moved: bool) -> Loss:
    return configured_denoising_loss(
        config.algorithm, config.rollout.denoising, config.tolerance, coefficient, has_moved=has_moved
    )


def terms_of(
    config: Config, batch: StepBatch, v: torch.Tensor, has_moved: bool, coefficient: float = 0.0
) -> PolicyTerms:
    terms = loss_of(config, coefficient, has_moved).terms(batch, v)
    assert isinstance(terms, PolicyTerms)
    return terms


def metrics_of(config: Config, batch: StepBatch, v: torch.Tensor, has_moved: bool) -> dict[str, float]:
    loss = loss_of(config, 0.5, has_moved)
    return values(merge([read(loss.metrics(batch, loss.terms(batch, v)))]))


# Comparison with recorded values of public trainers.

X, V, REFERENCE = (tensor(RECORDED[name]) for name in ("x", "v", "v_reference"))
SIGMAS = tensor(RECORDED["sigmas"], torch.float64)


def recorded_batch(entry: dict[str, Any], **fields) -> StepBatch:
    now, after, second = (SIGMAS[i].expand(len(X)) for i in (entry["index"], entry["index"] + 1, 1))
    return batch_of(X, tensor(entry["x_next_sampled"]), now, after, second_sigma=second, **fields)


def recorded_weight(weight: str) -> torch.Tensor:
    weights = step_weights(weight, LOSSES["kind"], LOSSES["noise"], SIGMAS, trained=range(9))
    return weights[LOSSES["index"]].float().expand(len(X))


def mean_deviation_of_published_weight() -> float:
    """Return 2.25·g over our weight s/mean(s), with s = g·√Δ."""
    intervals = SIGMAS[:9] - SIGMAS[1:10]
    g = 0.7 * (SIGMAS[:9] / (1 - SIGMAS[:9].clamp(max=float(SIGMAS[1])))).sqrt()
    return float(2.25 * (g * intervals.sqrt()).mean() / intervals[LOSSES["index"]].sqrt())


CLIP = f"clip_low: {LOSSES['clip']}, clip_high: {LOSSES['clip']}"
PUBLISHED = {
    "flow_grpo": (f"name: clip, {CLIP}", None, 1.0),
    "grpo_guard": (f"name: grpo_guard, {CLIP}", "inverse_interval", 1.0),
    "flow_dppo": (f"name: flow_dppo, divergence_limit: {LOSSES['kl_mask_threshold']}", None, 1.0),
    "tempflow_2.25_std_dev_t": (f"name: clip, {CLIP}", "deviation", mean_deviation_of_published_weight()),
}
"""Recorded loss -> the objective's keys, the step weight, and the ratio of the published weight to megarl's."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_losses_and_gradients_match_libraries(name):
    keys, weight, factor = PUBLISHED[name]
    batch = recorded_batch(
        LOSSES,
        advantage=tensor(LOSSES["advantages"]),
        old_v=tensor(LOSSES["old_v"]),
        step_weight=None if weight is None else recorded_weight(weight),
    )
    v = V.clone().requires_grad_()
    terms = terms_of(config_of(f"algorithm.objective={{{keys}}}"), batch, v, has_moved=True)
    [gradient] = torch.autograd.grad(terms.loss, v)
    published = LOSSES["value_and_gradient_by_v"][name]
    assert relative_error(terms.old, tensor(LOSSES["old_log_prob"])) <= TOLERANCE
    assert relative_error(factor * terms.loss.detach(), tensor(published["loss"])) <= TOLERANCE
    assert relative_error(factor * gradient, tensor(published["grad_v"])) <= TOLERANCE


@pytest.mark.parametrize("entry", [step for step in RECORDED["steps"] if "kl" in step], ids=lambda step: step["index"])
@pytest.mark.parametrize(("estimator", "field"), [("null", "exact_mean_over_elements"), ("velocity", "velocity_mse")])
def test_kl_to_the_reference_matches_libraries(entry, estimator, field):
    config = config_of(f"algorithm.kl={{coefficient: 0.5, estimator: {estimator}}}")
    batch = recorded_batch(entry, advantage=torch.zeros(len(X)), reference_v=REFERENCE)
    terms = terms_of(config, batch, V, has_moved=False, coefficient=0.5)
    expected = tensor(entry["kl"][field])
    assert terms.kl is not None and relative_error(terms.kl, expected) <= TOLERANCE
    assert relative_error(terms.loss, 0.5 * expected.mean()) <= TOLERANCE


# Comparison with a float64 reference.

SIGMA, SIGMA_NEXT = tensor([[1.0, 0.8, 0.5, 0.2], [0.8, 0.5, 0.2, 0.1]], torch.float64)
SECOND = torch.full((4,), 0.8, dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(1)
SIZE = (4, 2, 3, 5)
BASE_X, NOISE, BASE_V, *SHIFTS, IMAGE = torch.randn(7, *SIZE, dtype=torch.float64, generator=GENERATOR)
OLD, REFERENCE_V = BASE_V + 0.05 * SHIFTS[0], BASE_V + 0.3 * SHIFTS[1]
ADVANTAGE = tensor([1.5, -0.7, 0.4, -2.0], torch.float64)
WEIGHT = tensor([0.1, 0.2, 0.3, 0.4], torch.float64)
STEP_WEIGHT = tensor([2.0, 0.5, 1.5, 1.0], torch.float64)


def policy(kind: str, v: torch.Tensor) -> Normal:
    """Return the distribution of x' as the papers state it."""
    sigma, after = SIGMA.view(4, 1, 1, 1), SIGMA_NEXT.view(4, 1, 1, 1)
    level, interval = KINDS[kind], sigma - after
    if kind == "cps":
        s = after * math.sin(level * math.pi / 2)
        mean = (1 - after) * (BASE_X - sigma * v) + (after**2 - s**2).sqrt() * (BASE_X + (1 - sigma) * v)
        return Normal(mean, s.expand(SIZE))
    bounded = torch.where(sigma == 1, 0.8, sigma)
    g = level * (sigma / (1 - bounded)).sqrt() if kind == "flow" else torch.full_like(sigma, level)
    score = -(BASE_X + (1 - sigma) * v) / sigma
    mean = BASE_X - interval * (v - g**2 / 2 * score)
    return Normal(mean, (g * interval.sqrt()).expand(SIZE))


def per_step(elements: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return elements.flatten(1).mean(1) if reduction == "mean" else elements.flatten(1).sum(1)


def clipped(log_ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * ADVANTAGE, ratio.clamp(1 - low, 1 + high) * ADVANTAGE)


def guarded(log_ratio: torch.Tensor, now: Normal, old: Normal) -> torch.Tensor:
    s = now.stddev[:, 0, 0, 0]
    return clipped(s * log_ratio + per_step((now.mean - old.mean) ** 2) / (2 * s), 1e-4, 2e-4)


def masked_surrogate(log_ratio: torch.Tensor, now: Normal, old: Normal) -> torch.Tensor:
    further = (log_ratio > 0) == (ADVANTAGE > 0)
    far = per_step(kl_divergence(now, old)) > 1e-3
    return torch.where(far & further, 0.0, -log_ratio.exp() * ADVANTAGE)


def gated(log_ratio: torch.Tensor, *_: Normal) -> torch.Tensor:
    tau = torch.where(ADVANTAGE > 0, torch.ones_like(ADVANTAGE), 1.05)
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * ADVANTAGE


REFERENCES: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "clip": ("clip_low: 0.01, clip_high: 0.02", lambda log_ratio, *_: clipped(log_ratio, 0.01, 0.02)),
    "unclipped": ("", lambda log_ratio, *_: -log_ratio.exp() * ADVANTAGE),
    "cispo": ("clip_high: 0.01", lambda d, *_: -d.detach().exp().clamp(max=1.01) * ADVANTAGE * d),
    "sapo": ("", gated),
    "grpo_guard": ("clip_low: 1.0e-4, clip_high: 2.0e-4", guarded),
    "flow_dppo": ("divergence_limit: 1.0e-3", masked_surrogate),
}
"""Objective -> its options and ℓ from the log-ratio and the policies. For cispo, ℓ differs by a constant."""


def contrast(v: torch.Tensor) -> torch.Tensor:
    """Return DiffusionNFT's loss on newly noised images, for mixture=0.3 and advantages up to 1.2."""
    sigma = SIGMA.view(4, 1, 1, 1)

    def error(velocity: torch.Tensor) -> torch.Tensor:
        difference = noised_batch().latents - sigma * velocity - IMAGE
        return per_step(difference**2) / per_step(difference.detach().abs())

    good = ADVANTAGE.clamp(-1.2, 1.2) / 2.4 + 0.5
    parts = good * error(OLD + 0.3 * (v - OLD)) + (1 - good) * error(OLD - 0.3 * (v - OLD))
    return 1.2 / 0.3 * parts


def noised_batch(**fields) -> StepBatch:
    sigma = SIGMA.view(4, 1, 1, 1)
    given = dict(advantage=ADVANTAGE, weight=WEIGHT, old_v=OLD, reference_v=REFERENCE_V, step_weight=None)
    noised = (1 - sigma) * IMAGE + sigma * NOISE
    return batch_of(noised, IMAGE, SIGMA, torch.zeros_like(SIGMA), second_sigma=SECOND, **given | fields)


VELOCITY_REFERENCES = {"diffusion_nft": ("mixture: 0.3, advantage_limit: 1.2", contrast)}
"""Objective without log-probs -> its options and ℓ from v."""


def reference_loss(
    name: str, kind: str, reduction: str, kl: str, v: torch.Tensor, x_next: torch.Tensor
) -> torch.Tensor:
    now, old, other = (policy(kind, velocity) for velocity in (v, OLD, REFERENCE_V))
    log_ratio = per_step(now.log_prob(x_next) - old.log_prob(x_next), reduction)
    divergence = per_step(kl_divergence(now, other) if kl == "gaussian" else (v - REFERENCE_V) ** 2)
    return (WEIGHT * (STEP_WEIGHT * REFERENCES[name][1](log_ratio, now, old) + 0.3 * divergence)).sum()


def random_batch(kind: str, **fields) -> StepBatch:
    x_next = policy(kind, OLD).mean + policy(kind, OLD).stddev * NOISE
    given = dict(advantage=ADVANTAGE, weight=WEIGHT, step_weight=STEP_WEIGHT, old_v=OLD, reference_v=REFERENCE_V)
    return batch_of(BASE_X, x_next, SIGMA, SIGMA_NEXT, second_sigma=SECOND, **given | fields)


def random_config(
    kind: str, name: str = "clip", options: str = "", reduction: str = "mean", kl: str = "null"
) -> Config:
    denoising = f"{{kind: {kind}, noise_level: {KINDS[kind]}, logprob: {reduction}}}"
    objective = f"{{name: {name}{', ' if options else ''}{options}}}"
    keys = (f"rollout.denoising={denoising}", f"algorithm.objective={objective}")
    return config_of(*keys, f"algorithm.kl={{coefficient: 0.3, estimator: {kl}}}")


@pytest.mark.parametrize("kl", ["gaussian", "velocity"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REFERENCES)
def test_loss_and_gradient_equal_the_reference(name, kind, reduction, kl):
    config, batch = random_config(kind, name, REFERENCES[name][0], reduction, kl), random_batch(kind)
    ours, plain = (BASE_V.clone().requires_grad_() for _ in range(2))
    loss = terms_of(config, batch, ours, has_moved=True, coefficient=0.3).loss
    expected = reference_loss(name, kind, reduction, kl, plain, batch.next_latents)
    if name != "cispo":
        torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, ours), torch.autograd.grad(expected, plain)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", VELOCITY_REFERENCES)
def test_velocity_loss_and_gradient_equal_the_reference(name):
    options, reference = VELOCITY_REFERENCES[name]
    ours, plain = (BASE_V.clone().requires_grad_() for _ in range(2))
    terms = velocity_terms(nft_config(options, name), noised_batch(), ours, has_moved=True, coefficient=0.3)
    expected = (WEIGHT * (reference(plain) + 0.3 * per_step((plain - REFERENCE_V) ** 2))).sum()
    torch.testing.assert_close(terms.loss, expected)
    gradients = torch.autograd.grad(terms.loss, ours), torch.autograd.grad(expected, plain)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(terms.change, per_step((BASE_V - OLD) ** 2))


def test_velocity_losses_match_diffusion_nft():
    recorded, x0 = LOSSES["diffusion_nft"], tensor(RECORDED["x_next"])
    sigma = tensor(recorded["sigma"])
    x = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * X
    given = dict(advantage=tensor(LOSSES["advantages"]), old_v=tensor(LOSSES["old_v"]), second_sigma=sigma)
    batch = batch_of(x, x0, sigma, torch.zeros_like(sigma), **given)
    options = f"mixture: {recorded['beta']}, advantage_limit: {recorded['adv_clip_max']}"
    v = V.clone().requires_grad_()
    loss = velocity_terms(nft_config(options), batch, v, has_moved=True).loss
    [gradient] = torch.autograd.grad(loss, v)
    assert relative_error(loss.detach(), tensor(recorded["loss"])) <= TOLERANCE
    assert relative_error(gradient, tensor(recorded["grad_v"])) <= TOLERANCE


def test_single_velocity_update_starts_at_the_old_policy():
    v = BASE_V.clone().requires_grad_()
    once = velocity_terms(nft_config(), noised_batch(old_v=None), v, has_moved=False)
    twice = velocity_terms(nft_config(), noised_batch(old_v=BASE_V), v, has_moved=True)
    assert torch.equal(once.loss, twice.loss) and not once.change.any()
    [gradient] = torch.autograd.grad(once.loss, v)
    assert gradient.any() and torch.equal(gradient, torch.autograd.grad(twice.loss, v)[0])
    with pytest.raises(AssertionError, match="no velocities from the start"):
        velocity_terms(nft_config(), noised_batch(old_v=None), v, has_moved=True)


def test_untrained_rows_have_no_effect_on_velocity_losses():
    mask = torch.tensor([True, False, True, True])

    def results(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        batch = noised_batch(mask=mask, weight=WEIGHT * mask)
        changed = {
            key: getattr(batch, key).clone().index_fill_(0, torch.tensor([1]), filler)
            for key in ("latents", "next_latents", "old_v", "reference_v")
        }
        v = BASE_V.clone().index_fill_(0, torch.tensor([1]), filler).requires_grad_()
        loss = velocity_terms(nft_config(), replace(batch, **changed), v, has_moved=True, coefficient=0.3).loss
        return loss, torch.autograd.grad(loss, v)[0]

    (loss, gradient), expected = results(math.nan), results(0.5)
    assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])
    assert not gradient[1].any() and gradient[[0, 2, 3]].flatten(1).any(1).all()


def test_velocity_metrics():
    """Without log-probs, there are no ratios and no differences from the engine."""
    metrics = metrics_of(nft_config(), noised_batch(), BASE_V, has_moved=True)
    loss = velocity_terms(nft_config(), noised_batch(), BASE_V, has_moved=True, coefficient=0.5).loss
    assert metrics == pytest.approx(
        {
            "policy/loss": loss.item(),
            "policy/velocity_change": per_step((BASE_V - OLD) ** 2).mean().item(),
            "kl/loss_token_velocity": per_step((BASE_V - REFERENCE_V) ** 2).mean().item(),
            "kl/coefficient": 0.5,
        }
    )
    assert metrics_of(nft_config(), noised_batch(reference_v=None), BASE_V, has_moved=False).keys() == {"policy/loss"}


def nft_config(options: str = "mixture: 0.3", name: str = "diffusion_nft") -> Config:
    return config_of(f"algorithm.objective={{name: {name}, {options}}}", "algorithm.kl.coefficient=0.3")


def velocity_terms(
    config: Config, batch: StepBatch, v: torch.Tensor, has_moved: bool, coefficient: float = 0.0
) -> VelocityTerms:
    terms = loss_of(config, coefficient, has_moved).terms(batch, v)
    assert isinstance(terms, VelocityTerms)
    return terms


def test_every_step_objective_has_a_reference():
    supported = {name for name, spec in OBJECTIVES.items() if "steps" in spec.actions}
    assert supported == REFERENCES.keys() | VELOCITY_REFERENCES.keys()


@pytest.mark.parametrize("name", REFERENCES)
def test_single_update_starts_at_ratio_one(name):
    """Without a pass for the old policy, loss and gradient are the same as with an old policy that equals the current
    one."""
    config, v = random_config("flow", name), BASE_V.clone().requires_grad_()
    once = terms_of(config, random_batch("flow", old_v=None), v, has_moved=False)
    twice = terms_of(config, random_batch("flow", old_v=BASE_V), v, has_moved=True)
    assert once.divergence is not None and not once.divergence.any()
    assert torch.equal(once.policy.ratio, torch.ones_like(ADVANTAGE))
    [gradient] = torch.autograd.grad(once.loss, v)
    assert gradient.any() and torch.equal(gradient, torch.autograd.grad(twice.loss, v)[0])
    assert torch.equal(once.loss, twice.loss)


@pytest.mark.parametrize("name", REFERENCES)
def test_loss_is_the_sum_over_rows(name):
    config, batch = random_config("flow", name, REFERENCES[name][0]), random_batch("flow")
    whole = terms_of(config, batch, BASE_V, has_moved=True).loss
    parts = []
    for i in range(4):
        row = torch.tensor([i])
        single = replace(
            batch.take_rows(row),
            row_sample=torch.tensor([0]),
            captions=batch.captions[:1],
            **{
                key: getattr(batch, key)[row]
                for key in ("reward", "baseline", "scale", "token_baseline", "token_scale")
            },
        )
        parts.append(terms_of(config, single, BASE_V[row], has_moved=True).loss)
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


@pytest.mark.parametrize("kl", ["gaussian", "velocity"])
@pytest.mark.parametrize("name", REFERENCES)
def test_untrained_rows_have_no_effect(name, kl):
    """Velocities, latents and old velocities of an untrained row are NaN."""
    config, mask = random_config("flow", name, REFERENCES[name][0], kl=kl), torch.tensor([True, False, True, True])

    def results(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        batch = random_batch("flow", mask=mask, weight=WEIGHT * mask)
        changed = {
            key: getattr(batch, key).clone().index_fill_(0, torch.tensor([1]), filler)
            for key in ("latents", "next_latents", "old_v", "reference_v")
        }
        v = BASE_V.clone().index_fill_(0, torch.tensor([1]), filler).requires_grad_()
        loss = terms_of(config, replace(batch, **changed), v, has_moved=True, coefficient=0.3).loss
        return loss, torch.autograd.grad(loss, v)[0]

    (loss, gradient), expected = results(math.nan), results(0.5)
    assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])
    assert not gradient[1].any() and gradient[[0, 2, 3]].flatten(1).any(1).all()


def test_half_precision_velocities_are_upcast():
    config, batch = random_config("flow"), random_batch("flow")
    batch = replace(
        batch, **{f.name: value.float() for f in fields(batch) if is_float64(value := getattr(batch, f.name))}
    )
    rounded = BASE_V.to(torch.bfloat16)
    terms = terms_of(config, batch, rounded, has_moved=True)
    assert terms.log_prob.dtype == torch.float32
    assert torch.equal(terms.loss, terms_of(config, batch, rounded.float(), has_moved=True).loss)


def is_float64(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64


def test_metrics_of_moved_policy():
    """The KL to the old policy is exact, and the KL of the engine to the trainer is the mean log-ratio."""
    now, old, reference = (policy("flow", v) for v in (BASE_V, OLD, REFERENCE_V))
    batch = random_batch("flow")
    log_probs = [per_step(p.log_prob(batch.next_latents)) for p in (now, old)]
    engine = log_probs[1] + tensor([0.01, -0.02, 0.03, 0.04], torch.float64)
    metrics = metrics_of(random_config("flow"), replace(batch, rollout_logprobs=engine), BASE_V, has_moved=True)
    expected = {
        "policy/kl_old": per_step(kl_divergence(now, old)).mean(),
        "policy/entropy": per_step(now.entropy()).mean(),
        "policy/ratio_mean": (log_probs[0] - log_probs[1]).exp().mean(),
        "policy/drift_abs_max": (log_probs[0] - log_probs[1]).abs().max(),
        "mismatch/logprob_abs_mean": torch.tensor(0.025),
        "mismatch/kl": torch.tensor(0.015),
        "kl/loss_token_gaussian": per_step(kl_divergence(now, reference)).mean(),
        "kl/coefficient": torch.tensor(0.5),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-6
    )


def test_kl_old_without_old_velocities_is_the_mean_log_ratio():
    """The ratio to the engine's policy does not require a pass for the old policy."""
    batch, config = random_batch("flow", old_v=None), config_of("algorithm.correction.old=rollout")
    log_prob = per_step(policy("flow", BASE_V).log_prob(batch.next_latents))
    engine = log_prob + tensor([0.01, -0.02, 0.03, 0.04], torch.float64)
    metrics = metrics_of(config, replace(batch, rollout_logprobs=engine), BASE_V, has_moved=True)
    assert metrics["policy/kl_old"] == pytest.approx(0.015)


def test_objective_requires_old_velocities_after_an_update():
    with pytest.raises(AssertionError, match="flow_dppo: inputs"):
        terms_of(random_config("flow", "flow_dppo"), random_batch("flow", old_v=None), BASE_V, has_moved=True)


def test_advantages_are_limited():
    samples = dict(reward=tensor([9.0, 3.0, 2.5, -9.0], torch.float64), baseline=torch.full((4,), 2.0).double())
    config = config_of("algorithm.advantage.limit=5.0")
    [estimated] = with_advantages(config.algorithm, [random_batch("flow", advantage=None, **samples)])
    assert estimated.advantage is not None and estimated.advantage.tolist() == [5.0, 1.0, 0.5, -5.0]


def test_denoising_steps_share_the_samples_advantage():
    """All steps of a sample have its advantage; a row that is not trained has 0."""
    mask = torch.tensor([True, True, False, True])
    samples = dict(reward=tensor([1.0, 3.0], torch.float64), baseline=tensor([2.0, 2.0], torch.float64))
    others = dict(token_baseline=torch.zeros(2), token_scale=torch.ones(2), scale=tensor([0.5, 0.5], torch.float64))
    batch = random_batch("flow", row_sample=torch.tensor([0, 0, 1, 1]), mask=mask, advantage=None, **samples, **others)
    [estimated] = with_advantages(random_config("flow").algorithm, [batch])
    assert isinstance(estimated, StepBatch) and estimated.advantage is not None
    assert estimated.advantage.tolist() == [-2.0, -2.0, 0.0, 2.0]
    assert mean_advantages(estimated, ["a", "b"]) == {"a": -2.0, "b": 2.0}
