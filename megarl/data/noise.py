"""Noise that depends only on the seed, the sample and the denoising step."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
import torch


def standard_normal(seed: int, sample_id: str, step: int | Literal["start"], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the noise of a denoising step, float32 on the CPU. `step` is "start" for the initial latents.

    torch's CPU generator keeps only 32 bits of a seed, so some of a run's millions of draws would be identical. Philox
    uses a key of 128 bits.
    """
    digest = hashlib.sha256(f"{seed} {step} {sample_id}".encode()).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return torch.from_numpy(random.standard_normal(shape, np.float32))
