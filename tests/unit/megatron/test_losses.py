"""Loss preconditions, and the explained variance in the critic's metrics."""

import pytest
import torch

from megarl.algorithms.registry import OBJECTIVES
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.metrics import merge
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.core.score import NO_BASELINE
from megarl.data.collate import collate
from megarl.megatron.advantages import with_advantages
from megarl.megatron.configured_losses import (
    configured_policy_loss,
    configured_value_loss,
    on_sampled_tokens,
    with_distillation_loss,
)
from megarl.megatron.metric_sums import read
from megarl.megatron.token_selection import _draw
from megarl.step.metrics import add_explained_variance
from tests.closeness import LOSS_FLOOR, close_to, expected
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

    def explained() -> float:
        residual, of_return = (torch.cat(x).to(torch.get_default_dtype()).var() for x in (residuals, returns))
        return float(1 - residual / of_return)

    assert metrics["value/explained_variance"].value == close_to(*expected(explained), LOSS_FLOOR)
    assert not [name for name in metrics if "residual" in name or "square" in name]
    assert add_explained_variance({}) == {}


def test_masked_tokens_have_no_loss_term():
    """Trainer and engine disagree on the second token. It has no gradient from the policy, KL, entropy or imitation
    terms, and the loss is the same as for a sample without the token."""
    keys = ["model.path=m", "data.source=arithmetic", "logprob_check={action: mask, mask: token}"]
    keys += ["algorithm.objective={entropy_coefficient: 0.1, imitation_coefficient: 0.2, aggregation: token_sum}"]
    config = load(BASE, [*keys, "algorithm.kl.coefficient=0.5"])
    assert config.tolerance.threshold < 5

    def terms(engine: tuple[float, ...], trained: tuple[bool, ...]):
        run = (VersionRun(0, 3),)
        sample = Sample("a", Prompt("p", "", (7, 8)), (9,) * 3, engine, trained, run, "stop", "")
        scores = {"old": {"a": torch.tensor([-1.0, -1.5, -2.0])}, "reference": {"a": torch.tensor([-1.2, -1.1, -1.9])}}
        ref = training_ref(sample, 1.0, NO_BASELINE, 1.0, imitation_weight=0.25)
        [batch] = with_advantages(config.algorithm, [collate([ref], packing(), **scores)])
        scored = torch.tensor([[-0.9, 2.0], [-1.4, 3.0], [-2.1, 4.0]], requires_grad=True)
        loss = configured_policy_loss(config.algorithm, config.tolerance, 0.5).terms(batch, scored).loss
        loss.backward()
        return loss, scored.grad

    masked = terms((-1.0, -9.0, -2.0), (True, True, True))
    untrained = terms((-1.0, -9.0, -2.0), (True, False, True))
    torch.testing.assert_close(masked, untrained)
    assert not masked[1][1].any() and masked[1][[0, 2]].all()


def test_epochs_have_different_draws():
    sample = Sample("a", Prompt("p", "", (7, 8)), (9,) * 3, (-1.0,) * 3, (True,) * 3, (VersionRun(0, 3),), "stop", "")
    draws = [_draw(training_ref(sample, 1.0), epoch) for epoch in (0, 1, 2, 1)]
    assert torch.equal(draws[1], draws[3])
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


def test_distillation_in_the_loss_is_added_and_measured():
    """Σ w·Σ_k c·w_k·d²/2 on trained tokens, and the metric of each teacher is its mean d, over the tokens of the sample
    that it scores. The loss without teachers is the same except for this term."""
    keys = ["model.path=m", "data.source=arithmetic", "algorithm.distillation={placement: loss, coefficient: 0.5}"]
    config = load(BASE, [*keys, "teachers.models=[{name: a, path: x}, {name: b, path: y, weight: 3.0}]"])
    masks, scores = {"s": (True, False, True), "t": (True,)}, {"a": {"s": [-2.0, torch.nan, -0.5]}}
    scores["b"] = {"s": [-1.0, torch.inf, -3.0], "t": [-4.0]}
    given = {f"teacher/{k}": {i: torch.tensor(v) for i, v in of_k.items()} for k, of_k in scores.items()}
    refs = []
    for name, mask in masks.items():
        n = len(mask)
        sample = Sample(name, Prompt("p", "", (7, 8)), (9,) * n, (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")
        refs.append(training_ref(sample, 1.0, NO_BASELINE, 1.0))
    [batch] = with_advantages(config.algorithm, [collate(refs, packing(), **given)])
    scored = torch.tensor([[-1.5, 2.0], [-1.0, 3.0], [-2.5, 4.0], [-1.0, 4.0]])
    loss = configured_policy_loss(config.algorithm, config.tolerance, 0.0, teachers=config.teachers.models)
    plain = configured_policy_loss(config.algorithm, config.tolerance, 0.0)
    differences = {"a": (0.5, -2.0), "b": (-0.5, 0.5, 3.0)}
    squares = sum(w * sum(d**2 for d in differences[k]) / 2 for k, w in (("a", 1.0), ("b", 3.0)))
    terms = loss.terms(batch, scored)
    assert len(set(batch.weight[batch.mask].tolist())) == 1
    added = float(terms.loss - plain.terms(batch, scored).loss)
    assert added == pytest.approx(float(batch.weight[0]) * 0.5 * squares)
    metrics = read(loss.metrics(batch, terms))
    assert {k: metrics[f"kl/teacher_{k}"].value for k in "ab"} == {"a": -0.75, "b": 1.0}


@pytest.mark.parametrize("excludes", [False, True])
def test_exact_divergences_are_added_and_measured(excludes):
    """The added loss is Σ w·Σ_k c·w_k·D_k over trained tokens that the other loss keeps, with D_k from the head's last
    columns. The second teacher does not score the first sample."""
    overrides = ["model.path=m", "data.source=arithmetic", "batch.samples_per_prompt=2"]
    models = "teachers.models=[{name: a, path: x}, {name: b, path: y, weight: 3.0}]"
    distillation = "algorithm.distillation={divergence: jsd, placement: loss, coefficient: 0.5}"
    mask = ["logprob_check={action: mask, mask: token, threshold: 1.0}"] if excludes else []
    config = load(BASE, [*overrides, models, distillation, *mask])
    refs = []
    for name, trained in {"s": (True, False, True), "t": (True,)}.items():
        n = len(trained)
        sample = Sample(name, Prompt("p", "", (7, 8)), (9,) * n, (-1.0,) * n, trained, (VersionRun(0, n),), "stop", "")
        refs.append(training_ref(sample, 1.0, NO_BASELINE, 1.0))
    [batch] = with_advantages(config.algorithm, [collate(refs, packing())])
    scored = torch.tensor([[-1.5, 2.0], [-1.0, 3.0], [-2.5, 4.0], [-1.0, 4.0]])
    inf, nan = torch.inf, torch.nan
    divergences = torch.tensor([[0.25, inf], [nan, inf], [0.5, inf], [1.0, 2.0]], requires_grad=True)
    plain = configured_policy_loss(config.algorithm, config.tolerance, 0.0, teachers=config.teachers.models)
    loss = with_distillation_loss(plain, config.algorithm.distillation, config.teachers.models)
    terms = loss.terms(batch, torch.cat((scored, divergences), -1))
    # The third token's log-prob differs from the engine's by 1.5.
    counted = 0.25 + (0.0 if excludes else 0.5) + 1.0 + 3.0 * 2.0
    before, added = plain.terms(batch, scored), float(batch.weight[0]) * 0.5 * counted
    assert float((terms.loss - before.loss).detach()) == pytest.approx(added)
    terms.loss.backward()
    weight = 0.5 * float(batch.weight[0])
    assert divergences.grad is not None
    assert divergences.grad[:, 0].tolist() == pytest.approx([weight, 0, 0 if excludes else weight, weight])
    assert divergences.grad[:, 1].tolist() == pytest.approx([0, 0, 0, 3 * weight])
    metrics, expected = read(loss.metrics(batch, terms)), read(plain.metrics(batch, before))
    assert {k: metrics[f"kl/teacher_{k}"].value for k in "ab"} == pytest.approx({"a": 1.75 / 3, "b": 2.0})
    assert metrics["policy/loss"].value == pytest.approx(expected["policy/loss"].value + added)


def test_given_responses_are_only_distilled():
    """All other terms and metrics equal those of a batch without the given response. Its log-probs under the engine are
    unknown, so no tolerance excludes its tokens."""
    overrides = ["model.path=m", "data.source=arithmetic", "algorithm.objective.entropy_coefficient=0.1"]
    teachers = ["teachers.models=[{name: a, path: x}]", "algorithm.distillation={divergence: jsd, placement: loss}"]
    tolerance = "logprob_check={action: mask, mask: token, threshold: 1.0}"
    config = load(BASE, [*overrides, *teachers, tolerance])
    refs = []
    for name, trained in {"1.0.0": (True, False, True), "1.1.given": (True, True)}.items():
        run = (VersionRun(0, len(trained)),)
        logprobs = (-1.0 if name == "1.0.0" else 0.0,) * len(trained)
        sample = Sample(name, Prompt(name, "", (7, 8)), (9,) * len(trained), logprobs, trained, run, "stop", "")
        refs.append(training_ref(sample, 1.0, NO_BASELINE, 0.5))
    both, sampled = (with_advantages(config.algorithm, [collate(part, packing())])[0] for part in (refs, refs[:1]))
    scored = torch.tensor([[-1.5, 2.0], [-1.0, 3.0], [-0.5, 4.0], [-3.0, 5.0], [-4.0, 6.0]])
    divergences = torch.tensor([[0.25], [torch.nan], [0.5], [1.0], [2.0]])
    plain = configured_policy_loss(config.algorithm, config.tolerance, 0.0)
    loss = with_distillation_loss(on_sampled_tokens(plain), config.algorithm.distillation, config.teachers.models)
    terms, expected = loss.terms(both, torch.cat((scored, divergences), -1)), plain.terms(sampled, scored[:3])
    assert float(terms.loss) == pytest.approx(float(expected.loss) + 0.5 * (0.25 + 0.5 + 1.0 + 2.0))
    metrics, others = read(loss.metrics(both, terms)), read(plain.metrics(sampled, expected))
    assert metrics.pop("kl/teacher_a").value == pytest.approx(3.75 / 4)
    assert metrics.pop("policy/loss").value == pytest.approx(others["policy/loss"].value + 0.5 * 3.75)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(
        {name: metric.value for name, metric in others.items() if name != "policy/loss"}
    )
