"""Compare initial main weights with closed forms: all positions in a cell are enumerated instead of sampled."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.megatron import main_weights

POWERS = {torch.bfloat16: (1.0, 2.0**-8, 2.0**100, 2.0**-125), torch.float16: (1.0, 2.0**-8, 2.0**15, 2.0**-13)}
OTHERS = {torch.bfloat16: (1.5, 0.1, 3.0**40, 3.0**-40), torch.float16: (1.5, 0.1, 3.0**8, 3.0**-6)}
DTYPES = pytest.mark.parametrize("dtype", POWERS)


@pytest.fixture(autouse=True)
def _all_positions(monkeypatch):
    """Place element i of a tensor at the i-th position in its cell."""

    def shares(levels, tensor, rectangle, device):
        [(start, stop)] = rectangle
        return torch.arange(start, stop, device=device).float().add_(0.5).div_(levels).sub_(0.5)

    monkeypatch.setattr(main_weights, "_shares", shares)


def placed(value: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the float32 main weights at all positions in the value's cell."""
    count = main_weights._levels(dtype)
    values = torch.full((count,), value).to(dtype).float()
    main_weights._place(values, dtype, "w", ((0, count),))
    return values


def neighbors(value: float, dtype: torch.dtype) -> tuple[float, float, float]:
    """Return the rounded value and its distances to the next larger and the next smaller value."""
    rounded = torch.tensor(value).to(dtype)
    infinity = torch.tensor(torch.inf, dtype=dtype)
    above, below = (float(torch.nextafter(rounded, end).double()) for end in (infinity, -infinity))
    return float(rounded.double()), above - float(rounded), float(rounded) - below


def mean_move(main: torch.Tensor, dtype: torch.dtype, step: float) -> float:
    """Return the mean change of the parameter after a step, computed in double precision."""
    moved = (main.double() + step).float()
    return float((moved.to(dtype).double() - main.to(dtype).double()).mean())


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_moves_of_powers_of_two_are_unbiased(dtype, sign):
    """Covers steps of up to a third of the larger distance, in both directions. The mean has a resolution of 2⁻¹⁵ or
    2⁻¹², the probability of a single position."""
    for power in POWERS[dtype]:
        value, above, below = neighbors(sign * power, dtype)
        distance = max(above, below)
        assert min(above, below) == distance / 2
        main = placed(value, dtype)
        for part in (0.01, 0.1, 0.25, 0.3, 1 / 3):
            for step in (part * distance, -part * distance):
                assert mean_move(main, dtype, step) == pytest.approx(step, abs=2 * distance / len(main))


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_moves_of_other_values_are_unbiased_for_all_steps(dtype, sign):
    for number in OTHERS[dtype]:
        value, above, below = neighbors(sign * number, dtype)
        assert above == below
        main = placed(value, dtype)
        for part in (0.01, 0.25, 0.5, 0.9, 1.3):
            for step in (part * above, -part * above):
                assert mean_move(main, dtype, step) == pytest.approx(step, abs=2 * above / len(main))


@DTYPES
@pytest.mark.parametrize("sign", [1, -1])
def test_main_weights_round_to_their_parameters(dtype, sign):
    info = torch.finfo(dtype)
    largest, smallest_normal = info.max, info.smallest_normal
    smallest = float(torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)))
    for number in (*POWERS[dtype], *OTHERS[dtype], largest, smallest_normal, smallest, 3 * smallest, 2 * smallest):
        value, *_ = neighbors(sign * number, dtype)
        main = placed(value, dtype)
        assert main.isfinite().all()
        assert (main.to(dtype).double() == value).all(), number
        assert main.double().std() > 0, number


@DTYPES
def test_positions_of_powers_of_two_match_the_derivation(dtype):
    """A third of the positions are uniform over the outermost third of the distance, the others over the innermost."""
    main = placed(1.0, dtype).double() - 1
    distance = torch.finfo(dtype).eps
    outer = main[main > distance / 8]
    inner = main[main < distance / 8]
    assert len(outer) / len(main) == pytest.approx(1 / 3, abs=1 / len(main))
    for part, low, high in ((outer, 1 / 6, 1 / 2), (inner, -1 / 4, 1 / 12)):
        assert low * distance < part.min() < part.max() < high * distance
        assert float(part.mean()) == pytest.approx((low + high) / 2 * distance, abs=distance / len(main))
        assert float(part.std()) == pytest.approx((high - low) * distance / math.sqrt(12), rel=1e-3)


@DTYPES
def test_subnormals_and_the_smallest_normal_have_equal_distances(dtype):
    """Below twice the smallest normal value, all distances are equal, so powers of two are not special."""
    info = torch.finfo(dtype)
    smallest = float(torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)))
    for number in (info.smallest_normal, 4 * smallest, smallest):
        main = placed(number, dtype).double() - number
        assert float(main.mean()) == pytest.approx(0, abs=smallest / len(main))
        assert float(main.max()) == -float(main.min())


@DTYPES
def test_zeros_and_nonfinite_weights_are_kept(dtype):
    for number in (0.0, math.inf, -math.inf):
        main = placed(number, dtype)
        assert (main == number).all()
    assert placed(math.nan, dtype).isnan().all()


def test_only_powers_of_two_differ_from_a_symmetric_cell():
    """For all positive finite bfloat16 values except powers of two and the largest, either neighbor gives the same
    main weight."""
    values = torch.arange(1, 0x7F7F, dtype=torch.int16).view(torch.bfloat16).float()
    main = values.clone()
    main_weights._place(main, torch.bfloat16, "w", ((0, len(values)),))
    share = main_weights._shares(2**15, "w", ((0, len(values)),), torch.device("cpu"))
    infinity = torch.tensor(torch.inf, dtype=torch.bfloat16)
    above = torch.nextafter(values.bfloat16(), infinity).float() - values
    is_power = (values.frexp().mantissa == 0.5) & (values > 2.0**-126)
    assert is_power.sum() == 253
    assert torch.equal(main[~is_power], (values + share * above)[~is_power])
