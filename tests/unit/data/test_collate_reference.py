"""Collated tensors match a plain loop over tokens, bit for bit."""

from __future__ import annotations

from dataclasses import fields

import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.completion import CandidateIds, VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Baseline
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import collate
from megarl.data.packing import Packing
from tests.packing import packing
from tests.samples import training_ref

NUMBERS = st.floats(-1e6, 1e6)
LOGPROBS = st.floats(-50, 0, width=32)


@st.composite
def training_samples(draw) -> list[SampleRef]:
    prompts = [Prompt(name, "", draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))) for name in "pqr"]
    return [draw(training_sample(f"{i}", prompts)) for i in range(draw(st.integers(0, 6)))]


@st.composite
def training_sample(draw, name: str, prompts: list[Prompt]) -> SampleRef:
    n = draw(st.integers(0, 7))
    candidates = [draw(st.lists(st.integers(0, 99), max_size=3)) for _ in range(n)] if draw(st.booleans()) else None
    labels = draw(st.none() | st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n))
    sample = Sample(
        id=name,
        prompt=draw(st.sampled_from(prompts)),
        response_ids=draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)),
        response_logprobs=draw(st.lists(LOGPROBS, min_size=n, max_size=n)),
        response_mask=draw(st.lists(st.booleans(), min_size=n, max_size=n)),
        versions=(VersionRun(0, n),),
        finish_reason="stop",
        text="",
        candidate_ids=None if candidates is None else CandidateIds.of(candidates),
        labels=labels,
    )
    reward, *baseline, weight, imitation = draw(st.lists(NUMBERS, min_size=7, max_size=7))
    scores = {"old": torch.randn(n, generator=torch.Generator().manual_seed(n))}
    return training_ref(sample, reward, Baseline(*baseline), weight, scores, imitation)


PACKINGS = st.builds(
    packing, st.integers(1, 8), st.booleans(), document_multiple=st.integers(1, 8), token_budget=st.just(10**6)
)


@given(training_samples(), PACKINGS, st.sampled_from(["states", "tokens"]), st.booleans())
def test_collate_equals_a_loop_over_tokens(samples, layout, reads, truncates):
    scores = {item.sample.id: item.scores["old"] for item in samples}
    batch = collate(samples, layout, reads, truncates, old=scores)
    reference = loop(samples, layout, reads, truncates, scores)
    for field in fields(TokenBatch):
        actual, expected = getattr(batch, field.name), reference.get(field.name)
        if expected is None:
            assert actual == field.default, field.name
        else:
            assert actual.dtype is expected.dtype and torch.equal(actual, expected), field.name


def loop(
    samples: list[SampleRef], layout: Packing, reads: str, truncates: bool, old: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the batch's tensors by field; a field that the batch does not have is None or missing."""
    tokens, positions, prompt_places = [], [], {}

    def append(ids: list[int], first_position: int) -> list[int]:
        places = [*range(len(tokens), len(tokens) + len(ids))]
        tokens.extend(ids)
        positions.extend(first_position + i for i in range(len(ids)))
        return places

    names = [item.sample.prompt.id if layout.shares_prompts else i for i, item in enumerate(samples)]
    placed = {}
    for i in sorted(range(len(samples)), key=lambda i: names.index(names[i])):  # prompts in order of first occurrence
        prompt_ids, response_ids = (
            x.tolist() for x in (samples[i].sample.prompt.token_ids, samples[i].sample.response_ids)
        )
        if names[i] not in prompt_places:
            prompt_places[names[i]] = append(prompt_ids, 0)
        prompt = prompt_places[names[i]]
        response = append(response_ids, len(prompt_ids))
        document = prompt + response
        rows = document[len(prompt) - 1 : -1] if reads == "states" else response
        placed[i] = rows, document + append([0] * (-len(document) % layout.document_multiple), len(document))
    rows, documents = (
        [row for i in range(len(samples)) for row in placed[i][0]],
        [placed[i][1] for i in range(len(samples))],
    )
    if missing := -max(len(tokens), 1) % layout.pack_multiple + (not tokens):
        documents.append(append([0] * missing, 0))

    flags = [flag for item in samples for flag in item.sample.response_mask.tolist()]
    owners = [i for i, item in enumerate(samples) for _ in item.sample.response_ids]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))

    def by_trained_row(values: list[float]) -> torch.Tensor:
        return torch.tensor([values[i] if flag else 0.0 for i, flag in zip(owners, flags, strict=True)])

    return {
        "tokens": torch.tensor(tokens, dtype=torch.int64),
        "positions": torch.tensor(positions, dtype=torch.int64),
        "document_tokens": torch.tensor([place for document in documents for place in document], dtype=torch.int64),
        "boundaries": torch.tensor(boundaries, dtype=torch.int32),
        "rows": torch.tensor(rows, dtype=torch.int64),
        "targets": torch.tensor([i for item in samples for i in item.sample.response_ids.tolist()], dtype=torch.int64),
        "row_sample": torch.tensor(owners, dtype=torch.int64),
        "rollout_logprobs": torch.tensor([x for item in samples for x in item.sample.response_logprobs.tolist()]),
        "mask": torch.tensor(flags, dtype=torch.bool),
        "weight": by_trained_row([item.weight for item in samples]),
        "imitation_weight": by_trained_row([item.imitation_weight for item in samples]),
        "reward": torch.tensor([item.scalar_reward for item in samples], dtype=torch.float64),
        "baseline": torch.tensor([item.baseline.center for item in samples], dtype=torch.float64),
        "scale": torch.tensor([item.baseline.scale for item in samples], dtype=torch.float64),
        "token_baseline": torch.tensor([item.baseline.token_center for item in samples]),
        "token_scale": torch.tensor([item.baseline.token_scale for item in samples]),
        "old": torch.tensor([x for item in samples for x in old[item.sample.id].tolist()]),
        "candidate_ids": candidate_rows(samples) if truncates else None,
        "labels": label_rows(samples),
    }


def label_rows(samples: list[SampleRef]) -> torch.Tensor | None:
    if any(item.sample.labels is None for item in samples):
        return None
    return torch.tensor([label for item in samples for label in item.sample.labels.tolist()])


def candidate_rows(samples: list[SampleRef]) -> torch.Tensor | None:
    rows = []
    for item in samples:
        candidates = item.sample.candidate_ids
        rows += [[] for _ in item.sample.response_ids] if candidates is None else [ids.tolist() for ids in candidates]
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows]) if width else None
