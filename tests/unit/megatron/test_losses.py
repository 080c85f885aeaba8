"""A batch without what a loss asks of it is refused."""

import pytest
import torch

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.load import load
from megarl.core.types import NO_BASELINE, Prompt, Sample, TrainingSample, VersionRun
from megarl.data.collate import collate
from megarl.megatron.advantages import with_advantages
from megarl.megatron.losses import policy_loss
from tests.packing import packing
from tests.paths import BASE


@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if spec.selects_tokens])
def test_tokens_that_are_treated_apart_are_selected(name):
    keys = ["model.path=m", "data.source=arithmetic", f"algorithm.objective.name={name}"]
    algorithm = load(BASE, keys).algorithm
    sample = Sample("a", Prompt("p", "", (7, 8)), (9,) * 3, (-1.0,) * 3, (True,) * 3, (VersionRun(0, 3),), "stop", "")
    [batch] = with_advantages(algorithm, [collate([TrainingSample(sample, 1.0, NO_BASELINE, 1.0)], packing())])
    with pytest.raises(AssertionError, match=f"{name}: the tokens that it treats apart are not selected"):
        policy_loss(algorithm, 0.0, batch, torch.zeros(3, 2))
