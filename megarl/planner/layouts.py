"""Candidate layouts for a model on a given number of GPUs, and the rules that exclude invalid layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.divisors import divisors
from megarl.config.model_schema import Layout
from megarl.config.rules import layout as layout_rules
from megarl.config.rules.models import PLACED_RULES
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core.errors import UserError
from megarl.models.rules import check_model
from megarl.planner.hardware import Cluster

MAX_STAGES = 32
LARGEST_ENGINE = 32
SHORTEST_SHARE = 2048
"""Minimum number of tokens that each context-parallel rank receives from the longest sample. Splitting the sample
further does not speed up training."""


def replace_layout(config: Config, **sizes: Any) -> Config:
    """Return the recipe with the given keys replaced in actor.layout."""
    layout = config.actor.layout.model_copy(update=sizes)
    return config.model_copy(update={"actor": config.actor.model_copy(update={"layout": layout})})


def replace_engine(config: Config, **keys: Any) -> Config:
    """Return the recipe with the given keys replaced in the rollout section."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=keys)})


def broken_rules(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Return an error line for each rule that the actor's layout or the engines' layout breaks."""
    lines = [line for rule in layout_rules.RULES for line in rule("actor.layout.", config.actor.layout)]
    lines += [line for rule in PLACED_RULES for line in rule(config, config.actor)]
    return lines + _model_violations(config, hf_config)


def _model_violations(config: Config, hf_config: Mapping[str, Any]) -> list[str]:
    """Return an error line for each rule that the recipe breaks for a model with this config.json."""
    try:
        check_model(config, hf_config)
    except UserError as error:
        return str(error).splitlines()
    return []


class Sizes:
    """Powers of two that split the model evenly, for each kind of parallelism. refused: an error line for each power of
    two, up to the cluster's maximum, that does not split it evenly."""

    def __init__(self, config: Config, hf_config: Mapping[str, Any], model: ModelParameters, cluster: Cluster):
        """Find the valid sizes. Raise a UserError if the recipe breaks a rule in every layout."""
        self._config, self._hf_config = config, hf_config
        self.refused: list[str] = []
        raise_all(self._broken("actor.layout.tp", 1))
        self.tp = self._legal("actor.layout.tp", min(cluster.num_gpus, cluster.gpus_per_node))
        self.ep = self._legal("actor.layout.ep", cluster.num_gpus) if model.shape.experts else [1]
        largest = 1 if config.samples_images else min(cluster.num_gpus, LARGEST_ENGINE)
        self.engine = [] if config.is_offline else self._legal("rollout.tp", largest)

    def _legal(self, key: str, largest: int) -> list[int]:
        sizes = []
        for size in (2**power for power in range(largest.bit_length())):
            lines = [line for line in self._broken(key, size) if line.startswith(f"{key}={size}:")]
            self.refused += lines[:1]
            sizes += [] if lines else [size]
        return sizes

    def _broken(self, key: str, size: int) -> list[str]:
        one_rank = dict(tp=1, pp=1, vpp=1, cp=1, ep=1, etp=None, first_stage_layers=None, last_stage_layers=None)
        config = replace_layout(replace_engine(self._config, tp=1), **one_rank, sequence_parallel=False)
        name = key.rpartition(".")[2]
        if key == "rollout.tp":
            config = replace_engine(config, tp=size)
        elif name == "tp":
            config = replace_layout(config, tp=size, sequence_parallel=size > 1)
        else:
            config = replace_layout(config, ep=size, etp=1)
        return _model_violations(config, self._hf_config)


def training_layouts(
    longest: int, model: ModelParameters, sizes: Sizes, num_gpus: int, memory_bytes: float
) -> Iterator[Layout]:
    """Yield the layouts for `num_gpus` GPUs in which the weights and gradients alone may fit. Layout rules are not
    checked here because they need the full recipe. Use `broken_rules` to check them. longest: number of tokens in the
    longest sample or denoising step."""
    for tp in sizes.tp:
        if num_gpus % tp:
            continue
        for pp in (pp for pp in divisors(num_gpus // tp) if pp <= MAX_STAGES):
            stages = _stages(model.shape.num_layers, pp)
            if stages is None:
                continue
            for cp in (cp for cp in divisors(num_gpus // tp // pp) if cp == 1 or longest // cp >= SHORTEST_SHARE):
                if cp & (cp - 1):
                    continue
                for ep, etp in _expert_sizes(sizes, num_gpus // pp, tp):
                    if not _may_fit(model, tp, pp, ep * (tp if etp is None else etp), memory_bytes):
                        continue
                    for vpp in (1, 2) if pp > 1 else (1,):
                        yield Layout(
                            tp=tp,
                            pp=pp,
                            vpp=vpp,
                            cp=cp,
                            ep=ep,
                            etp=etp,
                            dp=num_gpus // tp // pp // cp,
                            sequence_parallel=tp > 1,
                            first_stage_layers=None,
                            last_stage_layers=stages or None,
                        )


def _expert_sizes(sizes: Sizes, ranks: int, tp: int) -> list[tuple[int, int | None]]:
    """Return the (ep, etp) pairs whose product divides the number of ranks in a pipeline stage."""
    pairs: list[tuple[int, int | None]] = [(1, None)]
    for ep in sizes.ep[1:]:
        pairs += [(ep, etp) for etp in sorted({1, tp}) if ranks % (ep * etp) == 0]
    return pairs


def _may_fit(model: ModelParameters, tp: int, pp: int, expert_ranks: int, memory_bytes: float) -> bool:
    """Return whether bfloat16 weights and float32 gradients fit, excluding the embedding and the output head."""
    shape = model.shape
    experts = 0
    if shape.experts is not None:
        experts = 3 * shape.hidden * shape.experts.intermediate * shape.experts.count * sum(shape.experts.layers)
    dense = model.count - experts - 2 * shape.vocab * shape.hidden
    return 6 * (dense / tp + experts / expert_ranks) / pp < memory_bytes


def stage_counts(num_layers: int, num_gpus: int) -> list[int]:
    """Return the numbers of pipeline stages into which the layers can be split on `num_gpus` GPUs."""
    return [pp for pp in divisors(num_gpus) if pp <= MAX_STAGES and _stages(num_layers, pp) is not None]


def _stages(num_layers: int, pp: int) -> int | None:
    """Return the number of layers in the last pipeline stage. Return 0 if the layers can be split evenly, and None if
    the earlier stages leave no layers for the last one."""
    per_stage = -(-num_layers // pp)
    last = num_layers - (pp - 1) * per_stage
    if num_layers % pp == 0:
        return 0
    return last if last > 0 else None
