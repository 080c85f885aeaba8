"""Counts of skipped updates in checkpoints."""

from megarl.megatron.nonfinite import SkippedUpdates


def test_counts_are_restored_from_a_checkpoint():
    before, after = SkippedUpdates(), SkippedUpdates()
    for is_skipped in (True, False, True, True):
        before.add(is_skipped)
    after.restore({"num_updates": 1, **before.counters()})
    assert (after.total, after.consecutive) == (3, 2)


def test_checkpoint_without_counts_starts_at_zero():
    skipped = SkippedUpdates()
    skipped.restore({"num_updates": 7})
    assert (skipped.total, skipped.consecutive) == (0, 0)
