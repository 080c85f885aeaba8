"""Requests whose responses start with a prefix of the given response."""

from __future__ import annotations

import pytest

from megarl.config.load import load
from megarl.core.prompt import Prompt
from megarl.data.prompts import GivenResponse
from megarl.step.requests import requests
from tests.paths import BASE

LENGTHS = {"a": 8, "b": 1}
RESPONSES = {name: GivenResponse(range(10, 10 + n), (True,) * n, "") for name, n in LENGTHS.items()}
PROMPTS = [Prompt(name, "", (1, 2)) for name in LENGTHS]


@pytest.mark.parametrize(("share", "longest"), [(0.5, 4), (1.0, 7)])
def test_prefixes_are_drawn_uniformly_for_each_group(share, longest):
    keys = ("rollout.max_new_tokens=20", "batch.samples_per_prompt=3", "algorithm.advantage.estimator=remax")
    data = "data={source: rows.jsonl, response_column: solution}"
    config = load(BASE, ["model.path=m", data, *keys, f"rollout.prefix_share={share}"])
    lengths = []
    for number in range(200):
        groups = requests(config, number, PROMPTS, responses=RESPONSES)
        assert groups == requests(config, number, PROMPTS, responses=RESPONSES)
        [prefix], [empty] = ({request.prefix for request in group} for group in groups)
        assert prefix == tuple(range(10, 10 + len(prefix))) and empty == ()
        limits = {request.max_new_tokens for request in groups[0]}
        assert limits == {20 - len(prefix) if prefix else None} and len(groups[0]) == 4
        assert len({request.seed for request in groups[0]}) == 4 and len({r.sample_id for r in groups[0]}) == 4
        lengths.append(len(prefix))
    counts = [lengths.count(length) for length in range(longest + 1)]
    assert sum(counts) == 200 and min(counts) > 0.4 * 200 / (longest + 1)
    without = load(BASE, ["model.path=m", "data.source=rows.jsonl", *keys])
    assert not any(request.prefix for group in requests(without, 1, PROMPTS) for request in group)


def test_prefixes_do_not_end_inside_other_messages():
    response = GivenResponse(range(10, 18), (True, True, False, False, False, True, True, True), "")
    config = load(
        BASE, ["model.path=m", "data={source: rows.jsonl, response_column: solution}", "rollout.prefix_share=1"]
    )
    drawn = {
        len(group[0].prefix)
        for number in range(100)
        for group in requests(config, number, PROMPTS[:1], responses={"a": response})
    }
    assert drawn == {0, 1, 5, 6, 7}
