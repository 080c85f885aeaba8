"""Plans for layouts and weight transfers. Planning does not run anything."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.planner.hardware import headroom_of, read_cluster
from megarl.planner.plan import Planned, plan_recipe
from megarl.resharding.planning import preview
from megarl.resharding.planning.figures import Figures


def plan_layout(
    config: Config,
    gpus: str,
    *,
    gpus_per_node: int = 8,
    keep_layout: bool = False,
    headroom: float | None = None,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Planned:
    """Rank the layouts of a recipe that fit on the given GPUs by predicted step time, as `megarl plan` does.

    Args:
        gpus: number and type of the GPUs, such as "64xH100-80GB".
        keep_layout: evaluate the recipe's own layout instead of searching for others.
        headroom: fraction of each GPU's memory that stays free; 0.08 by default, and 0 with keep_layout.
        prompt_tokens: mean length of a prompt in tokens; 512 by default, or less if the context is short.
        response_tokens: mean length of a response in tokens; half of the maximum by default.

    Returns:
        The plans. `best` is the fastest one, with its complete recipe (`best.config`), the predicted seconds of each
        phase (`best.times`), and the memory of the fullest GPU in each phase (`best.loads`).

    Raises:
        UserError: no layout fits, or the recipe's own layout does not fit.
    """
    cluster = read_cluster(gpus, gpus_per_node, headroom_of(headroom, keep_layout))
    return plan_recipe(config, cluster, keep_layout, prompt_tokens, response_tokens)


def plan_reshard(
    model: str,
    source: str,
    destination: str,
    *,
    ranks_per_node: int = 8,
    bandwidth: str = "inter=50GB/s,intra=400GB/s",
    colocated: bool = False,
) -> Figures:
    """Plan the transfer of a model's weights between two layouts, and prove that every element of the destination is
    written exactly once, as `megarl reshard` does. No weights are read or moved.

    Args:
        model: a config.json, a model folder, or a Hub id in the local cache.
        source, destination: layouts such as "tp=8,pp=16,ep=32,dp=4", "vllm:tp=8,replicas=32" or "hf".
        bandwidth: per rank and direction, between and within nodes.
        colocated: whether rank i of both sides uses the same device; otherwise they are on different nodes.

    Raises:
        UserError: a layout is invalid or does not fit the model.
    """
    return preview.reshard(model, source, destination, ranks_per_node, bandwidth, colocated)
