"""Random number generators on a trainer rank: seeding, and saving and restoring the RNG state."""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from megarl.core import device


def seed(value: int) -> None:
    """Seed all generators. Megatron's generators additionally depend on the rank's position in the layout."""
    random.seed(value)
    torch.manual_seed(value)
    model_parallel_cuda_manual_seed(value)


def reseed(value: int, num_updates: int) -> None:
    """Seed the generators of a run that resumes after `num_updates` updates, if the checkpoint has no RNG state for its
    layout. The seed is deterministic and differs from the initial seed."""
    seed(random.Random(f"{value}.{num_updates}").getrandbits(31))


def capture() -> dict[str, Any]:
    """Return the RNG state for Python, torch, the device and Megatron's tensor-parallel regions."""
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": device.random_state(),
        "regions": _regions().get_states(),
    }


def restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    device.set_random_state(states["device"])
    _regions().set_states(states["regions"])


def _regions() -> CudaRNGStatesTracker:
    return get_cuda_rng_tracker()  # pyright: ignore[reportReturnType]  # Megatron's global is inferred as None
