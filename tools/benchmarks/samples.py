"""Samples made for benchmarks, as batches of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Lengths, Packing, schedule


def sample_of(
    name: str, prompt: Prompt, ids: Sequence[int], mask: Sequence[bool] | None = None, text: str = ""
) -> Sample:
    """Return a sample with a log-prob of -1 for each token. mask: whether the policy sampled a token (None: all)."""
    n = len(ids)
    return Sample(
        name, prompt, ids, [-1.0] * n, [True] * n if mask is None else mask, (VersionRun(0, n),), "stop", text
    )


def local_batches(samples: Sequence[Sample], rewards: Sequence[float], packing: Packing) -> list[LocalBatch]:
    """Return the batch of each data-parallel rank. The loss is a mean over response tokens, without a baseline."""
    weight = 1 / sum(len(sample.response_ids) for sample in samples)
    refs = [
        replace(SampleRef.of(sample, sample), scalar_reward=reward, weight=weight)
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    return [LocalBatch(refs, share) for share in schedule(list(map(Lengths.of, refs)), packing)]
