"""Log-prob differences between trainer and engine, for samples of the current weights and for stale ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.core.completion import VersionRun
from megarl.core.metrics import merge, values
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import collate
from megarl.megatron.loss_metrics import start_metrics
from megarl.megatron.metric_sums import read
from tests.closeness import LOSS_FLOOR
from tests.packing import packing

LENGTHS = (3, 5, 4)


def batch_of(*is_stale: bool) -> TokenBatch:
    random = np.random.default_rng(0)
    samples = [
        Sample(
            str(i),
            Prompt(str(i), "", [1]),
            [7] * n,
            random.normal(-2, 1, n),
            [True] * (n - 1) + [False],
            (VersionRun(0, n),),
            "stop",
            "",
        )
        for i, n in enumerate(LENGTHS)
    ]
    refs = [replace(SampleRef.of(sample, sample), is_stale=old) for sample, old in zip(samples, is_stale, strict=True)]
    return collate(refs, packing())


def metrics_of(batch: TokenBatch) -> dict[str, float]:
    start = batch.rollout_logprobs + torch.linspace(-0.3, 0.4, sum(LENGTHS))
    return values(merge([read(start_metrics(batch, start, start, has_moved=False, mismatch_threshold=0.1))]))


def expected(section: str, batch: TokenBatch, *members: int) -> dict[str, float]:
    """Compute the metrics of these samples in float64, excluding each sample's last token, which is not trained on."""
    differences = np.split(np.linspace(-0.3, 0.4, sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    kept = np.concatenate([differences[i][:-1] for i in members])
    kl = np.exp(kept) - 1 - kept
    return {
        f"{section}/logprob_abs_mean": np.abs(kept).mean(),
        f"{section}/logprob_abs_max": np.abs(kept).max(),
        f"{section}/kl": kl.mean(),
    }


def test_stale_samples_are_reported_as_policy_lag() -> None:
    fresh, mixed, stale = (batch_of(*old) for old in ((False,) * 3, (False, True, False), (True,) * 3))
    both = expected("mismatch", mixed, 0, 2) | expected("policy_lag", mixed, 1)
    cases = (
        (fresh, expected("mismatch", fresh, 0, 1, 2)),
        (mixed, both),
        (stale, expected("policy_lag", stale, 0, 1, 2)),
    )
    for batch, differences in cases:
        metrics = metrics_of(batch)
        shown = {
            name: value
            for name, value in metrics.items()
            if name.endswith(("_mean", "_max", "/kl")) and "weight" not in name
        }
        assert shown == pytest.approx(differences, abs=LOSS_FLOOR)
        # All other metrics cover all trained tokens.
        assert metrics["mismatch/weight_mean"] == pytest.approx(metrics_of(fresh)["mismatch/weight_mean"])
