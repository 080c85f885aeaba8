"""A refit after an update that changes no byte ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from megarl.cluster import sync_verifier
from megarl.cluster.sync_verifier import SyncVerifier
from megarl.core.errors import RunFailure
from megarl.resharding.piece import whole
from megarl.resharding.verification import Checksum, Region, checksum

NAMES = [f"model.layers.{i}.weight" for i in range(8)]
REGIONS = [Region(name, whole((40, 50)), "float32") for name in NAMES]
NOT_MOVED = "do not reach the actor's weights"


class FakeTrainers:
    """Trainers that hold all weights in the test process. `asked` is the number of regions of each request."""

    def __init__(self) -> None:
        self.weights = {name: torch.full((40, 50), 0.5) for name in NAMES}
        self.asked: list[int] = []

    def checksums(self, wanted: Sequence[Region]) -> Mapping[Region, Checksum]:
        self.asked.append(len(wanted))
        return {region: Checksum(checksum(self._values(region), region.rectangle), ()) for region in wanted}

    def _values(self, region: Region) -> torch.Tensor:
        (top, bottom), (left, right) = region.rectangle
        return self.weights[region.tensor][top:bottom, left:right]

    def learn(self, *names: str) -> None:
        for name in names:
            self.weights[name] += 1e-3


@pytest.fixture
def trainers() -> FakeTrainers:
    return FakeTrainers()


def watch(trainers: FakeTrainers, verify: str = "first", frozen: Sequence[str] = ()) -> SyncVerifier:
    """Return the verifier after the refit at the start of a run."""
    watched = SyncVerifier(trainers.checksums, verify, frozen)
    watched.summarize(watched.expect(REGIONS, 0.0), [])
    return watched


def test_first_step_that_changes_no_byte_ends_the_run(trainers):
    watched = watch(trainers)
    with pytest.raises(RunFailure, match=rf"{NOT_MOVED}.*learning rates sum to 0\.001"):
        watched.expect(REGIONS, 1e-3)


def test_later_in_the_run_two_unchanged_steps_end_it(trainers):
    watched = watch(trainers)
    for _ in range(3):
        trainers.learn(*NAMES)
        watched.expect(REGIONS, 1e-3)
    watched.expect(REGIONS, 1e-3)
    with pytest.raises(RunFailure, match=NOT_MOVED):
        watched.expect(REGIONS, 1e-3)


def test_steps_without_learning_may_change_nothing(trainers):
    """Examples: critic warm-up, skipped updates, a gradient of 0."""
    watched = watch(trainers)
    for _ in range(3):
        watched.expect(REGIONS, 0.0)
    trainers.learn(*NAMES)
    watched.expect(REGIONS, 1e-3)


def test_small_learning_rates_are_summed_over_steps(trainers):
    watched = watch(trainers)
    for _ in range(5):
        watched.expect(REGIONS, 1e-5)  # 5 · 1e-5 · 16,000 elements < 1
    with pytest.raises(RunFailure, match=NOT_MOVED):
        for _ in range(5):
            watched.expect(REGIONS, 1e-5)


def test_changes_outside_the_sampled_regions_count(trainers, monkeypatch):
    """The sampled embeddings or experts may be unused."""
    monkeypatch.setattr(sync_verifier, "NUM_REGIONS", 2)
    watched = watch(trainers)
    sampled = {region.tensor for region in watched.expect(REGIONS, 0.0)}
    for _ in range(4):
        trainers.learn(*(name for name in NAMES if name not in sampled))
        watched.expect(REGIONS, 1e-3)


def test_all_regions_are_checked_first_then_a_trained_sample(trainers, monkeypatch):
    monkeypatch.setattr(sync_verifier, "NUM_REGIONS", 3)
    monkeypatch.setattr(sync_verifier, "NUM_ELEMENTS", 100)
    watched = SyncVerifier(trainers.checksums, "first", ["model.layers.[0-3].*"])
    watched.expect(REGIONS, 0.0)
    first = watched.expect(REGIONS, 0.0)  # the first refit is repeated, because it lost a rank
    watched.summarize(first, [])
    later = watched.expect(REGIONS, 0.0)
    assert first.keys() >= set(REGIONS) and first.keys() >= later.keys()
    assert len(later) == 3 and {region.tensor for region in later} <= set(NAMES[4:])
    assert {region.rectangle for region in later} == {((0, 2), (0, 50))}
    assert trainers.asked == [8 + 3, 8 + 3, 3]


def test_verify_always_checks_all_regions(trainers):
    watched = watch(trainers, "always")
    assert watched.expect(REGIONS, 0.0).keys() >= set(REGIONS)
    with pytest.raises(RunFailure, match=NOT_MOVED):
        watched.expect(REGIONS, 1e-3)
