"""The model's inputs of the microbatches are prepared one ahead, in a thread of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from megarl.megatron import step


@pytest.fixture
def prepared(monkeypatch) -> list[int]:
    """The batches that have been prepared. Batches are numbers here, of which −1 has a flaw."""
    numbers: list[int] = []

    def prepare(batch: int, _: bool) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if batch < 0:
            raise ValueError("a flaw")
        numbers.append(batch)
        return f"input {batch}"

    monkeypatch.setattr(step.ModelInput, "of", prepare)
    return numbers


def test_the_next_one_is_prepared_while_one_is_computed(prepared):
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs([0, 1, 2, 3], False, thread))
        assert next(inputs) == "input 0"
        thread.submit(int).result()  # what the thread was given before is done
        assert prepared == [0, 1]
        assert [*inputs] == ["input 1", "input 2", "input 3"]
    assert prepared == [0, 1, 2, 3]


def test_chunks_of_a_model_share_them(prepared):
    """The second chunk is behind the first, as under virtual pipeline stages."""
    with ThreadPoolExecutor(1) as thread:
        inputs = step._Inputs([0, 1, 2], False, thread)
        first, second = iter(inputs), iter(inputs)
        assert [next(first), next(first), next(second), next(first), next(second), next(second)] == [
            *("input 0", "input 1", "input 0", "input 2", "input 1", "input 2")
        ]
    assert prepared == [0, 1, 2]


def test_a_flaw_is_raised_where_the_batch_is_wanted(prepared):
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs([0, -1], False, thread))
        assert next(inputs) == "input 0"
        with pytest.raises(ValueError, match="a flaw"):
            next(inputs)
