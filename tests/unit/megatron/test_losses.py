"""Loss preconditions, and the explained variance in the critic's metrics."""

import pytest
import torch

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.load import load
from megarl.core.metrics import merge
from megarl.core.types import NO_BASELINE, Prompt, Sample, VersionRun
from megarl.data.collate import collate
from megarl.megatron.advantages import with_advantages
from megarl.megatron.configured_losses import configured_policy_loss, configured_value_loss
from megarl.megatron.metric_sums import read
from megarl.step.metrics import add_explained_variance
from tests.packing import packing
from tests.paths import BASE
from tests.samples import training_ref


@pytest.mark.parametrize("name", [name for name, spec in OBJECTIVES.items() if spec.selects_tokens])
def test_policy_loss_requires_selected_tokens(name):
    keys = ["model.path=m", "data.source=arithmetic", f"algorithm.objective.name={name}"]
    config = load(BASE, keys)
    algorithm = config.algorithm
    sample = Sample("a", Prompt("p", "", (7, 8)), (9,) * 3, (-1.0,) * 3, (True,) * 3, (VersionRun(0, 3),), "stop", "")
    [batch] = with_advantages(algorithm, [collate([training_ref(sample, 1.0, NO_BASELINE, 1.0)], packing())])
    with pytest.raises(AssertionError, match=f"{name}: the batch has no token selection"):
        configured_policy_loss(algorithm, config.tolerance, 0.0).terms(batch, torch.zeros(3, 2))


def test_explained_variance_matches_torch():
    """Two microbatches, compared with torch over all trained tokens. The critic's current output has no effect."""
    keys = ["model.path=m", "data.source=arithmetic", "algorithm.advantage={estimator: gae, gamma: 0.9, whiten: false}"]
    algorithm = load(BASE, keys).algorithm
    masks = {"a": (True, False, True, True), "b": (True, True), "c": (False, True, True)}
    generator, parts, residuals, returns = torch.Generator().manual_seed(0), [], [], []
    for i, names in enumerate(("ab", "c")):
        samples = []
        for name in names:
            n = len(masks[name])
            run = (VersionRun(0, n),)
            sample = Sample(name, Prompt(name, "", (7, 8)), (9,) * n, (-1.0,) * n, masks[name], run, "stop", "")
            samples.append(training_ref(sample, float(i + 1), NO_BASELINE, 1.0))
        values = {name: torch.randn(len(masks[name]), generator=generator) for name in names}
        [batch] = with_advantages(algorithm, [collate(samples, packing(), values=values)])
        loss = configured_value_loss(algorithm.value)
        parts.append(read(loss.metrics(batch, loss.terms(batch, torch.zeros(len(batch.mask), 1)))))
        returns.append(batch.returns[batch.mask])
        residuals.append((batch.returns - batch.values)[batch.mask])
    metrics = add_explained_variance(merge(parts))
    expected = 1 - torch.cat(residuals).var() / torch.cat(returns).var()
    assert metrics["value/explained_variance"].value == pytest.approx(float(expected), rel=1e-5)
    assert not [name for name in metrics if "residual" in name or "square" in name]
    assert add_explained_variance({}) == {}
