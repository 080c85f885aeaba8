"""The states of all random number generators of a trainer rank."""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megarl.core import device


def seed(value: int) -> None:
    """Seeds all generators; Megatron's follow from the rank's place in the layout, too."""
    random.seed(value)
    torch.manual_seed(value)
    model_parallel_cuda_manual_seed(value)


def seed_anew(value: int, num_updates: int) -> None:
    """Seeds ranks that go on after num_updates in a layout whose states were not saved. The seed is the same for every
    run that goes on from there, and differs from that of the start."""
    seed(random.Random(f"{value}.{num_updates}").getrandbits(31))


def capture() -> dict[str, Any]:
    """Return the states of Python's, torch's and the device's generator, and those that Megatron keeps for
    tensor-parallel regions."""
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "device": device.random_state(),
        "regions": get_cuda_rng_tracker().get_states(),
    }


def restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    device.set_random_state(states["device"])
    get_cuda_rng_tracker().set_states(states["regions"])
