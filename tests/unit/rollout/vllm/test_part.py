"""The parts of an engine over several nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.entrypoints.llm as entrypoint
from vllm import LLM

from megarl.config.load import load
from megarl.rollout.vllm import part
from megarl.rollout.vllm.engine import rollout_arguments
from tests.paths import BASE
from tests.tiny_model import write_tiny_llama


class Stop(Exception):
    """The end of a start, as soon as vLLM's configuration is made."""


def test_all_parts_have_one_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A scheduler that begins more sequences than another node's ranks have room for would end the engine."""
    folder, made = write_tiny_llama(tmp_path), []
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.tp=2", "rollout.context_length=64"]
    rollout = load(BASE, [*keys, "rollout.max_new_tokens=32"]).rollout
    arguments = rollout_arguments(rollout, folder, "float32", seed=0)

    def of_first(engine_args: Any, usage_context: Any, **_: Any) -> None:
        made.append(engine_args.create_engine_config(usage_context))
        raise Stop

    def of_other(config: Any) -> Any:
        made.append(config)
        return SimpleNamespace(register_failure_callback=lambda died: died())

    monkeypatch.setattr(entrypoint, "LLMEngine", SimpleNamespace(from_engine_args=of_first))
    monkeypatch.setattr(part, "MultiprocExecutor", of_other)
    first, other = (part.Part(number, 2, "127.0.0.1", 1).arguments for number in (0, 1))
    with pytest.raises(Stop):
        LLM(**arguments | first)
    assert part.PartRanks(arguments | other).died.is_set()
    ours, theirs = made
    assert ours.scheduler_config == theirs.scheduler_config
    assert ours.compilation_config.cudagraph_capture_sizes == theirs.compilation_config.cudagraph_capture_sizes
    assert ours.cache_config == theirs.cache_config
    assert [c.parallel_config.node_rank for c in made] == [0, 1]
    assert {(c.parallel_config.nnodes, c.parallel_config.world_size) for c in made} == {(2, 2)}
