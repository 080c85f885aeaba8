"""Which samples share a microbatch, and which rank gets it. Pure arithmetic on lengths: the driver decides it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Microbatch = tuple[int, ...]
"""Indexes of the samples that are packed together; empty for a microbatch that only keeps ranks in step."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that are packed as one: those of one prompt, whose tokens then stand in the pack once."""

    samples: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one sample: the prompt that it belongs to, and its tokens."""

    prompt: str
    prompt_tokens: int
    response_tokens: int


def bundle(lengths: Sequence[Lengths], most_tokens: int, share_prompts: bool) -> list[Bundle]:
    """Bundles of at most most_tokens; without share_prompts, one sample each.

    Raises ValueError for a sample that alone has more: a sample is never split over microbatches.
    """
    bundles: list[Bundle] = []
    unfinished: dict[str, Bundle] = {}
    for index, item in enumerate(lengths):
        own = Bundle((index,), item.prompt_tokens + item.response_tokens)
        if own.num_tokens > most_tokens:
            raise ValueError(
                f"actor.tokens_per_microbatch={most_tokens}: sample {index} alone has {own.num_tokens} tokens; "
                f"a sample is never split over microbatches, so raise it to at least {own.num_tokens}"
            )
        begun = unfinished.get(item.prompt) if share_prompts else None
        if begun is not None and begun.num_tokens + item.response_tokens <= most_tokens:
            own = Bundle((*begun.samples, index), begun.num_tokens + item.response_tokens)
        elif begun is not None:
            bundles.append(begun)
        if share_prompts:
            unfinished[item.prompt] = own
        else:
            bundles.append(own)
    return bundles + list(unfinished.values())


def pack(bundles: Sequence[Bundle], token_budget: int) -> list[Microbatch]:
    """Packs bundles, the largest first, into as few microbatches as first-fit finds; none exceeds the budget."""
    members: list[list[int]] = []
    room: list[int] = []
    for item in sorted(bundles, key=lambda b: (-b.num_tokens, b.samples)):
        slot = next((i for i, free in enumerate(room) if free >= item.num_tokens), len(room))
        if slot == len(room):
            members.append([])
            room.append(token_budget)
        members[slot].extend(item.samples)
        room[slot] -= item.num_tokens
    return [tuple(sorted(indexes)) for indexes in members]


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Spreads items over ranks, the costliest first, each to the rank with the least so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        heapq.heappush(heap, (load + costs[index], rank))
    return [sorted(members) for members in ranks]


def schedule(
    lengths: Sequence[Lengths], token_budget: int, num_ranks: int, share_prompts: bool
) -> list[list[Microbatch]]:
    """Microbatches per data-parallel rank, equally many on each: pipeline schedules need that of all ranks.

    Every rank packs its own share, and the shorter lists are filled up with empty microbatches.
    """
    bundles = bundle(lengths, token_budget, share_prompts)
    shares = balance([item.num_tokens for item in bundles], num_ranks)
    packed = [pack([bundles[i] for i in share], token_budget) for share in shares]
    most = max(len(microbatches) for microbatches in packed)
    return [microbatches + [()] * (most - len(microbatches)) for microbatches in packed]
