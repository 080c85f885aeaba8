"""Verify that updates change the trainer's weights and, after a refit, the engines' weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Literal

from megarl.core.errors import RunFailure
from megarl.resharding.piece import num_elements
from megarl.resharding.verification import Checksum, Region, sample

NUM_REGIONS, NUM_ELEMENTS = 256, 4096
"""Number of sampled regions, and of elements in each. Checksums of a million elements take well under 0.1 s."""


class SyncVerifier:
    """Compares checksums at each refit. The checksums cover all weights at the first refit and, with
    rollout.verify_refit=always, at every refit. Otherwise, they cover a fixed sample of the trained elements.

    Comparing engines with the trainer proves that the engines hold the trainer's current bytes for these elements. An
    engine that keeps older weights, or reads an old copy, is detected at the first refit after an update that changes
    the sample.

    Comparing the trainer with its earlier state proves that its weights change during training. If updates with a
    nonzero gradient and learning rate leave the sample unchanged, all weights are compared. If they are also unchanged,
    the updates do not reach the weights, and the run fails. This takes a second step if checksums for all weights have
    not been computed yet.

    Only a refit that verifies all weights proves that all elements have arrived. Neither comparison proves that the
    weights changed correctly.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Region]], Mapping[Region, Checksum]],
        verify: Literal["first", "always"],
        frozen: Sequence[str],
    ):
        """`compute` returns the trainer's checksums for regions. `frozen` has name patterns of frozen tensors."""
        self._compute, self._verify, self._frozen = compute, verify, frozen
        self._sampled: dict[Region, int] = {}
        self._known: dict[Region, int] | None = None
        """Checksums for all regions as of the last change to the sample; None: not computed."""
        self._movement = 0.0
        """Sum of the steps' mean learning rates since the last change to the sample."""

    def expect(self, regions: Sequence[Region], rate: float) -> dict[Region, Checksum]:
        """Return the checksums that the engines should have after this refit. Raise RunFailure if the trainer's weights
        do not change during training. `regions` are all regions that the engines hold, and `rate` is the mean learning
        rate since the last refit; 0 without updates."""
        trained = [r for r in regions if not any(fnmatch(r.tensor, pattern) for pattern in self._frozen)]
        wanted = sample(trained, NUM_REGIONS, NUM_ELEMENTS)
        verifies_all = self._verify == "always" or not self._sampled
        checksums = dict(self._compute([*dict.fromkeys([*regions, *wanted])] if verifies_all else wanted))
        sampled = _values(checksums, wanted)
        if sampled == self._sampled:
            self._check_moved(regions, rate)
        else:
            self._known, self._movement = (_values(checksums, regions) if verifies_all else None), 0.0
        self._sampled = sampled
        return checksums

    def _check_moved(self, regions: Sequence[Region], rate: float) -> None:
        """If the sampled elements are unchanged, check the others: the sampled ones may have no gradient."""
        self._movement += rate
        # AdamW changes an element by up to the learning rate, and rounding to bfloat16 may lose this change. Once the
        # expected total change in the sample is 1, hundreds of elements change: their last digit is about 1/1000.
        if self._movement * sum(num_elements(region.rectangle) for region in self._sampled) < 1:
            return
        values = _values(self._compute(regions), regions)
        if values == self._known:
            raise RunFailure(
                "refit: the optimizer's updates do not reach the actor's weights. No byte changed during updates "
                f"whose learning rates sum to {self._movement:g}. Fix: remove actor.megatron_overrides, and check the "
                "installed versions with megarl doctor"
            )
        self._known, self._movement = values, 0.0


def _values(checksums: Mapping[Region, Checksum], regions: Sequence[Region]) -> dict[Region, int]:
    return {region: checksums[region].value for region in regions}
