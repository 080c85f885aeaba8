from __future__ import annotations

from megarl.cluster.share import Share


def test_a_share_keeps_the_samples_of_its_own_microbatches() -> None:
    samples = ["a", "b", "c", "d", "e"]
    share = Share.of(samples, [(4, 1), (2,)])
    assert share.samples == ("b", "c", "e")
    assert [[share.samples[i] for i in members] for members in share.microbatches] == [["e", "b"], ["c"]]


def test_a_share_of_nothing() -> None:
    assert Share.of(["a"], []) == Share(samples=(), microbatches=())
