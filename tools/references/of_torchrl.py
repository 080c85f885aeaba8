"""TorchRL's generalized advantages and discounted returns. TorchRL has no mask for tokens not trained on, so they are
left out, and each sample is a terminated trajectory."""

from __future__ import annotations

from typing import Any

import torch
from of_verl import GAMMA, LAMBDA
from torchrl.objectives.value.functional import generalized_advantage_estimate, reward2go


def numbers(batch: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, list[float]] = {"gae": [], "gae_returns": [], "to_go": []}
    for sample in range(len(batch["prompts"])):
        value, reward = (_trained(batch, name, sample) for name in ("values", "token_rewards"))
        if not len(value):
            continue
        reward[-1] += batch["rewards"][sample]
        following = torch.cat((value[1:], torch.zeros_like(value[:1])))
        done = torch.zeros_like(value, dtype=torch.bool)
        done[-1] = True
        advantage, returns = generalized_advantage_estimate(GAMMA, LAMBDA, value, following, reward, done)
        for name, own in (("gae", advantage), ("gae_returns", returns), ("to_go", reward2go(reward, done, GAMMA))):
            found[name] += own[:, 0].tolist()
    return found


def _trained(batch: dict[str, Any], name: str, sample: int) -> torch.Tensor:
    """Return a sample's values on trained tokens, as float64 [trained tokens, 1]."""
    own = zip(batch[name][sample], batch["mask"][sample], strict=True)
    return torch.tensor([value for value, trained in own if trained], dtype=torch.float64)[:, None]
