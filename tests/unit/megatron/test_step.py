"""Model inputs of microbatches are prepared one ahead, in a separate thread."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from megarl.megatron import step


def preparations(batches: list[int], prepared: list[int]) -> list[Callable[[], str]]:
    """Return functions that prepare the batches and append them to `prepared`. A number stands for a batch, and −1
    for an invalid one."""

    def prepare(batch: int) -> str:
        assert threading.current_thread() is not threading.main_thread()
        if batch < 0:
            raise ValueError("invalid batch")
        prepared.append(batch)
        return f"input {batch}"

    return [partial(prepare, batch) for batch in batches]


def test_next_input_is_prepared_during_computation():
    prepared = []
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs(preparations([0, 1, 2, 3], prepared), thread, 1))
        assert next(inputs) == "input 0"
        thread.submit(int).result()  # earlier tasks of the thread are complete
        assert prepared == [0, 1]
        assert [*inputs] == ["input 1", "input 2", "input 3"]
    assert prepared == [0, 1, 2, 3]


def test_chunks_of_a_model_share_inputs():
    """The second chunk lags behind the first, as with virtual pipeline stages."""
    prepared = []
    with ThreadPoolExecutor(1) as thread:
        inputs = step._Inputs(preparations([0, 1, 2], prepared), thread, 2)
        first, second = iter(inputs), iter(inputs)
        assert [next(first), next(first), next(second), next(first), next(second), next(second)] == [
            *("input 0", "input 1", "input 0", "input 2", "input 1", "input 2")
        ]
    assert prepared == [0, 1, 2]


class Prepared:
    """An input that can be weakly referenced."""


@pytest.mark.parametrize(("num_chunks", "most"), [(1, 2), (2, 3)])
def test_used_inputs_are_dropped(num_chunks, most):
    """Each chunk uses all inputs, and the second one lags behind by an input."""
    references: list[weakref.ref] = []

    def prepare() -> Prepared:
        item = Prepared()
        references.append(weakref.ref(item))
        return item

    with ThreadPoolExecutor(1) as thread:
        inputs = step._Inputs([prepare] * 8, thread, num_chunks)
        iterators = [iter(inputs) for _ in range(num_chunks)]
        for number in range(8 + num_chunks - 1):
            for lag, iterator in enumerate(iterators):
                if lag <= number < 8 + lag:
                    assert next(iterator) is references[number - lag]()
            thread.submit(int).result()  # the thread drops its own reference
            assert sum(reference() is not None for reference in references) <= most
        assert not any(reference() for reference in references)


def test_preparation_error_is_raised_when_the_input_is_used():
    with ThreadPoolExecutor(1) as thread:
        inputs = iter(step._Inputs(preparations([0, -1], []), thread, 1))
        assert next(inputs) == "input 0"
        with pytest.raises(ValueError, match="invalid batch"):
            next(inputs)
