"""verl's advantages, KL estimates, objectives, aggregations and corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from batch import at_last_trained_token, padded
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

GAMMA, LAMBDA = 0.9, 0.8
DIVERGENCES = [0.05, 0.3, 0.105, 0.1]
"""KL divergences in four steps of an adaptive KL coefficient, below and above its target."""

Numbers = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def numbers(batch: dict[str, Any]) -> Numbers:
    return advantages(batch) | estimates(batch) | losses(batch) | aggregations(batch) | corrections(batch)


def advantages(batch: dict[str, Any]) -> Numbers:
    """Return the advantages of all trained tokens, concatenated."""
    trained = padded(batch["mask"]).bool()
    found = _of_groups(batch) | _of_tokens(batch)
    return {f"advantage/{name}": of_each[trained].tolist() for name, of_each in found.items()} | _pass_at_k(batch)


def _of_groups(batch: dict[str, Any]) -> Tensors:
    groups = dict(response_mask=padded(batch["mask"]), index=np.array(batch["prompts"]))
    whole = _whole(batch["rewards"], groups["response_mask"])
    # GPG needs different rewards: its factor counts nonzero rewards, and groups of one have a baseline of 0.
    of_gpg = whole + _whole([0.0 if prompt == "b" else 1.0 for prompt in batch["prompts"]], whole)
    of_gpg[batch["prompts"].index("b")] = 0
    plus_plus_baseline = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
    found = {
        "grpo": core_algos.compute_grpo_outcome_advantage(whole, **groups),
        "dr_grpo": core_algos.compute_grpo_outcome_advantage(whole, **groups, norm_adv_by_std_in_grpo=False),
        "rloo": core_algos.compute_rloo_outcome_advantage(whole, **groups),
        "rloo_vectorized": core_algos.compute_rloo_vectorized_outcome_advantage(whole, **groups),
        "opo": core_algos.compute_opo_outcome_advantage(whole, **groups),
        "gpg": core_algos.compute_gpg_outcome_advantage(of_gpg, **groups),
        "reinforce_plus_plus_baseline": plus_plus_baseline(whole, **groups),
        "gdpo": _gdpo(batch, whole, groups),
    }
    return {name: advantage for name, (advantage, _) in found.items()}


def _gdpo(batch: dict[str, Any], whole: torch.Tensor, groups: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages for two rewards, with weights of 1 and 0.5. The second one is the batch's advantages."""
    names = ["rewards", "advantages"]
    return core_algos.compute_gdpo_outcome_advantage(
        whole,
        **groups,
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={name: batch[name] for name in names},
        batch={"prompts": whole[:, :1], "attention_mask": torch.ones(len(whole), 1 + whole.shape[1]).long()},
    )


def _of_tokens(batch: dict[str, Any]) -> Tensors:
    mask = padded(batch["mask"])
    outcome, greedy = at_last_trained_token(batch["rewards"], mask), torch.tensor(batch["greedy"], dtype=mask.dtype)
    rewards = (outcome + padded(batch["token_rewards"])) * mask
    plus_plus = core_algos.compute_reinforce_plus_plus_outcome_advantage
    gae, returns = core_algos.compute_gae_advantage_return(rewards, padded(batch["values"]), mask, GAMMA, LAMBDA)
    return {
        "remax": core_algos.compute_remax_outcome_advantage(outcome, greedy, mask)[0],
        "reinforce_plus_plus": plus_plus(rewards, mask, config=AlgoConfig(gamma=GAMMA))[0],
        "gae": gae,
        "gae_returns": returns,
    }


def _pass_at_k(batch: dict[str, Any]) -> Numbers:
    """Return the advantages in groups with several samples, not divided by the standard deviation."""
    rows = [i for i, prompt in enumerate(batch["prompts"]) if batch["prompts"].count(prompt) > 1]
    mask = padded(batch["mask"])
    groups = dict(response_mask=mask[rows], index=np.array(batch["prompts"])[rows])
    config = AlgoConfig(norm_adv_by_std_in_grpo=False)
    whole = _whole(batch["rewards"], mask)[rows]
    advantage = core_algos.compute_grpo_passk_outcome_advantage(whole, **groups, config=config)[0]
    return {"advantage/pass_at_k": advantage[mask[rows].bool()].tolist()}


def _whole(rewards: list[float], mask: torch.Tensor) -> torch.Tensor:
    """Return token rewards whose sum over all tokens of a sample is its reward, as in verl."""
    placed = torch.zeros_like(mask)
    placed[:, 0] = torch.tensor(rewards, dtype=mask.dtype)
    return placed


def estimates(batch: dict[str, Any]) -> Numbers:
    forms = [f"{name}{plus}" for name in ("k1", "k2", "k3", "abs") for plus in ("", "+")]
    mask = padded(batch["mask"])

    def estimate(form: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda now: (core_algos.kl_penalty(now, padded(batch["reference"]), form) * mask).sum()

    return {f"kl/{form}": value_and_gradient(batch, estimate(form)) for form in forms} | {
        "kl/reward": _kl_rewards(batch)[mask.bool()].tolist(),
        "kl/adaptive": _coefficients(),
    }


def _kl_rewards(batch: dict[str, Any]) -> torch.Tensor:
    old = padded(batch["old"])
    return core_algos.compute_rewards(torch.zeros_like(old), old, padded(batch["reference"]), kl_ratio=0.3)


def _coefficients() -> list[float]:
    """Return the coefficients after each step of 256 samples."""
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.3, target_kl=0.1, horizon=1000)
    found = []
    for divergence in DIVERGENCES:
        controller.update(divergence, n_steps=256)
        found.append(float(controller.value))
    return found


def losses(batch: dict[str, Any]) -> Numbers:
    mask, old = padded(batch["mask"]), padded(batch["old"])
    advantage = torch.tensor(batch["advantages"], dtype=torch.float64)[:, None].expand_as(mask)
    of_samples = {"loss_agg_mode": "seq-mean-token-mean"}
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "clip": ("vanilla", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0), {}),
        "dppo_tv": ("dppo_tv", dict(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0), {}),
        "dppo_kl": ("dppo_kl", dict(clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0), {}),
        "gspo": ("gspo", dict(clip_ratio_low=0.1, clip_ratio_high=0.15), of_samples),
        "sapo": ("sapo", dict(tau_pos=1.0, tau_neg=1.05), of_samples),
        "gmpo": ("geo_mean", dict(clip_ratio_low=0.4, clip_ratio_high=0.4), {}),
        "cispo": ("cispo", dict(clip_ratio_low=1.0, clip_ratio_high=4.0), {}),
        "gpg": ("gpg", {}, {}),
        "clip_cov": ("clip_cov", dict(policy_loss=_policy(clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=0.8)), {}),
        "kl_cov": ("kl_cov", dict(policy_loss=_policy(kl_cov_ratio=0.2, ppo_kl_coef=0.5)), {}),
        "dro": ("dro", dict(policy_loss=_policy(dro_beta=0.3)), {}),
    }

    def policy_loss(name: str, settings: dict[str, Any], how: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
        # As in a training run, include samples without a trained token.
        config.global_batch_info["global_batch_size"] = len(mask)
        loss = core_algos.get_policy_loss_fn(name)
        return lambda now: loss(old, now, advantage, mask, **how, config=config)[0]

    found = {f"loss/{name}": value_and_gradient(batch, policy_loss(*case)) for name, case in cases.items()}
    values = dict(returns=padded(batch["returns"]), values=padded(batch["values"]), response_mask=mask)
    found["loss/value"] = value_and_gradient(
        batch, lambda now: core_algos.compute_value_loss(now, **values, cliprange_value=0.2)[0], of="values_now"
    )
    return found


def _policy(**settings: float) -> PolicyLossConfig:
    return PolicyLossConfig(**settings)


def aggregations(batch: dict[str, Any]) -> Numbers:
    """Return each aggregation of −now over all samples, including those without a trained token."""
    mask, loss = padded(batch["mask"]), -padded(batch["now"])
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
    return {
        f"aggregation/{mode}": core_algos.agg_loss(
            loss, mask, mode, global_batch_size=len(mask), loss_scale_factor=12
        ).item()
        for mode in modes
    }


def corrections(batch: dict[str, Any]) -> Numbers:
    """Return the weights and masks of all trained tokens, concatenated."""
    mask = padded(batch["mask"])
    log_ratio = padded(batch["old"]) - padded(batch["rollout_logprobs"])
    weights = {
        f"weight/{level}/{limit}": compute_rollout_correction_weights(log_ratio, mask, level, limit)[0]
        for level in ("token", "sequence")
        for limit in (1.2, "0.7_1.4")
    }
    masks = {
        f"mask/{statistic}": compute_rollout_rejection_mask(log_ratio, mask, statistic, "0.7_1.25")[0]
        for statistic in ("token_k1", "seq_sum_k1", "seq_mean_k1")
    }
    return {name: of_each[mask.bool()].tolist() for name, of_each in (weights | masks).items()}


def value_and_gradient(
    batch: dict[str, Any], loss: Callable[[torch.Tensor], torch.Tensor], of: str = "now"
) -> dict[str, Any]:
    """Return the value, and the gradient of all trained tokens, concatenated."""
    now = padded(batch[of]).requires_grad_()
    value = loss(now)
    [gradient] = torch.autograd.grad(value, now)
    return {"value": value.item(), "gradient": gradient[padded(batch["mask"]).bool()].tolist()}
