"""The routes of a sequence of turns, each of which knows those of all tokens before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.core.types import NO_ROUTE, Completion, Prompt, VersionRun
from megarl.environments.transcript import Transcript


def turn(start: int, count: int, number: int | None) -> Completion:
    """Tokens after `start` others; their routes, and those of all before them, are of experts `number` and the next."""
    completion = Completion([7] * count, [-1.0] * count, (VersionRun(number or 0, count),), "stop")
    if number is None:
        return completion
    routes = np.full((start + count, 3, 2), NO_ROUTE, np.int8)
    routes[:-1] = (number, number + 1)
    return replace(completion, routes=routes)


def sample(*numbers: int | None):
    """A sample of two prompt tokens, and turns of three with two tokens of context between them."""
    transcript = Transcript([1, 2])
    for index, number in enumerate(numbers):
        if index:
            transcript.add_context([8, 9])
        transcript.add_turn(turn(len(transcript.ids), 3, number))
    return transcript.sample("0", Prompt("p", "", [1, 2]), "", "0", None)


def test_tokens_keep_the_routes_by_which_what_follows_was_sampled():
    """A later turn tells those of the context, and of the last token before it, which the engine reads only then."""
    found = sample(10, 20)
    assert found.num_tokens == 10
    assert found.routes[:, 0, 0].tolist() == [10, 10, 10, 10, 20, 20, 20, 20, 20, NO_ROUTE]
    assert (found.routes[:, :, 1] == found.routes[:, :, 0] + (found.routes[:, :, 0] != NO_ROUTE)).all()


def test_a_turn_without_routes_leaves_its_tokens_to_later_ones():
    assert sample(None, 20).routes[:, 0, 0].tolist() == [20] * 9 + [NO_ROUTE]
    assert sample(10, None).routes[:, 0, 0].tolist() == [10] * 4 + [NO_ROUTE] * 6
    assert sample(None, None).routes is None
