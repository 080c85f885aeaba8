"""Tiled divergences compared with full logits, in value and gradient, at sizes that cross tile boundaries."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from megarl.ops import head_tile, output_layer
from megarl.ops.divergence import divergence, plain_divergence
from megarl.ops.linear_head import log_prob_and_entropy
from megarl.ops.output_layer import OutputLayer
from tests.closeness import LOSS_FLOOR, TOLERANCE, assert_close, assert_matches, expected, limit, relative_error
from tests.divergence_case import HIDDEN, KINDS, DivergenceCase, plain, tiled

KLS = [("forward_kl", 0.5), ("reverse_kl", 0.5)]
each_kind = pytest.mark.parametrize(("kind", "beta"), KINDS)


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(output_layer, "CPU_TILE", (8, 16))
        monkeypatch.setattr(head_tile, "BLOCK", 24)
        yield


def check(case: DivergenceCase, kind, beta) -> dict[str, torch.Tensor]:
    """Compare values and gradients with full logits, and return them."""
    actual = tiled(case, kind, beta)
    assert_matches(actual, partial(plain, case, kind, beta), f"{kind}, beta {beta}")
    return actual


@settings(deadline=None, max_examples=100, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    num_tokens=st.integers(1, 30),
    vocab=st.integers(3, 60),
    padding=st.tuples(st.sampled_from([0, 1, 20]), st.sampled_from([0, 1, 20])),
    temperature=st.sampled_from([1.0, 0.7, None]),
    biases=st.tuples(st.booleans(), st.booleans()),
)
def test_equals_full_logits(kind, num_tokens, vocab, padding, temperature, biases):
    padded = (vocab + padding[0], vocab + padding[1])
    case = DivergenceCase.random(num_tokens, vocab, padded, temperature, biases)
    assert check(case, *kind)["weight"][vocab:].abs().sum() == 0


@each_kind
def test_value_alone_has_its_own_gradient(kind, beta):
    """Without targets, the result is the third column alone."""
    case = DivergenceCase.random(19, 43, (43, 48))
    case = replace(case, gradient=case.gradient * torch.tensor([0, 0, 1]))
    student, both = case.student, tiled(case, kind, beta)
    hidden, weight = student.hidden.clone().requires_grad_(), student.weight.clone().requires_grad_()
    value = divergence(hidden, weight, case.teacher, kind, 1.0, 43, beta)
    assert torch.equal(value.detach(), both["divergence"])
    (value * case.gradient[:, 2]).sum().backward()
    assert torch.equal(hidden.grad, both["hidden"]) and torch.equal(weight.grad, both["weight"])


def test_log_prob_and_entropy_equal_those_of_the_head():
    case = DivergenceCase.random(19, 43, (48, 43), temperature=None)
    both, student = tiled(case, "reverse_kl", 0.5), case.student
    alone = log_prob_and_entropy(student.hidden, student.weight, case.targets, case.temperature, 43)
    largest = limit(*expected(partial(plain, case, "reverse_kl", 0.5)))
    for name, values in zip(("log_prob", "entropy"), alone.unbind(-1), strict=True):
        assert relative_error(both[name], values) <= largest


def logits_case(student: list[list[float]], teacher: list[list[float]]) -> DivergenceCase:
    """Return a case with these logits. Only the divergence has a gradient."""
    layers = [OutputLayer(torch.eye(len(x)), torch.tensor(x).t()) for x in (student, teacher)]
    count, vocab = len(student), len(student[0])
    gradient = torch.tensor([0.0, 0.0, 1.0]).expand(count, 3)
    return DivergenceCase(*layers, torch.zeros(count, dtype=torch.long), 1.0, vocab, gradient)


WORKED_EXAMPLE = {
    ("forward_kl", 0.5): (0.75 * math.log(3) + 0.25 * math.log(1 / 3), [0.25 - 0.75, 0.75 - 0.25]),
    ("reverse_kl", 0.5): (0.75 * math.log(3) + 0.25 * math.log(1 / 3), [-0.375 * math.log(3), 0.375 * math.log(3)]),
    ("jsd", 0.5): (
        0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
        [-0.5 * 0.25 * 0.75 * math.log(3), 0.5 * 0.25 * 0.75 * math.log(3)],
    ),
}
"""Value and gradient of the logits for the student's probabilities (1/4, 3/4) and the teacher's (3/4, 1/4)."""


@pytest.mark.parametrize("kind", WORKED_EXAMPLE)
def test_matches_worked_example(kind):
    value, gradient = WORKED_EXAMPLE[kind]
    case = logits_case([[0.0, math.log(3)]], [[math.log(3), 0.0]])
    exact = {"divergence": [value], "weight": [[x] for x in gradient]}
    exact = {name: torch.tensor(x, dtype=torch.float64) for name, x in exact.items()}
    assert_close(tiled(case, *kind), exact, plain(case, *kind), "worked example")


def test_jsd_tends_to_the_kls_at_its_limits():
    """The difference is about as large as the distance from the limit."""
    case = DivergenceCase.random(19, 43, (43, 43))
    for end, beta in ((0.0, 1e-3), (1.0, 1 - 1e-3)):
        near, at = (plain_divergence(*_plain_inputs(case), "jsd", 1.0, 43, x) for x in (beta, end))
        assert 0 < relative_error(near / 1e-3, at) <= 1e-2
        assert torch.equal(at, plain_divergence(*_plain_inputs(case), ("forward_kl", "reverse_kl")[int(end)], 1.0, 43))


def _plain_inputs(case: DivergenceCase) -> tuple[torch.Tensor, torch.Tensor, OutputLayer]:
    return case.student.hidden, case.student.weight, case.teacher


@each_kind
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4])
def test_extreme_logits_stay_exact(kind, beta, size):
    """Per row: both models are certain of the same token; of different ones in different tiles; only the student is;
    only the teacher is; ten tokens are possible for one of the models, and ten for the other one."""
    certain, other = ([size if i == token else 0.0 for i in range(20)] for token in (2, 17))
    equal, halves = [0.0] * 20, [size * (i < 10) for i in range(20)]
    student = [certain, certain, certain, equal, halves]
    teacher = [certain, other, equal, certain, halves[::-1]]
    equal, *others = check(logits_case(student, teacher), kind, beta)["divergence"].tolist()
    assert equal == pytest.approx(0, abs=LOSS_FLOOR)
    if kind == "jsd" and 0 < beta < 1:
        distinct = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert (others[0], others[3]) == pytest.approx((distinct, distinct), rel=TOLERANCE)


@each_kind
def test_equal_models_have_no_divergence(kind, beta):
    """The KL divergences are exactly zero. The mixture's logarithm is rounded."""
    case = DivergenceCase.random(19, 43, (43, 43))
    case = replace(case, teacher=case.student, gradient=case.gradient * torch.tensor([0, 0, 1]))
    result = tiled(case, kind, beta)
    largest = LOSS_FLOOR if kind == "jsd" and 0 < beta < 1 else 0
    assert all(result[name].abs().max() <= largest for name in ("divergence", "hidden", "weight"))


def test_main_grad_accumulates_over_microbatches():
    case = DivergenceCase.random(19, 40, (40, 40))
    weight = case.student.weight.clone().requires_grad_()
    weight.main_grad = torch.ones_like(weight)
    for part in (slice(0, 11), slice(11, 19)):
        teacher, targets = replace(case.teacher, hidden=case.teacher.hidden[part]), case.targets[part]
        values = divergence(case.student.hidden[part], weight, teacher, "jsd", 1.0, 40, targets=targets)
        (values * case.gradient[part]).sum().backward()
        assert weight.grad_added_to_main_grad
    exact, in_float32 = expected(partial(plain, case, "jsd", 0.5))
    assert_close({"weight": weight.main_grad - 1}, {"weight": exact["weight"]}, in_float32, "main_grad")


@pytest.mark.parametrize(("kind", "passes"), [("forward_kl", 1), ("reverse_kl", 1), ("jsd", 2)])
def test_computes_each_tile_once_per_pass(kind, passes):
    """A KL divergence needs one forward pass over the vocabulary, jsd two; the backward pass recomputes the tiles. A
    frozen weight has no gradient, and the teacher has none in any case."""
    case = DivergenceCase.random(9, 40, (40, 40))
    case.student.weight.requires_grad_()
    hidden = case.student.hidden.clone().requires_grad_()
    of_tiles = 2 * 9 * 40 * sum(HIDDEN)
    for weight, products in ((case.student.weight, 2), (case.student.weight.detach(), 1)):
        with FlopCounterMode(display=False) as counter:
            divergence(hidden, weight, case.teacher, kind, 1.0, 40).sum().backward()
        assert counter.get_total_flops() == of_tiles * (passes + 1) + products * 2 * 9 * 40 * HIDDEN[0]


class Largest(TorchDispatchMode):
    """Records the largest number of elements of any operation's result."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.mark.parametrize(
    ("kind", "beta"),
    [pytest.param(*case, marks=() if case[0] == "reverse_kl" else pytest.mark.exhaustive) for case in KINDS],
)
def test_computes_nothing_of_the_size_of_the_logits(kind, beta):
    case = DivergenceCase.random(64, 640, (640, 640))
    student = case.student
    leaves = [x.requires_grad_() for x in (student.hidden, student.weight)]
    with Largest() as largest:
        value = divergence(*leaves, case.teacher, kind, 1.0, 640, beta)
        torch.autograd.grad(value, leaves, torch.ones(64))
    assert largest.num_elements == 640 * HIDDEN[1]  # views of the teacher's weight; the logits have 640 · 64 elements


@each_kind
def test_saves_inputs_and_a_few_numbers_per_token(kind, beta):
    case, saved = DivergenceCase.random(21, 50, (64, 50), temperature=None), []
    student, teacher = case.student, case.teacher
    weight = student.weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        divergence(student.hidden, weight, teacher, kind, case.temperature, 50, beta)
    inputs = [tuple(x.shape) for layer in (student, teacher) for x in (layer.hidden, layer.weight)]
    assert sorted(tuple(x.shape) for x in saved) == sorted([*inputs, (21,), (21,), (4, 21), (21,), (21,)])


def test_empty_batch_has_empty_output():
    case = DivergenceCase.random(0, 40, (40, 40))
    weight = case.student.weight.requires_grad_()
    for kind, beta in KINDS:
        value = divergence(case.student.hidden, weight, case.teacher, kind, 1.0, 40, beta)
        assert value.shape == (0,)
        assert torch.autograd.grad(value.sum(), weight)[0].abs().max() == 0


@each_kind
def test_bfloat16_is_accurate_within_its_precision(kind, beta):
    """Only gradients of logits are rounded to 8 bits; logits, and sums over tokens and vocabulary, are not."""
    check(DivergenceCase.random(30, 70, (77, 70), dtype=torch.bfloat16), kind, beta)


@each_kind
@pytest.mark.parametrize("rounded", ["student", "teacher", "both"])
def test_bfloat16_logits_match_a_bfloat16_product(kind, beta, rounded):
    """The factors have few bits, so that their sums are exact in float32 and both sides round once, identically. The
    reference gets the rounded logits through the identity matrix."""
    generator = torch.Generator().manual_seed(0)
    case = DivergenceCase.random(30, 47, (50, 47), temperature=200.0, biases=(True, True))

    def integers(layer: OutputLayer, is_rounded: bool) -> OutputLayer:
        parts = [torch.randint(-16, 17, x.shape, generator=generator).float() for x in (layer.hidden, layer.weight)]
        bias = torch.randint(-4, 5, layer.bias.shape, generator=generator).float()
        return OutputLayer(*parts, bias, torch.bfloat16 if is_rounded else torch.float32)

    def as_logits(layer: OutputLayer) -> OutputLayer:
        logits = layer.hidden @ layer.weight.t() + layer.bias
        return OutputLayer(logits.to(layer.logits_dtype), torch.eye(logits.shape[1]))

    student, teacher = (
        integers(layer, rounded in (name, "both"))
        for name, layer in (("student", case.student), ("teacher", case.teacher))
    )
    case = replace(case, student=student, teacher=teacher)

    def reference() -> dict[str, torch.Tensor]:
        result = plain(replace(case, student=as_logits(student), teacher=as_logits(teacher)), kind, beta)
        gradient, dtype = result["hidden"], torch.get_default_dtype()
        return result | {
            "hidden": gradient @ student.weight.to(dtype),
            "weight": gradient.t() @ student.hidden.to(dtype),
            "bias": gradient.sum(0),
        }

    actual = tiled(case, kind, beta)
    assert_matches(actual, reference, f"{kind}, beta {beta}, {rounded} rounded")
    assert relative_error(plain(case, kind, beta)["divergence"], actual["divergence"]) > 1e-3


def test_wrong_inputs_are_rejected():
    hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match="for student and teacher, but got"):
        divergence(hidden, weight, OutputLayer(torch.zeros(2, 4), weight), "jsd", 1.0, 5)
    with pytest.raises(ValueError, match="5 rows, 5 of them for tokens, but the teacher's has 4"):
        divergence(hidden, weight, OutputLayer(hidden, weight[:4]), "jsd", 1.0, 5)
    with pytest.raises(ValueError, match="expected beta from 0 to 1"):
        divergence(hidden, weight, OutputLayer(hidden, weight), "jsd", 1.0, 5, beta=1.5)
