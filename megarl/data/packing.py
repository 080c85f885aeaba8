"""Assigns samples to microbatches and microbatches to ranks; pure arithmetic on lengths, run by the driver."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megarl.core.errors import UserError
from megarl.core.sample import SampleRef
from megarl.models.token_cost import TokenCost

Microbatch = tuple[int, ...]
"""Indices of samples packed together. Empty microbatches let a rank run as many microbatches as the other ranks."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The packing requirements of a model's ranks.

    Attributes:
        token_budget: maximum number of tokens in a microbatch, summed over the context-parallel ranks of a replica.
        shares_prompts: whether samples of one prompt in the same microbatch compute its tokens only once.
        document_multiple: every document is padded to a multiple of this.
        pack_multiple: every pack is padded to a multiple of this.
        microbatch_multiple: the number of microbatches is a multiple of this.
        cost: cost model used to balance ranks.
    """

    token_budget: int
    num_ranks: int
    shares_prompts: bool
    document_multiple: int
    pack_multiple: int
    microbatch_multiple: int
    cost: TokenCost

    def padded(self, num_tokens: int) -> int:
        return round_up(num_tokens, self.document_multiple)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of a sample or denoising step, the patch grids of its images and its prompt key. Samples with equal
    keys share their prompt tokens and images."""

    prompt: Hashable
    prompt_tokens: int
    response_tokens: int
    patch_grids: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, sample: SampleRef) -> Lengths:
        if sample.step is not None:
            return cls((sample.id, sample.step), 0, sample.tokens_per_step)
        counts = sample.num_prompt_tokens, sample.num_response_tokens
        return cls((sample.prompt_id, sample.beginning), *counts, sample.patch_grids)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples of one prompt that are packed as one unit, so that they can share the prompt's tokens and images."""

    samples: tuple[int, ...]
    num_tokens: int
    cost: float


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Units = Sequence[Sequence[int]]
"""A partition of the samples into units. The samples of a unit, given by index, are packed into one microbatch."""


def schedule(lengths: Sequence[Lengths], packing: Packing, units: Units | None = None) -> list[list[Microbatch]]:
    """Return the microbatches for each data-parallel rank. Every rank gets the same number of microbatches, as pipeline
    schedules require: the smallest number that suffices for all ranks. Each rank spreads its samples across all of its
    microbatches. `units` is None if every sample may be placed independently."""
    shares = share_out(lengths, packing, units)
    fewest = max(len(pack(share, packing.token_budget)) for share in shares)
    count = round_up(fewest, packing.microbatch_multiple)
    return [spread(share, count, packing.token_budget) for share in shares]


def share_out(lengths: Sequence[Lengths], packing: Packing, units: Units | None = None) -> list[list[Bundle]]:
    """Return the bundles for each data-parallel rank, with the bundle size that minimizes the cost of the busiest rank.
    Large bundles save work, since a prompt is computed once for each bundle that contains its samples. But a few large
    bundles do not spread evenly over many ranks."""
    largest = max((len(item.samples) for item in bundle(lengths, packing, units=units)), default=1)
    sizes = [largest >> halvings for halvings in range(largest.bit_length())] if packing.num_ranks > 1 else [largest]
    candidates = []
    for size in sizes:
        bundles = bundle(lengths, packing, size, units)
        shares = balance([item.cost for item in bundles], packing.num_ranks)
        candidates.append([[bundles[i] for i in share] for share in shares])
    return min(candidates, key=lambda ranks: max(sum(item.cost for item in rank) for rank in ranks))


def bundle(
    lengths: Sequence[Lengths], packing: Packing, max_samples: int | None = None, units: Units | None = None
) -> list[Bundle]:
    """Return bundles within the token budget, of at most `max_samples` samples each, unless a single unit has more.
    Without prompt sharing, each unit is a bundle, except that units of a prompt with images are bundled to share its
    images. Raise a UserError if a single unit exceeds the token budget. Units are never split across microbatches."""
    bundles: list[_Counts] = []
    unfinished: dict[Hashable, _Counts] = {}
    limit = len(lengths) if max_samples is None else max_samples
    for unit in units or [(index,) for index in range(len(lengths))]:
        counts = _Counts.of(unit, lengths, packing)
        _check_fits(counts, packing)
        prompt = lengths[unit[0]]
        open_bundle = unfinished.get(prompt.prompt) if packing.shares_prompts or prompt.patch_grids else None
        shared_tokens = prompt.prompt_tokens if packing.shares_prompts else 0
        if open_bundle is not None and open_bundle.has_room(counts, shared_tokens, limit, packing.token_budget):
            open_bundle.add(counts, shared_tokens)
        else:
            bundles.append(counts)
            unfinished[prompt.prompt] = counts
    return [
        Bundle(
            tuple(item.samples),
            item.num_tokens,
            packing.cost.of(item.num_tokens, item.num_scored, item.num_attended) + item.image_cost,
        )
        for item in bundles
    ]


@dataclass(slots=True)
class _Counts:
    """Counts for a set of samples of one prompt: tokens in the pack, scored tokens, attended token pairs, and the cost
    of the prompt's images. A microbatch encodes an image once."""

    samples: list[int]
    num_tokens: int
    num_scored: int
    num_attended: float
    image_cost: float

    @classmethod
    def of(cls, unit: Sequence[int], lengths: Sequence[Lengths], packing: Packing) -> _Counts:
        num_tokens = num_scored = num_attended = 0
        for index in unit:
            sample = lengths[index]
            total = sample.num_tokens
            num_tokens += sample.response_tokens if packing.shares_prompts else packing.padded(total)
            num_scored += sample.response_tokens
            num_attended += packing.cost.pairs(total)
        first = lengths[unit[0]]
        prompt_tokens = first.prompt_tokens if packing.shares_prompts else 0
        image_cost = packing.cost.of_images(first.patch_grids)
        return cls([*unit], prompt_tokens + num_tokens, num_scored, num_attended, image_cost)

    def has_room(self, other: _Counts, shared_tokens: int, max_samples: int, token_budget: int) -> bool:
        """Return whether `other`, a set of samples of the same prompt, can be added within the limits."""
        num_tokens = self.num_tokens + other.num_tokens - shared_tokens
        return len(self.samples) + len(other.samples) <= max_samples and num_tokens <= token_budget

    def add(self, other: _Counts, shared_tokens: int) -> None:
        """Add other samples of the same prompt, counting shared tokens and the prompt's images once."""
        self.samples += other.samples
        self.num_tokens += other.num_tokens - shared_tokens
        self.num_scored += other.num_scored
        self.num_attended += other.num_attended


def _check_fits(unit: _Counts, packing: Packing) -> None:
    needed = packing.padded(unit.num_tokens)
    if needed > packing.token_budget:
        subject, kind = f"sample {unit.samples[0]}", "sample"
        if len(unit.samples) > 1:
            subject, kind = f"the pair of samples {unit.samples[0]} and {unit.samples[1]}", "pair"
        raise UserError(
            f"tokens_per_microbatch: a microbatch can hold {packing.token_budget} tokens, but {subject} has {needed} "
            f"tokens, and a {kind} is never split across microbatches. Fix: raise tokens_per_microbatch to at least "
            f"{needed} / cp, where cp is the number of context-parallel ranks"
        )


def pack(bundles: Sequence[Bundle], token_budget: int) -> list[Microbatch]:
    """Pack bundles into microbatches within the budget by first-fit decreasing."""
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


def spread(bundles: Sequence[Bundle], count: int, token_budget: int) -> list[Microbatch]:
    """Spread bundles evenly across `count` microbatches, because pipeline stages wait for the most expensive one.
    Bundles are placed in order of decreasing cost, each into the cheapest microbatch with enough room. If a bundle does
    not fit anywhere, fall back to `pack`, which needs at most `count` microbatches."""
    members: list[list[int]] = [[] for _ in range(count)]
    room, loads = [token_budget] * count, [0.0] * count
    for item in sorted(bundles, key=lambda b: (-b.cost, b.samples)):
        slots = [i for i, free in enumerate(room) if free >= item.num_tokens]
        if not slots:
            packed = pack(bundles, token_budget)
            return packed + [()] * (count - len(packed))
        slot = min(slots, key=loads.__getitem__)
        members[slot].extend(item.samples)
        room[slot] -= item.num_tokens
        loads[slot] += item.cost
    return [tuple(sorted(indexes)) for indexes in members]


def balance(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Assign items to ranks in order of decreasing cost, each to the rank with the least total cost so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        heapq.heappush(heap, (load + costs[index], rank))
    return [sorted(members) for members in ranks]
