"""A pass with other weights leaves the model as it was, bit by bit, and the kept copy too."""

import pytest
import torch

from megarl.megatron.weight_sets import WeightSets


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def bits(module: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_kept_weights_are_in_the_model_inside_and_its_own_afterwards():
    live = model()
    sets = WeightSets(dict(live.named_parameters()))
    sets.keep("reference")
    start = bits(live)
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.mul_(1.1)
    moved = bits(live)
    addresses = [p.data_ptr() for p in live.parameters()]
    for _ in range(2):
        with sets.swapped_in("reference"):
            assert bits(live) == start
        assert bits(live) == moved
    assert [p.data_ptr() for p in live.parameters()] == addresses  # an engine may read them where they lie


def test_own_weights_return_after_an_error():
    live = model()
    sets = WeightSets(dict(live.named_parameters()))
    sets.keep("reference")
    with torch.no_grad():
        live.weight.zero_()
    with pytest.raises(RuntimeError, match="inside"), sets.swapped_in("reference"):
        raise RuntimeError("inside")
    assert live.weight.abs().max() == 0
