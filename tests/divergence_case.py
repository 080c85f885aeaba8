"""Random inputs for divergences, and the results of `divergence` and of full logits for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.ops.divergence import DivergenceKind, divergence, plain_divergence
from megarl.ops.linear_head import plain_log_prob_and_entropy
from megarl.ops.output_layer import OutputLayer

KINDS: list[tuple[DivergenceKind, float]] = [
    ("forward_kl", 0.5),
    ("reverse_kl", 0.5),
    ("jsd", 0.0),
    ("jsd", 0.1),
    ("jsd", 0.5),
    ("jsd", 0.9),
    ("jsd", 1.0),
]
"""Each kind with values of beta."""

HIDDEN = (12, 20)
"""Hidden sizes of student and teacher."""


@dataclass(frozen=True)
class DivergenceCase:
    """Inputs of `divergence` and the gradient of its output, [N, 3]."""

    student: OutputLayer
    teacher: OutputLayer
    targets: torch.Tensor
    temperature: float | torch.Tensor
    vocab: int
    gradient: torch.Tensor

    @classmethod
    def random(
        cls,
        num_tokens: int,
        vocab: int,
        padded: tuple[int, int],
        temperature: float | None = 1.0,
        biases: tuple[bool, bool] = (False, False),
        dtype: torch.dtype = torch.float32,
    ) -> DivergenceCase:
        """`padded`: rows of the student's and the teacher's weight. If `temperature` is None, each token has its own.
        `biases`: whether student and teacher have one."""
        generator = torch.Generator().manual_seed(0)

        def layer(hidden_size: int, num_rows: int, has_bias: bool) -> OutputLayer:
            hidden, weight = (torch.randn(n, hidden_size, generator=generator) for n in (num_tokens, num_rows))
            bias = torch.randn(num_rows, generator=generator) if has_bias else None
            parts = (hidden / hidden_size**0.5, weight, bias)
            return OutputLayer(*(None if x is None else x.to(dtype) for x in parts))

        student, teacher = map(layer, HIDDEN, padded, biases)
        temperatures = torch.rand(num_tokens, generator=generator) + 0.5
        return cls(
            student,
            teacher,
            torch.randint(vocab, (num_tokens,), generator=generator),
            temperatures if temperature is None else temperature,
            vocab,
            torch.randn(num_tokens, 3, generator=generator),
        )

    def to(self, place: torch.dtype | str) -> DivergenceCase:
        """Return the case with its layers in another dtype, or on another device with all other tensors."""

        def moved(x: Any) -> Any:
            return x.to(place) if isinstance(x, torch.Tensor) else x

        def layer(x: OutputLayer) -> OutputLayer:
            return OutputLayer(moved(x.hidden), moved(x.weight), moved(x.bias), x.logits_dtype)

        case = replace(self, student=layer(self.student), teacher=layer(self.teacher))
        if isinstance(place, torch.dtype):
            return case
        others = {name: moved(getattr(self, name)) for name in ("targets", "temperature", "gradient")}
        return replace(case, **others)


def tiled(case: DivergenceCase, kind: DivergenceKind, beta: float, process_group: Any = None) -> dict:
    """Return the values and gradients of `divergence`."""
    leaves = leaves_of(case.student)
    values = divergence(
        leaves["hidden"],
        leaves["weight"],
        case.teacher,
        kind,
        case.temperature,
        case.vocab,
        beta,
        process_group,
        leaves.get("bias"),
        case.student.logits_dtype,
        case.targets,
    )
    return results_of(values, case.gradient, leaves)


def plain(case: DivergenceCase, kind: DivergenceKind, beta: float) -> dict[str, torch.Tensor]:
    """Return the values and gradients from full logits, computed in the default dtype."""
    case = case.to(torch.get_default_dtype())
    leaves = leaves_of(case.student)
    hidden, weight, bias = leaves["hidden"], leaves["weight"], leaves.get("bias")
    scores = plain_log_prob_and_entropy(hidden, weight, case.targets, case.temperature, case.vocab, bias)
    value = plain_divergence(hidden, weight, case.teacher, kind, case.temperature, case.vocab, beta, bias)
    return results_of(torch.stack((*scores, value), -1), case.gradient, leaves)


def leaves_of(student: OutputLayer) -> dict[str, torch.Tensor]:
    tensors = {"hidden": student.hidden, "weight": student.weight, "bias": student.bias}
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items() if x is not None}


def results_of(
    values: torch.Tensor, gradient: torch.Tensor, leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    gradients = torch.autograd.grad((values * gradient).sum(), list(leaves.values()))
    columns = zip(("log_prob", "entropy", "divergence"), values.detach().unbind(-1), strict=True)
    return dict(columns) | dict(zip(leaves, gradients, strict=True))
