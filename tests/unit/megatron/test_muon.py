"""Newton-Schulz against the singular value decomposition, updates against torch's Muon, and the assignment of matrices
to ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from megarl.megatron.muon import COEFFICIENTS, LocalPart, Part, Round, _update, assign, orthogonalize
from megarl.models.flops import orthogonalization_flops
from megarl.resharding.piece import Rectangle
from megarl.resharding.transports.transport import view
from tests.closeness import assert_close, expected


def exact(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the polynomial of each step to the singular values, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


@pytest.mark.parametrize("shape", [(8, 8), (5, 24), (24, 5), (1, 7), (7, 1)])
def test_result_has_the_singular_vectors_of_the_matrix(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrix, torch.float32)
    # A step multiplies small errors by up to 3.4445.
    limit = 3.4445**5 * torch.finfo(torch.float32).eps
    assert (result - exact(matrix)).abs().max() < limit
    assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.35


def test_result_does_not_depend_on_the_scale() -> None:
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    one, other = (orthogonalize(matrix * scale, torch.bfloat16) for scale in (1.0, 2.0**20))
    assert torch.equal(one, other)
    assert one.dtype is torch.float32


@pytest.mark.parametrize("shape", [(6, 9), (24, 5), (4, 4)])
def test_operations_are_those_that_torch_counts(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), torch.float32)
    assert counter.get_total_flops() == orthogonalization_flops(*shape)


def test_zero_matrix_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(4, 6), torch.float32).any()


SHAPES = {"wide": (24, 96), "tall": (96, 24), "square": (64, 64)}
START, *GRADIENTS = [
    {name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for name, shape in SHAPES.items()}
    for seed in range(3)
]
LR, DECAY, MOMENTUM = 0.5, 0.1, 0.9


class WholeMatrix:
    """An OwnedRange of a whole matrix, without an optimizer."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self.main, self.shape = matrix.flatten().clone(), matrix.shape
        self.param_group, self.optimizer_state = {"lr": LR, "weight_decay": DECAY}, {}

    def view(self, values: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        return view(values.view(self.shape), rectangle)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def updated(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the matrices after an update with each gradient."""
    owned = {name: WholeMatrix(matrix) for name, matrix in START.items()}
    rectangles = [((0, rows), (0, columns)) for rows, columns in SHAPES.values()]
    rounds = [
        Round([[LocalPart(index, rectangle)]], shape, [[rectangle]])
        for index, (rectangle, shape) in enumerate(zip(rectangles, SHAPES.values(), strict=True))
    ]
    for gradients in GRADIENTS:
        for name, matrix in owned.items():
            matrix.main.grad = gradients[name].flatten().clone()
        _update(list(owned.values()), rounds, MOMENTUM, dtype)
    return {name: matrix.main.view(matrix.shape) for name, matrix in owned.items()}


def updated_by_torch() -> dict[str, torch.Tensor]:
    dtype = torch.get_default_dtype()
    parameters = {name: torch.nn.Parameter(matrix.to(dtype, copy=True)) for name, matrix in START.items()}
    how = dict(lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    optimizer = torch.optim.Muon(parameters.values(), **how)
    for gradients in GRADIENTS:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].to(dtype, copy=True)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


class Unrounded(TorchFunctionMode):
    """Lets torch's Muon, which always rounds to bfloat16, compute in the dtype of its inputs."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.clone if func is torch.Tensor.bfloat16 else func
        return func(*args, **kwargs or {})


def unrounded() -> dict[str, torch.Tensor]:
    with Unrounded():
        return updated_by_torch()


def test_two_updates_equal_those_of_torch(process_group) -> None:
    """torch's momentum is ours times 1 − μ, which the orthogonalization removes."""
    assert_close(updated(torch.float32), *expected(unrounded), "matrix")


def test_bfloat16_updates_are_as_accurate_as_those_of_torch(process_group) -> None:
    """Both round randomly, about as often. Over thousands of elements, the norms of the errors are nearly equal."""
    exact, ours, theirs = expected(unrounded).exact, updated(torch.bfloat16), updated_by_torch()
    for name, matrix in exact.items():
        assert (ours[name] - matrix).norm() <= 2 * (theirs[name] - matrix).norm(), name


def test_matrices_are_balanced_over_the_ranks_that_hold_them() -> None:
    shapes = {"a": (8, 8), "b": (8, 8), "c": (4, 8), "d": (4, 8), "e": (2, 2)}
    held = [("a", "b", "c", "d"), ("a", "b", "c", "d"), ("e",)]
    parts = [[Part(tensor, ((0, 1), (0, 1))) for tensor in tensors] for tensors in held]
    assert assign(parts, shapes) == [["a", "c"], ["b", "d"], ["e"]]
