"""TRL's objectives, aggregations, pairwise losses and divergences, computed by its trainers' code on given log-probs
or logits.

The trainers' model and accelerator are stubs. The functions call the loss method that the trainers call in every step.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from batch import padded
from of_verl import value_and_gradient
from trl import DPOTrainer, GRPOTrainer, RewardTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

LONGEST, BETA, KL, TEMPERATURE = 12, 0.2, 0.3, 0.7
Numbers = dict[str, Any]

POLICY: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo", epsilon_low=0.2, epsilon_high=0.28, delta=3.0),
    "grpo_with_kl": dict(loss_type="grpo", epsilon_low=0.2, epsilon_high=0.28, beta=KL),
    "bnpo": dict(loss_type="bnpo", epsilon_low=0.2, epsilon_high=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", epsilon_low=0.2, epsilon_high=0.2),
    "dapo": dict(loss_type="dapo", epsilon_low=0.2, epsilon_high=0.28),
    "cispo": dict(loss_type="cispo", epsilon_low=0.2, epsilon_high=5.0),
    "sapo": dict(loss_type="sapo"),
    "gspo": dict(loss_type="grpo", epsilon_low=0.1, epsilon_high=0.15, importance_sampling_level="sequence"),
    "luspo": dict(loss_type="luspo", epsilon_low=0.2, epsilon_high=0.2),
}


def numbers(batch: dict[str, Any]) -> Numbers:
    return policy_losses(batch) | pair_losses(batch) | divergences(batch) | logit_numbers()


def policy_losses(batch: dict[str, Any]) -> Numbers:
    mask = padded(batch["mask"])
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": padded([[1.0] * len(own) for own in batch["mask"]]),
        "tool_mask": mask,
        "advantages": torch.tensor(batch["advantages"], dtype=torch.float64),
        "old_per_token_logps": padded(batch["old"]),
        "ref_per_token_logps": padded(batch["reference"]),
        "num_items_in_batch": mask.sum(),
    }

    def loss_numbers(trainer_class: type, settings: dict[str, Any]) -> dict[str, Any]:
        return value_and_gradient(batch, lambda now: trainer_class._compute_loss(_trainer(now, settings), None, inputs))

    found = {f"loss/{name}": loss_numbers(GRPOTrainer, settings) for name, settings in POLICY.items()}
    return found | {"loss/gmpo": loss_numbers(GMPOTrainer, dict(epsilon_low=0.4, epsilon_high=0.4))}


def _trainer(now: torch.Tensor, settings: dict[str, Any]) -> SimpleNamespace:
    """Return a stub with the attributes that GRPOTrainer's loss reads. Its model returns the given log-probs."""
    args = dict(delta=settings.get("delta"), use_bias_correction_kl=False, steps_per_generation=1)
    temperatures = dict(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    defaults = dict(beta=0.0, epsilon_low=0.0, epsilon_high=0.0, importance_sampling_level="token", loss_type="")
    return SimpleNamespace(
        **{**defaults, **{name: value for name, value in settings.items() if name != "delta"}},
        **_bookkeeping(),
        args=SimpleNamespace(**args, **temperatures),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (now, torch.zeros_like(now), None),
    )


def pair_losses(batch: dict[str, Any]) -> Numbers:
    """Return the losses of two pairs, the better sample first: samples 1 and 2, and samples 5 and 7."""
    better, worse = [0, 4], [1, 6]
    rows = better + worse
    mask = padded(batch["mask"])[rows]
    scores = torch.tensor(batch["rewards"], dtype=torch.float64)[rows]
    found = {"pairs/reward_model": _reward_model(scores)}
    cases = {
        "dpo": dict(loss_types=["sigmoid"]),
        "dpo_by_length": dict(loss_types=["sigmoid_norm"]),
        "ipo_by_length": dict(loss_types=["ipo"]),
        "conservative_dpo": dict(loss_types=["aot"], label_smoothing=0.1),  # AOT's sorting does not affect single pairs
    }
    for name, settings in cases.items():
        pairs = [[0, 2], [1, 3]] if name == "conservative_dpo" else [[0, 1, 2, 3]]
        losses = [_dpo(batch, [rows[i] for i in pair], mask[pair], settings) for pair in pairs]
        found[f"pairs/{name}"] = sum(losses) / len(losses)
    return found


def _dpo(batch: dict[str, Any], rows: list[int], mask: torch.Tensor, settings: dict[str, Any]) -> float:
    """Return DPO's loss. The completion is the whole sequence except its first token, which has no log-prob."""
    first = mask.new_zeros(len(mask), 1)
    whole = torch.cat((first, mask), 1)
    outputs = SimpleNamespace(
        log_probs=padded(batch["now"])[rows] * mask,
        entropy=torch.zeros_like(mask),
        mean_logits=torch.zeros_like(mask),
        is_top1=torch.zeros_like(mask, dtype=torch.bool),
    )
    reference = (padded(batch["reference"])[rows] * mask).sum(1)
    trainer = SimpleNamespace(
        **settings,
        **_bookkeeping(),
        loss_weights=[1.0],
        beta=BETA,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
    )
    inputs = {"input_ids": whole.long(), "attention_mask": torch.ones_like(whole), "completion_mask": whole}
    inputs["ref_chosen_logps"], inputs["ref_rejected_logps"] = reference.chunk(2)
    return float(DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, return_outputs=False))


def _reward_model(scores: torch.Tensor) -> float:
    trainer = SimpleNamespace(**_bookkeeping(), args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {"attention_mask": torch.ones(len(scores), 1)}
    return float(RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores[:, None]), inputs))


def _bookkeeping() -> dict[str, Any]:
    """Return the metrics attributes of a trainer with one process, in training mode."""
    model = torch.nn.Linear(1, 1)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
    )
    metrics = {"train": defaultdict(list)}
    return dict(
        model=model,
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )


def divergences(batch: dict[str, Any]) -> Numbers:
    """Return the mean divergence from the teacher over the trained tokens, and its gradient with respect to the
    student's logits, by the teacher's share in the mixture."""
    labels = torch.where(padded(batch["mask"]).bool(), 0, -100)
    teacher = padded(batch["teacher_logits"])

    def divergence(beta: float) -> dict[str, Any]:
        options = dict(labels=labels, beta=beta, temperature=TEMPERATURE)
        return value_and_gradient(
            batch, lambda now: GKDTrainer.generalized_jsd_loss(now, teacher, **options), of="logits"
        )

    return {f"divergence/{beta}": divergence(beta) for beta in (0.0, 0.1, 0.5, 1.0)}


def logit_numbers() -> Numbers:
    """Return the log-probs and entropies of the logits (i·j mod 11) / 3 for token j at position i. The target at
    position i is token i.
    """
    logits = torch.tensor([[(i * j % 11) / 3 for j in range(13)] for i in range(5)], dtype=torch.float64)
    targets = torch.arange(5)
    return {
        "logits/log_prob": selective_log_softmax(logits, targets).tolist(),
        "logits/entropy": entropy_from_logits(logits).tolist(),
    }
