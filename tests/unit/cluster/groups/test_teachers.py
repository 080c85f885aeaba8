"""A teacher's samples are those of its sources, each assigned to one data-parallel rank."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.cluster.groups.teachers import ScoredPrompts, SelfTeacher, TeacherEngineGroup, TeacherGroup
from megarl.cluster.pending import ready
from megarl.cluster.rank_batch import FetchedBatches, RankBatch, ScoreRef
from megarl.config.load import load
from megarl.config.model_schema import Teacher
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.errors import UserError
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.data.prompts import PromptSet
from tests.packing import packing
from tests.paths import BASE

SOURCES = {"p0": "math", "p1": "code", "p2": "math", "p3": None}


def sample(prompt: str, k: int) -> SampleRef:
    return SampleRef(f"{prompt}.{k}", prompt, 5, 3, 3, "stop", 0, 0, sample=f"{prompt}.{k}")


KEYS = [
    *("model.path=m", "data.source=rows.jsonl", "data.source_column=kind"),
    *("rollout.context_length=64", "rollout.max_new_tokens=32"),
]
ROWS = tuple(Prompt(name, "", [7, i], columns={"kind": source}) for i, (name, source) in enumerate(SOURCES.items()))
SAMPLES = [sample(prompt, k) for prompt in SOURCES for k in range(2)]


@pytest.mark.parametrize(
    ("sources", "prompts"), [(None, "0123"), (["math"], "02"), (["code", "math"], "012"), (["physics"], "")]
)
def test_samples_of_the_teachers_sources_are_scored(monkeypatch, sources, prompts) -> None:
    group = object.__new__(TeacherGroup)
    teacher = Teacher(name="t", path="x", sources=sources)
    group.prompts = ScoredPrompts(teacher).among(PromptSet(ROWS, "hash"), load(BASE, KEYS))
    group.packing, group._data_parallel_ranks = packing(num_ranks=2), [0, 0, 1, 1]
    calls: list[list[str]] = []

    def on_each(arguments):
        calls.extend([item.id for item in batch.samples] for (batch,) in arguments)
        return ready({name: "log-probs" for of_rank in calls for name in of_rank})

    monkeypatch.setattr(TeacherGroup, "_score_tokens", SimpleNamespace(on_each=on_each))
    expected = {f"p{prompt}.{k}" for prompt in prompts for k in range(2)}
    assert group.score_tokens(SAMPLES).result().keys() == expected
    if expected:
        assert calls[0] == calls[1] and calls[2] == calls[3] and sorted(calls[0] + calls[2]) == sorted(expected)
    else:
        assert calls == []


def test_teacher_in_vllm_receives_privileged_prompts(monkeypatch) -> None:
    group = object.__new__(TeacherEngineGroup)
    hinted = Teacher(name="t", path="x", engine="vllm", prompt_column="hint")
    group.prompts = ScoredPrompts(hinted).among(DATA, load(BASE, KEYS))
    call = SimpleNamespace(method="score", on=lambda *arguments: arguments)
    monkeypatch.setattr(TeacherEngineGroup, "_score", call)
    monkeypatch.setattr(group, "_route_samples", lambda phase, samples, method, start: start("engine", samples))
    _, samples, privileged = group.score_tokens(SAMPLES)
    assert [item.id for item in samples] == ["p0.0", "p0.1", "p2.0", "p2.1", "p3.0", "p3.1"]
    assert privileged == {item.id: HINTS[item.prompt_id] for item in samples}


HINTS = {name: np.arange(10 + i, dtype=np.int32) for i, name in enumerate(("p0", "p2", "p3"))}
DATA = PromptSet(ROWS, "hash", privileged={"hint": HINTS})


class Actor:
    """A fake TrainerGroup that returns the same log-probs for every sample."""

    packing = packing(num_ranks=2)

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[RankBatch]]] = []

    def score_as_teacher(self, teacher, batches):
        self.calls.append((teacher, batches))
        return ready({item.id: "log-probs" for batch in batches for item in batch.samples})


def test_self_teacher_scores_rows_with_privileged_prompts() -> None:
    actor = Actor()
    teacher = SelfTeacher(Teacher(name="t", prompt_column="hint", sources=["math", "code"]), actor)
    teacher.prompts = teacher.prompts.among(DATA, load(BASE, KEYS))
    assert teacher.score_tokens(SAMPLES).result().keys() == {"p0.0", "p0.1", "p2.0", "p2.1"}
    [(name, batches)] = actor.calls
    assert name == "t"
    lengths = {item.id: item.num_prompt_tokens for batch in batches for item in batch.samples}
    assert lengths == {"p0.0": 10, "p0.1": 10, "p2.0": 11, "p2.1": 11}
    assert all(batch.privileged.keys() == {item.id for item in batch.samples} for batch in batches)
    assert teacher.score_tokens(SAMPLES[2:4]).result() == {} and len(actor.calls) == 1


def played(prompt: Prompt, number: int, ids: tuple[int, ...], num_tokens: int = 3) -> SampleRef:
    """Return sample `number` of a rollout; it starts with these tokens."""
    info = RolloutInfo("done", 1, 2, {}, 0, 0)
    episode = Episode(info, (), {}, None, (), first_turn=0, is_last=number == 1)
    rollout = f"{prompt.id}.0"
    name = rollout if number == 0 else f"{rollout}/{number}"
    values = (5,) * num_tokens, (-1.0,) * num_tokens, (True,) * num_tokens, (VersionRun(0, num_tokens),)
    sample = Sample(name, replace(prompt, token_ids=ids), *values, "stop", "", rollout_id=rollout, episode=episode)
    return SampleRef.of(sample)


def test_later_samples_of_a_rollout_are_skipped() -> None:
    """Later samples of a rollout are skipped, as are samples that are too long with the privileged prompt."""
    row = ROWS[0]
    first, second = played(row, 0, (7, 0)), played(row, 1, (7, 0, 5, 5))
    assert first.beginning != second.beginning
    scored = ScoredPrompts(Teacher(name="t", prompt_column="hint")).among(DATA, load(BASE, KEYS))
    [batch] = scored.batches([first, second], packing())
    assert [item.id for item in batch.samples] == ["p0.0"]
    assert scored.batches([played(row, 0, (7, 0), 54)], packing()) != []
    assert scored.batches([played(row, 0, (7, 0), 55)], packing()) == []
    message = "teachers.models: t with prompt_column=hint: the environment started a rollout of p0 with a prompt"
    with pytest.raises(UserError, match=re.escape(message)):
        scored.batches([played(row, 0, (7, 1))], packing())


@pytest.mark.parametrize("keys", [{}, {"prompt_column": "hint"}])
def test_samples_with_tokens_beyond_the_embedding_are_skipped(keys) -> None:
    """The largest ids are 7 in the first and last rows, and 9 and 8 in the second row's prompt and response."""
    scored = ScoredPrompts(Teacher(name="t", path="x", **keys), vocab_size=8).among(DATA, load(BASE, KEYS))
    row, runs = ROWS[0], (VersionRun(0, 1),)
    ids = {"a": ((1, 7), 2), "b": ((1, 9), 2), "c": ((1, 2), 8), "d": ((1, 2), 7)}
    samples = [
        Sample(name, replace(row, token_ids=prompt), (token,), (-1.0,), (True,), runs, "stop", "")
        for name, (prompt, token) in ids.items()
    ]
    [batch] = scored.batches([SampleRef.of(sample) for sample in samples], packing())
    assert [item.id for item in batch.samples] == ["a", "d"]


def test_privileged_prompts_replace_prompts_and_routes(monkeypatch) -> None:
    """The same samples keep their own prompts in other passes of the step."""
    prompt, runs = ROWS[0], (VersionRun(0, 3),)
    routes = np.zeros((5, 2, 1), np.int8)
    sample = Sample("p0.0", prompt, (4, 5, 6), (-1.0,) * 3, (True, False, True), runs, "stop", "", routes=routes)
    monkeypatch.setattr("megarl.cluster.rank_batch._get", lambda refs: dict.fromkeys(refs, sample))
    [own] = RankBatch.split([replace(sample.ref, sample="ref")], packing())
    [batch] = RankBatch.split_privileged([replace(sample.ref, sample="ref")], packing(), {"p0.0": HINTS["p0"]})
    fetched = FetchedBatches()
    for _ in range(2):
        assert fetched.fetch(own).samples[0].sample is sample
        [item] = fetched.fetch(batch).samples
        assert item.sample.token_ids.tolist() == [*range(10), 4, 5, 6] and item.sample.routes is None
        assert item.num_prompt_tokens == 10
        assert item.sample.response_mask.tolist() == [True, False, True]


def test_feedback_belongs_to_a_single_sample(monkeypatch) -> None:
    """Samples without feedback, and those that are too long with it, are skipped. The remaining samples share no
    prompt."""
    prompts = {"p0.0": range(20), "p0.1": range(20, 40), "p1.0": range(62)}
    store = torch.tensor([token for ids in prompts.values() for token in ids], dtype=torch.int32)
    bounds = {"p0.0": (0, 20), "p0.1": (20, 40), "p1.0": (40, 102)}
    feedback = {"t": {name: ScoreRef("stored", *bound) for name, bound in bounds.items()}, "other": {}}
    told = ScoredPrompts(Teacher(name="t", feedback=["check"])).among(DATA, load(BASE, KEYS))
    [batch] = told.batches(SAMPLES, packing(), feedback)
    lengths = {item.id: item.num_prompt_tokens for item in batch.samples}
    assert lengths == {"p0.0": 20, "p0.1": 20} and len({item.beginning for item in batch.samples}) == 2
    run = (VersionRun(0, 3),)
    whole = [Sample(name, ROWS[0], (4, 5, 6), (-1.0,) * 3, (True,) * 3, run, "stop", "") for name in lengths]
    objects = {"stored": store} | {sample.id: sample for sample in whole}
    monkeypatch.setattr("megarl.cluster.rank_batch._get", lambda refs: {ref: objects[ref] for ref in refs})
    for item in batch.fetch_samples():
        assert item.sample.token_ids.tolist() == [*prompts[item.id], 4, 5, 6]
    assert told.batches(SAMPLES, packing(), {}) == told.batches(SAMPLES[2:], packing(), {"other": {}}) == []
