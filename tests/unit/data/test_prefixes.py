"""The tree of tokens shared by the samples of a pack."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.prefixes import SHORTEST_RUN, place_runs
from megarl.ops.shared_attention import pack_mask
from tests.packing import packing


def sample(name: str, prompt: Prompt, response: tuple[int, ...]) -> Sample:
    count = len(response)
    return Sample(name, prompt, response, (0.0,) * count, (True,) * count, (VersionRun(0, count),), "stop", "")


@st.composite
def branching(draw) -> list[Sample]:
    """Draw samples that continue part of an earlier sample or start from scratch."""
    source = random.Random(draw(st.integers(0, 10**6)))
    prompts = [Prompt(name, "", tuple(source.randrange(4) for _ in range(source.choice([1, 20])))) for name in "pq"]
    responses: dict[str, list[tuple[int, ...]]] = {"p": [()], "q": [()]}
    samples = []
    for i in range(draw(st.integers(1, 9))):
        prompt = source.choice(prompts)
        before = source.choice(responses[prompt.id])
        cut = source.choice([len(before), source.randrange(len(before) + 1)])
        response = before[:cut] + tuple(source.randrange(3) for _ in range(source.choice([0, 1, 15, 16, 17, 40])))
        responses[prompt.id].append(response)
        samples.append(sample(f"{i}", prompt, response))
    return samples


@given(branching(), st.sampled_from([1, 8]))
def test_samples_share_exactly_their_common_prefixes(samples, multiple):
    """A remainder shorter than SHORTEST_RUN may not be shared. The order is depth-first, as attention requires."""
    runs, end = place_runs(samples, packing(document_multiple=multiple))
    places = [[start + k for start, length in sample_runs for k in range(length)] for sample_runs in runs]
    ids = [[*item.prompt.token_ids.tolist(), *item.response_ids.tolist()] for item in samples]
    assert {place for sample_places in places for place in sample_places} == set(range(end))
    token_at: dict[int, int] = {}
    for sample_places, tokens in zip(places, ids, strict=True):
        assert len(sample_places) == -(-len(tokens) // multiple) * multiple
        assert sample_places == sorted(sample_places)
        pairs = zip(sample_places, tokens, strict=False)
        assert all(token_at.setdefault(place, token) == token for place, token in pairs)
    for i, one in enumerate(samples):
        for j, other in enumerate(samples[:i]):
            shared = len(set(places[i]) & set(places[j]))
            assert places[i][:shared] == places[j][:shared]
            if one.prompt.id != other.prompt.id:
                assert shared == 0
                continue
            common = next(
                (k for k, (a, b) in enumerate(zip(ids[i], ids[j], strict=False)) if a != b),
                min(len(ids[i]), len(ids[j])),
            )
            assert len(one.prompt.token_ids) <= shared <= common < shared + SHORTEST_RUN
    boundaries = np.cumsum([0, *map(len, places)])
    pack_mask(torch.tensor([place for sample_places in places for place in sample_places]), torch.tensor(boundaries))


def test_turns_of_a_rollout_appear_once_in_the_pack():
    prompt, turns = Prompt("p", "", range(30)), [tuple(range(100 * k, 100 * k + 20)) for k in range(1, 4)]
    samples = [sample(f"{k}", prompt, sum(turns[: k + 1], ())) for k in range(3)]
    runs, end = place_runs(samples, packing())
    assert end == 30 + 3 * 20
    assert runs == [[(0, 30), (30, 20)], [(0, 30), (30, 20), (50, 20)], [(0, 30), (30, 20), (50, 20), (70, 20)]]


@pytest.mark.parametrize(("common", "tokens"), [(SHORTEST_RUN - 1, 10 + 2 * 40), (SHORTEST_RUN, 10 + 2 * 40 - 16)])
def test_responses_share_prefixes_of_sufficient_length(common, tokens):
    prompt, begin = Prompt("p", "", range(10)), tuple(range(50, 50 + common))
    samples = [sample(f"{k}", prompt, begin + (1000 + k,) * (40 - common)) for k in range(2)]
    assert place_runs(samples, packing())[1] == tokens
    assert place_runs(samples, packing(shares_prompts=False))[1] == 2 * 50


@pytest.mark.parametrize("differs_at", [25, 39, None])
def test_tokens_with_different_routes_are_not_shared(differs_at):
    """Both samples start with the same 10 + 30 tokens."""
    prompt, begin = Prompt("p", "", range(10)), tuple(range(50, 80))
    samples = [sample(f"{k}", prompt, (*begin, 1000 + k)) for k in range(2)]
    routes = np.zeros((2, 41, 3, 2), np.int8)
    if differs_at is not None:
        routes[1, differs_at, 2] = 1
    routed = [replace(item, routes=item_routes) for item, item_routes in zip(samples, routes, strict=True)]
    shared = {25: 10, 39: 39, None: 40}[differs_at]  # 15 common tokens after the prompt are not shared
    assert place_runs(routed, packing())[1] == 2 * 41 - shared


@pytest.mark.parametrize(
    ("digests", "shared"), [(("a", "a"), 10 + 40), (("a", "b"), 10 + 20), (("a", None), 10 + 20), ((None, None), 50)]
)
def test_placeholders_of_different_images_are_not_shared(digests, shared):
    """After 20 tokens, each response has an image, or placeholders that the policy sampled as tokens."""
    prompt, response = Prompt("p", "", range(10)), (*range(50, 70), *[9] * 12, *range(70, 78))
    samples = [
        replace(
            sample(f"{k}", prompt, (*response, 1000 + k)),
            response_images=() if digest is None else (PromptImage(30, 12, (1, 6, 8), digest),),
        )
        for k, digest in enumerate(digests)
    ]
    assert place_runs(samples, packing())[1] == 2 * 51 - shared


def test_runs_do_not_split_images():
    """If routes differ within an image, no part of the image is shared."""
    prompt, response = Prompt("p", "", range(10)), (*range(50, 70), *[9] * 12, 5)
    routes = np.zeros((2, 43, 3, 2), np.int8)
    routes[1, 35] = 1
    samples = [
        replace(sample(f"{k}", prompt, response), response_images=(PromptImage(30, 12, (1, 6, 8), "a"),), routes=each)
        for k, each in enumerate(routes)
    ]
    assert place_runs(samples, packing())[1] == 2 * 43 - 30
