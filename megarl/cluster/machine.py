"""What a run asks of the devices of this machine, checked before anything starts."""

from __future__ import annotations

from megarl import device
from megarl.config.schema import Config
from megarl.config.violations import raise_all


def check_machine(config: Config) -> None:
    """Raises ValueError with a line for each thing that the devices do not allow."""
    raise_all([weights_reach_the_engines(config), parameters_can_move(config)])


def weights_reach_the_engines(config: Config) -> str | None:
    if not device.on_cuda() or config.rollout.transport != "shared_memory":
        return None
    return (
        "rollout.transport=shared_memory: this machine has a CUDA device, and in its memory engines cannot read the "
        "weights where they lie; set rollout.transport=p2p"
    )


def parameters_can_move(config: Config) -> str | None:
    """The actor's, from where the engines read them."""
    if device.on_cuda() or "parameters" not in config.actor.offload:
        return None
    return (
        f"actor.offload={config.actor.offload}: without a GPU the actor's parameters are in host memory already, where "
        "the engines read them; leave parameters out"
    )
