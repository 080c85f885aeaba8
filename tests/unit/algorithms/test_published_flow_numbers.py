"""Comparison with public trainers of flow-matching models on a small batch of denoising steps, in float32.

Each entry of the file names the repository and function that computed it.
"""

import json
import math
from typing import Any

import pytest
import torch

from megarl.algorithms import transition as policy
from megarl.algorithms.advantages.grpo import grpo, step_scale
from megarl.algorithms.baselines import Member
from megarl.algorithms.objectives.clip import clip
from megarl.algorithms.objectives.diffusion_nft import diffusion_nft
from megarl.algorithms.objectives.flow_dppo import flow_dppo
from megarl.algorithms.objectives.grpo_guard import grpo_guard
from megarl.algorithms.relative import sample_advantages
from megarl.algorithms.transition import Transition, sigma_schedule, step_weights, transition
from tests.closeness import TOLERANCE, relative_error
from tests.paths import ROOT

RECORDED = json.loads((ROOT / "tests" / "published_numbers" / "flow_grpo.json").read_text())


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def assert_equal(actual: torch.Tensor, numbers: Any, tolerance: float = TOLERANCE) -> None:
    expected = torch.tensor(numbers, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= tolerance


SIGMAS, X, V, REFERENCE = (tensor(RECORDED[name]) for name in ("sigmas", "x", "v", "v_reference"))


def step_of(entry: dict[str, Any]) -> Transition:
    now, after, second = (SIGMAS[i].expand(len(X)) for i in (entry["index"], entry["index"] + 1, 1))
    return transition(entry["kind"], entry["noise"], now, after, second)


def step_name(entry: dict[str, Any]) -> str:
    return f"{entry['kind']}-{entry['index']}"


LIBRARIES = ("verl_omni", "flow_grpo", "mixgrpo", "dancegrpo")


@pytest.mark.parametrize("entry", RECORDED["steps"], ids=step_name)
def test_transitions_match_libraries(entry):
    """For cps, verl-omni computes −(x' − μ)² as the log-prob."""
    step, x_next = step_of(entry), tensor(entry["x_next_sampled"])
    mean, log_prob = policy.mean(step, X, V), policy.log_prob(step, X, V, x_next)
    if entry["kind"] == "cps":
        log_prob = 2 * step.std**2 * (log_prob + step.std.log() + math.log(2 * math.pi) / 2)
    for library in (entry[name] for name in LIBRARIES if name in entry):
        assert_equal(log_prob, library["log_prob"])
        if "mean" in library:
            assert_equal(mean, library["mean"])
    published = entry["verl_omni"]
    std = tensor(published["std_dev_t"]) * (tensor(published["sqrt_dt"]) if entry["kind"] == "flow" else 1)
    assert_equal(step.std.float(), std.tolist())


@pytest.mark.parametrize("entry", [step for step in RECORDED["steps"] if step["kind"] == "dance"], ids=step_name)
def test_mixgrpo_omits_the_log_prob_constant(entry):
    step = step_of(entry)
    log_prob = policy.log_prob(step, X, V, tensor(entry["x_next_sampled"]))
    constant = step.std.log() + math.log(2 * math.pi) / 2
    assert_equal(log_prob, (tensor(entry["mixgrpo_dance"]["log_prob"]) - constant).tolist())


@pytest.mark.parametrize("entry", [step for step in RECORDED["steps"] if "kl" in step], ids=step_name)
def test_kl_matches_libraries(entry):
    """Flow-GRPO and verl-omni return Δ times the KL, averaged over the batch."""
    kl, interval = policy.gaussian_kl(step_of(entry), V, REFERENCE), SIGMAS[entry["index"]] - SIGMAS[entry["index"] + 1]
    assert_equal(kl, entry["kl"]["exact_mean_over_elements"])
    assert_equal(policy.velocity_kl(V, REFERENCE), entry["kl"]["velocity_mse"])
    assert_equal(interval * kl.mean(), entry["kl"]["published_without_dt"])


LOSSES = RECORDED["losses"]
OLD, OLD_V, ADVANTAGE = (tensor(LOSSES[name]) for name in ("old_log_prob", "old_v", "advantages"))
CLIP = dict(clip_low=LOSSES["clip"], clip_high=LOSSES["clip"])
STEP = step_of(LOSSES)


def log_prob_of(v: torch.Tensor) -> torch.Tensor:
    return policy.log_prob(STEP, X, v, tensor(LOSSES["x_next_sampled"]))


def clipped(v: torch.Tensor) -> torch.Tensor:
    return clip(log_prob_of(v), OLD, ADVANTAGE, **CLIP).loss


def guarded(v: torch.Tensor) -> torch.Tensor:
    divergence = policy.gaussian_kl(STEP, v, OLD_V)
    loss = grpo_guard(log_prob_of(v), OLD, ADVANTAGE, STEP.std, divergence, **CLIP).loss
    return weight_of_step("inverse_interval") * loss


def masked(v: torch.Tensor) -> torch.Tensor:
    divergence = policy.gaussian_kl(STEP, v, OLD_V)
    return flow_dppo(log_prob_of(v), OLD, ADVANTAGE, divergence, LOSSES["kl_mask_threshold"]).loss


def weighted(v: torch.Tensor) -> torch.Tensor:
    """The recorded weight is 2.25·g; ours is s/mean(s) with s = g·√Δ."""
    intervals = SIGMAS[:9] - SIGMAS[1:10]
    deviations = 0.7 * (SIGMAS[:9] / (1 - SIGMAS[:9].clamp(max=float(SIGMAS[1]))) * intervals).sqrt()
    return weight_of_step("deviation") * clipped(v) * 2.25 * deviations.mean() / intervals[LOSSES["index"]].sqrt()


def weight_of_step(weight: str) -> torch.Tensor:
    return step_weights(weight, LOSSES["kind"], LOSSES["noise"], SIGMAS, trained=range(9))[LOSSES["index"]]


def nft(v: torch.Tensor) -> torch.Tensor:
    options = dict(mixture=LOSSES["diffusion_nft"]["beta"], advantage_limit=LOSSES["diffusion_nft"]["adv_clip_max"])
    x0, sigma = tensor(RECORDED["x_next"]), tensor(LOSSES["diffusion_nft"]["sigma"])
    return diffusion_nft(v, OLD_V, x0, policy.interpolate(x0, X, sigma), sigma, ADVANTAGE, **options)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("flow_grpo", clipped),
        ("grpo_guard", guarded),
        ("flow_dppo", masked),
        ("tempflow_2.25_std_dev_t", weighted),
        ("diffusion_nft", nft),
    ],
)
def test_losses_and_gradients_match_libraries(name, loss):
    published = (LOSSES["value_and_gradient_by_v"] | LOSSES)[name]
    v = V.clone().requires_grad_()
    value = loss(v).mean()
    [gradient] = torch.autograd.grad(value, v)
    assert_equal(value.detach(), published["loss"])
    assert_equal(gradient, published["grad_v"])


def advantages(prompts: list[str], rewards: list[float], over: str, std: str, std_epsilon: float) -> torch.Tensor:
    names = sorted(set(prompts))
    rows = [[i for i, prompt in enumerate(prompts) if prompt == name] for name in names]
    groups = [[Member(rewards[i], 1) for i in row] for row in rows]
    baselines = [grpo(group, std, std_epsilon) for group in groups]
    by_row = {i: b for row, group in zip(rows, baselines, strict=True) for i, b in zip(row, group, strict=True)}
    center, scale = ([getattr(by_row[i], name) for i in range(len(rewards))] for name in ("center", "scale"))
    if over == "step":
        scale = [step_scale(groups, std, std_epsilon)] * len(rewards)
    return sample_advantages(*(torch.tensor(values, dtype=torch.float64) for values in (rewards, center, scale)))


@pytest.mark.parametrize(("library", "std"), [("flow_grpo", "population"), ("verl_omni", "sample")])
@pytest.mark.parametrize(("over", "flag"), [("group", "false"), ("step", "true")])
def test_advantages_match_libraries(library, std, over, flag):
    recorded = RECORDED["advantages"]
    actual = advantages(recorded["prompts"], recorded["rewards"], over, std, std_epsilon=1e-4)
    assert_equal(actual, recorded[f"{library}_global_std_{flag}"])


@pytest.mark.parametrize(("over", "flag"), [("group", "false"), ("step", "true")])
def test_advantages_of_each_step_match_flow_grpo(over, flag):
    """With one reward per denoising step, each step forms a separate batch."""
    recorded = RECORDED["advantages"]["per_step"]
    steps = [
        advantages(recorded["prompts"], list(rewards), over, "population", std_epsilon=1e-4)
        for rewards in zip(*recorded["rewards"], strict=True)
    ]
    assert_equal(torch.stack(steps, 1), recorded[f"flow_grpo_global_std_{flag}"])


def test_schedule_and_step_weights_match_recorded_ones():
    assert_equal(tensor(sigma_schedule(RECORDED["num_steps"], RECORDED["shift"])), RECORDED["sigmas"])
    recorded = RECORDED["step_weight"]
    sigmas = torch.tensor(recorded["sigmas"], dtype=torch.float64)
    weights = step_weights("deviation", "flow", 0.7, sigmas, trained=range(9))
    assert_equal(weights[:9], recorded["weights_of_first_9"])
    step = transition("flow", 0.7, sigmas[:-1], sigmas[1:], sigmas[1].expand(10))
    assert_equal(step.std, recorded["std"])
    assert float(weights[0] / step.std[0]) == pytest.approx(recorded["inverse_mean_of_first_9"])
