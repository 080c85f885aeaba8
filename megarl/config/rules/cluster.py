"""The rules of the section cluster, where roles may be given devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.config.schema import Config
from megarl.core.spans import overlap


def all_roles_are_given_devices_or_none(config: Config) -> str | None:
    given, roles = config.cluster.roles.spans, config.num_ranks
    if not given or given.keys() == roles.keys():
        return None
    missing, strange = [r for r in roles if r not in given], [r for r in given if r not in roles]
    problem = f"{', '.join(missing)} missing" if missing else f"the run has no {', '.join(strange)}"
    return f"cluster.roles: {problem}; give devices to all of {', '.join(roles)} and to no other, or to none"


def each_rank_has_a_device(config: Config) -> str | None:
    return "\n".join(_wrong_sizes(config)) or None


def _wrong_sizes(config: Config) -> Iterator[str]:
    """Yields a line for each role whose devices are more or fewer than its ranks."""
    ranks = config.num_ranks
    for role, span in config.cluster.roles.spans.items():
        if role in ranks and len(span) != ranks[role]:
            key = "rollout.replicas x rollout.tp" if role == "rollout" else f"{role}.layout"
            yield (
                f"{_shown(role, span)}: {len(span)} devices, and {key} makes {ranks[role]} ranks, one on each; set "
                f"{_shown(role, range(span.start, span.start + ranks[role]))}, or another layout"
            )


def engines_are_where_placement_says(config: Config) -> str | None:
    """Colocated, engines read the weights of the actor on their own devices; else no model is on them."""
    spans = config.cluster.roles.spans
    if config.is_offline or spans.keys() != config.num_ranks.keys():
        return None
    engines, actor = spans.pop("rollout"), spans["actor"]
    if config.is_colocated and engines.start != actor.start:
        return (
            f"{_shown('rollout', engines)}: colocated engines begin on the actor's first device, and "
            f"{_shown('actor', actor)}; let both begin there, or set cluster.placement=disaggregated"
        )
    shared = [] if config.is_colocated else [role for role, span in spans.items() if overlap(engines, span)]
    if not shared:
        return None
    return (
        f"{_shown('rollout', engines)}: disaggregated engines share devices with no model, and "
        f"{_shown(shared[0], spans[shared[0]])}; give them others, or set cluster.placement=colocated"
    )


def _shown(role: str, span: range) -> str:
    return f"cluster.roles.{role}={span.start}-{span.stop - 1}"


RULES: tuple[Callable[[Config], str | None], ...] = (
    all_roles_are_given_devices_or_none,
    each_rank_has_a_device,
    engines_are_where_placement_says,
)
