"""Passes with swapped-in weights restore the model and the snapshot bit for bit."""

import pytest
import torch

from megarl.megatron.weight_snapshots import WeightSnapshots


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def bits(module: torch.nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in module.parameters()]


def test_swapped_in_weights_are_restored_afterwards():
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
    assert [p.data_ptr() for p in live.parameters()] == addresses  # engines may read weights in place


def test_live_weights_are_restored_after_an_error():
    live = model()
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference")
    with torch.no_grad():
        live.weight.zero_()
    with pytest.raises(RuntimeError, match="inside"), sets.swapped_in("reference"):
        raise RuntimeError("inside")
    assert live.weight.abs().max() == 0


def shift(live: torch.nn.Linear, change: float) -> None:
    with torch.no_grad():
        for parameter in live.parameters():
            parameter.add_(change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_renewed_snapshot_equals_live_weights(dtype):
    live = model().to(dtype)
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference", share=1.0)
    shift(live, 0.1)
    sets.renew("reference")
    renewed = [p.detach().clone() for p in live.parameters()]
    shift(live, 0.1)
    with sets.swapped_in("reference"):
        assert all(torch.equal(p, at) for p, at in zip(live.parameters(), renewed, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_average_matches_its_closed_form(dtype):
    """After n renewals with constant live weights the average is live + (start − live) · (1 − share)ⁿ. Kept in
    bfloat16, it would never change: a step is less than half a unit in the last place."""
    live = model().to(dtype)
    start = [p.detach().double() for p in live.parameters()]
    sets = WeightSnapshots(dict(live.named_parameters()))
    sets.keep("reference", share=0.001)
    shift(live, 1.0)
    for _ in range(1000):
        sets.renew("reference")
    now = [p.detach().double() for p in live.parameters()]
    expected = [b + (a - b) * 0.999**1000 for a, b in zip(start, now, strict=True)]
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    with sets.swapped_in("reference"):
        for p, mean in zip(live.parameters(), expected, strict=True):
            torch.testing.assert_close(p.detach().double(), mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_restored_snapshot_continues_identically(share):
    live = model().to(torch.bfloat16)
    original, restored = (WeightSnapshots(dict(live.named_parameters())) for _ in range(2))
    original.keep("fixed")
    original.keep("reference", share)
    shift(live, 0.1)
    original.renew("reference")
    restored.keep("reference", share)  # starts from other live weights than `original`
    restored.restore(
        {name: {key: w.clone() for key, w in weights.items()} for name, weights in original.state().items()}
    )
    assert original.state().keys() == {"reference"}
    held = []
    for sets in (original, restored):
        for _ in range(2):
            with sets.swapped_in("reference"):
                held.append([p.detach().clone() for p in live.parameters()])
            sets.renew("reference")
    for first, second in zip(held[:2], held[2:], strict=True):
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
