"""Watches that what the trainer learns arrives: in its own weights, and from there in the engines'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Literal

from megarl.cluster.failure import RunFailure
from megarl.resharding.piece import num_elements
from megarl.resharding.verification import Checksum, Region, sample

NUM_REGIONS, NUM_ELEMENTS = 256, 4096
"""Regions in the sample, and elements of each: a million at most, whose checksums take some hundredths of a second."""


class SyncVerifier:
    """Compares checksums at each refit: of all weights where rollout.verify_refit asks for it, else of a sample of the
    trained ones, the same elements every time.

    The engines' comparison proves that they hold the trainer's present bytes at these elements, whether these have
    changed or not: an engine that keeps older weights, or reads a copy of them, is found at the first refit after an
    update that moves any of the sample.

    The trainer's own proves that its weights move while it trains. If updates with a gradient and a learning rate leave
    the sample as it was at the refit before, all weights are compared; if these are unchanged too, the updates do not
    reach them, and the run ends. Where only the start of the run's weights is known in full, that takes a second step.

    Neither proves that all elements have arrived, but for a refit that verifies all, nor that they moved rightly.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Region]], Mapping[Region, Checksum]],
        verify: Literal["first", "always"],
        frozen: Sequence[str],
    ):
        """compute: the trainers' checksums of regions. frozen: patterns of tensors that are not trained."""
        self._compute, self._verify, self._frozen = compute, verify, frozen
        self._sampled: dict[Region, int] = {}
        self._known: dict[Region, int] | None = None
        """All checksums of weights that have not changed since, as far as the sample tells; None: not computed."""
        self._movement = 0.0
        """The sum of the learning rates of steps since then."""

    def expect(self, regions: Sequence[Region], rate: float) -> dict[Region, Checksum]:
        """Returns the checksums that the engines should have after this refit.

        regions   all that the engines hold
        rate      the learning rate of the step before this refit, 0 where nothing was learned

        Raises RunFailure where the trainer's weights do not move.
        """
        wanted = sample([region for region in regions if self._is_trained(region)], NUM_REGIONS, NUM_ELEMENTS)
        verifies_all = self._verify == "always" or not self._sampled
        found = dict(self._compute([*dict.fromkeys([*regions, *wanted])] if verifies_all else wanted))
        sampled = _values(found, wanted)
        if sampled == self._sampled:
            self._check_moved(regions, rate)
        else:
            self._known, self._movement = (_values(found, regions) if verifies_all else None), 0.0
        self._sampled = sampled
        return found

    def _is_trained(self, region: Region) -> bool:
        return not any(fnmatch(region.tensor, pattern) for pattern in self._frozen)

    def _check_moved(self, regions: Sequence[Region], rate: float) -> None:
        """Checks that other weights have moved where the sample has not: it may be of tokens or experts without a
        gradient."""
        self._movement += rate
        # AdamW moves an element by up to the learning rate. In bfloat16 that may be lost in rounding; of elements that
        # make this 1 together, hundreds change, since their last digits are at some thousandths.
        if self._movement * sum(num_elements(region.rectangle) for region in self._sampled) < 1:
            return
        values = _values(self._compute(regions), regions)
        if values == self._known:
            raise RunFailure(
                "refit: no byte of the actor's weights has changed, although it has been updated since the last refit "
                f"that brought any (sum of the learning rates {self._movement:g}): its updates do not reach the weights"
            )
        self._known, self._movement = values, 0.0


def _values(checksums: Mapping[Region, Checksum], regions: Sequence[Region]) -> dict[Region, int]:
    return {region: checksums[region].value for region in regions}
