"""The count of skipped updates, as checkpoints have it."""

from megarl.megatron.nonfinite import SkippedUpdates


def test_counts_go_on_from_a_checkpoint():
    before, after = SkippedUpdates(), SkippedUpdates()
    for is_skipped in (True, False, True, True):
        before.add(is_skipped)
    after.restore({"num_updates": 1, **before.counters()})
    assert (after.total, after.in_a_row) == (3, 2)


def test_a_checkpoint_from_before_they_were_counted_begins_at_none():
    skipped = SkippedUpdates()
    skipped.restore({"num_updates": 7})
    assert (skipped.total, skipped.in_a_row) == (0, 0)
