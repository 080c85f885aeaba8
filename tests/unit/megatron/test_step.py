"""Model inputs of microbatches are prepared one ahead, in a separate thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.megatron import step


@pytest.fixture
def prepared(monkeypatch) -> list[int]:
    """The prepared batches. Batches are numbers here; −1 is invalid."""
    numbers: list[int] = []

    def prepare(batch: int, _: bool) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if batch < 0:
            raise ValueError("invalid batch")
        numbers.append(batch)
        return f"input {batch}"

    monkeypatch.setattr(step.ModelInput, "of", prepare)
    return numbers


def test_next_input_is_prepared_during_computation(prepared):
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs([0, 1, 2, 3], False, thread))
        assert next(inputs) == "input 0"
        thread.submit(int).result()  # earlier tasks of the thread are complete
        assert prepared == [0, 1]
        assert [*inputs] == ["input 1", "input 2", "input 3"]
    assert prepared == [0, 1, 2, 3]


def test_chunks_of_a_model_share_inputs(prepared):
    """The second chunk lags behind the first, as with virtual pipeline stages."""
    with ThreadPoolExecutor(1) as thread:
        inputs = step._Inputs([0, 1, 2], False, thread)
        first, second = iter(inputs), iter(inputs)
        assert [next(first), next(first), next(second), next(first), next(second), next(second)] == [
            *("input 0", "input 1", "input 0", "input 2", "input 1", "input 2")
        ]
    assert prepared == [0, 1, 2]


def test_preparation_error_is_raised_when_the_input_is_used(prepared):
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs([0, -1], False, thread))
        assert next(inputs) == "input 0"
        with pytest.raises(ValueError, match="invalid batch"):
            next(inputs)
