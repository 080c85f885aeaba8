"""Digests of the weights that a refit compares."""

from __future__ import annotations

import pytest

from megarl.cluster.sync_verifier import SyncVerifier
from megarl.resharding.verification import Checksum, Region


def regions(count: int) -> list[Region]:
    return [Region(f"layer {i}", ((0, 2), (0, 3)), "bfloat16") for i in range(count)]


def summary(values: dict[str, int], engines: list[dict[int, int]], count: int = 3, verify="first", refits: int = 1):
    def compute(wanted):
        return {region: Checksum(values[region.tensor], ("rank 0",)) for region in wanted}

    verifier = SyncVerifier(compute, verify, [])
    summarized = {}
    for _ in range(refits):
        summarized = verifier.summarize(verifier.expect(regions(count), 0.0), engines)
    return summarized


VALUES = {f"layer {i}": 100 + i for i in range(4)}
COMPLETE = {0: 100, 1: 101, 2: 102}


def test_digests_are_equal_for_equal_weights():
    first, again = (summary(VALUES, [COMPLETE, COMPLETE]) for _ in range(2))
    assert first == again and set(first) == {"sample", "all"}
    assert first["all"]["trainer"] == first["all"]["engines"]
    other = summary(VALUES | {"layer 1": 7}, [COMPLETE | {1: 7}])
    assert other["all"]["regions"] == first["all"]["regions"]
    assert other["all"]["trainer"] == other["all"]["engines"] != first["all"]["trainer"]


@pytest.mark.parametrize("engines", [[COMPLETE, {0: 100, 1: 101}], [{}], [COMPLETE, COMPLETE | {2: 9}], []], ids=str)
def test_digest_of_engines_needs_every_engine(engines):
    assert summary(VALUES, engines)["all"]["engines"] is None
    assert summary(VALUES, engines)["sample"]["engines"] is None


def test_digest_of_engines_is_that_of_their_checksums():
    wrong = summary(VALUES, [COMPLETE | {2: 9}])["all"]
    assert wrong["engines"] != wrong["trainer"]


def test_regions_depend_on_the_layout():
    assert summary(VALUES, [], count=3)["all"]["regions"] != summary(VALUES, [], count=2)["all"]["regions"]


@pytest.mark.parametrize(("verify", "scopes"), [("first", {"sample"}), ("always", {"sample", "all"})])
def test_second_refit_has_the_digests_of_its_mode(verify, scopes):
    assert set(summary(VALUES, [COMPLETE], verify=verify, refits=2)) == scopes
