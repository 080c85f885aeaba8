"""Expert routes of a sequence of turns. Each turn reports the routes of all tokens before it."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from megarl.core.completion import NO_ROUTE, Completion, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.environments.transcript import Context, Transcript


def turn(start: int, count: int, number: int | None) -> Completion:
    """Return a turn of `count` tokens after `start` tokens. All routes are experts `number` and `number + 1`."""
    completion = Completion([7] * count, [-1.0] * count, (VersionRun(number or 0, count),), "stop")
    if number is None:
        return completion
    routes = np.full((start + count, 3, 2), NO_ROUTE, np.int8)
    routes[:-1] = (number, number + 1)
    return replace(completion, routes=routes)


def sample(*numbers: int | None):
    """Return a sample with two prompt tokens and turns of three tokens, separated by two context tokens."""
    transcript = Transcript([1, 2])
    for index, number in enumerate(numbers):
        if index:
            transcript.add_context(Context([8, 9]))
        transcript.add_turn(turn(len(transcript.ids), 3, number))
    return transcript.sample("0", Prompt("p", "", [1, 2]), "", "0", None)


def test_tokens_keep_the_first_reported_routes():
    """A turn adds the routes of the previous turn's last token and of the context after it. The model processes these
    tokens only in that turn.
    """
    found = sample(10, 20)
    assert found.num_tokens == 10
    assert found.routes[:, 0, 0].tolist() == [10, 10, 10, 10, 20, 20, 20, 20, 20, NO_ROUTE]
    assert (found.routes[:, :, 1] == found.routes[:, :, 0] + (found.routes[:, :, 0] != NO_ROUTE)).all()


def test_turn_without_routes_gets_routes_of_later_turns():
    assert sample(None, 20).routes[:, 0, 0].tolist() == [20] * 9 + [NO_ROUTE]
    assert sample(10, None).routes[:, 0, 0].tolist() == [10] * 4 + [NO_ROUTE] * 6
    assert sample(None, None).routes is None


def test_sample_keeps_all_fields_of_its_prompt():
    prompt = Prompt("p", "text", [9, 2], "answer", ({"role": "user"},), {"a": 1}, (PromptImage(0, 1, (1, 2, 2), "d"),))
    transcript = Transcript([9, 2], prompt.images)
    transcript.add_turn(turn(2, 3, None))
    found = transcript.sample("0", prompt, "", "0", None).prompt
    for name in {item.name for item in fields(Prompt)} - {"token_ids"}:
        assert getattr(found, name) == getattr(prompt, name), name
    assert found.token_ids.tolist() == [9, 2]


def test_images_shift_with_their_tokens():
    """The sample ends with its last turn, before the last observation."""
    a, b, c = (PromptImage(1, 2, (1, 2, 4), digest) for digest in "abc")
    transcript = Transcript([1, 9, 9, 2], [a])
    transcript.add_turn(turn(4, 3, None))
    transcript.add_context(Context([5, 9, 9], (b,)))
    transcript.add_turn(turn(10, 3, None))
    transcript.add_context(Context([5, 9, 9], (c,)))
    found = transcript.sample("0", Prompt("p", "", [1, 9], images=(c,)), "", "0", None)
    assert found.prompt.images == (a,) and found.response_images == (replace(b, start=8),)
    assert found.num_tokens == 13 and found.response_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert transcript.images[2].start == 14
    assert transcript.prompt.short_ids == [1, 9, 2]


def test_context_is_cut_between_images():
    context = Context([9, 9, 1, 9], (PromptImage(0, 2, (1, 2, 4), "a"), PromptImage(3, 1, (1, 2, 2), "b")))
    assert context.before(3) == Context([9, 9, 1], context.images[:1])
    assert context.short_ids == [9, 1, 9]
    joined = Context([7], ()) + context
    assert joined.ids == [7, 9, 9, 1, 9] and [image.start for image in joined.images] == [1, 4]
