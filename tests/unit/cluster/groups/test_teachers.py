"""A teacher's samples are those of its sources, each assigned to one data-parallel rank."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megarl.cluster.groups.teachers import TeacherGroup
from megarl.cluster.pending import ready
from megarl.config.model_schema import Teacher
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from tests.packing import packing

SOURCES = {"p0": "math", "p1": "code", "p2": "math", "p3": None}


def sample(prompt: str, k: int) -> SampleRef:
    return SampleRef(f"{prompt}.{k}", prompt, 5, 3, 3, "stop", 0, 0, sample=f"{prompt}.{k}")


SAMPLES = [sample(prompt, k) for prompt in SOURCES for k in range(2)]


@pytest.mark.parametrize(
    ("sources", "prompts"), [(None, "0123"), (["math"], "02"), (["code", "math"], "012"), (["physics"], "")]
)
def test_samples_of_the_teachers_sources_are_scored(monkeypatch, sources, prompts) -> None:
    group = object.__new__(TeacherGroup)
    group._teacher, group._prompts = Teacher(name="t", path="x", sources=sources), None
    group.packing, group._data_parallel_ranks = packing(num_ranks=2), [0, 0, 1, 1]
    calls: list[list[str]] = []

    def on_each(arguments):
        calls.extend([item.id for item in batch.samples] for (batch,) in arguments)
        return ready({name: "log-probs" for of_rank in calls for name in of_rank})

    monkeypatch.setattr(TeacherGroup, "_score_tokens", SimpleNamespace(on_each=on_each))
    rows = [Prompt(name, "", np.empty(0, np.int32), columns={"kind": source}) for name, source in SOURCES.items()]
    group.select(rows, "kind")
    expected = {f"p{prompt}.{k}" for prompt in prompts for k in range(2)}
    assert group.score_tokens(SAMPLES).result().keys() == expected
    if expected:
        assert calls[0] == calls[1] and calls[2] == calls[3] and sorted(calls[0] + calls[2]) == sorted(expected)
    else:
        assert calls == []
