"""Decides which samples share a microbatch, and which rank gets it: pure arithmetic on lengths, done by the driver."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megarl.core.errors import UserError
from megarl.core.types import SampleInfo
from megarl.models.token_cost import TokenCost

Microbatch = tuple[int, ...]
"""The indexes of the samples that are packed together; empty for a microbatch that only keeps ranks in step."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The way in which the ranks of one model want their samples packed.

    token_budget          most tokens of a microbatch, over the context-parallel ranks of a replica together
    num_ranks             data-parallel ranks
    shares_prompts        samples of one prompt that meet in a microbatch compute its tokens once
    document_multiple     every document is padded to a multiple of this
    pack_multiple         every pack is padded to a multiple of this
    microbatch_multiple   the number of microbatches is a multiple of this
    cost                  the cost by which ranks are balanced
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
    """The numbers of tokens of one sample, and the prompt whose tokens it begins with."""

    prompt: Hashable
    prompt_tokens: int
    response_tokens: int

    @classmethod
    def of(cls, info: SampleInfo) -> Lengths:
        return cls((info.prompt_id, info.beginning), info.num_prompt_tokens, info.num_response_tokens)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True)
class Bundle:
    """Samples that are packed as one: those of one prompt, whose tokens then stand in the pack once."""

    samples: tuple[int, ...]
    num_tokens: int
    cost: float


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Units = Sequence[Sequence[int]]
"""The indexes of samples that are never apart: all of a unit are in one microbatch. Every sample is in one of them."""


def schedule(lengths: Sequence[Lengths], packing: Packing, units: Units | None = None) -> list[list[Microbatch]]:
    """Returns the microbatches of each data-parallel rank, equally many on each, as pipeline schedules need it.

    They are as few as the rank that needs most of them can do with, and every rank spreads its share over all.

    units   None if each sample may be anywhere
    """
    shares = share_out(lengths, packing, units)
    fewest = max(len(pack(share, packing.token_budget)) for share in shares)
    count = round_up(fewest, packing.microbatch_multiple)
    return [spread(share, count, packing.token_budget) for share in shares]


def share_out(lengths: Sequence[Lengths], packing: Packing, units: Units | None = None) -> list[list[Bundle]]:
    """Returns the bundles of each data-parallel rank, as large as they may be without any rank waiting longer for
    another: a prompt whose samples are in two bundles is computed twice, but bundles of few prompts do not spread
    evenly over many ranks."""
    largest = max((len(item.samples) for item in bundle(lengths, packing, units=units)), default=1)
    sizes = [largest >> halvings for halvings in range(largest.bit_length())] if packing.num_ranks > 1 else [largest]
    candidates = []
    for size in sizes:
        bundles = bundle(lengths, packing, size, units)
        shares = balance([item.cost for item in bundles], packing.num_ranks)
        candidates.append([[bundles[i] for i in share] for share in shares])
    return min(candidates, key=lambda ranks: max(sum(item.cost for item in rank) for rank in ranks))


def bundle(
    lengths: Sequence[Lengths], packing: Packing, most_samples: int | None = None, units: Units | None = None
) -> list[Bundle]:
    """Returns bundles within the token budget, of at most `most_samples` samples or of one unit; unless prompts are
    shared, each is one unit.

    Raises UserError for a unit that alone has more tokens: it is never split over microbatches.
    """
    bundles: list[_Counts] = []
    unfinished: dict[Hashable, _Counts] = {}
    most = len(lengths) if most_samples is None else most_samples
    for unit in units or [(index,) for index in range(len(lengths))]:
        counts = _Counts.of(unit, lengths, packing)
        _check_fits(counts, packing)
        prompt = lengths[unit[0]]
        begun = unfinished.get(prompt.prompt) if packing.shares_prompts else None
        if begun is not None and begun.has_room(counts, prompt.prompt_tokens, most, packing.token_budget):
            begun.add(counts, prompt.prompt_tokens)
        else:
            bundles.append(counts)
            unfinished[prompt.prompt] = counts
    return [
        Bundle(
            tuple(item.samples), item.num_tokens, packing.cost.of(item.num_tokens, item.num_scored, item.num_attended)
        )
        for item in bundles
    ]


@dataclass(slots=True)
class _Counts:
    """The sizes of some samples of one prompt: their tokens in the pack, the scored ones, and the pairs of tokens of
    which one attends to the other."""

    samples: list[int]
    num_tokens: int
    num_scored: int
    num_attended: int

    @classmethod
    def of(cls, unit: Sequence[int], lengths: Sequence[Lengths], packing: Packing) -> _Counts:
        num_tokens = num_scored = num_attended = 0
        for index in unit:
            sample = lengths[index]
            total = sample.num_tokens
            num_tokens += sample.response_tokens if packing.shares_prompts else packing.padded(total)
            num_scored += sample.response_tokens
            num_attended += total * (total + 1) // 2
        prompt_tokens = lengths[unit[0]].prompt_tokens if packing.shares_prompts else 0
        return cls([*unit], prompt_tokens + num_tokens, num_scored, num_attended)

    def has_room(self, other: _Counts, prompt_tokens: int, most_samples: int, token_budget: int) -> bool:
        """Returns whether the other samples of the prompt may be added."""
        num_tokens = self.num_tokens + other.num_tokens - prompt_tokens
        return len(self.samples) + len(other.samples) <= most_samples and num_tokens <= token_budget

    def add(self, other: _Counts, prompt_tokens: int) -> None:
        """Adds other samples of the prompt, which stands in the pack once."""
        self.samples += other.samples
        self.num_tokens += other.num_tokens - prompt_tokens
        self.num_scored += other.num_scored
        self.num_attended += other.num_attended


def _check_fits(unit: _Counts, packing: Packing) -> None:
    needed = packing.padded(unit.num_tokens)
    if needed > packing.token_budget:
        what, kind = f"sample {unit.samples[0]} alone", "sample"
        if len(unit.samples) > 1:
            what, kind = f"the pair of samples {unit.samples[0]} and {unit.samples[1]}", "pair"
        raise UserError(
            f"tokens_per_microbatch: a microbatch holds {packing.token_budget} tokens, and {what} has {needed}; a "
            f"{kind} is never split over microbatches, so raise it to at least {needed} (divided by the "
            "context-parallel ranks)"
        )


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


def spread(bundles: Sequence[Bundle], count: int, token_budget: int) -> list[Microbatch]:
    """Returns `count` microbatches, of which the costliest costs little, as stages of a pipeline wait for it: the
    costliest bundle goes first, each into the one with the least to do that has room. Where a bundle finds no room,
    they are as `pack` makes them; `count` is no less than it needs."""
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
    """Spreads items over ranks, the costliest first, each to the rank with the least so far."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(heap)
        ranks[rank].append(index)
        heapq.heappush(heap, (load + costs[index], rank))
    return [sorted(members) for members in ranks]
