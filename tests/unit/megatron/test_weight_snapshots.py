"""A pass with other weights leaves the model as it was, bit by bit, and the kept copy too."""

import pytest
import torch

from megarl.megatron.weight_snapshots import WeightSnapshots


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def bits(module: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_kept_weights_are_in_the_model_inside_and_its_own_afterwards():
    live = model()
    sets = WeightSnapshots(dict(live.named_parameters()))
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
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference")
    with torch.no_grad():
        live.weight.zero_()
    with pytest.raises(RuntimeError, match="inside"), sets.swapped_in("reference"):
        raise RuntimeError("inside")
    assert live.weight.abs().max() == 0


def moved_by(live: torch.nn.Linear, change: float) -> None:
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_renewed_set_is_the_live_one_of_that_moment(dtype):
    live = model().to(dtype)
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference", share=1.0)
    moved_by(live, 0.1)
    sets.renew("reference")
    renewed = [p.detach().clone() for p in live.parameters()]
    moved_by(live, 0.1)
    with sets.swapped_in("reference"):
        assert all(torch.equal(p, at) for p, at in zip(live.parameters(), renewed, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moving_average_is_its_closed_form_and_does_not_stall(dtype):
    """The average after n renewals of weights that stay is live + (start − live) · (1 − share)ⁿ. In bfloat16 alone, the
    first renewal would change nothing: the step is below half of the last place."""
    live = model().to(dtype)
    start = [p.detach().double() for p in live.parameters()]
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference", share=0.001)
    moved_by(live, 1.0)
    for _ in range(1000):
        sets.renew("reference")
    now = [p.detach().double() for p in live.parameters()]
    expected = [b + (a - b) * 0.999**1000 for a, b in zip(start, now, strict=True)]
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    with sets.swapped_in("reference"):
        for p, mean in zip(live.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach().double(), mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_restored_set_goes_on_as_if_it_had_stayed(share):
    live = model().to(torch.bfloat16)
    ours, other = (WeightSnapshots(dict(live.named_parameters())) for _ in range(2))
    ours.keep("fixed")
    ours.keep("reference", share)
    moved_by(live, 0.1)
    ours.renew("reference")
    other.keep("reference", share)  # of other weights than ours was
    other.restore({name: {key: w.clone() for key, w in weights.items()} for name, weights in ours.state().items()})
    assert ours.state().keys() == {"reference"}
    held = []
    for sets in (ours, other):
        for _ in range(2):
            with sets.swapped_in("reference"):
                held.append([p.detach().clone() for p in live.parameters()])
            sets.renew("reference")
    for first, second in zip(held[:2], held[2:], strict=True):
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
