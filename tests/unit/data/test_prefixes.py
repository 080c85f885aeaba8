"""The tree of tokens that samples of a pack share."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.prefixes import SHORTEST_RUN, place_runs
from megarl.ops.shared_attention import pack_mask
from tests.packing import packing


def sample(name: str, prompt: Prompt, response: tuple[int, ...]) -> Sample:
    count = len(response)
    return Sample(name, prompt, response, (0.0,) * count, (True,) * count, (VersionRun(0, count),), "stop", "")


@st.composite
def branching(draw) -> list[Sample]:
    """Samples that go on from a part of an earlier one, or begin anew."""
    source = random.Random(draw(st.integers(0, 10**6)))
    prompts = [Prompt(name, "", tuple(source.randrange(4) for _ in range(source.choice([1, 20])))) for name in "pq"]
    responses: dict[str, list[tuple[int, ...]]] = {"p": [()], "q": [()]}
    samples = []
    for i in range(draw(st.integers(1, 9))):
        prompt = source.choice(prompts)
        before = source.choice(responses[prompt.id])
        kept = source.choice([len(before), source.randrange(len(before) + 1)])
        response = before[:kept] + tuple(source.randrange(3) for _ in range(source.choice([0, 1, 15, 16, 17, 40])))
        responses[prompt.id].append(response)
        samples.append(sample(f"{i}", prompt, response))
    return samples


@given(branching(), st.sampled_from([1, 8]))
def test_samples_share_what_they_begin_with(samples, multiple):
    """All of it but for less than a run of the shortest length, and nothing else; depth first, as attention asks."""
    runs, end = place_runs(samples, packing(document_multiple=multiple))
    places = [[start + k for start, length in own for k in range(length)] for own in runs]
    ids = [[*item.prompt.token_ids.tolist(), *item.response_ids.tolist()] for item in samples]
    assert {place for own in places for place in own} == set(range(end))
    standing: dict[int, int] = {}
    for own, tokens in zip(places, ids, strict=True):
        assert len(own) == -(-len(tokens) // multiple) * multiple
        assert own == sorted(own)
        assert all(standing.setdefault(place, token) == token for place, token in zip(own, tokens, strict=False))
    for i, one in enumerate(samples):
        for j, other in enumerate(samples[:i]):
            shared = len(set(places[i]) & set(places[j]))
            assert places[i][:shared] == places[j][:shared]
            if one.prompt.id != other.prompt.id:
                assert shared == 0
                continue
            alike = next(
                (k for k, (a, b) in enumerate(zip(ids[i], ids[j], strict=False)) if a != b),
                min(len(ids[i]), len(ids[j])),
            )
            assert len(one.prompt.token_ids) <= shared <= alike < shared + SHORTEST_RUN
    boundaries = np.cumsum([0, *map(len, places)])
    pack_mask(torch.tensor([place for own in places for place in own]), torch.tensor(boundaries))


def test_turns_of_a_rollout_stand_in_the_pack_once():
    prompt, turns = Prompt("p", "", range(30)), [tuple(range(100 * k, 100 * k + 20)) for k in range(1, 4)]
    samples = [sample(f"{k}", prompt, sum(turns[: k + 1], ())) for k in range(3)]
    runs, end = place_runs(samples, packing())
    assert end == 30 + 3 * 20
    assert runs == [[(0, 30), (30, 20)], [(0, 30), (30, 20), (50, 20)], [(0, 30), (30, 20), (50, 20), (70, 20)]]


@pytest.mark.parametrize(("alike", "tokens"), [(SHORTEST_RUN - 1, 10 + 2 * 40), (SHORTEST_RUN, 10 + 2 * 40 - 16)])
def test_responses_that_begin_alike_share_what_is_worth_it(alike, tokens):
    prompt, begin = Prompt("p", "", range(10)), tuple(range(50, 50 + alike))
    samples = [sample(f"{k}", prompt, begin + (1000 + k,) * (40 - alike)) for k in range(2)]
    assert place_runs(samples, packing())[1] == tokens
    assert place_runs(samples, packing(shares_prompts=False))[1] == 2 * 50


@pytest.mark.parametrize("differs_at", [25, 39, None])
def test_tokens_that_go_to_other_experts_are_not_shared(differs_at):
    """Two samples have the same 10 + 30 tokens, and then others."""
    prompt, begin = Prompt("p", "", range(10)), tuple(range(50, 80))
    samples = [sample(f"{k}", prompt, (*begin, 1000 + k)) for k in range(2)]
    routes = np.zeros((2, 41, 3, 2), np.int8)
    if differs_at is not None:
        routes[1, differs_at, 2] = 1
    routed = [replace(item, routes=own) for item, own in zip(samples, routes, strict=True)]
    shared = {25: 10, 39: 39, None: 40}[differs_at]  # 15 tokens after the prompt are no run
    assert place_runs(routed, packing())[1] == 2 * 41 - shared
