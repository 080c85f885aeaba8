"""Verify that updates change the trainer's weights and, after a refit, the engines' weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, Literal

from megarl.core.errors import RunFailure
from megarl.resharding.piece import num_elements
from megarl.resharding.verification import Checksum, Region, sample

DIGEST_DIGITS = 32
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
        """`compute` returns the trainer's checksums for regions. `frozen` lists name patterns of frozen tensors."""
        self._compute, self._verify, self._frozen = compute, verify, frozen
        self._sampled: dict[Region, int] = {}
        self._known: dict[Region, int] | None = None
        """Checksums of all regions when the sample last changed; None: not computed."""
        self._movement = 0.0
        """Sum of the steps' mean learning rates since the last change to the sample."""
        self._has_verified_all = False
        """Whether the engines have reported checksums of all weights; a refit that has lost a rank is repeated."""
        self._compared: dict[str, list[Region]] = {}
        """Regions that the last refit compares: `sample` and, if it compares all weights, `all`."""

    def expect(self, regions: Sequence[Region], rate: float) -> dict[Region, Checksum]:
        """Return the checksums that the engines should have after this refit. Raise RunFailure if the trainer's weights
        do not change during training. `regions` are all regions that the engines hold, and `rate` is the mean learning
        rate since the last refit; 0 without updates."""
        trained = [r for r in regions if not any(fnmatch(r.tensor, pattern) for pattern in self._frozen)]
        wanted = sample(trained, NUM_REGIONS, NUM_ELEMENTS)
        verifies_all = self._verify == "always" or not self._has_verified_all
        checksums = dict(self._compute([*dict.fromkeys([*regions, *wanted])] if verifies_all else wanted))
        sampled = _values(checksums, wanted)
        if sampled == self._sampled:
            self._check_moved(regions, rate)
        else:
            self._known, self._movement = (_values(checksums, regions) if verifies_all else None), 0.0
        self._sampled = sampled
        self._compared = {"sample": wanted, **({"all": list(regions)} if verifies_all else {})}
        return checksums

    def summarize(
        self, expected: Mapping[Region, Checksum], engines: Sequence[Mapping[int, int]]
    ) -> dict[str, dict[str, Any]]:
        """Return digests of the checksums in the last refit, as JSON values: `sample` and, if the refit compared all
        weights, `all`. Each has a digest that identifies the regions (they depend on the engines' layout), and digests
        of the trainer's and of the engines' checksums. The engines' digest is null unless every engine has reported
        every checksum and all of them are equal.

        Args:
            expected: the trainer's checksums, as `expect` returned them.
            engines: each engine's checksums, by the region's position in `expected`.
        """
        self._has_verified_all = self._has_verified_all or "all" in self._compared
        positions = {region: position for position, region in enumerate(expected)}
        summary: dict[str, dict[str, Any]] = {}
        for name, regions in self._compared.items():
            places = [positions[region] for region in regions]
            found = {_digest([str(values.get(place)) for place in places]) for values in engines}
            is_complete = all(place in values for values in engines for place in places)
            summary[name] = {
                "regions": _digest(map(str, regions)),
                "trainer": _digest(str(expected[region].value) for region in regions),
                "engines": found.pop() if is_complete and len(found) == 1 else None,
            }
        return summary

    def _check_moved(self, regions: Sequence[Region], rate: float) -> None:
        """If the sampled elements are unchanged, check the others: the sampled ones may have no gradient."""
        self._movement += rate
        # AdamW changes an element by up to the learning rate, and rounding to bfloat16 may lose this change. Once the
        # changes add up to 1 over the sample, hundreds of elements have changed, because bfloat16 values of typical
        # weights are about 1/1000 apart.
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


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGEST_DIGITS]


def _values(checksums: Mapping[Region, Checksum], regions: Sequence[Region]) -> dict[Region, int]:
    return {region: checksums[region].value for region in regions}
